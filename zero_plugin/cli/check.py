"""`zero-plugin check`: every problem of configuration files, located. For a folder, all configuration files in it.

Prints the problems as text, as text with excerpts in colour, as JSON, or as GitHub annotations.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.cli.fix import fix_file
from zero_plugin.cli.output import print_json, print_line
from zero_plugin.config.check import find_problems
from zero_plugin.config.commented import replace_file
from zero_plugin.config.document import Document
from zero_plugin.config.keys import CONFIG_FILE, LAUNCH, MICRO_BATCH, SHORT_FIELDS, STAGE, ZERO, LaunchSettings
from zero_plugin.config.launch_settings import asks_for_deepspeed, dropped_zero, launch_settings
from zero_plugin.config.parallelism import sequence_parallel_size
from zero_plugin.config.read import STANDARD_INPUT, named_file, parse_file, read_document
from zero_plugin.config.resolve.facts import StrategyName
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.config.schema import deepspeed_schema, yaml_schema
from zero_plugin.config.tree import holds_auto
from zero_plugin.errors import ConfigError, Problem, Severity, printable

_SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "note")
_STYLES: Final = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_GITHUB_LEVELS: Final = {"error": "error", "warning": "warning", "note": "notice"}
_MARKED: Final = re.compile(r'"(?:[^"\\]|\\.)*"?|[^\s:,{}\[\]]+|.')  # a quoted word, a bare one, or one character
_WIDEST: Final = 100  # characters of a line in an excerpt
_MOST_SKIPPED: Final = 5  # names of skipped files in the text; JSON lists all


@dataclass(frozen=True)
class Findings:
    """The result of a check.

    Attributes:
        files: the checked files, in order.
        skipped: files of folders that are not configurations.
        problems: errors, warnings and notes, file by file, in reading order.
        contents: the text of files that cannot be read again, by name.
    """

    files: tuple[str, ...]
    skipped: tuple[str, ...]
    problems: tuple[Problem, ...]
    contents: Mapping[str, str] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        """Count the problems of a severity."""
        return sum(problem.severity == severity for problem in self.problems)

    @property
    def summary(self) -> str:
        """One line with the file, or the number of files, and the number of problems of each severity."""
        subject = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        counts = [(self.count(severity), severity) for severity in _SEVERITIES]
        found = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for n, severity in counts if n)
        return f"{subject}: {found or 'no problem found'}"


def as_text(findings: Findings) -> str:
    """Return a line for each problem and lines for its fix, then the summary. Lines stay unbroken for searching."""
    lines = []
    for problem in findings.problems:
        lines.append(f"{problem.where}: {problem.severity}: {problem.finding}")
        lines += [f"    {line}" for line in printable(problem.fix).splitlines()]
    return "\n".join([*lines, *_skipped(findings), findings.summary])


def print_excerpts(findings: Findings) -> None:
    """Print each problem with an excerpt of its line, then a summary, for a terminal.

    Sentences wrap at words. Places and excerpts do not wrap, so a terminal can open the place.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    lines_of = dict(findings.contents)
    for problem in findings.problems:
        style = _STYLES[problem.severity]
        console.print(Text.assemble((problem.severity, style), (f": {printable(problem.finding)}", "bold")))
        file, row, column = problem.place
        gutter = " " * len(str(row))
        console.print(Text.assemble((f"{gutter}--> ", "blue"), printable(problem.where)), soft_wrap=True)
        excerpt = _excerpt(lines_of, file, row, column, min(_WIDEST, console.width - len(gutter) - 3))
        if excerpt is not None:
            line, start, length = excerpt
            console.print(Text.assemble((f"{gutter} |\n{row} | ", "blue"), line), soft_wrap=True)
            console.print(Text.assemble((f"{gutter} | ", "blue"), " " * start, ("^" * length, style)), soft_wrap=True)
        for line in printable(problem.fix).splitlines():
            console.print(Text(f"{gutter} = ", "blue"), end="")
            indent = len(gutter) + 3
            wrapped = Text(line).wrap(console, max(20, console.width - indent))
            console.print(wrapped[0] if wrapped else "")
            for rest in wrapped[1:]:
                console.print(Padding(rest, (0, 0, 0, indent)))
        console.print()
    for line in _skipped(findings):
        console.print(printable(line), style="dim", markup=False, soft_wrap=True)
    worst = next((severity for severity in _SEVERITIES if findings.count(severity)), None)
    console.print(printable(findings.summary), style=_STYLES[worst] if worst else "bold green", markup=False)


def as_json(findings: Findings) -> dict[str, Any]:
    """Return one object: the files, every problem with its parts, and the counts."""
    return {
        "files": findings.files,
        "skipped": findings.skipped,
        "problems": [_parts(problem) for problem in findings.problems],
        "summary": {f"{severity}s": findings.count(severity) for severity in _SEVERITIES},
    }


def as_github(findings: Findings) -> str:
    """Return GitHub's workflow commands, which show each problem at its line of the pull request; then the summary."""
    return "\n".join([*map(_annotation, findings.problems), findings.summary])


