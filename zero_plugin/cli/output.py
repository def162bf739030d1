"""Output of the commands: lines, tables and findings of checks.

A table fits the terminal. In a pipe, a table has aligned plain lines, which stay unbroken for searching.
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
    """Print a line, in a style on a terminal. Only a line that `wraps` is broken at the terminal's width.

    Like all functions here, print no terminal control characters: texts may come from untrusted files.
    """
    text = printable(text)
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style), soft_wrap=not wraps)


def terminal_width() -> int | None:
    """Return the width of the terminal that stdout is, in columns; None if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return Console().width


def print_json(value: Any) -> None:
    """Print a value as JSON, without escaping non-ASCII texts."""
    print(printable(json.dumps(value, indent=2, ensure_ascii=False)))


def print_rows(
    rows: Sequence[Sequence[Cell]],
    head: Sequence[str] = (),
    *,
    widths: Sequence[int] = (),
    to_the_right: Collection[str] = (),
    unbroken: Collection[str] = (),
) -> None:
    """Print rows in aligned columns.

    Args:
        rows: the rows, with equally many cells each.
        head: names of the columns; default: no head.
        widths: widths of the first columns; default: the cells' width.
        to_the_right: names of columns that a terminal aligns to the right.
        unbroken: names of columns whose cells a terminal does not wrap.
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
        check: the subject of the check.
        level: `wrong` if the configuration cannot run like this; `warning` if it will cost time, or may matter later.
        found: the facts, with their numbers.
        fix: the command or the edit that fixes the problem; never empty if `level` is `warning` or `wrong`.
    """

    check: str
    level: Level
    found: str
    fix: str = ""


_LEVEL_STYLES: Final = {"ok": "green", "warning": "yellow", "wrong": "bold red", "left out": "dim"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a row for each finding and its fix below. Fixes stay unbroken, so they can be copied."""
    levels = max((len(finding.level) for finding in findings), default=0)
    names = max((len(finding.check) for finding in findings), default=0)
    margin = " " * (levels if sys.stdout.isatty() else levels + 2 + names)
    for finding in findings:
        style, dim = _LEVEL_STYLES[finding.level], "dim" if finding.level == "left out" else ""
        print_rows([((finding.level, style), (finding.check, dim), (finding.found, dim))], widths=(levels, names))
        for line in finding.fix.splitlines():
            print_line(f"{margin}  → {line}", style)
