"""The facts in SLURM's, MPI's and Kubernetes' variables about a process and the machines."""

from __future__ import annotations

import pytest

from zero_plugin.errors import LaunchError
from zero_plugin.machine.scheduler_job import TORCH, Place, expand_hosts, find_allocation, find_task_place

# The variables that srun sets in the second task on the second of two nodes with two tasks each.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}
BATCH = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "3563388929",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("", []),
        ("node", ["node"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("n[9-11],login,gpu-[2]", ["n9", "n10", "n11", "login", "gpu-2"]),
        ("r[1-2]n[3-4].lan", ["r1n3.lan", "r1n4.lan", "r2n3.lan", "r2n4.lan"]),
        ("a,b, c", ["a", "b", "c"]),
    ],
)
def test_short_forms_of_host_names(short: str, hosts: list[str]) -> None:
    """Ranges keep zeros, several brackets multiply, commas separate numbers inside brackets and hosts outside."""
    assert expand_hosts(short) == hosts


def test_a_task_of_srun() -> None:
    """Rank, world and local rank are the step's. Rank 0 is on the step's first node. All tasks compute one port."""
    place = find_task_place(SRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert place.main_address == "gpu08"
    first = find_task_place({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first is not None
    assert first.port == place.port
    assert 20000 <= int(place.port) < 30000
    other = find_task_place({**SRUN, "SLURM_STEP_ID": "1"})
    assert other is not None
    assert other.port != place.port


def test_tasks_of_one_node_need_no_name_of_it() -> None:
    """Tasks on one node meet at 127.0.0.1, even if the node's name cannot be resolved."""
    place = find_task_place({**SRUN, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4"})
    assert place is not None
    assert (place.main_address, place.local_size) == ("127.0.0.1", 4)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,
        {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's interactive step
        {**SRUN, "SLURM_PTY_PORT": "1"},  # srun --pty bash
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
    ids=["none", "batch", "salloc", "pty", "one task", "one MPI process", "one PMI process"],
)
def test_what_is_no_task_among_others(environ: dict[str, str]) -> None:
    """Batch scripts, interactive shells and single tasks have scheduler variables, and are one process."""
    assert find_task_place(environ) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPENMPI, (1, 2, 1, 2, "127.0.0.1", "OMPI_COMM_WORLD_RANK")),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (1, 2, 1, 1, "", "OMPI_COMM_WORLD_RANK")),
        (HYDRA, (2, 4, 0, 2, "", "PMI_RANK")),
        ({**HYDRA, **OPENMPI}, (1, 2, 1, 2, "127.0.0.1", "OMPI_COMM_WORLD_RANK")),
    ],
    ids=["openmpi", "openmpi, two machines", "hydra", "both"],
)
def test_processes_of_mpirun(environ: dict[str, str], expected: tuple[object, ...]) -> None:
    """Open MPI's and PMI's variables are read. Processes of one machine meet on it."""
    place = find_task_place(environ)
    assert place is not None
    found = (place.rank, place.world_size, place.local_rank, place.local_size, place.main_address, place.source)
    assert found == expected


def test_half_a_place_is_an_error() -> None:
    """PMI without a local rank is an error, because no GPU could be chosen."""
    with pytest.raises(LaunchError, match=r"PMI_RANK is set but MPI_LOCALRANKID is not[\s\S]*LOCAL_RANK"):
        find_task_place({"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert find_task_place({"PMI_RANK": "0", "PMI_SIZE": "2", "LOCAL_RANK": "0"}) is not None


def test_a_place_as_torchrun_describes_it() -> None:
    """A rendezvous that the user set is kept. If none is known, the error says how to set one."""
    place = Place(3, 4, 1, 2, "gpu08", "20001", TORCH)
    assert place.environment({}) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "20001",
    }
    kept = place.environment({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})
    assert (kept["MASTER_ADDR"], kept["MASTER_PORT"]) == ("10.0.0.1", "7")
    elsewhere = find_task_place({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    assert elsewhere is not None
    with pytest.raises(LaunchError, match=r"one of 2 processes, but MASTER_ADDR is not[\s\S]*mpirun -x MASTER_ADDR="):
        elsewhere.environment({})


def test_the_machines_of_a_job() -> None:
    """srun with one task per node gives number, rank and first node. A batch script alone has no rank."""
    one_each = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    job = find_allocation(one_each)
    assert job is not None
    assert (job.machines, job.machine_rank, job.main_address, job.launchers_here) == (2, 1, "gpu08", 1)
    assert find_allocation(SRUN).launchers_here == 2  # type: ignore[union-attr]
    assert find_allocation(BATCH).machine_rank is None  # type: ignore[union-attr]
    assert find_allocation({**BATCH, "SLURM_JOB_NUM_NODES": "1"}) is None
    assert find_allocation({}) is None
