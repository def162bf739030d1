"""The command `zero-plugin`: finds the command's module, imports only that, and prints errors without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import zero_plugin
from zero_plugin.errors import ConfigError, ZeroPluginError
from zero_plugin.launch.flags import refuse_flag

# command: (module, function, whether what follows the first argument belongs to the user's script)
_COMMANDS = {
    "config": ("zero_plugin.cli.config", "config", False),
    "launch": ("zero_plugin.cli.launch", "launch", True),
    "check": ("zero_plugin.cli.check", "check", False),
    "explain": ("zero_plugin.cli.explain", "explain", False),
    "plan": ("zero_plugin.cli.plan", "plan", False),
    "test": ("zero_plugin.cli.selftest", "selftest", False),
    "doctor": ("zero_plugin.cli.doctor", "doctor", False),
    "env": ("zero_plugin.cli.env", "env", False),
    "demo": ("zero_plugin.cli.launch", "demo", False),
}
_CHECKPOINT_COMMANDS = {
    "inspect": ("zero_plugin.cli.checkpoint", "inspect", False),
    "verify": ("zero_plugin.cli.checkpoint", "verify", False),
    "export": ("zero_plugin.cli.checkpoint", "export", False),
    "import": ("zero_plugin.cli.checkpoint", "import_", False),
}


class _Command(TyperCommand):
    """Says of a flag that Accelerate has, and this package does not, what to do in its place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            refused = refuse_flag(getattr(error, "option_name", ""))  # only the error of an unknown flag has it
            if refused is None:
                raise
            raise ConfigError([refused]) from None


class _LazyCommands(TyperGroup):
    """Imports a command's module when the command is named, so that none pays for another's imports."""

    commands_known = _COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(self.commands_known)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in self.commands_known:
            return None
        module, function, takes_script = self.commands_known[cmd_name]
        return _build_command(cmd_name, getattr(import_module(module), function), takes_script=takes_script)


class _CheckpointCommands(_LazyCommands):
    commands_known = _CHECKPOINT_COMMANDS


class _AllCommands(_LazyCommands):
    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), "checkpoint"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _checkpoint_group() if cmd_name == "checkpoint" else super().get_command(ctx, cmd_name)


def _build_command(name: str, function: Callable[..., None], *, takes_script: bool) -> TyperCommand:
    app = typer.Typer(add_completion=False)
    app.command(
        name,
        cls=_Command,
        context_settings={
            "allow_interspersed_args": not takes_script,
            "token_normalize_func": lambda flag: flag.replace("-", "_"),  # --zero_stage and --zero-stage are one
            "help_option_names": ["--help", "-h"],
        },
    )(function)
    command = typer.main.get_command(app)
    assert isinstance(command, TyperCommand), "an app with one command is that command"
    return command


def _checkpoint_group() -> Any:
    app = typer.Typer(
        name="checkpoint",
        cls=_CheckpointCommands,
        add_completion=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
    )

    @app.callback()
    def _checkpoint() -> None:
        """Look into checkpoints, verify them, and take them from and to other formats."""

    return typer.main.get_command(app)


_app = typer.Typer(
    cls=_AllCommands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


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
