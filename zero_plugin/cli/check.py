"""`zero-plugin check`: every problem of configuration files, located."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from zero_plugin.cli.findings import Findings, as_github, as_json, as_text, print_excerpts
from zero_plugin.cli.folders import config_files
from zero_plugin.config.check import find_problems
from zero_plugin.config.document import Document
from zero_plugin.config.files import STANDARD_INPUT
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_deepspeed, dropped_zero, launch_settings
from zero_plugin.config.read import read_document
from zero_plugin.config.registry import deepspeed_schema, known_release, yaml_schema
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.draft import holds_auto
from zero_plugin.resolve.preflight import find_hopeless

__all__ = ["check"]

_SCHEMAS: Final = {"deepspeed": deepspeed_schema, "yaml": yaml_schema}


class _Format(str, Enum):
    text = "text"
    json = "json"
    github = "github"


def check(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help="Files, folders, or - for standard input.", show_default=False),
    ] = None,
    output: Annotated[_Format, typer.Option("--format", help="How to print what was found.")] = _Format.text,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 where there are warnings.")] = False,
    deepspeed_version: Annotated[
        str | None,
        typer.Option(
            "--deepspeed_version", help="Check for this release; default: the installed one.", metavar="X.Y.Z"
        ),
    ] = None,
    print_schema: Annotated[
        bool,
        typer.Option("--print_schema", help="Print the JSON Schema for `deepspeed` (default) or `yaml`, and stop."),
    ] = False,
) -> None:
    """Read launch configs (YAML) and DeepSpeed configs (JSON) and print every problem of all of them.

    Below a folder, every file that looks like either is read. Exit code: 2 with an error, 1 with --strict and a warning
    (something that is written has no effect, or is read as another value than it looks like), 0 otherwise.
    """
    known_release(deepspeed_version)
    if print_schema:
        print(json.dumps(_schema(files or [])(deepspeed_version), indent=1, ensure_ascii=False))
        return
    if not files:
        raise typer.BadParameter("Name a file, a folder, or - for standard input.", param_hint="FILE...")
    findings = _check_all(files, deepspeed_version)
    if output is _Format.text and sys.stdout.isatty():
        print_excerpts(findings)
    else:
        render = {_Format.text: as_text, _Format.json: as_json, _Format.github: as_github}[output]
        print(render(findings))
    if findings.count("error"):
        raise typer.Exit(2)
    if strict and findings.count("warning"):
        raise typer.Exit(1)


def _check_all(names: list[str], release: str | None) -> Findings:
    files: list[str] = []
    skipped: list[str] = []
    found: list[Problem] = []
    contents: dict[str, str] = {}
    seen: set[Path] = set()
    for name in names:
        if name == "-":
            data = sys.stdin.buffer.read()
            contents[STANDARD_INPUT] = data.decode("utf-8-sig", "replace")
            files.append(STANDARD_INPUT)
            found += _problems(STANDARD_INPUT, release, data)
            continue
        path = Path(name)  # ./a.yaml is a.yaml, also in what is printed
        configs, others = config_files(path) if path.is_dir() else ([path], [])
        if not configs:
            message = "no launch config and no DeepSpeed configuration below this folder"
            found.append(Problem(name, "", message, "Name the folder that holds them, or the file itself."))
        new = [config for config in configs if config.resolve() not in seen]
        seen.update(config.resolve() for config in new)
        files += map(str, new)
        skipped += map(str, others)
        found += [problem for config in new for problem in _problems(str(config), release)]
    # A JSON that a YAML names is checked with it, and perhaps by itself too.
    problems = list(dict.fromkeys(found))
    order = {file: n for n, file in reversed(list(enumerate(problem.place[0] for problem in problems)))}
    problems.sort(key=lambda problem: (order[problem.place[0]], problem.place[1:]))
    return Findings(tuple(dict.fromkeys(files)), tuple(dict.fromkeys(skipped)), tuple(problems), contents)


def _problems(file: str, release: str | None, content: bytes | None = None) -> Iterator[Problem]:
    try:
        document = read_document(file, release, content)
        problems = find_problems(document, release)
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
    """What `launch` of this version refuses on every machine, although it is right: what to wait for, not to mend."""
    hopeless = find_hopeless(
        document,
        accelerator="cuda",
        processes=settings.num_processes or 1,
        strategy="deepspeed" if asks_for_deepspeed(document, settings) else "ddp",
    )
    # The rest of it depends on the machine and on how many processes there are.
    yield from (p for p in hopeless if holds_auto(document.deepspeed.value(*p.key.split("."))))


def _schema(words: list[str]) -> Callable[[str | None], Mapping[str, Any]]:
    name = words[0] if words else "deepspeed"
    if len(words) > 1 or name not in _SCHEMAS:
        raise typer.BadParameter(f"{' '.join(words)}: write deepspeed or yaml.", param_hint="--print_schema")
    return _SCHEMAS[name]
