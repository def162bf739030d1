"""A progress line of a training loop: step, loss, learning rate, throughput, memory, time left."""

from __future__ import annotations

import resource
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from torch import distributed

from zero_plugin.config.amounts import show_bytes


class _Report(NamedTuple):
    """What one process reports about the steps since its last report."""

    loss: float
    units: int
    seconds: float
    memory_bytes: int


class Progress:
    """Shows the progress of a training loop on the main process; every process creates it and updates it at every step.

    A line appears about every `seconds` seconds. Only then is the loss read from the device and gathered from the
    processes, so the other steps run without synchronization. The loss is the mean over processes, the throughput their
    sum, and the memory the highest peak of any process (resident set size on a CPU, allocator peak on a GPU).

        with Progress(total=1000) as progress:
            for step, batch in enumerate(loader, start=1):
                ...
                progress.update(step, loss=loss, lr=scheduler.get_last_lr()[0], units=batch.numel())

    Args:
        total: the number of steps of the loop.
        unit: what `units` counts, e.g. tokens.
        seconds: the time between two lines; None is 0.5 on a terminal, where one line is redrawn, and 10 elsewhere,
            where each is a new line.
        console: a rich console; None writes to standard output.
    """

    def __init__(
        self, total: int, *, unit: str = "tokens", seconds: float | None = None, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False)
        self._total = total
        self._unit = unit
        self._seconds = seconds if seconds is not None else 0.5 if self._console.is_terminal else 10.0
        self._units = 0
        self._reported = 0  # the last step that was reported
        self._next = 1
        self._first: tuple[int, float] | None = None  # step and time of the first line
        self._bar: Bar | None = None

    def __enter__(self) -> Progress:
        self._main = not _distributed() or distributed.get_rank() == 0
        self._before = time.perf_counter()
        if self._main and self._console.is_terminal:
            shows_bar = self._console.width >= 100
            self._bar = Bar(
                TextColumn("{task.description}"),
                *([BarColumn(bar_width=None)] if shows_bar else []),
                console=self._console,
                auto_refresh=False,  # without a thread: the line is drawn when it changes
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
        reports = _gather(_Report(float(loss), self._units, now - self._before, _peak_memory_bytes()))
        # All must gather at the same step, so the clock of the main process decides for all. The interval at most
        # doubles, since the first steps, which compile kernels and fill caches, take longer than the others.
        steps = step - self._reported
        due = round(self._seconds * steps / max(reports[0].seconds, 1e-9))
        self._next = step + max(1, min(due, 2 * steps))
        self._reported, self._before, self._units = step, now, 0
        if self._main:
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
        line = "  ".join(  # short enough for 80 columns
            [
                f"step {step}/{self._total}",
                f"loss {loss:.3f}",
                f"lr {lr:.2e}",
                f"{_scaled(speed)} {self._unit}/s",
                f"{show_bytes(peak)}/rank",
                f"ETA {left}",
            ]
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=line, refresh=True)
        else:
            self._console.print(line, soft_wrap=True)


def _distributed() -> bool:
    return bool(distributed.is_available() and distributed.is_initialized())


def _gather(report: _Report) -> list[_Report]:
    if not _distributed():
        return [report]
    reports: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reports, report)
    return reports


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
