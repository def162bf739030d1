"""`zero-plugin launch`, `zero-plugin demo`: launch a script on all GPUs or the CPU, configured by a file and flags."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zero_plugin.cli.doctor_software import installed_cuda
from zero_plugin.cli.launch_flags import launch_flags, typed_flags, with_launch_flags
from zero_plugin.config.amounts import require_count
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, launch_settings
from zero_plugin.config.tree import AUTO, Entry, Origin
from zero_plugin.distributed.messages import TIMES_VARIABLE, VERBOSE_VARIABLE, show_messages
from zero_plugin.launch.build import build_spec, fill_from_job, plan_launch
from zero_plugin.launch.command import describe_cores, overridden, shell_script
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import Machine, look_at_machine
from zero_plugin.machine.op_builds import build_folder, describe_missing_tools, needed_ops

_logger = logging.getLogger(__name__)

_PARSERS_OF_CLASSES = ("HfArgumentParser", "TrlParser", "jsonargparse", "simple_parsing", "tyro")
_DEMO = Path(__file__).parents[1] / "demo"


@with_launch_flags()
def launch(
    ctx: typer.Context,
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="The program to run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="The script's own arguments.")
    ] = None,
    **_: Any,
) -> None:
    """Start SCRIPT with a config file and flags. Everything after SCRIPT is passed to it.

    Flags override the file. Without --config_file, the first of these files is used: $ZERO_PLUGIN_CONFIG_FILE, the
    file of `zero-plugin config`, the file of `accelerate config`.
    """
    flags = typed_flags(ctx)
    kind: Literal["script", "module", "executable"] = (
        "module" if flags.get("module") else "executable" if flags.get("no_python") else "script"
    )
    document = document_from_flags(flags)
    _show_messages_as(document)
    notes = [f"configuration: {', '.join(document.sources)}"] if document.sources and "config_file" not in flags else []
    document, of_job = fill_from_job(document, os.environ, flags.get("rdzv_endpoint"))
    machine = look_at_machine()
    if "model" in flags:
        length = require_count("--sequence_length", flags.get("sequence_length"), "2048")
        document, of_plan = plan_launch(document, flags["model"], length, machine.gpus)
        notes += of_plan
    _start(document, Program(program, tuple(arguments or ()), kind), machine, flags, [*notes, *of_job])


def _flags_after(script: Path, arguments: Sequence[str]) -> Iterator[str]:
    """Yield launch flags among a script's arguments that its text does not contain.

    Yields none if the script uses a parser that derives flags from classes: its text need not contain them.
    """
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # the launch reports the problem with the script
    if any(parser in text for parser in _PARSERS_OF_CLASSES):
        return
    text = text.replace("-", "_")
    for argument in arguments:
        flag = argument.partition("=")[0]
        name = flag[2:].replace("-", "_")
        if flag.startswith("--") and name in {*launch_flags(), "config"} and name not in text:
            yield flag


@with_launch_flags("module", "no_python", "model", "sequence_length")  # the program is the demo's
def demo(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENT", help="Arguments of the training script.")
    ] = None,
    **_: Any,
) -> None:
    """Train a small GPT on Python's own library with ZeRO-2, on all GPUs or in two processes on the CPU.

    Launch flags change the run, e.g. --zero_stage 3 --offload_optimizer_device cpu. Arguments after -- go to the
    training script: zero-plugin demo -- --steps 1000 --width 256. List its options with -- --help.
    """
    flags = {"config_file": str(_DEMO / "config.yaml"), **typed_flags(ctx)}
    document, machine = document_from_flags(flags), look_at_machine()
    _show_messages_as(document)
    settings = launch_settings(document)
    on_cpu = asks_for_cpu(settings) or not machine.gpus
    if on_cpu and settings.num_processes is None and settings.distributed_type != "NO":
        why = "the run is on the CPU, where two processes show what is partitioned"
        two = Entry(2, Origin("rule", "zero-plugin demo", why))
        document = replace(document, launch=document.launch.replace({("num_processes",): two}))
    _start(document, Program(str(_DEMO / "train.py"), tuple(arguments or ())), machine, flags)


def _show_messages_as(document: Document) -> None:
    """Apply the configuration's message settings to this process. Workers get them through their environment."""
    settings = launch_settings(document)
    show_messages(quiet=settings.quiet, prefix="")
    for is_on, variable in ((settings.log_timestamps, TIMES_VARIABLE), (settings.verbose, VERBOSE_VARIABLE)):
        if is_on:
            os.environ[variable] = "1"


def _missing_tools(document: Document, machine: Machine) -> str | None:
    """Describe tools that this machine lacks to build the ops that the configuration needs for any script."""
    settings = launch_settings(document)
    if not asks_for_deepspeed(document, settings):
        return None
    kind = document.deepspeed.value("optimizer", "type")
    on_gpu = bool(machine.gpus) and not asks_for_cpu(settings)
    ops = needed_ops(document.deepspeed, None if kind in (None, AUTO) else str(kind).lower(), on_gpu=on_gpu)
    return describe_missing_tools(ops, build_folder(os.environ, installed_cuda()), os.environ) if ops else None


def _start(
    document: Document, program: Program, machine: Machine, flags: Mapping[str, Any], notes: Sequence[str] = ()
) -> None:
    """Resolve the launch and log its notes, then run it or, for `--dry_run`, print it.

    The configuration's notes are logged here and not passed to the workers, which would repeat them. Scripts built on
    other libraries would not log the notes at all.

    Raises:
        Exit: with the exit code of the workers.
    """
    found, document = document.notes, replace(document, notes=())
    spec = build_spec(document, program, machine, os.environ, rendezvous_endpoint=flags.get("rdzv_endpoint"))
    of_spec = [*([describe_cores(spec)] if spec.cores_reason else []), *overridden(spec.environment, os.environ)]
    for problem in found:
        _logger.log(logging.WARNING if problem.severity == "warning" else logging.INFO, "%s", problem.remark)
    for flag in _flags_after(Path(program.name), program.arguments) if program.kind == "script" else ():
        _logger.warning(
            "%s is after %s, so the flag is passed to the script, whose text does not contain the flag. If the flag is "
            "meant for `launch`, write it before the script.",
            *(flag, program.name),
        )
    if spec.hosts is None and (missing := _missing_tools(document, machine)):
        _logger.warning(missing)
    for note in [*notes, *of_spec]:
        _logger.info(note)
    if flags.get("dry_run"):
        print(shell_script(spec, with_document=spec.settings.verbose or not sys.stdout.isatty()))
    else:
        raise typer.Exit(run_workers(spec))
