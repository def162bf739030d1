"""The launch flags: Accelerate's names, with `-` or `_`, and advice for Accelerate's flags that are refused.

A flag of a launch config's key has the key's name and help text. A dataclass may describe the options of a single
command.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

from zero_plugin.config.keys import COMPILATION, FLAGS, TOPICS, TRAINING, Flag
from zero_plugin.config.launch_settings import ON_EVERY_MACHINE, compiler_schema, launch_schema
from zero_plugin.config.schema import key_schema
from zero_plugin.errors import Problem

T = TypeVar("T")

RARE_TOPICS: Final = frozenset(TOPICS[1:])  # `--help` shows only the first topic, `--help-all` shows all
WITH_ALL: Final = "zero_plugin.help_all"  # key in a command's context: all topics are requested
_OF_TYPES: Final[Mapping[str, str]] = {"integer": "INT", "number": "NUMBER", "boolean": "BOOL"}

LENGTH: Final = "Tokens of a sample; default: 2048, or the model's positions if fewer."


@functools.cache
def launch_flags() -> Mapping[str, Any]:
    """Return each flag's option, by the flag's name.

    Values are parsed like values in a file (`auto`, numbers, true/false), so the same check reports wrong values with
    the same message. A key with only the values true and false is a switch.
    """
    compiling = compiler_schema()["dynamo_config"]["properties"]
    schemas = {key.typed: key_schema(key.path) or {} for key in TRAINING if key.flag}
    schemas |= {**launch_schema()["properties"], **compiling}
    known = {**FLAGS, **{name: Flag(COMPILATION, place) for place, name in enumerate(compiling)}}
    flags = {}
    for name, flag in sorted(known.items(), key=lambda item: (TOPICS.index(item[1].topic), item[1].place)):
        schema = schemas.get(name, {})
        is_switch = flag.sets is not None or schema.get("type") == "boolean"
        described = flag.help or schema["description"]
        if is_switch:
            described = described.removeprefix("true or false: ").removesuffix(" Default: false.")
            described = described[0].upper() + described[1:]
        metavar = None if is_switch else flag.metavar or _metavar(schema)
        short = [flag.short] if flag.short else []
        option = options_of(flag.topic)(described, f"--{name}", *short, metavar=metavar)
        flags[name] = Annotated[bool | None if is_switch else str | None, option]
    return flags


def _metavar(schema: Mapping[str, Any]) -> str:
    """Return the placeholder for a key's value in the help."""
    types = [part.get("type") for part in (schema, *schema.get("anyOf", ()))]
    return next((_OF_TYPES[kind] for kind in types if kind in _OF_TYPES), "TEXT")


def _print_help_with_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[WITH_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_HELP_ALL: Final = typer.Option(
    "--help-all", help="Show all flags, by topic.", is_eager=True, callback=_print_help_with_all
)


def with_launch_flags(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the launch flags to a command that takes `ctx` and keywords. `typed_flags(ctx)` returns the typed ones.

    Args:
        left_out: names of flags that have no meaning for this command.
    """
    flags = {name: (flag, None) for name, flag in launch_flags().items() if name not in left_out}
    return lambda command: _with_keywords(command, {**flags, "help_all": (Annotated[bool, _HELP_ALL], False)})


def options_of(panel: str) -> Callable[..., Any]:
    """Return a function that builds options of one help panel, from a text, flags and arguments of `typer.Option`."""

    def option(help: str, *flags: str, **more: Any) -> Any:  # noqa: A002 - typer's word
        return typer.Option(*flags, help=help, rich_help_panel=panel, **more)

    return option


def with_options(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a dataclass to a command that takes keywords; see `typed_options`.

    Args:
        record: the dataclass. Each field is annotated with its option, and has a default.
    """
    hints = get_type_hints(record, include_extras=True)
    options = {field.name: (hints[field.name], field.default) for field in fields(record)}
    return lambda command: _with_keywords(command, options)


def _with_keywords(command: Callable[..., None], keywords: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    """Add keywords to the command's signature, each with its annotation and its default."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    more = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in keywords.items()
    ]
    command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return command


def typed_options(record: type[T], keywords: Mapping[str, Any]) -> T:
    """Build the dataclass of `with_options` from the keywords of a command's call."""
    return record(**{field.name: keywords[field.name] for field in fields(record)})  # type: ignore[arg-type]


def typed_flags(ctx: typer.Context) -> dict[str, Any]:
    """Return the launch flags that the user typed, by name."""
    return {name: value for name, value in ctx.params.items() if name in launch_flags() and value is not None}


# What to do instead of Accelerate's refused flags, by a pattern of their names.
_REFUSED: Final[Mapping[str, str]] = {
    "use_fsdp|fsdp_.*": "Give --use_deepspeed --zero_stage 3, which shards the same states as FSDP's FULL_SHARD.",
    "use_megatron_lm|megatron_lm_.*": "Give --use_deepspeed; tensor and pipeline parallelism are not supported.",
    "use_parallelism_config|parallelism_config_.*": "Give --sequence_parallel_size instead of its sp_size.",
    "fp8_.*": "Give --mixed_precision bf16: DeepSpeed ZeRO has no fp8.",
    "tpu_cluster|vm": f"Leave it out, and {ON_EVERY_MACHINE}.",
    "no_tpu_cluster": "Leave it out: this command always starts processes on this machine's devices.",
    "tpu_use_sudo": "Write sudo before the command.",
    "env": "Write NAME=value before the command: the workers have its environment. (It is for TPU pods.)",
    "downcast_bf16": "Give --mixed_precision bf16, which computes by autocast; weights stay fp32.",
    "aws_.*": "Run the command on the machines themselves; SageMaker jobs are not started from here.",
    "mpirun_.*": "Start the same command on every machine, with --num_machines and its own --machine_rank.",
}

# This command's flag for a flag of torchrun or of DeepSpeed's launcher.
_OF_OTHER_LAUNCHERS: Final[Mapping[str, str]] = {
    "nproc_per_node|num_gpus": "--num_processes, the number of all machines' processes",
    "nnodes|num_nodes": "--num_machines",
    "node_rank": "--machine_rank",
    "master_addr": "--main_process_ip",
    "master_port": "--main_process_port",
    "hostfile": "--deepspeed_hostfile",
    "include": "--deepspeed_inclusion_filter",
    "exclude": "--deepspeed_exclusion_filter",
}


def refuse_flag(typed: str) -> Problem | None:
    """Return the problem with a flag that only other launchers have, None for any other flag.

    Args:
        typed: the flag as it was typed, e.g. `--fsdp-version`.
    """
    name = typed.lstrip("-").replace("-", "_")
    for pattern, fix in _REFUSED.items():
        if re.fullmatch(pattern, name):
            return Problem(f"--{name}", "", "this flag of Accelerate's is not supported", fix)
    for pattern, ours in _OF_OTHER_LAUNCHERS.items():
        if re.fullmatch(pattern, name):
            return Problem(f"--{name}", "", "this flag is another launcher's", f"Write {ours}.")
    return None
