"""`zero-plugin config`: ask how to train, and write that as a commented launch config."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from zero_plugin.cli.prompts import prompts_for_terminal
from zero_plugin.cli.questionnaire import ask_launch_config
from zero_plugin.config.commented import write_config
from zero_plugin.config.location import default_config_file, find_config_file
from zero_plugin.config.update import update_config
from zero_plugin.errors import ConfigError, LaunchError, Problem
from zero_plugin.launch.basic_config import basic_values, best_precision
from zero_plugin.launch.machine import look_at_machine
from zero_plugin.launch.problems import obstacle

__all__ = ["config"]


class _Action(str, Enum):
    default = "default"
    update = "update"


def config(
    action: Annotated[
        _Action | None,
        typer.Argument(help="In Accelerate's words: default is --default, update is --update.", show_default=False),
    ] = None,
    config_file: Annotated[
        str | None,
        typer.Option("--config_file", help="Where to write it, in place of the default file.", show_default=False),
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Write what suits this machine, without a question.", show_default=False)
    ] = False,
    update: Annotated[
        str | None,
        typer.Option("--update", metavar="FILE", help="Rewrite FILE in today's keys.", show_default=False),
    ] = None,
) -> None:
    """Answer questions, get a launch config, with a sentence beside each key. Ctrl-C stops, and writes nothing.

    The default file is $HF_HOME/zero_plugin/default_config.yaml, and
    `zero-plugin launch` reads it when it is given none. A file that is there
    is replaced only after you agree.
    """
    default = default or action is _Action.default
    if action is _Action.update and update is None:
        update, config_file = config_file or str(find_config_file(os.environ) or default_config_file(os.environ)), None
    try:
        if update is None:
            _write(Path(config_file) if config_file else default_config_file(os.environ), default)
        elif default or config_file is not None:
            other = "--default" if default else "--config_file"
            raise ConfigError([Problem("--update", "", f"contradicts {other}", "Keep one of the two.")])
        else:
            print("\n".join(update_config(Path(update))))
    except KeyboardInterrupt:
        print()  # what follows starts on a line of its own
        raise typer.Exit(130) from None
    except EOFError:
        print()
        raise LaunchError("the answers ended before the questions; nothing is written") from None


def _write(file: Path, default: bool) -> None:
    blocked = None if file.is_dir() else obstacle(file.parent)
    if file.is_dir() or blocked is not None:  # said before the questions, not after them
        why = "it is a folder" if blocked is None else f"{blocked} is no folder that can be written"
        fix = "Give --config_file the path of a file that can be written."
        raise ConfigError([Problem("--config_file", "", f"{file} cannot be written: {why}", fix)])
    prompts = prompts_for_terminal()
    if file.exists() and not prompts.confirm(f"{file} exists. Replace it?", default=False):
        print("nothing is written")
        raise typer.Exit(1)
    machine = look_at_machine()
    precision = best_precision(machine)
    values = basic_values(machine, precision) if default else ask_launch_config(prompts, machine, precision)
    write_config(values, file)
    taken = find_config_file(os.environ)
    named = "" if taken is not None and taken == file else f" --config_file {file}"
    print(f"written: {file}\nrun it:  zero-plugin launch{named} train.py")
