"""Amounts of bytes: as text, and as a bar that fills while they are read or written."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["progress_bar", "show_bytes"]

_BIG: Final = 2**28  # bytes, from which on a bar is worth looking at
_UNITS: Final = ("bytes", "KB", "MB", "GB", "TB")


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far a long reading or writing is; give what it is told the bytes with."""
    if total_bytes < _BIG or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.advance(task, count)


def show_bytes(count: float) -> str:
    """Three digits and a decimal unit."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} {_UNITS[-1]}"
