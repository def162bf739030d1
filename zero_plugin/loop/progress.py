"""`Progress`: a line about a training loop with step, loss, learning rate, throughput, MFU, memory and time left."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from torch import nn

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.distributed.collectives import gather_values, process_index
from zero_plugin.distributed.messages import QUIET_VARIABLE, is_set
from zero_plugin.loop.state import newest_run
from zero_plugin.plan.decoder import training_flops_per_token
from zero_plugin.plan.machines import peak_flops
from zero_plugin.plan.model_source import KEYS, model_sizes, stated_number
from zero_plugin.tensors.wrappers import extract_model

_PRECISIONS: Final[Mapping[object, Precision]] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class _Report(NamedTuple):
    """One process's measurements of the steps since its last report."""

    loss: float
    units: int
    seconds: float
    memory_bytes: int


class Progress:
    """The progress line of a training loop; every process creates and updates one, the main process shows it.

    A line appears about every `seconds` seconds. Other steps run without synchronization: only for a line the loss is
    read from the device and gathered from the processes. The loss is the mean over processes, the throughput their sum,
    and the memory the highest peak of any process (resident set size on a CPU, allocator peak on a GPU).

        with Progress(total=1000) as progress:
            for step, batch in enumerate(loader, start=1):
                ...
                progress.update(step, loss=loss, lr=scheduler.get_last_lr()[0], units=batch.numel())

    Without `with`, a terminal shows a new line each time instead of redrawing one.

    With `model`, the line shows the Model FLOPs Utilization (MFU): the floating-point operations per second at this
    throughput, relative to the peak in the device's data sheet. `training_flops_per_token` counts the operations. The
    line has no MFU if the peak is unknown, as on a CPU. `launch --quiet` shows no lines.

    Args:
        total: the number of steps of the loop.
        unit: the name of the unit that `units` counts, e.g. tokens.
        seconds: the time between two lines. None means 0.5 on a terminal, which redraws one line, and 10 elsewhere.
        console: a rich console; None writes to standard output.
        model: the trained model, prepared or not, if the unit is the tokens of a transformer.
        sequence_length: the tokens of one sample; None leaves out the operations of attention.
        flops_per_unit: the operations of forward and backward for one unit, for models that `model` does not support.
        peak_flops: the peak of one device, per second. None takes the data sheet's value for the precision of the
            newest `Accelerator`.
    """

    def __init__(
        self,
        total: int,
        *,
        unit: str = "tokens",
        seconds: float | None = None,
        console: Console | None = None,
        model: nn.Module | None = None,
        sequence_length: int | None = None,
        flops_per_unit: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if flops_per_unit is None and model is not None:
            flops_per_unit = _flops_per_token(model, sequence_length or 0)
        self._flops_per_unit = flops_per_unit
        self._peak = peak_flops or (_peak_flops(model) if flops_per_unit else None)
        self._console = console or Console(highlight=False)
        self._total = total
        self._unit = unit
        self._seconds = seconds if seconds is not None else 0.5 if self._console.is_terminal else 10.0
        self._units = 0
        self._reported = 0  # the last reported step
        self._next = 1
        self._first: tuple[int, float] | None = None  # step and time of the first line
        self._bar: Bar | None = None
        self._before = time.perf_counter()

    def __enter__(self) -> Progress:
        self._before = time.perf_counter()
        if _shows() and self._console.is_terminal:
            shows_bar = self._console.width >= 100
            self._bar = Bar(
                TextColumn("{task.description}"),
                *([BarColumn(bar_width=None)] if shows_bar else []),
                console=self._console,
                auto_refresh=False,  # no thread: `update` redraws the line
                expand=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._total)
            self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, *, loss: float | torch.Tensor, lr: float, units: int = 0) -> None:
        """Report that a step is done; every process calls this with the same `step`.

        Args:
            step: the number of steps done so far, counted from 1.
            loss: the loss of this process; a tensor is read from its device only when a line is due.
            lr: the learning rate of the step.
            units: how many units, e.g. tokens, this process computed in the step.
        """
        self._units += units
        if step < self._next and step < self._total:
            return
        now = time.perf_counter()
        own = _Report(float(loss), self._units, now - self._before, _peak_memory_bytes())
        reports = [_Report(*one) for one in gather_values(own)]
        # All processes must gather at the same step, so the main process's clock decides. The interval at most doubles:
        # the first steps compile kernels and fill caches, and take longer than the others.
        steps = step - self._reported
        due = round(self._seconds * steps / max(reports[0].seconds, 1e-9))
        self._next = step + max(1, min(due, 2 * steps))
        self._reported, self._before, self._units = step, now, 0
        if _shows():
            self._show(step, lr, reports, now)

    def _show(self, step: int, lr: float, reports: list[_Report], now: float) -> None:
        loss = sum(r.loss for r in reports) / len(reports)
        speed = sum(r.units for r in reports) / max(reports[0].seconds, 1e-9)
        peak = max(r.memory_bytes for r in reports)
        if self._first is None:  # the first step is not representative
            self._first, left = (step, now), "?"
        else:
            seconds = (self._total - step) * (now - self._first[1]) / (step - self._first[0])
            left = str(timedelta(seconds=round(seconds)))
        used = speed * (self._flops_per_unit or 0.0) / len(reports)
        parts = [
            f"step {step}/{self._total}",
            f"loss {loss:.3f}",
            f"lr {lr:.2e}",
            f"{_scaled(speed)} {self._unit}/s",
            *([f"MFU {used / self._peak:.1%}"] if self._peak and used else []),
            f"{show_bytes(peak)}/rank",
            f"ETA {left}",
        ]
        line = "  ".join(parts)
        if self._bar is not None and len(line) >= self._console.width:  # without `lr` the line fits into 80 columns
            line = " ".join(part for part in parts if not part.startswith("lr "))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line, refresh=True)
        else:
            self._console.print(line, soft_wrap=True)


def _flops_per_token(model: nn.Module, sequence_length: int) -> float:
    module = extract_model(model, keep_torch_compile=False)
    sizes, config = model_sizes(module), getattr(module, "config", None)
    heads, head_size = (stated_number(config, KEYS[name]) for name in ("heads", "head_size"))
    return training_flops_per_token(sizes, sequence_length, heads * head_size if heads and head_size else None)


def _peak_flops(model: nn.Module | None) -> float | None:
    """Return the peak of this process's GPU in the newest `Accelerator`'s precision, or without one the model's."""
    if not torch.cuda.is_available():
        return None
    run, parameter = newest_run(), next(model.parameters(), None) if model is not None else None
    found = None if parameter is None else parameter.dtype
    precision: Any = run.expected_precision() if run is not None else _PRECISIONS.get(found, "no")
    if precision == "no" and torch.backends.cuda.matmul.allow_tf32:
        return None  # the table of data sheets has no peak for TF32
    return peak_flops(torch.cuda.get_device_name(), precision)


def _shows() -> bool:
    return process_index() == 0 and not is_set(QUIET_VARIABLE)


def _peak_memory_bytes() -> int:
    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, getrusage(2)


def _scaled(value: float) -> str:
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}" if value < 100 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.3g}G"
