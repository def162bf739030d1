"""Prints what checks came to: a mark, a name and what was found, and under what is not well the way to mend it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Mark", "Verdict", "print_verdicts"]

Mark = Literal["ok", "warning", "wrong", "left out"]
_STYLES: Final = {"ok": "green", "warning": "yellow", "wrong": "bold red", "left out": "dim"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table, and the one that mends it.

    Attributes:
        mark: what the check came to.
        name: what was looked at.
        said: what was found.
        fix: a command or an edit; empty where nothing is to be done.
    """

    mark: Mark
    name: str
    said: str
    fix: str = ""


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print to a terminal in colour and within its width; to a pipe one line each, so that they can be searched."""
    marks = max((len(verdict.mark) for verdict in verdicts), default=0)
    names = max((len(verdict.name) for verdict in verdicts), default=0)
    if not sys.stdout.isatty():
        for verdict in verdicts:
            print(f"{verdict.mark:{marks}}  {verdict.name:{names}}  {verdict.said}")
            for line in verdict.fix.splitlines():
                print(f"{'':{marks}}  {'':{names}}  → {line}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for verdict in verdicts:
        style, dim = _STYLES[verdict.mark], "dim" if verdict.mark == "left out" else ""
        row = Table.grid(padding=(0, 2, 0, 0))
        for width in (marks, names, None):
            row.add_column(min_width=width, overflow="fold")
        row.add_row(Text(verdict.mark, style), Text(verdict.name, dim), Text(verdict.said, dim))
        console.print(row)
        for line in verdict.fix.splitlines():  # never broken, so that it can be copied
            console.print(Text(f"{'':{marks}}  → {line}", style), soft_wrap=True)
