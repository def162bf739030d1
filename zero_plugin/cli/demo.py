"""`zero-plugin demo`: train a small GPT on Python's own library, at the stage that a config file and flags choose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from zero_plugin import demo as package
from zero_plugin.cli.flags import typed_flags, with_launch_flags
from zero_plugin.launch.command import shell_script
from zero_plugin.launch.engine import run_workers
from zero_plugin.launch.machine import count_gpus
from zero_plugin.launch.plan import plan_launch

__all__ = ["demo"]

_FOLDER = Path(package.__file__).parent


@with_launch_flags
def demo(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENT...", help="Arguments of the training script.", show_default=False),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="Short for --config_file.", show_default=False)] = None,
    **_: Any,
) -> None:
    """Train a small GPT on Python's own library: ZeRO-2, on all GPUs, else by two processes on the CPU.

    Every launch flag changes how it runs, e.g. --zero_stage 3 --offload_optimizer_device cpu. What follows -- goes to
    the training script: zero-plugin demo -- --steps 1000 --width 256; zero-plugin demo -- --help lists it all.
    """
    flags = typed_flags(ctx)
    if config is not None:
        flags.setdefault("config_file", config)
    if "config_file" not in flags:
        flags["config_file"] = str(_FOLDER / "config.yaml")
        if "num_processes" not in flags and count_gpus() == 0:
            print("no GPU here: two processes on the CPU")
            flags["num_processes"] = "2"
    spec = plan_launch(flags, str(_FOLDER / "train.py"), tuple(arguments or ()))
    if flags.get("dry_run"):
        print(shell_script(spec))
    else:
        raise typer.Exit(run_workers(spec))
