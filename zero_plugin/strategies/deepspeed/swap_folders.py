"""The folders in which one engine keeps its NVMe files."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_plugin.strategies.processes import Processes

__all__ = ["give_own_swap_folders", "remove_abandoned", "remove_swap_folders"]

_PREFIX = "zero_plugin-swap-"
_engine_numbers = itertools.count()
_held: dict[Path, int] = {}  # run folder -> descriptor that holds its lock as long as this process lives
_in_use: set[Path] = set()  # engine folders


def give_own_swap_folders(config: dict[str, Any], processes: Processes) -> tuple[Path, ...]:
    """Replace each `nvme_path` by a folder of this run and engine, and return those folders.

    DeepSpeed removes and fills a folder with a fixed name, so that two jobs or engines with one `nvme_path` would
    destroy each other's files. What killed runs left below `nvme_path` is removed. Collective.
    """
    sections = _nvme_sections(config)
    if not sections:
        return ()
    remove_abandoned(config, processes)
    run = [f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}"]
    dist.broadcast_object_list(run, src=0)
    number = next(_engine_numbers)
    folders = []
    for section in sections:
        run_folder = Path(section["nvme_path"]).absolute() / run[0]
        _hold(run_folder)
        folder = run_folder / f"engine-{number}"
        folder.mkdir(exist_ok=True)
        section["nvme_path"] = str(folder)
        folders.append(folder)
    _in_use.update(folders)
    return tuple(folders)


def remove_abandoned(config: dict[str, Any], processes: Processes) -> None:
    """Remove the folders, below each `nvme_path`, of runs of which no process lives; one process of a machine does."""
    if processes.local_rank == 0:
        for section in _nvme_sections(config):
            _remove_abandoned(Path(section["nvme_path"]))


def remove_swap_folders(folders: Iterable[Path]) -> None:
    """Remove engines' folders and the run's folder above; no process may use them any more."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        _in_use.discard(folder)
        if (descriptor := _held.pop(folder.parent, None)) is not None:
            os.close(descriptor)
        try:
            folder.parent.rmdir()
        except OSError:
            continue  # another engine of this run still has files there


def _nvme_sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    zero = config.get("zero_optimization", {})
    sections = [zero[name] for name in ("offload_optimizer", "offload_param") if zero.get(name)]
    return [section for section in sections if section.get("device") == "nvme"]


def _hold(run_folder: Path) -> None:
    """Make the folder and lock it, shared among the run's processes; the lock ends with the last of them."""
    while run_folder not in _held:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(descriptor), run_folder.stat()):
                _held[run_folder] = descriptor
                return
        except FileNotFoundError:
            pass  # another job took it for abandoned before it was locked
        os.close(descriptor)


def _remove_abandoned(nvme_path: Path) -> None:
    """Remove the folders of runs of which no process lives."""
    for run_folder in nvme_path.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(run_folder, os.O_RDONLY)
        except OSError:
            continue  # its own run removed it just now, or it is another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run_folder, ignore_errors=True)
        except OSError:
            continue  # in use, or on a file system without locks
        finally:
            os.close(descriptor)


@atexit.register
def _remove_left() -> None:
    # Registered before any Accelerator's own end, and so run after it: closed sessions have nothing left here. After an
    # error they were not closed, and the run is lost as a whole.
    remove_swap_folders(tuple(_in_use))
