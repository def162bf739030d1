"""What commands print: lines, tables, and what checks came to.

A table fits the terminal; for a pipe it has aligned plain lines, which are never broken, so that they can be searched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from zero_plugin.errors import printable

Cell = str | tuple[str, str]  # a text, or a text and its style on a terminal


def print_line(text: str, style: str = "", *, wraps: bool = False) -> None:
    """Print a line, in a style on a terminal; it is broken only where it `wraps` there.

    Like all that is printed here it shows no character that steers a terminal: texts come from files of others.
    """
    text = printable(text)
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style), soft_wrap=not wraps)


def terminal_width() -> int | None:
    """Columns of the terminal that is printed to; None where it is none."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console().width


def print_json(value: Any) -> None:
    """Print a value as JSON, texts as they are."""
    print(printable(json.dumps(value, indent=2, ensure_ascii=False)))


def print_rows(
    rows: Sequence[Sequence[Cell]],
    head: Sequence[str] = (),
    *,
    widths: Sequence[int] = (),
    to_the_right: Collection[str] = (),
    unbroken: Collection[str] = (),
) -> None:
    """Print rows in columns that are aligned.

    Args:
        rows: as many cells each.
        head: names of the columns; none are printed by default.
        widths: of the first columns; by default as the cells need them.
        to_the_right: columns whose cells a terminal shows at their right side.
        unbroken: columns whose cells a terminal shows in one line.
    """
    rows = [
        [printable(cell) if isinstance(cell, str) else (printable(cell[0]), cell[1]) for cell in row] for row in rows
    ]
    texts = [head, *rows] if head else rows
    lines = [[cell if isinstance(cell, str) else cell[0] for cell in line] for line in texts]
    if not sys.stdout.isatty():
        needed = [max(map(len, column)) for column in zip(*lines, strict=True)]
        needed[: len(widths)] = widths
        for line in lines:
            print("  ".join(f"{text:<{width}}" for text, width in zip(line, needed, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head), header_style="dim")
    for number, _ in enumerate(lines[0] if lines else ()):
        name = head[number] if head else ""
        width = widths[number] if number < len(widths) else None
        side: Literal["right", "left"] = "right" if name in to_the_right else "left"
        table.add_column(name, width=width, overflow="fold", justify=side, no_wrap=name in unbroken)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    Console(highlight=False).print(table)


Level = Literal["ok", "warning", "wrong", "left out"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table of `zero-plugin doctor`, or of `zero-plugin test`.

    Attributes:
        check: what was looked at.
        level: `wrong` is what the configuration cannot run with; `warning` what will cost time, or may be needed later.
        found: what is there, with its numbers.
        fix: the command or the edit that fixes it; never empty where `level` is `warning` or `wrong`.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


_LEVEL_STYLES: Final = {"ok": "green", "warning": "yellow", "wrong": "bold red", "left out": "dim"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a row for each, and below it what fixes it; that is never broken, so that it can be copied."""
    levels = max((len(finding.level) for finding in findings), default=0)
    names = max((len(finding.check) for finding in findings), default=0)
    margin = " " * (levels if sys.stdout.isatty() else levels + 2 + names)
    for finding in findings:
        style, dim = _LEVEL_STYLES[finding.level], "dim" if finding.level == "left out" else ""
        print_rows([((finding.level, style), (finding.check, dim), (finding.found, dim))], widths=(levels, names))
        for line in finding.fix.splitlines():
            print_line(f"{margin}  → {line}", style)
