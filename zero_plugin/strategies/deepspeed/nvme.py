"""Offload to NVMe: folders, reads, and its speed.

The folders in which one engine keeps its NVMe files.

What DeepSpeed reads from NVMe: each weight once at a time, and each gradient to where it belongs.

How fast DeepSpeed's asynchronous I/O writes and reads a file, with the settings of its offload.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from torch import Tensor, nn

from zero_plugin.distributed.processes import Processes

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


def fix_swapping(engine: Any) -> None:
    """Make NVMe offload train as host memory does, for every order and size of the weights.

    DeepSpeed asks twice for a weight that comes twice in what it looks ahead at (near the end of a forward, when the
    backward needs it again), and then asserts that nobody does. And it reads a gradient straight to its place in the
    sub-group's buffer; the system refuses where that place is not aligned, without an error: the step takes what was
    there before.
    """
    parameters: list[Any] = list(engine.module.parameters())
    swappers = {id(swapper): swapper for p in parameters if (swapper := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        swapper.swap_in = _without_repetition(swapper.swap_in)
    if (states := getattr(engine.optimizer, "optimizer_swapper", None)) is not None:
        states._adjust_for_misaligned_lengths = _with_aligned_offsets(states)


def _without_repetition(swap_in: Any) -> Any:
    def call(params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        swap_in(list(dict.fromkeys(params)), *args, **kwargs)

    return call


def _with_aligned_offsets(swapper: Any) -> Any:
    """What comes before the first aligned place stays in memory, as what is behind the last aligned length does."""
    cut_lengths = swapper._adjust_for_misaligned_lengths

    def call(tensors: list[Tensor], offsets: list[int]) -> Any:
        pieces = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            head = min(-offset % swapper.numel_alignment, tensor.numel())
            if head and swapper.is_swappable_tensor(tensor=tensor):
                pieces.append((tensor[:head], offset))
                tensor, offset = tensor[head:], offset + head
            pieces.append((tensor, offset))
        return cut_lengths(tensors=[tensor for tensor, _ in pieces], offsets=[offset for _, offset in pieces])

    return call


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Seconds of writing and reading, and whether what was read is what was written."""

    write_seconds: float
    read_seconds: float
    equal: bool


def measure_nvme(file: Path, size: int, aio: Mapping[str, Any]) -> RoundTrip:
    """Write `size` bytes from locked memory into `file`, and read them again past the page cache.

    Args:
        file: is made; the caller removes it.
        size: bytes, a multiple of 1 MiB.
        aio: the configuration's `aio` section; what it leaves out is DeepSpeed's default.
    """
    settings = get_aio_config({"aio": dict(aio)})
    names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    handle = AsyncIOBuilder().load(verbose=False).aio_handle(*(settings[name] for name in names))
    out, back = (handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)) for _ in range(2))
    try:
        out.copy_(torch.arange(size, dtype=torch.int64).remainder_(251))
        back.zero_()
        seconds = []
        for start, buffer in ((handle.async_pwrite, out), (handle.async_pread, back)):
            began = time.perf_counter()
            start(buffer, str(file), 0)
            handle.wait()
            seconds.append(max(time.perf_counter() - began, 1e-9))
        return RoundTrip(seconds[0], seconds[1], torch.equal(out, back))
    finally:
        handle.free_cpu_locked_tensor(out)
        handle.free_cpu_locked_tensor(back)
