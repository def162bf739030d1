"""When memory has run out: what to change, and going on with smaller micro-batches.

Says once what to change when memory has run out, and asks the launcher for smaller micro-batches where it may.

Tells errors that say that memory ran out from others.

A run that has run out of memory goes on with smaller micro-batches, and with as many more of them in each step.

What is said of a script that memory has ended, and what its launcher is asked for.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch

from zero_plugin.config.amounts import read_bytes, show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.handover import Shortage, leave_shortage, micro_batch_cut
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin
from zero_plugin.data.prepare import smaller_cut
from zero_plugin.distributed.collective_check import tell_loss
from zero_plugin.distributed.collectives import gather_object
from zero_plugin.loop.fewer_processes import redistribute_steps
from zero_plugin.machine.device_memory import memory_available_bytes
from zero_plugin.plan.run_plan import RunMemory
from zero_plugin.strategies.base import Saving

_log = logging.getLogger(__name__)

_OUT_OF_MEMORY: Final = (
    " out of memory.",  # CUDA, ROCm
    "CUDA error: out of memory",  # of the driver, beside torch's allocator; lines of advice follow
    "HIP error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


Phase = Literal["prepare()", "the forward", "backward()", "optimizer.step()"]

_ASKED: Final = re.compile(r"llocate ([\d.]+ ?(?:[KMGTPE]i)?[Bb])")
_PACKAGE: Final = Path(__file__).parents[1]
_PHASES: Final[dict[tuple[str, str], Phase]] = {
    ("loop/prepared.py", "prepare"): "prepare()",
    ("loop/training_loop.py", "backward"): "backward()",
    ("loop/optimizer.py", "step"): "optimizer.step()",
}


@dataclass(frozen=True, slots=True)
class FailedLoop:
    """The loop in which memory ran out.

    Attributes:
        trains: whether a model is prepared with its optimizer.
        micro_batch: samples of a micro-batch, None where no training loader tells.
        accumulation: micro-batches per optimizer step.
        cut: into how many micro-batches each of the loader's batches comes already.
        is_open: whether the configuration leaves the micro-batch to this package (`auto`).
        decides: whether the script counts its micro-batches itself, by setting `sync_gradients`.
        savings: what else lowers the use of memory, the cheapest first.
        run: what a plan computes its memory from; None where none was made.
        taken: bytes of the device that the process has used at most; 0 where not known.
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
    """What ran when it was raised; whatever is no call of this package's is taken for a forward."""
    while trace is not None:
        code = trace.tb_frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(_PACKAGE):
            phase = _PHASES.get((file.relative_to(_PACKAGE).as_posix(), code.co_name))
            if phase is not None:
                return phase
        trace = trace.tb_next
    return "the forward"


def describe_out_of_memory(error: BaseException, loop: FailedLoop, device: torch.device, rank: int) -> Shortage:
    """What was needed, what is there, what lowers the use, and whether a smaller micro-batch is to be tried.

    Args:
        error: says that memory ran out.
        loop: in which it did.
        device: where this process computes.
        rank: of this process.
    """
    phase = phase_of(error.__traceback__)
    on_device = device.type == "cpu" or not (isinstance(error, MemoryError) or "CPUAllocator" in str(error))
    depends = phase in ("the forward", "backward()") and on_device
    size = "" if loop.micro_batch is None else f", at micro-batch {loop.micro_batch}"
    asked = _asked_bytes(error)
    wanted = f"{show_bytes(asked)} were asked for" if asked else "as much as was asked for is not there"
    memory = device if on_device else torch.device("cpu")
    headline = (
        f"{'GPU' if memory.type == 'cuda' else 'Host'} memory ran out on rank {rank}, in {phase}{size}: {wanted}"
        f"{_describe_memory(memory)}."
    )
    factor = smaller_cut(loop.micro_batch) if depends and loop.trains and loop.micro_batch else 0
    ways = [*(_smaller(loop, factor) if factor else ()), *loop.savings]
    lines = [f"  {number}. {way}" for number, way in enumerate(_with_plan(ways, loop, loop.taken + asked), 1)]
    if not depends:
        lines.append(f"  A smaller micro-batch does not help: {_why_not(phase, on_device=on_device)}.")
    retries = factor and loop.is_open and not loop.decides
    return Shortage(
        headline,
        "\n".join(["What lowers it, the cheapest first:", *lines]),
        cut=loop.cut * factor if retries else 0,
        micro_batch=(loop.micro_batch or 0) // factor if retries else 0,
    )


