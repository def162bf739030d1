"""Finds this process's place in its run from the variables of any launcher. Contradictory variables are an error."""

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
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"  # if set, torchrun's agent has numbered this process
_DEVICE: Final = "ACCELERATE_TORCH_DEVICE"  # set by Ray
_NARROWS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # limit the visible GPUs


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Find this process's place in its run; None if it runs alone.

    The innermost launcher wins: torchrun and launchers with the same variables, then mpirun, then srun.

    Raises:
        LaunchError: the variables describe a place only in part, or contradict each other.
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
        if TORCH.local_rank not in environ:  # the variables are not from a launcher of several processes per machine
            _refuse_contradiction(place, job, environ)
            _refuse_several_here(environ)
        return place
    found = job or _place_of_lightning(environ) or _place_in_kubernetes(environ)
    if found is not None:
        _refuse_other_numbers(found, environ)
    elif environ.get(TORCH.world_size, "1") != "1":
        raise LaunchError(
            f"{TORCH.world_size}={environ[TORCH.world_size]} means that this is one of several processes, but "
            f"{TORCH.rank} is not set.\nStart the script with `zero-plugin launch` or torchrun; or set "
            f"{TORCH.rank} for each process; or, to run one process, unset {TORCH.world_size}."
        )
    return found


def find_local_rank(rank: int, world_size: int, environ: Mapping[str, str]) -> int:
    """Return the local rank of a process whose group the script or another library has made; 0 if unknown."""
    if TORCH.local_rank in environ:
        return number_of(environ, TORCH.local_rank)
    place = find_task_place(environ)
    return place.local_rank if place is not None and (place.rank, place.world_size) == (rank, world_size) else 0


def own_gpu(local_rank: int, visible: int, environ: Mapping[str, str]) -> int | None:
    """Return the index of this process's GPU among the visible ones; None if it has no GPU.

    Ray names the GPU. SLURM (`--gpus-per-task`) shows each process only its own GPUs, with indices from 0.

    Args:
        local_rank: this process's rank on its machine.
        visible: the number of visible GPUs.
        environ: this process's environment.
    """
    named = re.fullmatch(r"cuda:(\d+)", environ.get(_DEVICE, "").lower())
    if named is not None:
        return int(named[1]) if int(named[1]) < visible else None
    narrowed = any(environ.get(name) for name in _NARROWS)
    return local_rank % visible if narrowed else local_rank if local_rank < visible else None


@contextmanager
def variables_while(values: Mapping[str, str], others: Iterable[str] = ()) -> Iterator[None]:
    """Set environment variables inside the context. Restore these and `others` afterwards."""
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
    """Return whether the variables are inherited from a parent program that ran as a group of one process."""
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
            f"{_show(environ, TORCH.rank, _GLOBAL_RANK.rank)} contradict each other: both are this process's number in "
            "the run.\nUnset the one that was left over, or set by hand."
        )
    all_here = _are_all_here(world, environ)
    # Without a local rank, each machine has one process, as in a PyTorchJob.
    elsewhere = None if TORCH.local_rank in environ else 1
    local_size = _number_or(environ, TORCH.local_size, world if all_here else elsewhere)
    local_rank = _number_or(environ, TORCH.local_rank, rank if all_here else 0)
    return _check(_with_meeting_point(Place(rank, world, local_rank, local_size, "", "", names), environ), environ)


def _place_of_lightning(environ: Mapping[str, str]) -> Place | None:
    """Return the place from LOCAL_RANK, WORLD_SIZE and NODE_RANK, without a variable for the global rank."""
    if TORCH.local_rank not in environ or environ.get(TORCH.world_size, "1") == "1":
        return None
    world = number_of(environ, TORCH.world_size)
    if TORCH.local_size in environ:
        local_size = number_of(environ, TORCH.local_size)
    elif _are_all_here(world, environ):
        local_size = world
    else:
        raise LaunchError(
            f"{_show(environ, TORCH.world_size, TORCH.local_rank)} mean that this is one of several processes, but "
            f"neither {TORCH.rank} nor {TORCH.local_size} is set, so its rank is unknown.\nSet {TORCH.local_size} to "
            f"the number of processes on each machine, and {TORCH.machine} to this machine's number, from 0; or, to "
            f"run one process, unset {TORCH.world_size} and {TORCH.local_rank}."
        )
    machine, local_rank = _number_or(environ, TORCH.machine, 0), number_of(environ, TORCH.local_rank)
    place = Place(machine * local_size + local_rank, world, local_rank, local_size, "", "", _BY_LOCAL_RANK)
    return _check(_with_meeting_point(place, environ), environ)


