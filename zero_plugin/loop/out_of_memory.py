"""Out-of-memory errors: advice to the user, and a restart with smaller micro-batches.

If the configuration leaves the micro-batch size open, the launcher restarts the run with smaller micro-batches and
correspondingly more of them in each optimizer step.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch

from zero_plugin.config.amounts import read_bytes, show_bytes
from zero_plugin.config.run_files import OutOfMemoryReport, leave_out_of_memory_report
from zero_plugin.data.batch_sampler import smaller_cut
from zero_plugin.distributed.collective_check import report_failure
from zero_plugin.errors import Foreign
from zero_plugin.machine.hardware import memory_available_bytes
from zero_plugin.plan.run_plan import RunMemory
from zero_plugin.strategies.base import Saving

_log = logging.getLogger(__name__)

_OF_THE_CPU: Final = (
    Foreign("", kinds=MemoryError),
    Foreign("DefaultCPUAllocator: can't allocate memory", "torch/lib/libc10.so"),
)
_OUT_OF_MEMORY: Final = (
    *_OF_THE_CPU,
    Foreign("", kinds=torch.OutOfMemoryError),
    Foreign(r" out of memory\.|(CUDA|HIP) error: out of memory"),  # of torch's allocator; of the driver
)
_REQUESTED: Final = Foreign(r"llocate ([\d.]+ ?(?:[KMGTPE]i)?[Bb])", "torch/lib/libc10.so", kinds=Exception)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that the memory of a GPU or of the CPU ran out."""
    return any(row.find(error) for row in _OUT_OF_MEMORY)


Phase = Literal["prepare()", "the forward", "backward()", "optimizer.step()"]

_PACKAGE: Final = Path(__file__).parents[1]
_PHASES: Final[dict[tuple[str, str], Phase]] = {
    ("loop/prepared.py", "prepare"): "prepare()",
    ("loop/backward.py", "backward"): "backward()",
    ("loop/optimizer.py", "step"): "optimizer.step()",
}


@dataclass(frozen=True, slots=True)
class FailedLoop:
    """The state of the training loop in which memory ran out.

    Attributes:
        trains: whether a model is prepared with its optimizer.
        micro_batch: samples of a micro-batch; None if no training loader is prepared.
        accumulation: micro-batches per optimizer step.
        cut: the number of micro-batches that each batch of the loader is already split into.
        is_open: whether the configuration leaves the micro-batch size open (`auto`).
        decides: whether the script sets `sync_gradients` itself.
        savings: changes of the configuration that need less memory, the cheapest first.
        run: the plan's model of the run's memory; None without a plan.
        taken: the peak memory of the process on the device in bytes; 0 if unknown.
    """

    trains: bool
    micro_batch: int | None
    accumulation: int
    cut: int
    is_open: bool
    decides: bool
    savings: tuple[Saving, ...]
    run: RunMemory | None = None
    taken: int = 0


def phase_of(trace: TracebackType | None) -> Phase:
    """Return the call of this package that raised the error; the forward if the traceback has no such call."""
    while trace is not None:
        code = trace.tb_frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(_PACKAGE):
            phase = _PHASES.get((file.relative_to(_PACKAGE).as_posix(), code.co_name))
            if phase is not None:
                return phase
        trace = trace.tb_next
    return "the forward"


def describe_out_of_memory(
    error: BaseException, loop: FailedLoop, device: torch.device, rank: int
) -> OutOfMemoryReport:
    """Describe requested and available memory, changes that save memory, and whether to retry with a smaller batch.

    Args:
        error: the out-of-memory error.
        loop: the training loop in which it was raised.
        device: the device of this process.
        rank: the rank of this process.
    """
    phase = phase_of(error.__traceback__)
    on_device = device.type == "cpu" or not any(row.find(error) for row in _OF_THE_CPU)
    depends = phase in ("the forward", "backward()") and on_device
    size = "" if loop.micro_batch is None else f", at micro-batch {loop.micro_batch}"
    size_in_message = _REQUESTED.find(error)
    requested = (read_bytes(size_in_message[1]) or 0) if size_in_message else 0
    wanted = f"{show_bytes(requested)} were requested" if requested else "an allocation failed"
    memory = device if on_device else torch.device("cpu")
    headline = (
        f"{'GPU' if memory.type == 'cuda' else 'CPU'} memory ran out on rank {rank}, in {phase}{size}: {wanted}"
        f"{_describe_memory(memory)}."
    )
    factor = smaller_cut(loop.micro_batch) if depends and loop.trains and loop.micro_batch else 0
    options = [*(_smaller(loop, factor) if factor else ()), *loop.savings]
    lines = [f"  {number}. {text}" for number, text in enumerate(_with_plan(options, loop, loop.taken + requested), 1)]
    if not depends:
        why = f"the {'model' if phase == 'prepare()' else 'optimizer'}'s states need it"
        if not on_device:
            why = "CPU memory ran out, and the batches are computed on the GPU"
        lines.append(f"  A smaller micro-batch does not help: {why}.")
    retries = factor and loop.is_open and not loop.decides
    return OutOfMemoryReport(
        headline,
        "\n".join(["What needs less memory, the cheapest first:", *lines]),
        cut=loop.cut * factor if retries else 0,
        micro_batch=(loop.micro_batch or 0) // factor if retries else 0,
    )


