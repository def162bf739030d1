"""Tools to compare times on a machine that is never idle, by turns and by ratios within each round."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from typing import Any

__all__ = [
    "LATE",
    "WIDTH",
    "Timings",
    "describe_run",
    "installed",
    "keep",
    "measure_cases",
    "take_turns",
    "until_stopped",
]

WIDTH = 130  # characters of a table, on any terminal
LATE = "not run in time"  # text of a row after SIGTERM


class Timings(dict[str, list[float]]):
    """Seconds of each contender, round by round."""

    def seconds(self, name: str) -> float:
        """Return the contender's median."""
        return median(self[name])

    def ratio(self, name: str, base: str) -> float:
        """Return the median over the rounds of the contender's time over `base`'s in the same round."""
        return median(self._ratios(name, base))

    def spread(self, name: str, base: str) -> float:
        """Return half the distance between the quartiles of those ratios."""
        lower, _, upper = quantiles(self._ratios(name, base), n=4)
        return (upper - lower) / 2

    def extra(self, name: str, base: str) -> float:
        """Return the median over the rounds of the seconds that the contender took longer than `base`."""
        return median(a - b for a, b in zip(self[name], self[base], strict=True))

    def _ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self[name], self[base], strict=True)]


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Run every contender once per round, in reverse order every other round.

    The reversal keeps a contender from always following the same other one.
    """
    timings = Timings({name: [] for name in contenders})
    for index in range(warmup + rounds):
        order: Sequence[str] = list(contenders) if index % 2 == 0 else list(reversed(contenders))
        for name in order:
            start = clock()
            contenders[name]()
            elapsed = clock() - start
            if index >= warmup:
                timings[name].append(elapsed)
    return timings


class _Stopped(BaseException):
    pass


@contextmanager
def until_stopped() -> Iterator[None]:
    """End the block on SIGTERM, and the processes that torch has spawned in it.

    The program then prints its results so far.
    """

    def stop(*_: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        raise _Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Stopped:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def keep(file: Path, measured: Any) -> None:
    """Write the results so far; a process that is killed in between leaves the previous file."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(measured))
    part.replace(file)


def measure_cases(measure: Callable[..., None], cases: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    """Return the results that `measure` has kept for each case; None for a case that did not run.

    Each case runs in its own processes and folder.

    Args:
        measure: runs in every process with its rank, the number of processes, the case, a file for results, and
            `options`.
        cases: the values for `measure`.
        options: of the command line, with `processes` and `folder`.
    """
    import torch

    measured: list[Any] = [None] * len(cases)
    with until_stopped():
        for index, case in enumerate(cases):
            with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve()) as folder:
                file = Path(folder, "measured.json")
                try:
                    arguments = (options.processes, case, file, options)
                    torch.multiprocessing.spawn(measure, arguments, nprocs=options.processes)
                finally:
                    measured[index] = json.loads(file.read_text()) if file.exists() else None
    return measured


def installed(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_run(*packages: str) -> str:
    """Describe the conditions without which a table means nothing: date, versions, cores and load."""
    versions = [f"{name} {installed(name) or 'not installed'}" for name in packages]
    load = f"load before {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return ", ".join([str(date.today()), f"Python {platform.python_version()}", *versions, load])
