"""What commands print: tables, resolved values by section, progress bars, and what checks came to.

A table fits the terminal; for a pipe it has aligned plain lines, which are never broken, so that they can be searched.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from typing import Final

from zero_plugin.cli.doctor_checks.finding import Finding
from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Facts, Resolved, Row
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import KeyPath, dotted, show

_FIRST: Final = ("launch", "precision", "batch", "zero_optimization", "optimizer", "scheduler")
_SECTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mixed_precision", "fp16", "bf16", "torch_autocast", "data_types"), "precision"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "batch"),
    "gradient_clipping": "batch",
    "scheduler_counts": "scheduler",
}
_STYLES: Final = {"flag": "cyan", "code": "cyan", "rule": "green", "default": "dim", "open": "yellow", "unset": "dim"}


Cell = str | tuple[str, str]  # a text, or a text and its style on a terminal


def print_line(text: str, style: str = "", *, wraps: bool = False) -> None:
    """Print a line, in a style on a terminal; it is broken only where it `wraps` there."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style), soft_wrap=not wraps)


def print_rows(
    rows: Sequence[Sequence[Cell]],
    head: Sequence[str] = (),
    *,
    widths: Sequence[int] = (),
    to_the_right: Collection[str] = (),
) -> None:
    """Print rows in columns that are aligned.

    Args:
        rows: as many cells each.
        head: names of the columns; none are printed by default.
        widths: of the first columns; by default as the cells need them.
        to_the_right: columns whose cells a terminal shows at their right side.
    """
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
        table.add_column(name, width=width, overflow="fold", justify="right" if name in to_the_right else "left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else Text(*cell) for cell in row))
    Console(highlight=False).print(table)


@dataclass(frozen=True, slots=True)
class Explained:
    """One document, resolved as far as it is known."""

    document: Document
    facts: Facts
    resolved: Resolved
    rows: Sequence[Row]

    @property
    def name(self) -> str:
        """The files that were read, for messages."""
        return ", ".join(self.document.sources) or "no file"

    @property
    def headline(self) -> str:
        """Where this would run."""
        machine = self.facts.machine
        path = "DeepSpeed" if self.facts.strategy == "deepspeed" else self.facts.strategy
        return f"{self.name}: {path} on {machine.processes} × {machine.accelerator}"


def print_table(explained: Explained, options: Mapping[str, str]) -> None:
    """Print every value with where it came from, then what was noted.

    Args:
        explained: what to print.
        options: by dotted key, the option that replaces what would fill it in a run.
    """
    launch_keys = set(explained.document.launch) | set(explained.resolved.launch)
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in explained.rows:
        section = _section(row.path, is_launch=row.path in launch_keys)
        hint = options.get(dotted(row.path), "--set") if row.kind == "open" else ""
        line = (dotted(row.path), _value(row), _origin(row) + (f" ({hint})" if hint else ""), _STYLES.get(row.kind, ""))
        sections.setdefault(section, []).append(line)
    ordered = sorted(sections, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    waiting = sum(row.kind == "open" for row in explained.rows)
    keys = {dotted(row.path) for row in explained.rows}
    logged = [line for line in explained.resolved.logged if line.partition(" = ")[0] not in keys]
    notes = [*(note.headline for note in explained.document.notes), *logged]
    if waiting:
        notes.append(f"{waiting} open: a run fills what waits; here the options named beside it do")
    _print_sections(explained.headline, {name: sections[name] for name in ordered}, notes)


def print_difference(ours: Explained, theirs: Explained, *, as_json: bool) -> None:
    """Print the keys that two documents resolve to different values, both values and where they came from.

    A key that only one of them has counts with DeepSpeed's default in the other.
    """
    sides = [{row.path: row for row in side.rows} for side in (ours, theirs)]
    pairs = []
    for path in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [
            side.get(path) or _unset(path, explained) for side, explained in zip(sides, (ours, theirs), strict=True)
        ]
        if pair[0].value != pair[1].value or (pair[0].kind == "open") != (pair[1].kind == "open"):
            pairs.append((dotted(path), pair))
    names = [ours.name, theirs.name]
    if as_json:
        differences = [{"path": path, "values": [row.as_json() for row in pair]} for path, pair in pairs]
        print(json.dumps({"files": names, "differences": differences}, indent=2, ensure_ascii=False))
        return
    if not pairs:
        print(f"{names[0]} and {names[1]} resolve to the same values")
    widths = (max(map(len, names)) + 2, max((len(_value(row)) for _, pair in pairs for row in pair), default=0))
    for key, pair in pairs:
        print(key)
        print_rows(
            [(f"  {name}", _value(row), _origin(row)) for name, row in zip(names, pair, strict=True)], widths=widths
        )


def _unset(path: KeyPath, explained: Explained) -> Row:
    default = deepspeed_default(path, explained.resolved.tree.value("optimizer", "type"))
    return Row(path, default[0] if default else None, "unset", "", "nobody wrote the key")


def _section(path: KeyPath, *, is_launch: bool) -> str:
    if path[0] in _SECTIONS:
        return _SECTIONS[path[0]]
    if is_launch:
        return "launch"
    return path[0] if len(path) > 1 else "engine"


def _value(row: Row) -> str:
    if row.kind == "open" and row.value == "auto":
        return "open"
    return row.value if isinstance(row.value, str) else show(row.value)


def _origin(row: Row) -> str:
    """Where a value came from, in a few words."""
    if row.kind == "open":
        return f"waits for {'' if row.reason.startswith('Dummy') else 'the '}{row.reason}"
    if row.kind in ("file", "flag", "code"):
        return _place(row.where)
    words = ["auto"] if row.was_auto else ["rule"] if row.kind == "rule" else []
    if row.kind != "rule" and "default" not in row.reason:
        words.append("DeepSpeed's default")
    return ": ".join([*words, row.reason])


def _place(where: str) -> str:
    """`folder/ds.json:12:5` as `ds.json:12`; the headline has the whole path, and a row has one place."""
    file, _, place = where.partition(":")
    line, _, column = place.partition(":")
    return f"{Path(file).name}:{line}" if line.isdigit() and column.isdigit() else where


def _print_sections(headline: str, sections: Mapping[str, Sequence[Sequence[str]]], notes: Sequence[str]) -> None:
    """Print lines of a key, a value, where it came from, and the style of both."""
    columns = get_terminal_size().columns if sys.stdout.isatty() else 0
    if columns:  # where the section is above, and a name may be broken
        sections = {name: [(_within(name, key), *rest) for key, *rest in lines] for name, lines in sections.items()}
    every = [line for lines in sections.values() for line in lines]
    keys, values = (max((len(line[column]) for line in every), default=0) for column in (0, 1))
    if columns:  # however long a name is, two fifths of the terminal are left for the reasons
        keys, values = min(keys, columns * 2 // 5), min(values, columns // 5)
    print_line(headline, "bold")
    for section, lines in sections.items():
        print_line(f"\n{section}", "bold")
        rows = [
            ("  " + "\n    ".join(_folded(key, keys)), (value, "" if style == "dim" else style), (origin, style))
            for key, value, origin, style in lines
        ]
        print_rows(rows, widths=(keys + 2, values))
    for number, note in enumerate(notes):
        print_line(f"{'' if number else chr(10)}note: {note}", "dim", wraps=True)


def _within(section: str, key: str) -> str:
    return key.removeprefix(f"{section}.")


def _folded(name: str, width: int) -> list[str]:
    """A long name in lines of at most `width` characters, broken after an underscore or a dot."""
    lines: list[str] = []
    while len(name) > width:
        cut = max(name.rfind("_", 0, width), name.rfind(".", 0, width)) + 1 or width
        lines.append(name[:cut])
        name, width = name[cut:], width - 2 if not lines[1:] else width
    return [*lines, name]


_BIG: Final = 2**28  # bytes, from which on a bar is worth looking at


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far a long reading or writing is; give the function that counts bytes."""
    if total_bytes < _BIG or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda count: progress.advance(task, count)


_LEVEL_STYLES: Final = {"ok": "green", "warning": "yellow", "wrong": "bold red", "left out": "dim"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print to a terminal in colour and within its width; to a pipe one line each, so that they can be searched."""
    levels = max((len(finding.level) for finding in findings), default=0)
    names = max((len(finding.check) for finding in findings), default=0)
    if not sys.stdout.isatty():
        for finding in findings:
            print(f"{finding.level:{levels}}  {finding.check:{names}}  {finding.found}")
            for line in finding.fix.splitlines():
                print(f"{'':{levels}}  {'':{names}}  → {line}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for finding in findings:
        style, dim = _LEVEL_STYLES[finding.level], "dim" if finding.level == "left out" else ""
        row = Table.grid(padding=(0, 2, 0, 0))
        for width in (levels, names, None):
            row.add_column(min_width=width, overflow="fold")
        row.add_row(Text(finding.level, style), Text(finding.check, dim), Text(finding.found, dim))
        console.print(row)
        for line in finding.fix.splitlines():  # never broken, so that it can be copied
            console.print(Text(f"{'':{levels}}  → {line}", style), soft_wrap=True)
