"""The command `zero-plugin`: finds the command's module, imports only that, and prints errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

import zero_plugin
from zero_plugin.errors import ConfigError, ZeroPluginError

_HELP: Final = {"help_option_names": ["--help", "-h"]}
# By group and command: the module and the function. `checkpoint` is a group itself.
_COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "zero-plugin": {
        "config": "zero_plugin.cli.config:config",
        "launch": "zero_plugin.cli.launch:launch",
        "check": "zero_plugin.cli.check:check",
        "explain": "zero_plugin.cli.explain:explain",
        "plan": "zero_plugin.cli.plan:plan",
        "test": "zero_plugin.cli.selftest:selftest",
        "doctor": "zero_plugin.cli.doctor:doctor",
        "env": "zero_plugin.cli.doctor:env",
        "demo": "zero_plugin.cli.launch:demo",
        "checkpoint": "",
    },
    "checkpoint": {
        "inspect": "zero_plugin.cli.checkpoint:inspect",
        "verify": "zero_plugin.cli.checkpoint:verify",
        "export": "zero_plugin.cli.checkpoint:export",
        "import": "zero_plugin.cli.checkpoint:import_",
    },
}


class _Command(TyperCommand):
    """Explains what to do in place of a flag that Accelerate has and this package does not."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            from zero_plugin.cli.launch_flags import refuse_flag

            refused = refuse_flag(getattr(error, "option_name", ""))  # only the error of an unknown flag has it
            if refused is None:
                raise
            raise ConfigError([refused]) from None


class _LazyCommands(TyperGroup):
    """Imports a command's module when the command is named, so that none pays for another's imports."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(_COMMANDS[str(self.name)])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        target = _COMMANDS[str(self.name)].get(cmd_name)
        if target == "":
            help_text = "Inspect and verify checkpoints, and convert them from and to other formats."
            return typer.main.get_group(_group(cmd_name, help=help_text))
        module, _, function = (target or "").partition(":")
        return _command(cmd_name, getattr(import_module(module), function)) if target else None


def _command(name: str, function: Callable[..., None]) -> Any:
    app = typer.Typer(add_completion=False)
    settings = {
        "allow_interspersed_args": name != "launch",  # what follows the script is the script's
        "token_normalize_func": lambda flag: flag.replace("-", "_"),  # --zero_stage and --zero-stage are one
    }
    app.command(name, cls=_Command, context_settings={**settings, **_HELP})(function)
    return typer.main.get_command(app)


def _group(name: str, **more: Any) -> typer.Typer:
    return typer.Typer(
        name=name, cls=_LazyCommands, add_completion=False, no_args_is_help=True, context_settings=dict(_HELP), **more
    )


_app = _group("zero-plugin", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(zero_plugin.__version__)
        raise typer.Exit


@_app.callback()
def _zero_plugin(
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Train a PyTorch model that does not fit: DeepSpeed ZeRO from one config, or plain DDP with the same script."""


def main() -> None:
    """Entry point of the console script; exits with the error's own code for an error of ours."""
    try:
        _app(prog_name="zero-plugin")
    except ZeroPluginError as error:
        print_error(error)
        sys.exit(error.exit_code)


def print_error(error: ZeroPluginError) -> None:
    """The message on standard error, in colour on a terminal; lines are never broken, so paths can be copied."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print("error: ", style="bold red", end="")
    console.print(str(error), markup=False, soft_wrap=True)
