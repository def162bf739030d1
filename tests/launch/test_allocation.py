"""`zero-plugin launch` inside a SLURM job or under mpirun: the values it uses, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.errors import ConfigError
from zero_plugin.launch.build import fill_from_job

# srun --ntasks-per-node=1 on two nodes, on the second.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}

# A TrainJob's container, and a PyTorchJob's: the second of two.
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def document(kind: Any = "file", **keys: Any) -> Document:
    return Document().overlay(kind, {(key,): ("c.yaml:1:1", value) for key, value in keys.items()})


def test_machines_and_meeting_point_come_from_srun() -> None:
    """The number, rank, first node and the job's own port each come with their variable. Outside a job, none does."""
    filled, said = fill_from_job(Document(), SRUN)
    settings = launch_settings(filled)
    assert (settings.num_machines, settings.machine_rank, settings.main_process_ip) == (2, 1, "gpu08")
    assert 20000 <= (settings.main_process_port or 0) < 30000
    assert said == []
    assert str(filled.launch.entries["machine_rank",].origin) == "SLURM_NODEID (of the job)"
    assert fill_from_job(Document(), {}) == (Document(), [])
    assert fill_from_job(Document(), {**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}) == (
        Document(),
        [],
    )


def test_what_is_written_wins_but_for_the_rank_in_a_file() -> None:
    """All machines read the same file, so its `machine_rank` is true for only one of them. Other written values win."""
    asked = document(machine_rank=0, main_process_ip="10.0.0.1", main_process_port=5, num_machines=2)
    filled, said = fill_from_job(asked, SRUN)
    settings = launch_settings(filled)
    assert (settings.machine_rank, settings.main_process_ip, settings.main_process_port) == (1, "10.0.0.1", 5)
    assert said == ["machine_rank: using 1 from SLURM_NODEID instead of 0 at c.yaml:1:1"]
    filled, said = fill_from_job(document("flag", machine_rank=0), SRUN)
    assert launch_settings(filled).machine_rank == 0
    assert said == []


def test_the_elastic_rendezvous_needs_no_rank() -> None:
    """With c10d machines number themselves. A typed endpoint stays the meeting point."""
    filled, _ = fill_from_job(document(rdzv_backend="c10d"), SRUN, "node:1")
    assert filled.launch.value("machine_rank") is None
    assert filled.launch.value("main_process_ip") is None
    assert filled.launch.value("num_machines") == 2


def test_a_job_takes_back_what_was_said_of_one_machine() -> None:
    """The note that a key counts only with several machines disappears if the job has several."""
    asked = document(rdzv_backend="c10d", rdzv_conf="timeout=60")
    checked = replace(asked, notes=check_document(asked))
    assert [note.key for note in checked.notes] == ["rdzv_backend", "rdzv_conf"]
    assert fill_from_job(checked, SRUN, "node:1")[0].notes == ()


def test_under_mpirun_only_the_address_is_missing() -> None:
    """With one launcher per machine, number and rank are known, and MASTER_ADDR if it was set."""
    settings = launch_settings(fill_from_job(Document(), MPI)[0])
    assert (settings.num_machines, settings.machine_rank, settings.main_process_ip) == (2, 1, None)
    settings = launch_settings(fill_from_job(Document(), {**MPI, "MASTER_ADDR": "10.0.0.1"})[0])
    assert settings.main_process_ip == "10.0.0.1"


def test_in_kubernetes_torchruns_variables_are_read() -> None:
    """Machines, rank, address, port and a numeric process count come from the variables.

    They override a file's number.
    """
    settings = launch_settings(fill_from_job(Document(), POD)[0])
    assert (settings.num_machines, settings.machine_rank, settings.num_processes) == (2, 1, 8)
    assert (settings.main_process_ip, settings.main_process_port) == ("job-node-0-0.job", 29400)
    filled, said = fill_from_job(document(num_processes=2), POD)
    assert launch_settings(filled).num_processes == 8
    assert said == ["num_processes: using 8 from PET_NPROC_PER_NODE instead of 2 at c.yaml:1:1"]
    assert launch_settings(fill_from_job(document("flag", num_processes=2), POD)[0]).num_processes == 2
    settings = launch_settings(fill_from_job(document(num_processes=2), {**POD, "PET_NPROC_PER_NODE": "auto"})[0])
    assert (settings.num_machines, settings.num_processes) == (2, 2)
    assert fill_from_job(Document(), {**POD, "PET_NNODES": "1"}) == (Document(), [])


@pytest.mark.parametrize(
    ("environ", "asked", "parts"),
    [
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_PROCID": "0"},
            {},
            ["SLURM_JOB_NUM_NODES: this job has 2 machines", "srun --ntasks-per-node=1 zero-plugin launch"],
        ),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            {},
            ["the job started 2 launchers on this machine", "srun --ntasks-per-node=1"],
        ),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {}, ["started 2 launchers on this machine"]),
        (
            {"PET_NNODES": "1:3"},
            {},
            ["PET_NNODES: 1:3: this job has a changing number", "`torchrun`", "--rdzv_endpoint"],
        ),
        (SRUN, {"num_machines": 1}, ["c.yaml:1:1: num_machines: 1, but the job started this on 2 machines"]),
        (SRUN, {"num_machines": 3}, ["num_machines: 3, but"]),
        (SRUN, {"num_processes": 3}, ["3 processes do not divide among 2 machines"]),
    ],
    ids=[
        "batch",
        "two tasks a node",
        "two of mpirun",
        "elastic pods",
        "a file for one machine",
        "three",
        "three processes",
    ],
)
def test_several_runs_of_one_are_refused(environ: dict[str, str], asked: dict[str, Any], parts: list[str]) -> None:
    """A start that would wait forever, or start one run several times, is an error that shows the right start."""
    with pytest.raises(ConfigError) as caught:
        fill_from_job(document(**asked), environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("environ", [SRUN, {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}], ids=["srun", "batch"])
def test_a_run_of_this_machine_alone_can_be_asked_for(environ: dict[str, str]) -> None:
    """`--num_machines 1` is one run on each machine, as in a sweep."""
    asked = document("flag", num_machines=1)
    assert fill_from_job(asked, environ) == (asked, [])
