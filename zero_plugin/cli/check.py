"""`zero-plugin check`: every problem of configuration files, located."""

from __future__ import annotations

from typing import Annotated

import typer

from zero_plugin.config.check import check_document
from zero_plugin.config.launch_settings import dropped_zero, launch_settings
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError, Problem

__all__ = ["check"]


def check(files: Annotated[list[str], typer.Argument(metavar="FILE...", show_default=False)]) -> None:
    """Read launch configs (YAML) and DeepSpeed configs (JSON) and print every problem; exit code 2 if there is one."""
    problems = [problem for file in files for problem in _problems(file)]
    if problems:
        raise ConfigError(problems)


def _problems(file: str) -> tuple[Problem, ...]:
    try:
        document = read_document(file)
        check_document(document)
    except ConfigError as error:
        return error.problems
    dropped = dropped_zero(document, launch_settings(document))
    print(
        "\n".join(
            [*(note.headline for note in document.notes), *([dropped] if dropped else []), f"{file}: no problem found"]
        )
    )
    return ()
