"""This process's place among those of its run, by whatever launcher's variables; what contradicts there is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar

from zero_plugin.errors import LaunchError
from zero_plugin.machine.network import is_loopback
from zero_plugin.machine.scheduler_job import KUBERNETES, TORCH, Place, find_task_place, number_of

T = TypeVar("T")

_GLOBAL_RANK: Final = replace(TORCH, rank="GLOBAL_RANK")
_BY_LOCAL_RANK: Final = replace(TORCH, rank=TORCH.local_rank)
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"  # its agent has numbered this process, whatever started the agent
_DEVICE: Final = "ACCELERATE_TORCH_DEVICE"  # Ray sets it
_NARROWS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # shows a process some GPUs


def find_place(environ: Mapping[str, str]) -> Place | None:
    """This process's place among those of its run; None if it runs by itself.

    The nearest launcher counts: torchrun and what sets the same variables, then mpirun, then srun.

    Raises:
        LaunchError: the variables describe half a place, or contradict each other.
    """
    if _TORCHRUN in environ and TORCH.rank in environ:
        return _torch_place(environ)
    if _is_left_over(environ):
        own = (TORCH.rank, TORCH.world_size, TORCH.local_rank)
        environ = {name: value for name, value in environ.items() if name not in own}
    job = find_task_place(environ)
    if job is not None:
        _check(job, environ)
    if TORCH.rank in environ or (_GLOBAL_RANK.rank in environ and TORCH.world_size in environ):
        place = _torch_place(environ)
        if TORCH.local_rank not in environ:  # so no launcher of several processes on one machine has set the others
            _refuse_contradiction(place, job, environ)
            _refuse_several_here(environ)
        return place
    found = job or _place_of_lightning(environ) or _place_in_kubernetes(environ)
    if found is not None:
        _refuse_other_numbers(found, environ)
    elif environ.get(TORCH.world_size, "1") != "1":
        raise LaunchError(
            f"{TORCH.world_size}={environ[TORCH.world_size]} says that this is one of several processes, but nothing "
            f"says which: {TORCH.rank} is not set.\nStart the script with `zero-plugin launch` or torchrun; or set "
            f"{TORCH.rank} for each process; or, to run one process, unset {TORCH.world_size}."
        )
    return found


def find_local_rank(rank: int, world_size: int, environ: Mapping[str, str]) -> int:
    """The local rank of a process whose process group the script or another library has made; 0 where nobody says."""
    if TORCH.local_rank in environ:
        return number_of(environ, TORCH.local_rank)
    place = find_task_place(environ)
    return place.local_rank if place is not None and (place.rank, place.world_size) == (rank, world_size) else 0


def own_gpu(local_rank: int, visible: int, environ: Mapping[str, str]) -> int | None:
    """The number of this process's GPU among those that it sees; None where there is none for it.

    Ray names it. SLURM (`--gpus-per-task`) shows each process its own ones, which it counts from 0.

    Args:
        local_rank: of this process on its machine.
        visible: how many GPUs it sees.
        environ: its environment.
    """
    named = re.fullmatch(r"cuda:(\d+)", environ.get(_DEVICE, "").lower())
    if named is not None:
        return int(named[1]) if int(named[1]) < visible else None
    narrowed = any(environ.get(name) for name in _NARROWS)
    return local_rank % visible if narrowed else local_rank if local_rank < visible else None


@contextmanager
def variables_while(values: Mapping[str, str], others: Iterable[str] = ()) -> Iterator[None]:
    """Environment variables set inside; afterwards these and `others` are as before."""
    before = {name: os.environ.get(name) for name in (*values, *others)}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_left_over(environ: Mapping[str, str]) -> bool:
    """Whether the program that started this one was a group of one, whose variables were inherited."""
    alone = environ.get(TORCH.rank) == "0" and environ.get(TORCH.world_size) == "1"
    return alone and not (environ.get(TORCH.address) and environ.get(TORCH.port))


def _torch_place(environ: Mapping[str, str]) -> Place:
    names = TORCH if TORCH.rank in environ else _GLOBAL_RANK
    if TORCH.world_size not in environ:
        missing = [name for name in (TORCH.world_size, TORCH.address, TORCH.port) if name not in environ]
        raise LaunchError(
            f"{_show(environ, TORCH.rank)} is set but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not: "
            "the environment describes half a process group.\nStart the script with `zero-plugin launch` or torchrun, "
            f"which set them all; or, to run one process, unset {TORCH.rank} (in a notebook: "
            f'os.environ.pop("{TORCH.rank}")).'
        )
    rank, world = number_of(environ, names.rank), number_of(environ, TORCH.world_size)
    if _TORCHRUN not in environ and _GLOBAL_RANK.rank in environ and number_of(environ, _GLOBAL_RANK.rank) != rank:
        raise LaunchError(
            f"{_show(environ, TORCH.rank, _GLOBAL_RANK.rank)} contradict each other: both number this process among "
            "all of its run.\nUnset the one that was left over, or set by hand."
        )
    all_here = _are_all_here(world, environ)
    # Without a local rank there is one process on each machine, as in a PyTorchJob.
    elsewhere = None if TORCH.local_rank in environ else 1
    local_size = _number_or(environ, TORCH.local_size, world if all_here else elsewhere)
    local_rank = _number_or(environ, TORCH.local_rank, rank if all_here else 0)
    return _check(_with_meeting_point(Place(rank, world, local_rank, local_size, "", "", names), environ), environ)


def _place_of_lightning(environ: Mapping[str, str]) -> Place | None:
    """By machine and local rank, where no variable numbers all processes: LOCAL_RANK, WORLD_SIZE, NODE_RANK."""
    if TORCH.local_rank not in environ or environ.get(TORCH.world_size, "1") == "1":
        return None
    world = number_of(environ, TORCH.world_size)
    if TORCH.local_size in environ:
        local_size = number_of(environ, TORCH.local_size)
    elif _are_all_here(world, environ):
        local_size = world
    else:
        raise LaunchError(
            f"{_show(environ, TORCH.world_size, TORCH.local_rank)} say that this is one of several processes, but "
            f"neither {TORCH.rank} nor {TORCH.local_size} is set: nothing says which of all it is.\nSet "
            f"{TORCH.local_size}, how many processes run on each machine, and {TORCH.machine}, which machine this is, "
            f"from 0; or, to run one process, unset {TORCH.world_size} and {TORCH.local_rank}."
        )
    machine, local_rank = _number_or(environ, TORCH.machine, 0), number_of(environ, TORCH.local_rank)
    place = Place(machine * local_size + local_rank, world, local_rank, local_size, "", "", _BY_LOCAL_RANK)
    return _check(_with_meeting_point(place, environ), environ)


def _place_in_kubernetes(environ: Mapping[str, str]) -> Place | None:
    """That of a TrainJob's container, which has torchrun's flags in its environment; None if it is the only one."""
    if environ.get(KUBERNETES.machines, "1") in ("1", "1:1"):
        return None
    each = environ.get(KUBERNETES.local_size, "1")
    if each != "1" or not environ[KUBERNETES.machines].isdigit() or KUBERNETES.machine not in environ:
        raise LaunchError(
            f"{_show(environ, KUBERNETES.machines, KUBERNETES.local_size)}: this container is one of several, in which "
            "a launcher is to start the processes, and the script was started without one.\nWrite `torchrun train.py` "
            "or `zero-plugin launch train.py` in the manifest, which read these variables; or one process for each "
            "container (numProcPerNode: 1)."
        )
    rank, world = number_of(environ, KUBERNETES.machine), number_of(environ, KUBERNETES.machines)
    return _check(_with_meeting_point(Place(rank, world, 0, 1, "", "", KUBERNETES), environ), environ)


def _number_or(environ: Mapping[str, str], name: str, otherwise: T) -> int | T:
    """The integer that the variable holds, if it is set."""
    return number_of(environ, name) if name in environ else otherwise


def _are_all_here(world: int, environ: Mapping[str, str]) -> bool:
    address = environ.get(TORCH.address)
    return world == 1 or (bool(address) and is_loopback(str(address)))


def _with_meeting_point(place: Place, environ: Mapping[str, str]) -> Place:
    names = place.launcher
    return replace(place, main_address=environ.get(names.address, ""), port=environ.get(names.port, ""))


def _check(place: Place, environ: Mapping[str, str]) -> Place:
    """The place, if its numbers can be true together."""
    names = place.launcher
    count = names.world_size or names.machines
    for number, limit, variables in (
        (place.rank, place.world_size, (place.source, TORCH.machine, TORCH.local_size, count)),
        (place.local_rank, place.local_size, (names.local_rank, names.local_size, count)),
        (place.local_size, place.world_size + 1, (names.local_size, count)),
    ):
        if number is not None and limit is not None and not 0 <= number < limit:
            raise LaunchError(
                f"{_show(environ, *variables)} contradict each other: processes are counted from 0 to below their "
                "number, and no machine has more than all.\nStart the script with `zero-plugin launch` or torchrun, "
                "which set these variables; or correct them for all processes; or unset them, to run one process."
            )
    return place


def _refuse_contradiction(place: Place, job: Place | None, environ: Mapping[str, str]) -> None:
    """Raise where the script or the image of a job has exported another place than the job's."""
    if job is not None and (job.rank, job.world_size) != (place.rank, place.world_size):
        theirs = (job.source, job.launcher.world_size)
        raise LaunchError(
            f"{_show(environ, place.source, TORCH.world_size)} contradict {_show(environ, *theirs)}, with which this "
            f"process was started.\nUnset {place.source} and {TORCH.world_size} in the script or the image of the job: "
            f"{' and '.join(theirs)} are enough. To count in another way, set {TORCH.local_rank} too."
        )


