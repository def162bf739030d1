"""The command `zero-plugin`: import only the module of the typed command, and print errors without a traceback."""

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
# By group and command: the module and the function. `checkpoint` is itself a group.
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
    """A command with plain-text help by topic, and with advice for Accelerate's flags that this package lacks."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _format_help(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # typer's marks of required words

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            from zero_plugin.cli.launch_flags import refuse_flag

            flag = getattr(error, "option_name", "")  # only the error for an unknown flag has this attribute
            if (refused := refuse_flag(flag)) is not None:
                raise ConfigError([refused]) from None
            if flag and self.name == "demo":
                fix = f"If it is a flag of the training script, write it after --: zero-plugin demo -- {flag}."
                raise ConfigError([Problem(flag, "", "is no flag of demo", fix)]) from None
            raise


class _LazyCommands(TyperGroup):
    """A group that imports a command's module only when the user types the command."""

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
    """Build the command of a function. An option without a written flag gets the parameter's name, with underscores."""
    function.__signature__ = signature = inspect.signature(function, eval_str=True)
    for parameter in signature.parameters.values():
        described = getattr(parameter.annotation, "__metadata__", (None,))[0]
        if isinstance(described, OptionInfo) and described.default is ...:
            described.param_decls = (f"--{parameter.name}",)
    app = typer.Typer(add_completion=False)
    settings = {
        "allow_interspersed_args": name != "launch",  # arguments after the script belong to the script
        "token_normalize_func": lambda flag: flag.replace("-", "_"),  # --zero-stage means --zero_stage
    }
    app.command(name, cls=_Command, context_settings={**settings, **_HELP})(function)
    return typer.main.get_command(app)


def _format_help(command: Any, ctx: Any, formatter: Any) -> None:
    """Write plain-text help like click's, with a section for each topic. typer's tables cut names at 80 columns."""
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
    """Return the placeholder for an option's value in the help: "" for a switch, otherwise a word for the type."""
    if option.is_flag:
        return ""
    # An older typer prints these words itself.
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
    """Run the console script. Exit with the error's own code for an error of this package."""
    _open_streams()
    if os.environ.get("COLUMNS") == "0":  # a terminal of unknown size: rich would print nothing
        del os.environ["COLUMNS"]
    show_messages(prefix="")
    try:
        _app(prog_name="zero-plugin")
    except ZeroPluginError as error:
        print_error(error)
        sys.exit(error.exit_code)
    finally:
        gc.freeze()  # without this, Python searches all of torch and transformers for garbage at exit, for a second


def _open_streams() -> None:
    """Open missing standard streams, and let stdout and stderr accept every character.

    A stream that the caller has closed (`2>&-`, a daemon) becomes the null device. Otherwise the next file or socket of
    this program or a worker gets the stream's number, and compiled code prints into it.
    """
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's own
            os.set_inheritable(null, null == number)
            setattr(sys, name, open(null, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            stream.reconfigure(errors="replace")  # tables have arrows, which LANG=en_US.ISO-8859-1 cannot encode


def print_error(error: ZeroPluginError) -> None:
    """Print the message on standard error, in colour on a terminal. Lines stay unbroken, so paths can be copied."""
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), str(error))
    Console(stderr=True, highlight=False).print(text, soft_wrap=True)
