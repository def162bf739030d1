"""Offload to NVMe: an engine's folders, two fixes of DeepSpeed's reads, and a measurement of the speed."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from torch import Tensor, nn

from zero_plugin.config.amounts import show_bytes
from zero_plugin.distributed.collectives import broadcast_value
from zero_plugin.distributed.processes import Processes
from zero_plugin.strategies.deepspeed.patches import Patches

_PREFIX = "zero_plugin-swap-"
_engine_numbers = itertools.count()
_held: dict[Path, int] = {}  # run folder -> descriptor that holds its lock while this process runs
_in_use: set[Path] = set()  # engine folders


def give_own_swap_folders(config: dict[str, Any], processes: Processes) -> tuple[Path, ...]:
    """Replace each `nvme_path` by a folder of this run and engine, and return these folders. Collective.

    DeepSpeed uses a folder with a fixed name, so two jobs or engines with the same `nvme_path` would destroy each
    other's files. Files of killed runs below `nvme_path` are removed.
    """
    sections = _nvme_sections(config)
    if not sections:
        return ()
    remove_abandoned(config, processes)
    run = broadcast_value(f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}")
    number = next(_engine_numbers)
    folders = []
    for section in sections:
        run_folder = Path(section["nvme_path"]).absolute() / run
        _hold(run_folder)
        folder = run_folder / f"engine-{number}"
        folder.mkdir(exist_ok=True)
        section["nvme_path"] = str(folder)
        folders.append(folder)
    _in_use.update(folders)
    return tuple(folders)


def remove_abandoned(config: dict[str, Any], processes: Processes) -> None:
    """Remove the folders of runs below each `nvme_path` that have no running process; only on local rank 0."""
    if processes.local_rank == 0:
        for section in _nvme_sections(config):
            _remove_abandoned(Path(section["nvme_path"]))


def describe_failed_swap(folders: Sequence[Path], **_: Any) -> str:
    """Return a message that names the disk, for DeepSpeed's bare assertion; `folders` are the engine's."""
    found = [_state_of(folder) for folder in dict.fromkeys(folder.parents[1] for folder in folders)]
    return (
        f"offload to NVMe: DeepSpeed could not write or read its files ({'; '.join(found)}).\nThe optimizer states and "
        "weights there are lost: resume from the last checkpoint, with an nvme_path that stays."
    )


def _state_of(place: Path) -> str:
    try:
        return f"{place} has {show_bytes(shutil.disk_usage(place).free)} free"
    except OSError as error:
        return f"{place}: {error.strerror}"


def remove_swap_folders(folders: Iterable[Path]) -> None:
    """Remove the folders of engines, and the run's folder above them. No process may use them any more."""
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
    """Create the folder and take a shared lock on it. The lock ends when the last process of the run exits."""
    while run_folder not in _held:
        run_folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(descriptor), run_folder.stat()):
                _held[run_folder] = descriptor
                return
        except FileNotFoundError:
            pass  # another job removed the folder as abandoned before this lock
        os.close(descriptor)


def _remove_abandoned(nvme_path: Path) -> None:
    """Remove the folders of runs that have no running process."""
    for run_folder in nvme_path.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(run_folder, os.O_RDONLY)
        except OSError:
            continue  # its own run has just removed it, or it belongs to another user
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(run_folder, ignore_errors=True)
        except OSError:
            continue  # in use, or on a file system without locks
        finally:
            os.close(descriptor)


@atexit.register
def _remove_left() -> None:
    # Registered before the exit handlers of Accelerators, so it runs after them: closed sessions have removed their
    # folders. After an error sessions stay open, and their files are useless.
    remove_swap_folders(tuple(_in_use))


def fix_swapping(engine: Any, patches: Patches) -> None:
    """Fix two defects of DeepSpeed's NVMe offload, so it trains as CPU offload does.

    DeepSpeed requests a weight twice if it occurs twice in its prefetch queue (near the end of a forward, when the
    backward needs the weight again), and then fails an assertion. DeepSpeed also reads a gradient directly to its place
    in the sub-group's buffer. If that place is not aligned, the read fails silently, and the step uses the old values.
    """
    parameters: list[Any] = list(engine.module.parameters())
    swappers = {id(swapper): swapper for p in parameters if (swapper := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        patches.replace(swapper, "swap_in", _without_repetition(swapper.swap_in))
    if (states := getattr(engine.optimizer, "optimizer_swapper", None)) is not None:
        patches.replace(states, "_adjust_for_misaligned_lengths", _with_aligned_offsets(states))


def _without_repetition(swap_in: Any) -> Any:
    def call(params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        swap_in(list(dict.fromkeys(params)), *args, **kwargs)

    return call


def _with_aligned_offsets(swapper: Any) -> Any:
    """Keep elements before the first aligned offset in memory, as DeepSpeed does after the last aligned length."""
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
    """The seconds for writing and reading, and whether the data are equal."""

    write_seconds: float
    read_seconds: float
    equal: bool


def measure_nvme(file: Path, size: int, aio: Mapping[str, Any]) -> RoundTrip:
    """Write `size` bytes from locked memory to `file`, and read them back, bypassing the page cache.

    Args:
        file: the file to create; the caller removes it.
        size: the number of bytes, a multiple of 1 MiB.
        aio: the `aio` section of the configuration; missing keys have DeepSpeed's defaults.
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