def explain_out_of_memory(explain: Callable[[BaseException], OutOfMemoryReport]) -> Callable[[], None]:
    """Report the description that `explain` returns if an out-of-memory error ends this process.

    The launcher prints the description once; without a launcher it is logged below the traceback. The other processes
    are notified to exit, because they may wait for this one in a collective operation.

    Args:
        explain: a bound method; only a weak reference to its object is kept.

    Returns:
        A function that undoes this.
    """
    before = sys.excepthook
    explaining = weakref.WeakMethod(explain)
    _explaining.append(explaining)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        _explain(error)

    def undo() -> None:
        _explaining.remove(explaining)
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


# The methods of all Accelerators that have not ended; the newest one is used.
_explaining: Final[list[weakref.WeakMethod[Callable[[BaseException], OutOfMemoryReport]]]] = []
_explained: BaseException | None = None


def describe_end(error: BaseException | None) -> list[str]:
    """Return lines to print if an out-of-memory error ends this process without a launcher; none for other errors.

    The other processes are notified to exit, because they may wait for this one in a collective operation.
    """
    report = _report_of(error)
    if report is None:
        return []
    report_failure("has run out of memory")
    return _lines(report)


def _explain(error: BaseException | None) -> None:
    report = _report_of(error)
    if report is None:
        return
    if not leave_out_of_memory_report(report, os.environ):
        _log.error("\n".join(_lines(report)))
    report_failure("has run out of memory")


def _report_of(error: BaseException | None) -> OutOfMemoryReport | None:
    """Return the newest Accelerator's description, once for each error; None for errors of another kind."""
    global _explained
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__
    explaining = [explain for reference in _explaining if (explain := reference()) is not None]
    if error is None or error is _explained or not explaining:
        return None
    _explained = error
    return explaining[-1](error)


def _lines(report: OutOfMemoryReport) -> list[str]:
    lines = [report.headline, report.advice]
    if report.cut:
        lines.append(
            "This run is not restarted: a failed training loop cannot continue in the same process. "
            "`zero-plugin launch` restarts the run with the smaller micro-batch, also with one process."
        )
    return lines


def _smaller(loop: FailedLoop, factor: int) -> Iterator[Saving]:
    assert loop.micro_batch is not None, "a factor is only computed for a known micro-batch size"
    micro_batch, accumulation = loop.micro_batch // factor, loop.accumulation * factor
    by_itself = "" if loop.is_open else ", or train_micro_batch_size_per_gpu: auto, and the launcher does this"
    yield Saving(
        f"batch_size={micro_batch} with gradient_accumulation_steps {accumulation}, the same global batch{by_itself}",
        {"micro_batch": micro_batch, "accumulation": accumulation},
    )
    yield Saving(
        "activation checkpointing (transformers: model.gradient_checkpointing_enable())",
        {"activation_checkpointing": True},
    )


def _with_plan(options: Iterable[Saving], loop: FailedLoop, taken: int) -> Iterator[str]:
    """Yield each option with its predicted memory, scaled by the measured memory; mark the first that fits."""
    run, found = loop.run, False
    if run is None:
        yield from (option.text for option in options)
        return
    capacity = run.cluster.device_bytes
    short_by = max(1.0, taken / run.footprint.allocated_bytes) if loop.taken else 1.0
    for option in options:
        if option.changes.get("activation_checkpointing") and run.work.activations.checkpointed is None:
            yield option.text
            continue
        needed = int(short_by * run.changed(**option.changes).footprint.device_bytes)
        fits = "" if found or needed > capacity else "; according to the plan the cheapest that fits"
        found = found or bool(fits)
        yield f"{option.text}: {show_bytes(needed)} of {show_bytes(capacity)}{fits}"


def _describe_memory(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, cached = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"; of {show_bytes(total)} this process uses {show_bytes(held)} and keeps {show_bytes(cached - held)} for "
            f"reuse, and {show_bytes(free)} are free"
        )
    return f", and {show_bytes(memory_available_bytes(device))} are available"
