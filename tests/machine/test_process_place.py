"""A process's place from each launcher's variables. Contradictory or incomplete variables are an error."""

from __future__ import annotations

import pytest

from zero_plugin.errors import LaunchError
from zero_plugin.machine.process_place import find_local_rank, find_place, own_gpu

TWO = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
HERE = {**TWO, "MASTER_ADDR": "127.0.0.1"}
POD = {**TWO, "RANK": "1"}  # of a PyTorchJob
TRAIN_JOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "node7",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({**POD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 1, 2, "node-0", "29500")),
        (POD, (1, 2, 0, 1, "node-0", "29500")),
        (
            {**POD, "PET_NPROC_PER_NODE": "auto", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
            (1, 2, 0, 1, "node-0", "29500"),
        ),
        ({**POD, "LOCAL_RANK": "0"}, (1, 2, 0, None, "node-0", "29500")),
        ({**HERE, "RANK": "1"}, (1, 2, 1, 2, "127.0.0.1", "29500")),
        ({**HERE, "GLOBAL_RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "0"}, (1, 2, 1, 2, "127.0.0.1", "29500")),
        ({**HERE, "LOCAL_RANK": "1", "NODE_RANK": "0"}, (1, 2, 1, 2, "127.0.0.1", "29500")),
        (
            {**TWO, "WORLD_SIZE": "6", "LOCAL_RANK": "1", "NODE_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            (5, 6, 1, 2, "node-0", "29500"),
        ),
        (TRAIN_JOB, (1, 2, 0, 1, "job-node-0-0", "29400")),
        (SRUN, (1, 2, 1, 2, "127.0.0.1", None)),
        ({**SRUN, "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1, 2, "127.0.0.1", None)),
        (MPI, (1, 2, 1, 2, "127.0.0.1", None)),
        ({**MPI, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5"}, (1, 2, 1, 2, "127.0.0.1", None)),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2, "127.0.0.1", None)),
        ({**SRUN, **POD, "LOCAL_RANK": "0", **ELASTIC, "WORLD_SIZE": "8"}, (1, 8, 0, None, "node-0", "29500")),
        ({**MPI, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (1, 2, 1, 2, "127.0.0.1", None)),
    ],
    ids=[
        *("torchrun", "PyTorchJob", "PyTorchJob with auto", "a local rank alone", "by hand on one machine"),
        *("GLOBAL_RANK", "Lightning", "Lightning on three machines", "TrainJob", "srun", "srun and the same exported"),
        *("mpirun", "mpirun in a SLURM job", "srun --mpi=pmi2", "srun torchrun", "left over from a parent"),
    ],
)
def test_each_launcher_is_read(environ: dict[str, str], place: tuple[object, ...]) -> None:
    """Rank, processes, local values and rank 0's address are read. The nearest launcher counts."""
    found = find_place(environ)
    assert found is not None
    where = (found.main_address, found.port if "MASTER_PORT" in environ or "PET_MASTER_PORT" in environ else None)
    assert (found.rank, found.world_size, found.local_rank, found.local_size, *where) == place


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "1"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "tcp://10.0.0.1:80"},
        {**TRAIN_JOB, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"},
        {"GLOBAL_RANK": "3"},
    ],
)
def test_one_process(environ: dict[str, str]) -> None:
    """Variables that describe no other process mean one process, also leftovers of a parent that was a group of one."""
    assert find_place(environ) is None


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"RANK": "0"}, ["RANK=0 is set but WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not", 'os.environ.pop("RANK")']),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 means", "RANK is not set", "unset WORLD_SIZE"]),
        ({**POD, "RANK": "2"}, ["RANK=2, WORLD_SIZE=2 contradict each other", "from 0 to the number of processes - 1"]),
        ({**POD, "WORLD_SIZE": "0"}, ["RANK=1, WORLD_SIZE=0 contradict"]),
        ({**POD, "RANK": "one"}, ["RANK=one is not an integer", "unset RANK"]),
        ({**POD, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, ["LOCAL_RANK=2, LOCAL_WORLD_SIZE=2, WORLD_SIZE=2"]),
        ({**POD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, ["LOCAL_WORLD_SIZE=4, WORLD_SIZE=2 contradict"]),
        ({**POD, "GLOBAL_RANK": "0"}, ["RANK=1, GLOBAL_RANK=0 contradict each other"]),
        ({**POD, "MASTER_PORT": "tcp://10.0.0.1:80"}, ["MASTER_PORT=tcp://10.0.0.1:80 is not", "Service called"]),
        ({**TRAIN_JOB, "PET_MASTER_PORT": "0"}, ["PET_MASTER_PORT=0 is not the number of a port"]),
        ({**POD, "PET_NPROC_PER_NODE": "2"}, ["PET_NPROC_PER_NODE=2", "LOCAL_RANK is not set", "torchrun train.py"]),
        ({**TRAIN_JOB, "PET_NPROC_PER_NODE": "2"}, ["PET_NNODES=2, PET_NPROC_PER_NODE=2", "`torchrun train.py`"]),
        ({**TRAIN_JOB, "PET_NNODES": "1:3"}, ["PET_NNODES=1:3", "started without one"]),
        ({**TRAIN_JOB, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4 contradicts PET_NNODES=2"]),
        ({**TWO, "LOCAL_RANK": "0"}, ["WORLD_SIZE=2, LOCAL_RANK=0", "neither RANK nor LOCAL_WORLD_SIZE"]),
        (
            {**TWO, "LOCAL_RANK": "0", "NODE_RANK": "2", "LOCAL_WORLD_SIZE": "1"},
            ["LOCAL_RANK=0, NODE_RANK=2, LOCAL_WORLD_SIZE=1, WORLD_SIZE=2 contradict"],
        ),
        ({**SRUN, "WORLD_SIZE": "4"}, ["WORLD_SIZE=4 contradicts SLURM_STEP_NUM_TASKS=2", "Unset WORLD_SIZE"]),
        ({**SRUN, "LOCAL_RANK": "0"}, ["LOCAL_RANK=0 contradicts SLURM_LOCALID=1"]),
        ({**SRUN, "SLURM_PROCID": "2"}, ["SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=2 contradict"]),
        ({**SRUN, **HERE, "RANK": "0"}, ["RANK=0, WORLD_SIZE=2 contradict SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2"]),
        ({**MPI, **HERE, "RANK": "0"}, ["RANK=0, WORLD_SIZE=2 contradict OMPI_COMM_WORLD_RANK=1"]),
        ({**MPI, "WORLD_SIZE": "1"}, ["WORLD_SIZE=1 contradicts OMPI_COMM_WORLD_SIZE=2"]),
    ],
)
def test_what_contradicts_is_named(environ: dict[str, str], parts: list[str]) -> None:
    """An incomplete place, or two places together, is an error with the variables as set, and the fix."""
    with pytest.raises(LaunchError) as caught:
        find_place(environ).environment(environ)  # type: ignore[union-attr]
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (("MASTER_ADDR",), "MASTER_ADDR is not set:"),
        (("MASTER_PORT",), "MASTER_PORT is not set:"),
        (("MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT are not set:"),
    ],
)
def test_a_missing_meeting_point(missing: tuple[str, ...], said: str) -> None:
    """The error says what is missing, what it means, and how one process runs alone."""
    environ = {name: value for name, value in {**POD, "LOCAL_RANK": "0"}.items() if name not in missing}
    place = find_place(environ)
    assert place is not None
    with pytest.raises(LaunchError) as caught:
        place.environment(environ)
    assert f"RANK is set, so this is one of 2 processes, but {said} nothing says where rank 0 is" in str(caught.value)
    assert "127.0.0.1 if all are on this one" in str(caught.value)
    assert 'os.environ.pop("RANK")' in str(caught.value)


def test_local_rank_in_a_group_that_somebody_made() -> None:
    """LOCAL_RANK counts, or the job's variable if it describes the same process."""
    assert find_local_rank(1, 2, {"LOCAL_RANK": "5"}) == 5
    assert find_local_rank(1, 2, SRUN) == 1
    assert find_local_rank(1, 4, SRUN) == 0
    assert find_local_rank(1, 2, {}) == 0


@pytest.mark.parametrize(
    ("local_rank", "visible", "shown", "gpu"),
    [
        (3, 4, None, 3),
        (3, 1, "2", 0),  # srun --gpus-per-task=1, or an actor of Ray's
        (3, 1, "GPU-5d1c", 0),
        (3, 2, "6,7", 1),  # srun --gpus-per-task=2
        (1, 4, "0,1,2,3", 1),
        (4, 4, None, None),
        (1, 1, "", None),
    ],
)
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_each_process_has_a_gpu_of_those_that_it_sees(
    name: str, local_rank: int, visible: int, shown: str | None, gpu: int | None
) -> None:
    """If all processes see all GPUs, local rank chooses. If each sees its own, local rank is ignored."""
    environ = {} if shown is None else {name: shown}
    assert own_gpu(local_rank, visible, environ) == gpu


def test_the_gpu_that_ray_names() -> None:
    """Ray's workers see the GPUs of all workers on a machine, in an order that may differ from local ranks."""
    ray = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "ACCELERATE_TORCH_DEVICE": "cuda:2"}
    assert own_gpu(0, 4, ray) == 2
    assert own_gpu(0, 2, ray) is None
    assert own_gpu(1, 4, {**ray, "ACCELERATE_TORCH_DEVICE": "cuda"}) == 1
