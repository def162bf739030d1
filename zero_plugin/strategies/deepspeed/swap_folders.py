"""The folders in which one engine keeps its NVMe files."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_plugin.strategies.processes import Processes

__all__ = ["give_own_swap_folders", "remove_swap_folders"]

_engine_numbers = itertools.count()


def give_own_swap_folders(config: dict[str, Any], processes: Processes) -> tuple[Path, ...]:
    """Replace each `nvme_path` by a folder of this run and engine, and return those folders.

    DeepSpeed removes and fills a folder with a fixed name, so that two jobs or engines with one `nvme_path` would
    destroy each other's files.
    """
    zero = config.get("zero_optimization", {})
    sections = [zero[name] for name in ("offload_optimizer", "offload_param") if zero.get(name)]
    sections = [section for section in sections if section.get("device") == "nvme"]
    if not sections:
        return ()
    run = [f"run-{os.getpid()}-{os.urandom(4).hex()}"]
    dist.broadcast_object_list(run, src=0)
    number = next(_engine_numbers)
    folders = []
    for section in sections:
        folder = Path(section["nvme_path"]) / run[0] / f"engine-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        section["nvme_path"] = str(folder)
        folders.append(folder)
    if processes.local_rank == 0:
        atexit.register(remove_swap_folders, folders)
    return tuple(folders)


def remove_swap_folders(folders: Iterable[Path]) -> None:
    """Remove the engine's folders, and the run's folder above once it is empty."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.parent.rmdir()
        except OSError:
            continue  # another engine or process of this run still has files there
