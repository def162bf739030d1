"""Time things against each other on a machine that is never quiet: in turns, round by round, and by ratios."""

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

WIDTH = 130  # characters of a table, wherever it is printed
LATE = "not run in time"  # of a row, after SIGTERM


class Timings(dict[str, list[float]]):
    """Seconds of each contender, round by round."""

    def seconds(self, name: str) -> float:
        """The contender's median."""
        return median(self[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over the rounds of the contender's time over `base`'s in the same round."""
        return median(self._ratios(name, base))

    def spread(self, name: str, base: str) -> float:
        """Half the distance between the quartiles of those ratios."""
        lower, _, upper = quantiles(self._ratios(name, base), n=4)
        return (upper - lower) / 2

    def extra(self, name: str, base: str) -> float:
        """Median over the rounds of the seconds that the contender took longer than `base`."""
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
    """Run every contender once per round; every other round in reverse, so that none always follows the same one."""
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
    """SIGTERM ends the block and the processes that torch has spawned in it; the program then prints what it has."""

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
    """Write what is measured so far; a process that is killed leaves it as it was before."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(measured))
    part.replace(file)


def measure_cases(measure: Callable[..., None], cases: Sequence[Any], options: argparse.Namespace) -> list[Any]:
    """What `measure` has kept of each case, in processes and a folder of its own; None of a case that is not run.

    Args:
        measure: run in every process with its rank, their number, the case, a file to keep things in, and `options`.
        cases: as `measure` takes them.
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
    """The installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_run(*packages: str) -> str:
    """Date, versions, cores and load: what a table is worth nothing without."""
    versions = [f"{name} {installed(name) or 'not installed'}" for name in packages]
    load = f"load before {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return ", ".join([str(date.today()), f"Python {platform.python_version()}", *versions, load])