def explain_out_of_memory(explain: Callable[[BaseException], Shortage]) -> Callable[[], None]:
    """When an error that says that memory ran out ends this process, tell what `explain` makes of it.

    The launcher is told, which says it once; where there is none it is printed here, below the traceback. The other
    processes, which may wait in an operation for this one, are told to end.

    Args:
        explain: a method, whose object is not kept.

    Returns:
        What undoes it.
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


# Of all Accelerators that have not ended; the newest one speaks.
_explaining: Final[list[weakref.WeakMethod[Callable[[BaseException], Shortage]]]] = []
_explained: BaseException | None = None


def describe_end(error: BaseException | None) -> list[str]:
    """Lines to be said with an error that ends this process where no launcher starts the run again; none of others.

    The other processes, which may wait in an operation for this one, are told to end.
    """
    shortage = _report_of(error)
    if shortage is None:
        return []
    tell_loss("has run out of memory")
    return _lines(shortage)


def _explain(error: BaseException | None) -> None:
    shortage = _report_of(error)
    if shortage is None:
        return
    if not leave_shortage(shortage, os.environ):
        _log.error("\n".join(_lines(shortage)))
    tell_loss("has run out of memory")


def _report_of(error: BaseException | None) -> Shortage | None:
    """What the newest Accelerator makes of it, once; None where memory has not run out."""
    global _explained
    while error is not None and not is_out_of_memory(error):
        error = error.__cause__
    explaining = [explain for reference in _explaining if (explain := reference()) is not None]
    if error is None or error is _explained or not explaining:
        return None
    _explained = error
    return explaining[-1](error)


def _lines(shortage: Shortage) -> list[str]:
    lines = [shortage.headline, shortage.advice]
    if shortage.cut:
        lines.append(
            "Nothing starts this run again: a loop that has failed cannot go on from inside its own script. "
            "`zero-plugin launch` starts it again by itself with the smaller micro-batch, with one process too."
        )
    return lines


def _smaller(loop: FailedLoop, factor: int) -> Iterator[Saving]:
    assert loop.micro_batch is not None, "it has a factor"
    micro_batch, accumulation = loop.micro_batch // factor, loop.accumulation * factor
    by_itself = "" if loop.is_open else ", or train_micro_batch_size_per_gpu: auto, and the launcher does it"
    yield Saving(
        f"batch_size={micro_batch} with gradient_accumulation_steps {accumulation}, the same global batch{by_itself}",
        {"micro_batch": micro_batch, "accumulation": accumulation},
    )
    yield Saving(
        "activation checkpointing (transformers: model.gradient_checkpointing_enable())",
        {"activation_checkpointing": True},
    )


def _with_plan(ways: Iterable[Saving], loop: FailedLoop, taken: int) -> Iterator[str]:
    """Each way with what it takes by the plan, corrected by what was really taken; the first that fits is marked."""
    run, found = loop.run, False
    if run is None:
        yield from (way.text for way in ways)
        return
    capacity = run.cluster.device_bytes
    short_by = max(1.0, taken / run.footprint.allocated_bytes) if loop.taken else 1.0
    for way in ways:
        if way.changes.get("activation_checkpointing") and run.activations.checkpointed is None:
            yield way.text
            continue
        needed = int(short_by * run.changed(**way.changes).footprint.device_bytes)
        fits = "" if found or needed > capacity else "; by the plan the cheapest that fits"
        found = found or bool(fits)
        yield f"{way.text}: {show_bytes(needed)} of {show_bytes(capacity)}{fits}"


def _why_not(phase: Phase, *, on_device: bool) -> str:
    if not on_device:
        return "host memory ran out, where the batches are not computed"
    return "the model's states need it" if phase == "prepare()" else "the optimizer's states need it"


def _asked_bytes(error: BaseException) -> int:
    """What could not be had, by the error's own words; 0 where it does not say."""
    found = _ASKED.search(str(error))
    return (read_bytes(found[1]) or 0) if found else 0


def _describe_memory(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, cached = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f"; of {show_bytes(total)} this process uses {show_bytes(held)} and keeps {show_bytes(cached - held)} for "
            f"reuse, and {show_bytes(free)} are free"
        )
    return f", and {show_bytes(memory_available_bytes(device))} can be had"


_ACCUMULATION: KeyPath = ("gradient_accumulation_steps",)
_GLOBAL: KeyPath = ("train_batch_size",)


def agree_on_cut(processes: int, environ: Mapping[str, str]) -> int:
    """Into how many micro-batches each of the loaders' batches comes, the same on every process; collective.

    Args:
        processes: of the run. Only the launcher of the machine on which memory ran out knows of it.
        environ: of this process.
    """
    own = micro_batch_cut(environ)
    here = environ.get("LOCAL_WORLD_SIZE", str(processes))
    return own if here == str(processes) else max(gather_object([own]))


def accumulate_more(document: Document, cut: int, intended: int = 1, found: int = 1) -> Document:
    """The document with so much more than the accumulation that a user wrote that the global batch stays.

    Where `train_batch_size` is written and the accumulation is open, it follows from that one by itself.

    Args:
        document: as it was asked for.
        cut: into how many micro-batches each of the loaders' batches comes.
        intended, found: processes that the global batch is meant for, and those that there are.

    Raises:
        LaunchError: the micro-batches cannot be shared out among the processes.
    """
    entry = document.deepspeed.get(*_ACCUMULATION)
    is_open = entry is None or entry.value in (AUTO, None)
    if (cut == 1 and intended == found) or (entry is not None and not is_open and not entry.origin.typed_by_user):
        return document
    if is_open and document.deepspeed.value(*_GLOBAL) not in (AUTO, None):
        return document
    asked = 1 if entry is None or is_open else entry.value
    where = "to keep the global batch" if entry is None else entry.origin.where
    reasons = [f"{asked}"]
    if cut > 1:
        reasons.append(f"× {cut}: memory ran out before, so each of the loader's batches comes as {cut} micro-batches")
    if intended != found:
        reasons.append(f"× {intended} ÷ {found}: so many of the processes are left")
    more = Entry(redistribute_steps(asked * cut, intended, found), Origin("rule", where, " ".join(reasons)))
    return replace(document, deepspeed=document.deepspeed.replace({_ACCUMULATION: more}))
