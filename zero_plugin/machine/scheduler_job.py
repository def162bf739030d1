"""What SLURM or MPI says of this process: its place among the tasks of a job, or the machines that it may launch on."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from zero_plugin.errors import LaunchError

_SPECIAL_STEP: Final = 0xFFFFFFF0  # SLURM numbers batch scripts and interactive shells from here
_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems hand out by themselves

# By library: rank, processes, rank on this machine, processes on this machine; what tells one job from another.
_MPI: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_NARROWS: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)  # what shows a process some GPUs
_MPI_JOB: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")


@dataclass(frozen=True, slots=True)
class Place:
    """One task among those that `srun` or `mpirun` started.

    Attributes:
        rank, world_size: index and number of tasks.
        local_rank, local_size: the same on this machine.
        main_address: machine of rank 0; "" where only the user knows it.
        port: one that all tasks derive alike, and other jobs hardly.
        source: the variable that says so.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    main_address: str
    port: int
    source: str

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The place as torchrun would describe it; what `environ` says of the meeting point is kept.

        Raises:
            LaunchError: nobody says where rank 0 is.
        """
        address = environ.get("MASTER_ADDR") or self.main_address
        if not address:
            raise LaunchError(
                f"{self.source} is set, so this is one of {self.world_size} processes, but nothing says on which "
                "machine rank 0 is.\nGive it to all of them: mpirun -x MASTER_ADDR=HOST … (Intel MPI, MPICH: "
                "-genv MASTER_ADDR HOST)."
            )
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": environ.get("MASTER_PORT") or str(self.port),
        }


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of the job that a launcher runs in.

    Attributes:
        machines: how many.
        machine_rank: which of them this is; None in a batch script, which runs on the first alone.
        main_address: the first of them; "" where only the user knows it.
        port: one that all launchers derive alike.
        launchers_here: how many of the job's tasks run on this machine, each of them a launcher.
        sources: the variables that say so, by what they say.
    """

    machines: int
    machine_rank: int | None
    main_address: str
    port: int
    launchers_here: int
    sources: Mapping[str, str]


def find_place(environ: Mapping[str, str]) -> Place | None:
    """This process's place among the tasks of `srun` or `mpirun`; None if it is not one of several.

    Raises:
        LaunchError: the variables describe half of a place.
    """
    place = _slurm_place(environ) if _is_srun_task(environ) else _mpi_place(environ)
    return place if place is not None and place.world_size > 1 else None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The machines that SLURM or MPI gave to the job in which this launcher runs; None outside of a job."""
    if _is_srun_task(environ):
        place = _slurm_place(environ)
        sources = {"machines": "SLURM_STEP_NUM_NODES", "rank": "SLURM_NODEID", "address": "SLURM_STEP_NODELIST"}
        nodes, node = _slurm_nodes(environ), int(environ.get("SLURM_NODEID", "0"))
        return Allocation(nodes, node, place.main_address, place.port, place.local_size, sources)
    if environ.get("SLURM_JOB_ID") and (nodes := _slurm_nodes(environ)) > 1:
        return Allocation(nodes, None, "", 0, 1, {"machines": "SLURM_JOB_NUM_NODES"})
    mpi = _mpi_place(environ)
    if mpi is None:
        return None
    sources = {"machines": mpi.source.replace("RANK", "SIZE"), "rank": mpi.source, "address": "MASTER_ADDR"}
    address = environ.get("MASTER_ADDR") or mpi.main_address
    machines = mpi.world_size if mpi.local_size == 1 else -(-mpi.world_size // mpi.local_size)
    return Allocation(machines, mpi.rank, address, mpi.port, mpi.local_size, sources)


def own_gpu(local_rank: int, visible: int, environ: Mapping[str, str]) -> int | None:
    """The number of this process's GPU among those that it sees; None where there is none for it.

    SLURM (`--gpus-per-task`) and Ray show each process its own ones, which it counts from 0.

    Args:
        local_rank: of this process on its machine.
        visible: how many GPUs it sees.
        environ: its environment.
    """
    narrowed = any(environ.get(name) for name in _NARROWS)
    return local_rank % visible if narrowed else local_rank if local_rank < visible else None


def expand_hosts(nodelist: str) -> list[str]:
    """SLURM's short form of host names in full: `n[01-03,7],login` is n01, n02, n03, n7, login."""
    hosts = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[\]\s])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", item)  # text, numbers, text, …
        choices = [list(_numbers(part)) if n % 2 else [part] for n, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return hosts


def _numbers(text: str) -> Iterator[str]:
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if last:
            yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        else:
            yield first


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this; a batch script and an interactive shell have most of SLURM's variables too."""
    step = environ.get("SLURM_STEP_ID", "")
    started = step.isdigit() and int(step) < _SPECIAL_STEP and "SLURM_PROCID" in environ
    return started and "SLURM_PTY_PORT" not in environ


def _slurm_nodes(environ: Mapping[str, str]) -> int:
    step = environ.get("SLURM_STEP_NUM_NODES") if _is_srun_task(environ) else None
    return int(step or environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1")


def _slurm_place(environ: Mapping[str, str]) -> Place:
    nodes = _slurm_nodes(environ)
    world = int(environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1")
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        world_size=world,
        local_rank=int(environ.get("SLURM_LOCALID", "0")),
        local_size=_tasks_here(environ, -(-world // nodes)),
        main_address="127.0.0.1" if nodes == 1 else next(iter(hosts), ""),
        port=_shared_port(f"slurm {environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"),
        source="SLURM_PROCID",
    )


def _tasks_here(environ: Mapping[str, str], evenly: int) -> int:
    """Tasks of this node, from `2(x3),1`: three nodes with two each, then one with one."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else evenly


def _mpi_place(environ: Mapping[str, str]) -> Place | None:
    names = next((names for names in _MPI if names[0] in environ and names[1] in environ), None)
    if names is None:
        return None
    rank, world = int(environ[names[0]]), int(environ[names[1]])
    local_rank = environ.get(names[2]) or environ.get("LOCAL_RANK") or ("0" if world == 1 else None)
    if local_rank is None:
        raise LaunchError(
            f"{names[0]} is set but {names[2]} is not: nothing says which of this machine's processes this is.\n"
            "Set LOCAL_RANK for each process, or start them with `zero-plugin launch`."
        )
    local_size = int(environ.get(names[3]) or "1")
    alone = local_size == world
    job = next((environ[name] for name in _MPI_JOB if name in environ), f"child of {os.getppid()}" if alone else "")
    address = "127.0.0.1" if alone else ""
    return Place(rank, world, int(local_rank), local_size, address, _shared_port(f"mpi {job}"), names[0])


def _shared_port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
