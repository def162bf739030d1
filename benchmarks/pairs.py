"""Time things against each other on a machine that is never quiet: in turns, round by round, and by ratios."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from statistics import median, quantiles

__all__ = ["WIDTH", "Timings", "describe_run", "installed", "take_turns"]

WIDTH = 130  # characters of a table, wherever it is printed


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
