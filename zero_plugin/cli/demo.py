"""`zero-plugin demo`: train a small GPT on Python's own library, at the stage that a config file and flags choose."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from zero_plugin import demo as package
from zero_plugin.cli.flags import typed_flags, with_launch_flags
from zero_plugin.config.launch_settings import asks_for_cpu, launch_settings
from zero_plugin.config.tree import Entry, Origin
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import look_at_machine

_FOLDER = Path(package.__file__).parent


@with_launch_flags("module", "no_python", "model", "sequence_length")  # the program is the demo's
def demo(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENT", help="Arguments of the training script.", show_default=False),
    ] = None,
    **_: Any,
) -> None:
    """Train a small GPT on Python's own library: ZeRO-2, on every GPU, else by two processes on the CPU.

    Every launch flag changes how it runs, e.g. --zero_stage 3 --offload_optimizer_device cpu. What follows -- goes to
    the training script: zero-plugin demo -- --steps 1000 --width 256; zero-plugin demo -- --help lists it all.
    """
    flags = {"config_file": str(_FOLDER / "config.yaml"), **typed_flags(ctx)}
    document, machine = document_from_flags(flags), look_at_machine()
    settings = launch_settings(document)
    on_cpu = asks_for_cpu(settings) or not machine.gpus
    if on_cpu and settings.num_processes is None and settings.distributed_type != "NO":
        why = "the run is on the CPU, where two processes show what is split"
        two = Entry(2, Origin("rule", "zero-plugin demo", why))
        document = replace(document, launch=document.launch.replace({("num_processes",): two}))
    program = Program(str(_FOLDER / "train.py"), tuple(arguments or ()))
    spec = build_spec(document, program, machine, os.environ, rendezvous_endpoint=flags.get("rdzv_endpoint"))
    if flags.get("dry_run"):
        print(shell_script(spec))
    else:
        raise typer.Exit(run_workers(spec))
