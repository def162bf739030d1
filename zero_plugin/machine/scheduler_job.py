"""The variables of each launcher; the place of a task of srun or mpirun; and the machines of the scheduler's job."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from zero_plugin.errors import LaunchError
from zero_plugin.machine.network import OWN_ADDRESS

_SPECIAL_STEP: Final = 0xFFFFFFF0  # SLURM gives batch scripts and interactive shells step ids from here
_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that systems assign automatically


@dataclass(frozen=True, slots=True)
class Launcher:
    """The names of the variables in which a kind of launcher describes a process's place; "" for a missing one.

    Attributes:
        rank, world_size: index and number of processes.
        local_rank, local_size: the same on this machine.
        machine, machines: index and number of machines.
        address, port: address and port of rank 0.
        hint: how a user passes the address of rank 0 to all processes.
    """

    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_size: str = ""
    machine: str = ""
    machines: str = ""
    address: str = ""
    port: str = ""
    hint: str = ""


_MPI_JOB: Final = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # they differ between jobs; the better one first

# For torchrun, Ray, PyTorchJob, Lightning, DeepSpeed's launcher, and variables that users export themselves.
TORCH: Final = Launcher(
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"), address="MASTER_ADDR", port="MASTER_PORT"
)
# For Kubernetes' TrainJob and PyTorchJob: the defaults of torchrun's own flags in a container.
KUBERNETES: Final = Launcher(
    *("", "", "", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
)
_OPEN_MPI: Final = Launcher(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    hint="mpirun -x MASTER_ADDR=HOST …",
)
_MVAPICH: Final = Launcher(
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    hint="mpirun -genv MASTER_ADDR HOST …",
)
_PMI: Final = Launcher(  # Intel MPI and MPICH
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    hint="mpirun -genv MASTER_ADDR HOST …",
)
_SLURM: Final = Launcher(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
    hint="export MASTER_ADDR=HOST before srun",
)
MPI: Final = (_OPEN_MPI, _MVAPICH, _PMI)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one process among those that a launcher started.

    Attributes:
        rank, world_size: index and number of processes.
        local_rank, local_size: the same on this machine. The size is None if no variable has it.
        main_address: the machine of rank 0; "" if only the user knows it.
        port: the port of rank 0: given, or derived from the job, so equal for all processes and rarely another job's.
            "" if unknown.
        launcher: the launcher whose variables were read.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int | None
    main_address: str
    port: str
    launcher: Launcher

    @property
    def source(self) -> str:
        """The variable with this process's number."""
        return self.launcher.rank or self.launcher.machine

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the place in torchrun's variables. An address and port in `environ` are kept.

        Raises:
            LaunchError: the address of rank 0 is unknown.
        """
        address = environ.get(TORCH.address) or self.main_address
        port = environ.get(TORCH.port) or self.port
        missing = [name for name, value in ((TORCH.address, address), (TORCH.port, port)) if not value]
        if missing:
            raise LaunchError(
                f"{self.source} is set, so this is one of {self.world_size} processes, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set: nothing says where rank 0 is.\n"
                f"{self._how_to_say_where()} To run one process, unset {self.source} and its related variables "
                f'(in a notebook: os.environ.pop("{self.source}")).'
            )
        read_port(port, TORCH.port if environ.get(TORCH.port) else self.launcher.port)
        return {**self.numbers(), TORCH.address: address, TORCH.port: port}

    def numbers(self) -> dict[str, str]:
        """Return the place in torchrun's variables, without the address and port of rank 0."""
        numbers = {TORCH.rank: self.rank, TORCH.world_size: self.world_size, TORCH.local_rank: self.local_rank}
        here = {} if self.local_size is None else {TORCH.local_size: self.local_size}
        return {name: str(number) for name, number in (numbers | here).items()}

    def _how_to_say_where(self) -> str:
        if self.launcher.hint:
            return f"Give all of them the machine of rank 0 ({self.launcher.hint})."
        return (
            f"Set {TORCH.address} to the machine of rank 0 ({OWN_ADDRESS} if all are on this one) and {TORCH.port} "
            "to a free port there, the same for all processes. Or start the script with torchrun or `zero-plugin "
            "launch`."
        )


