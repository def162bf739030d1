"""Says a line once for the whole run."""

from __future__ import annotations

import sys

from zero_plugin.collectives import process_index

__all__ = ["announce"]


def announce(line: str) -> None:
    """Print `line` to stderr, on the main process only."""
    if process_index() == 0:
        print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up