def _skipped(findings: Findings) -> Iterator[str]:
    if findings.skipped:
        names = list(findings.skipped[:_MOST_SKIPPED])
        more = len(findings.skipped) - len(names)
        yield f"skipped, not configurations: {', '.join(names)}{f' and {more} more' if more else ''}"


def _parts(problem: Problem) -> dict[str, Any]:
    file, line, column = problem.place
    place = {"severity": problem.severity, "file": file, "line": line, "column": column}
    return place | {name: getattr(problem, name) for name in ("key", "value", "message", "fix")}


def _annotation(problem: Problem) -> str:
    file, line, column = problem.place
    place = {"file": file, "line": line or 1, "col": column or 1, "title": problem.key or "configuration"}
    properties = ",".join(f"{name}={_escaped(str(value), ':,')}" for name, value in place.items())
    text = "\n".join(part for part in (problem.finding, problem.fix) if part)
    return f"::{_GITHUB_LEVELS[problem.severity]} {properties}::{_escaped(text)}"


def _escaped(text: str, also: str = "") -> str:
    for character in "%\r\n" + also:  # % first, because the others become %XX
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _excerpt(contents: dict[str, str], file: str, row: int, column: int, widest: int) -> tuple[str, int, int] | None:
    """Return the line, and start and length of the word at `column`. A long line is cut around that word."""
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
    if len(line) <= widest:
        return line, start, length
    first = max(0, min(start - widest // 4, len(line) - widest))
    length = max(1, min(length, first + widest - start))
    return line[first : first + widest], start - first, length


_SUFFIXES: Final = (".yaml", ".yml", ".json")
_OTHERS_CODE: Final = ("node_modules", "site-packages", "__pycache__")

# Keys that only configurations have at the top level.
_TELLING: Final = (
    ZERO,
    MICRO_BATCH.name,
    "deepspeed_config",
    CONFIG_FILE.name,
    "distributed_type",
    STAGE.field,
)
_NEAR: Final = 0.9  # similarity from 0 to 1: accepts a typing error in a long word, not just a common beginning
_MOST_KEYS: Final = 50  # keys to look at in a file; a configuration has fewer
_TELLING_IN_BROKEN_TEXT: Final = re.compile(rf"""(?m)^[\s{{,]*["']?({"|".join(_TELLING)})["']?\s*:""")


def config_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the YAML and JSON files below `folder`: first the configurations, then the others.

    Skip hidden folders, virtual environments and other people's code. Do not follow links.
    """
    known: tuple[list[Path], list[Path]] = [], []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_skipped(Path(root, name)))
        for path in (Path(root, name) for name in sorted(names) if name.lower().endswith(_SUFFIXES)):
            known[0 if looks_like_config(path) else 1].append(path)
    return known


def looks_like_config(path: Path) -> bool:
    """Return whether a file is meant as a configuration: one key or most of its keys are specific to configurations."""
    try:
        keys = list(parse_file(path, []).value)
    except ConfigError:
        try:
            return _TELLING_IN_BROKEN_TEXT.search(path.read_text("utf-8-sig", "replace")) is not None
        except OSError:
            return True  # the check then reports the read error
    known = {*LAUNCH, *SHORT_FIELDS, *deepspeed_schema()["properties"]}
    of_config = [near for key in keys[:_MOST_KEYS] if (near := _nearest(key, known.union(_TELLING)))]
    return any(near in _TELLING for near in of_config) or 2 * len(of_config) > len(keys)


def _nearest(key: str, words: Collection[str]) -> str:
    """Return the word that equals `key` except for a typing error; "" without a match."""
    if key in words:
        return key
    return next(iter(difflib.get_close_matches(key, words, n=1, cutoff=_NEAR)), "")


def _is_skipped(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in _OTHERS_CODE or (folder / "pyvenv.cfg").exists()


def check(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Files, folders, or - for standard input.")
    ] = None,
    output: Annotated[
        Literal["text", "json", "github"], typer.Option("--format", help="How to print the problems.")
    ] = "text",
    strict: Annotated[bool, typer.Option(help="Exit with 1 if there are warnings.")] = False,
    print_schema: Annotated[
        bool, typer.Option(help="Print the JSON Schema for `deepspeed` (default) or `yaml`, and stop.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing as text if there is no problem.")] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print a diff that renames and removes keys as the problems say.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="With --fix: change the files.")] = False,
    target: Annotated[
        str | None, typer.Option("--output", metavar="PATH", help="With --fix: write the fixed file here instead.")
    ] = None,
) -> None:
    """Read launch configs (YAML) and DeepSpeed configs (JSON), and print all their problems.

    In a folder, every file that looks like a config is read. Exit code: 2 for an error; 1 for a warning with --strict
    (a key has no effect, or its value is not read as it looks); otherwise 0.
    """
    if print_schema:
        print(json.dumps(_schema(files or []), indent=1, ensure_ascii=False))
        return
    if not files:
        raise typer.BadParameter("Name a file, a folder, or - for standard input.", param_hint="FILE...")
    fixed = {}
    if fix or write or target is not None:
        fixed = _fix(files, write=write, target=target)
        files = list(fixed)
    findings = check_files(files, fixed)
    if quiet and output == "text" and not findings.problems:
        return
    if output == "json":
        print_json(as_json(findings))
    elif output == "text" and sys.stdout.isatty():
        print_excerpts(findings)
    else:
        print(printable(as_text(findings) if output == "text" else as_github(findings)))
    if findings.count("error"):
        raise typer.Exit(2)
    if strict and findings.count("warning"):
        raise typer.Exit(1)


def _fix(names: list[str], *, write: bool, target: str | None) -> dict[str, str]:
    """Fix files, or print the diffs. Return the fixed texts, by file name."""
    if target is not None and (write or len(names) > 1):
        raise typer.BadParameter("Name one file, and leave --write out.", param_hint="--output")
    texts = {}
    for name in names:
        if name == "-" or Path(name).is_dir():
            raise typer.BadParameter(f"{name}: --fix needs the name of a file.", param_hint="FILE")
        fixed = fix_file(name)
        place = target or (name if write else None)
        if place is not None and (target or fixed.diff):
            replace_file(Path(place), fixed.after)
        if place is None:
            print(printable(fixed.diff), end="")
        elif fixed.diff:
            print_line(f"{place}: written")
        for note in fixed.notes:
            print_line(f"{name}: note: {note}", wraps=True)
        texts[place or name] = fixed.after
    return texts


def check_files(names: list[str], texts: Mapping[str, str] = MappingProxyType({})) -> Findings:
    """Find the problems of files and folders, and of standard input for `-`.

    Args:
        names: the files and folders.
        texts: texts to check instead of the files' contents, by file name.
    """
    files: list[str] = []
    skipped: list[str] = []
    found: list[Problem] = []
    contents: dict[str, str] = dict(texts)
    seen: set[str] = set()
    for name in names:
        if name == "-":
            data = sys.stdin.buffer.read()
            contents[STANDARD_INPUT] = data.decode("utf-8-sig", "replace")
            files.append(STANDARD_INPUT)
            found += _problems(STANDARD_INPUT, data)
            continue
        try:
            path = named_file(name)  # ./a.yaml becomes a.yaml, in the output too
        except ConfigError as error:
            found += error.problems
            continue
        configs, others = config_files(path) if path.is_dir() else ([path], [])
        if not configs:
            message = "no launch config and no DeepSpeed configuration below this folder"
            found.append(Problem(name, "", message, "Name the folder that contains them, or the file itself."))
        new = [config for config in configs if os.path.realpath(config) not in seen]  # realpath: links may form a loop
        seen.update(map(os.path.realpath, new))
        files += map(str, new)
        skipped += map(str, others)
        for config in new:
            text = texts.get(name)
            found += _problems(str(config), None if text is None else text.encode())
    # A JSON that a YAML names is checked with the YAML, and perhaps also as a file of its own.
    problems = list(dict.fromkeys(found))
    reported = list(dict.fromkeys(problem.place[0] for problem in problems))
    problems.sort(key=lambda problem: (reported.index(problem.place[0]), problem.place[1:]))
    return Findings(tuple(dict.fromkeys(files)), tuple(dict.fromkeys(skipped)), tuple(problems), contents)


def _problems(file: str, content: bytes | None = None) -> Iterator[Problem]:
    try:
        document = read_document(file, content)
        problems = find_problems(document)
    except ConfigError as error:
        yield from error.problems
        return
    yield from problems
    if not any(problem.severity == "error" for problem in problems):
        settings = launch_settings(document)
        yield from (replace(problem, severity="warning") for problem in _never_launched(document, settings))
        dropped = dropped_zero(document, settings)
        if dropped:
            typed = document.launch.entries["distributed_type",]
            fix = "Write distributed_type: DEEPSPEED to train with ZeRO."
            yield Problem(typed.origin.where, "distributed_type", dropped, fix, str(typed.value), "warning")


def _never_launched(document: Document, settings: LaunchSettings) -> Iterator[Problem]:
    """Yield problems of a valid document that this version's `launch` refuses on every machine."""
    strategy: StrategyName = "deepspeed" if asks_for_deepspeed(document, settings) else "ddp"
    try:
        processes = settings.num_processes or sequence_parallel_size(document)
        resolve_before_run(document, accelerator="cuda", processes=processes, strategy=strategy)
    except ConfigError as error:
        # The other problems depend on the machine and on the number of processes.
        yield from (p for p in error.problems if holds_auto(document.deepspeed.value(*p.key.split("."))))


def _schema(words: list[str]) -> Mapping[str, Any]:
    name = words[0] if words else "deepspeed"
    if len(words) > 1 or name not in ("deepspeed", "yaml"):
        raise typer.BadParameter(f"{' '.join(words)}: write deepspeed or yaml.", param_hint="--print_schema")
    return yaml_schema() if name == "yaml" else deepspeed_schema()