def _place_in_kubernetes(environ: Mapping[str, str]) -> Place | None:
    """Return the place of a TrainJob's container, from torchrun's flags in its environment; None if it is alone."""
    if environ.get(KUBERNETES.machines, "1") in ("1", "1:1"):
        return None
    each = environ.get(KUBERNETES.local_size, "1")
    if each != "1" or not environ[KUBERNETES.machines].isdigit() or KUBERNETES.machine not in environ:
        raise LaunchError(
            f"{_show(environ, KUBERNETES.machines, KUBERNETES.local_size)}: this container is one of several, which "
            "need a launcher to start their processes, but the script was started without one.\nWrite `torchrun "
            "train.py` or `zero-plugin launch train.py` in the manifest, which read these variables; or use one "
            "process for each container (numProcPerNode: 1)."
        )
    rank, world = number_of(environ, KUBERNETES.machine), number_of(environ, KUBERNETES.machines)
    return _check(_with_meeting_point(Place(rank, world, 0, 1, "", "", KUBERNETES), environ), environ)


def _number_or(environ: Mapping[str, str], name: str, otherwise: T) -> int | T:
    """Return the integer value of a variable, or `otherwise` if it is not set."""
    return number_of(environ, name) if name in environ else otherwise


def _are_all_here(world: int, environ: Mapping[str, str]) -> bool:
    address = environ.get(TORCH.address)
    return world == 1 or (bool(address) and is_loopback(str(address)))


def _with_meeting_point(place: Place, environ: Mapping[str, str]) -> Place:
    names = place.launcher
    return replace(place, main_address=environ.get(names.address, ""), port=environ.get(names.port, ""))


def _check(place: Place, environ: Mapping[str, str]) -> Place:
    """Return the place. Raise LaunchError if its numbers contradict each other."""
    names = place.launcher
    count = names.world_size or names.machines
    for number, limit, variables in (
        (place.rank, place.world_size, (place.source, TORCH.machine, TORCH.local_size, count)),
        (place.local_rank, place.local_size, (names.local_rank, names.local_size, count)),
        (place.local_size, place.world_size + 1, (names.local_size, count)),
    ):
        if number is not None and limit is not None and not 0 <= number < limit:
            raise LaunchError(
                f"{_show(environ, *variables)} contradict each other: ranks go from 0 to the number of processes - 1, "
                "and no machine has more processes than the run.\nStart the script with `zero-plugin launch` or "
                "torchrun, which set these variables; or correct them for all processes; or unset them, to run one "
                "process."
            )
    return place


def _refuse_contradiction(place: Place, job: Place | None, environ: Mapping[str, str]) -> None:
    """Raise if the script or the job's image has exported another place than the job's."""
    if job is not None and (job.rank, job.world_size) != (place.rank, place.world_size):
        theirs = (job.source, job.launcher.world_size)
        raise LaunchError(
            f"{_show(environ, place.source, TORCH.world_size)} contradict {_show(environ, *theirs)}, which the "
            f"launcher has set.\nUnset {place.source} and {TORCH.world_size} in the script or the image of the job: "
            f"{' and '.join(theirs)} are enough. To use other numbers, set {TORCH.local_rank} too."
        )


def _refuse_other_numbers(place: Place, environ: Mapping[str, str]) -> None:
    """Raise if an exported single number differs from the launcher's."""
    theirs = place.launcher
    for name, its_name, number in (
        (TORCH.world_size, theirs.world_size or theirs.machines, place.world_size),
        (TORCH.local_rank, theirs.local_rank or theirs.local_size, place.local_rank),
    ):
        if name in environ and number_of(environ, name) != number:
            raise LaunchError(
                f"{_show(environ, name)} contradicts {_show(environ, its_name) or number}, which the launcher has "
                f"set.\nUnset {name} in the script or the image of the job: {its_name} is enough; or start the "
                "intended number of processes."
            )


def _refuse_several_here(environ: Mapping[str, str]) -> None:
    each = environ.get(KUBERNETES.local_size, "1")
    if each.isdigit() and int(each) > 1:
        raise LaunchError(
            f"{KUBERNETES.local_size}={each} means that {each} processes run in this container, but "
            f"{TORCH.local_rank} is not set: the script was started once.\nWrite `torchrun train.py` or `zero-plugin "
            f'launch train.py` in the manifest, which start {each}; or nprocPerNode: "1".'
        )


def _show(environ: Mapping[str, str], *names: str) -> str:
    """Return the variables that are set, as `A=1, B=2`."""
    return ", ".join(f"{name}={environ[name]}" for name in dict.fromkeys(names) if name in environ)
