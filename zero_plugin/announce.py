"""Says a line once for the whole run."""

from __future__ import annotations

import sys

from zero_plugin.collectives import num_processes, process_index

__all__ = ["announce"]


def announce(line: str, *, by_each: bool = False) -> None:
    """Print `line` to stderr, on the main process only, or by each process that comes here, with its number."""
    rank = process_index()
    if by_each and num_processes() > 1:
        line = f"process {rank}: {line}"
    if by_each or rank == 0:
        print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up
