"""`zero-plugin check`: every problem of configuration files, located."""

from __future__ import annotations

from typing import Annotated

import typer

from zero_plugin.config.check import check_document
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError, Problem

__all__ = ["check"]


def check(files: Annotated[list[str], typer.Argument(metavar="FILE...", show_default=False)]) -> None:
    """Read launch configs (YAML) and DeepSpeed configs (JSON) and print every problem; exit code 2 if there is one."""
    problems: list[Problem] = []
    for file in files:
        try:
            check_document(read_document(file))
        except ConfigError as error:
            problems += error.problems
        else:
            print(f"{file}: no problem found")
    if problems:
        raise ConfigError(problems)