def _refuse_other_numbers(place: Place, environ: Mapping[str, str]) -> None:
    """Raise where a single number was exported, and is another than the launcher's."""
    theirs = place.launcher
    for name, its_name, number in (
        (TORCH.world_size, theirs.world_size or theirs.machines, place.world_size),
        (TORCH.local_rank, theirs.local_rank or theirs.local_size, place.local_rank),
    ):
        if name in environ and number_of(environ, name) != number:
            raise LaunchError(
                f"{_show(environ, name)} contradicts {_show(environ, its_name) or number}, with which this process was "
                f"started.\nUnset {name} in the script or the image of the job: {its_name} is enough; or start as many "
                "processes as were meant."
            )


def _refuse_several_here(environ: Mapping[str, str]) -> None:
    each = environ.get(KUBERNETES.local_size, "1")
    if each.isdigit() and int(each) > 1:
        raise LaunchError(
            f"{KUBERNETES.local_size}={each} says that {each} processes run in this container, but {TORCH.local_rank} "
            "is not set: the script was started once.\nWrite `torchrun train.py` or `zero-plugin launch train.py` in "
            f'the manifest, which start {each}; or nprocPerNode: "1".'
        )


def _show(environ: Mapping[str, str], *names: str) -> str:
    """`A=1, B=2` and so on, of those that are set."""
    return ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)
