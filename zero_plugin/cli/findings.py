"""What a check found, as text, as text with excerpts in colour, as JSON, and as GitHub annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from zero_plugin.errors import Problem, Severity

__all__ = ["Findings", "as_github", "as_json", "as_text", "print_excerpts"]

_SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
_STYLES: Final = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GITHUB_LEVELS: Final = {"error": "error", "warning": "warning", "note": "notice"}
_MARKED: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[^\s:,{}\[\]]+|.')  # a quoted word, a bare one, or one character
_WIDEST: Final = 100  # characters of a line in an excerpt
_MOST_SKIPPED: Final = 5  # names of skipped files in a text; JSON has them all


@dataclass(frozen=True)
class Findings:
    """What a check found.

    Attributes:
        files: the files that were asked for, in order.
        skipped: files of folders that are no configurations.
        problems: errors, warnings and notes, file by file, in reading order.
        contents: the text of files that cannot be read again, by name.
    """

    files: tuple[str, ...]
    skipped: tuple[str, ...]
    problems: tuple[Problem, ...]
    contents: Mapping[str, str] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """How many problems are of that severity."""
        return sum(problem.severity == severity for problem in self.problems)

    @property
    def summary(self) -> str:
        """One line: how many files, how many problems of each kind."""
        subject = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        counts = [(self.count(severity), severity) for severity in _SEVERITIES]
        found = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n)
        return f"{subject}: {found or 'no problem found'}"


def as_text(findings: Findings) -> str:
    """A line for each problem and one for what to write, then the summary; never broken, so that it can be searched."""
    lines = []
    for problem in findings.problems:
        lines.append(f"{problem.where}: {problem.severity}: {problem.finding}")
        lines += [f"    {line}" for line in problem.fix.splitlines()]
    return "\n".join([*lines, *_skipped(findings), findings.summary])


def print_excerpts(findings: Findings) -> None:
    """Each problem with the line that it is about, for a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    lines_of = dict(findings.contents)
    for problem in findings.problems:
        style = _STYLES[problem.severity]
        console.print(Text.assemble((problem.severity, style), (f": {problem.finding}", "bold")))
        file, row, column = problem.place
        gutter = " " * len(str(row))
        console.print(Text.assemble((f"{gutter}--> ", "blue"), problem.where))
        excerpt = _excerpt(lines_of, file, row, column)
        if excerpt is not None:
            line, start, length = excerpt
            console.print(Text.assemble((f"{gutter} |\n{row} | ", "blue"), line))
            console.print(Text.assemble((f"{gutter} | ", "blue"), " " * start, ("^" * length, style)))
        for line in problem.fix.splitlines():
            console.print(Text.assemble((f"{gutter} = ", "blue"), line))
        console.print()
    for line in _skipped(findings):
        console.print(line, style="dim", markup=False)
    worst = next((severity for severity in _SEVERITIES if findings.count(severity)), None)
    console.print(findings.summary, style=_STYLES[worst] if worst else "bold green", markup=False)


def as_json(findings: Findings) -> str:
    """One object: the files, every problem with its parts, and the counts."""
    return json.dumps(
        {
            "files": findings.files,
            "skipped": findings.skipped,
            "problems": [_parts(problem) for problem in findings.problems],
            "summary": {f"{severity}s": findings.count(severity) for severity in _SEVERITIES},
        },
        indent=2,
        ensure_ascii=False,
    )


def as_github(findings: Findings) -> str:
    """GitHub's workflow commands, which show each problem at its line of the pull request; then the summary."""
    return "\n".join([*map(_annotation, findings.problems), findings.summary])


def _skipped(findings: Findings) -> Iterator[str]:
    if findings.skipped:
        names = list(findings.skipped[:_MOST_SKIPPED])
        more = len(findings.skipped) - len(names)
        yield f"skipped, as no configurations: {', '.join(names)}{f' and {more} more' if more else ''}"


def _parts(problem: Problem) -> dict[str, Any]:
    file, line, column = problem.place
    return {
        "severity": problem.severity,
        "file": file,
        "line": line,
        "column": column,
        "key": problem.key,
        "value": problem.value,
        "message": problem.message,
        "fix": problem.fix,
    }


def _annotation(problem: Problem) -> str:
    file, line, column = problem.place
    place = {"file": file, "line": line or 1, "col": column or 1, "title": problem.key or "configuration"}
    properties = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in place.items())
    text = "\n".join(part for part in (problem.finding, problem.fix) if part)
    return f"::{_GITHUB_LEVELS[problem.severity]} {properties}::{_escaped(text)}"


def _escaped(text: str, also: str = "") -> str:
    for character in "%\r\n" + also:  # % first, for the others become %XX
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _excerpt(contents: dict[str, str], file: str, row: int, column: int) -> tuple[str, int, int] | None:
    """The line, and where in it the word that starts at `column` is: start and length; a long line is cut around it."""
    if file not in contents:
        try:
            contents[file] = Path(file).read_text("utf-8-sig", "replace")
        except (OSError, ValueError):
            contents[file] = ""
    lines = contents[file].replace("\r\n", "\n").split("\n")
    if not 0 < row <= len(lines):
        return None
    line = "".join(character if character.isprintable() else " " for character in lines[row - 1])
    start = column - 1
    word = _MARKED.match(line, start)
    length = len(word.group()) if word else 1
    if len(line) <= _WIDEST:
        return line, start, length
    first = max(0, min(start - _WIDEST // 4, len(line) - _WIDEST))
    length = max(1, min(length, first + _WIDEST - start))
    return line[first : first + _WIDEST], start - first, length
