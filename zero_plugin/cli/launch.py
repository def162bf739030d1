"""`zero-plugin launch`: start a script on every GPU, or on the CPU, as a config file and flags say."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Literal

import typer

from zero_plugin.cli.flags import typed_flags, with_launch_flags
from zero_plugin.launch.build import build_spec, fill_from_job, plan_launch, sequence_length
from zero_plugin.launch.command import overridden, shell_script, tell_cores
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import look_at_machine


@with_launch_flags()
def launch(
    ctx: typer.Context,
    program: Annotated[str, typer.Argument(metavar="SCRIPT", help="What to run.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT...", help="The script's own arguments.", show_default=False)
    ] = None,
    **_: Any,
) -> None:
    """Start SCRIPT as a config file and flags say. All that follows SCRIPT belongs to it.

    A flag overrides the file. Without --config_file the file is $ZERO_PLUGIN_CONFIG_FILE, else what
    `zero-plugin config` wrote, else what `accelerate config` wrote, else none.
    """
    flags = typed_flags(ctx)
    kind: Literal["script", "module", "executable"] = (
        "module" if flags.get("module") else "executable" if flags.get("no_python") else "script"
    )
    document = document_from_flags(flags)
    endpoint = flags.get("rdzv_endpoint")
    said = [f"configuration: {', '.join(document.sources)}"] if document.sources and "config_file" not in flags else []
    document, of_job = fill_from_job(document, os.environ, endpoint)
    machine = look_at_machine()
    if "model" in flags:
        document, of_plan = plan_launch(document, flags["model"], sequence_length(flags), machine.gpus)
        said += of_plan
    spec = build_spec(
        document,
        Program(program, tuple(arguments or ()), kind),
        machine,
        os.environ,
        rendezvous_endpoint=endpoint,
    )
    said += [tell_cores(spec)] if spec.cores_reason else []
    for sentence in [] if flags.get("quiet") else [*said, *of_job, *overridden(spec.environment, os.environ)]:
        print(sentence, file=sys.stderr)
    if flags.get("dry_run"):
        print(shell_script(spec))
    else:
        raise typer.Exit(run_workers(spec, quiet=bool(flags.get("quiet"))))