@dataclass(frozen=True, slots=True)
class Allocation:
    """The machines of the job in which a launcher runs.

    Attributes:
        machines: the number of machines.
        machine_rank: this machine's index; None in a batch script, which only runs on the first machine.
        main_address: the first machine; "" if only the user knows it.
        port: the port of rank 0, which all launchers derive from the job.
        launchers_here: the number of the job's tasks on this machine. Each task is a launcher.
        sources: fact → the variable that it was read from.
        processes: the number of processes on all machines; None if the launcher counts them.
    """

    machines: int
    machine_rank: int | None
    main_address: str
    port: int
    launchers_here: int
    sources: Mapping[str, str]
    processes: int | None = None


def number_of(environ: Mapping[str, str], name: str) -> int:
    """Return the integer value of a variable.

    Raises:
        LaunchError: its value is not an integer.
    """
    try:
        return int(environ[name])
    except ValueError:
        raise LaunchError(
            f"{name}={environ[name]} is not an integer.\nA launcher sets it to this process's number in the run. Start "
            f"the script with `zero-plugin launch` or torchrun; or unset {name}, to run one process."
        ) from None


def read_port(text: str, name: str) -> int:
    """Return the number of a port.

    Raises:
        LaunchError: the text is not the number of a port.
    """
    if text.isdigit() and 0 < int(text) < 2**16:
        return int(text)
    raise LaunchError(
        f"{name}={text} is not the number of a port.\nSet {name} to a free port of the machine of rank 0, between 1024 "
        "and 65535. (In a pod, a Kubernetes Service called `master` sets MASTER_PORT=tcp://…: give it another name.)"
    )


def find_task_place(environ: Mapping[str, str]) -> Place | None:
    """Find this process's place among the tasks of `mpirun` or `srun`; None if it is the only one.

    In a SLURM job, mpirun starts its daemons by srun, so its processes have the variables of both: mpirun's are right.
    But srun itself may set PMI_RANK, without MPI_LOCALRANKID: then SLURM's are right.
    """
    by_mpi = _mpi_launcher(environ)
    if _is_srun_task(environ) and (by_mpi is None or (by_mpi is _PMI and by_mpi.local_rank not in environ)):
        place = _slurm_place(environ)
    elif by_mpi is not None:
        place = _mpi_place(by_mpi, environ)
    else:
        return None
    return place if place.world_size > 1 else None


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Find the machines that a job of SLURM, MPI or Kubernetes gives to this launcher; None outside of a job."""
    if _is_srun_task(environ):
        place = _slurm_place(environ)
        sources = {"machines": _SLURM.machines, "rank": _SLURM.machine, "address": _SLURM.address}
        nodes, node = _slurm_nodes(environ), int(environ.get(_SLURM.machine, "0"))
        return Allocation(nodes, node, place.main_address, int(place.port), place.local_size or 1, sources)
    if environ.get("SLURM_JOB_ID") and (nodes := _slurm_nodes(environ)) > 1:
        return Allocation(nodes, None, "", 0, 1, {"machines": "SLURM_JOB_NUM_NODES"})
    by_mpi = _mpi_launcher(environ)
    if by_mpi is None:
        return _allocation_in_kubernetes(environ)
    mpi = _mpi_place(by_mpi, environ)
    sources = {"machines": by_mpi.world_size, "rank": by_mpi.rank, "address": TORCH.address}
    address = environ.get(TORCH.address) or mpi.main_address
    here = mpi.local_size or 1
    machines = mpi.world_size if here == 1 else -(-mpi.world_size // here)
    return Allocation(machines, mpi.rank, address, int(mpi.port), here, sources)


def _allocation_in_kubernetes(environ: Mapping[str, str]) -> Allocation | None:
    """Read torchrun's flags in a container's environment; None if it is alone, or if torchrun assigns machine ranks."""
    machines, each = environ.get(KUBERNETES.machines, "1"), environ.get(KUBERNETES.local_size, "")
    if machines == "1" or not machines.isdigit() or KUBERNETES.machine not in environ:
        return None
    address, port = environ.get(KUBERNETES.address, ""), environ.get(KUBERNETES.port)
    sources = {"machines": KUBERNETES.machines, "rank": KUBERNETES.machine, "address": KUBERNETES.address}
    return Allocation(
        int(machines),
        number_of(environ, KUBERNETES.machine),
        address,
        read_port(port, KUBERNETES.port) if port else 29500,
        launchers_here=1,
        sources={**sources, "processes": KUBERNETES.local_size},
        processes=int(machines) * int(each) if each.isdigit() else None,
    )


def expand_hosts(nodelist: str) -> list[str]:
    """Expand SLURM's short form of host names: `n[01-03,7],login` is n01, n02, n03, n7, login."""
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
    """Return whether `srun` started this. Batch scripts and interactive shells have most of SLURM's variables too."""
    step = environ.get("SLURM_STEP_ID", "")
    started = step.isdigit() and int(step) < _SPECIAL_STEP and _SLURM.rank in environ
    return started and "SLURM_PTY_PORT" not in environ


