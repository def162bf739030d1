"""The command `zero-plugin`: finds the command's module, imports only that, and prints errors without a traceback."""

from __future__ import annotations

import difflib
import gc
import inspect
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from io import TextIOWrapper
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

import zero_plugin
from zero_plugin.distributed.messages import show_messages
from zero_plugin.errors import ConfigError, Problem, ZeroPluginError

_HELP: Final = {"help_option_names": ["--help", "-h"]}
_METAVARS: Final[Mapping[str, str]] = {
    "<str>": "TEXT",
    "<list[str]>": "TEXT",
    "<int>": "INT",
    "<int range>": "INT",
    "<float>": "NUMBER",
    "<float range>": "NUMBER",
    "<path>": "PATH",
}
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
    """Help in plain text, by topic; and what to do in place of a flag that Accelerate has and this package does not."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_help(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # typer's marks of what is required

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            from zero_plugin.cli.launch_flags import refuse_flag

            flag = getattr(error, "option_name", "")  # only the error of an unknown flag has it
            if (refused := refuse_flag(flag)) is not None:
                raise ConfigError([refused]) from None
            if flag and self.name == "demo":
                fix = f"If the training script has it, write it after --: zero-plugin demo -- {flag}."
                raise ConfigError([Problem(flag, "", "is no flag of demo", fix)]) from None
            raise


class _LazyCommands(TyperGroup):
    """Imports a command's module when the command is named, so that none pays for another's imports."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_help(self, ctx, formatter)
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            near = difflib.get_close_matches(args[0], known, n=1)
            ctx.fail(f"No such command {args[0]!r}. {f'Did you mean {near[0]}?' if near else ''}".rstrip())
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(_COMMANDS[str(self.name)])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        target = _COMMANDS[str(self.name)].get(cmd_name)
        if target == "":
            help_text = "Inspect and verify checkpoints, and convert them from and to other formats."
            return typer.main.get_group(_group(cmd_name, help=help_text))
        module, _, function = (target or "").partition(":")
        return _command(cmd_name, getattr(import_module(module), function)) if target else None


def _command(name: str, function: Any) -> Any:
    """The command of a function; an option for which no flag is written has its parameter's name, with underscores."""
    function.__signature__ = signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        described = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if isinstance(described, OptionInfo) and described.default is ...:
            described.param_decls = (f"--{parameter.name}",)
    app = typer.Typer(add_completion=False)
    settings = {
        "allow_interspersed_args": name != "launch",  # what follows the script is the script's
        "token_normalize_func": lambda flag: flag.replace("-", "_"),  # --zero_stage and --zero-stage are one
    }
    app.command(name, cls=_Command, context_settings={**settings, **_HELP})(function)
    return typer.main.get_command(app)


def _format_help(command: Any, ctx: Any, formatter: Any) -> None:
    """Plain text as click's, with a section for each topic: typer's tables cut long names at 80 columns."""
    from zero_plugin.cli.launch_flags import RARE_TOPICS, WITH_ALL  # reads the schema, which few commands need

    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    left_out = set() if ctx.meta.get(WITH_ALL) else RARE_TOPICS
    topics: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(ctx):
        is_option = parameter.param_type_name == "option"
        if is_option and parameter.metavar is None:
            parameter.metavar = _metavar(parameter, ctx)
        record = parameter.get_help_record(ctx)
        if record is not None:
            topic = (getattr(parameter, "rich_help_panel", None) or "Options") if is_option else "Arguments"
            named = record if is_option else (parameter.metavar or record[0], record[1])
            topics.setdefault(topic, []).append(named)
    for topic, records in topics.items():
        if records and topic not in left_out:
            with formatter.section(topic):
                formatter.write_dl(records)


def _metavar(option: Any, ctx: Any) -> str | None:
    """What stands for an option's value in the help: nothing for a switch, and a word for its type."""
    if option.is_flag:
        return ""
    # An older typer has such words itself.
    return _METAVARS.get(option.display_type(ctx)) if hasattr(option, "display_type") else None


def _group(name: str, completion: bool = False, **more: Any) -> typer.Typer:
    settings: dict[str, Any] = {"cls": _LazyCommands, "no_args_is_help": True, "context_settings": dict(_HELP), **more}
    return typer.Typer(name=name, add_completion=completion, **settings)


_app = _group("zero-plugin", completion=True, pretty_exceptions_enable=False)


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
    _open_streams()
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown size, for which rich would print nothing at all
        del os.environ["COLUMNS"]
    show_messages(prefix="")
    try:
        _app(prog_name="zero-plugin")
    except ZeroPluginError as error:
        print_error(error)
        sys.exit(error.exit_code)
    finally:
        gc.freeze()  # else Python looks through all of torch and transformers for garbage once more, for a second


def _open_streams() -> None:
    """Have all three standard streams, that take every character.

    One that the caller has closed (`2>&-`, a daemon) becomes the null device: else the next file or socket that this
    program or a worker opens gets its number, and with it what compiled code prints there.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is the stream's own
            os.set_inheritable(null, null == number)
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")  # a table has arrows, which LANG=en_US.ISO-8859-1 cannot write


def print_error(error: ZeroPluginError) -> None:
    """The message on standard error, in colour on a terminal; lines are never broken, so paths can be copied."""
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