def _slurm_nodes(environ: Mapping[str, str]) -> int:
    step = environ.get(_SLURM.machines) if _is_srun_task(environ) else None
    return int(step or environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "1")


def _slurm_place(environ: Mapping[str, str]) -> Place:
    nodes = _slurm_nodes(environ)
    world = int(environ.get(_SLURM.world_size) or environ.get("SLURM_NTASKS") or "1")
    hosts = expand_hosts(environ.get(_SLURM.address) or environ.get("SLURM_JOB_NODELIST") or "")
    return Place(
        rank=number_of(environ, _SLURM.rank),
        world_size=world,
        local_rank=int(environ.get(_SLURM.local_rank, "0")),
        local_size=_tasks_here(environ, -(-world // nodes)),
        main_address=OWN_ADDRESS if nodes == 1 else next(iter(hosts), ""),
        port=_shared_port(f"slurm {environ.get('SLURM_JOB_ID')}.{environ['SLURM_STEP_ID']}"),
        launcher=_SLURM,
    )


def _tasks_here(environ: Mapping[str, str], evenly: int) -> int:
    """Return the number of tasks on this node; `evenly` if unknown.

    The variable's format is `2(x3),1`: three nodes with two tasks each, then one node with one.
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get(_SLURM.local_size, "")):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get(_SLURM.machine, "0"))
    return counts[node] if node < len(counts) else evenly


def _mpi_launcher(environ: Mapping[str, str]) -> Launcher | None:
    return next((names for names in MPI if names.rank in environ and names.world_size in environ), None)


def _mpi_place(names: Launcher, environ: Mapping[str, str]) -> Place:
    rank, world = number_of(environ, names.rank), number_of(environ, names.world_size)
    local_rank = environ.get(names.local_rank) or environ.get(TORCH.local_rank) or ("0" if world == 1 else None)
    if local_rank is None:
        raise LaunchError(
            f"{names.rank} is set but {names.local_rank} is not, so this process's number on its machine is unknown.\n"
            f"Set {TORCH.local_rank} for each process, or start them with `zero-plugin launch`."
        )
    local_size = number_of(environ, names.local_size) if environ.get(names.local_size) else None
    alone = local_size == world
    job = next((environ[name] for name in _MPI_JOB if name in environ), f"child of {os.getppid()}" if alone else "")
    address = OWN_ADDRESS if alone else ""
    return Place(rank, world, int(local_rank), local_size, address, _shared_port(f"mpi {job}"), names)


def _shared_port(job: str) -> str:
    return str(_FIRST_PORT + zlib.crc32(job.encode()) % _PORTS)
