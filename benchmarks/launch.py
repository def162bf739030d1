"""Measure how long an empty script takes from command to prompt: `zero-plugin launch` against bare `torchrun`.

The script is an empty file, so only the launcher and the start of its workers are timed. Rounds alternate between the
launchers. The numbers are medians over the rounds of the time, and of the difference to torchrun's time in the same
round. Accelerate's launcher takes part if it is installed.

    python benchmarks/launch.py --pairs 10 --processes 1 2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from pairs import WIDTH, describe_run, installed, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

TORCHRUN, OURS, ACCELERATE = "torchrun", "zero-plugin launch", "accelerate launch"


def launch_commands(script: str, processes: int) -> dict[str, list[str]]:
    """Return the command line of each launcher; all are started as modules, which costs each the same."""
    commands = {
        # The system chooses the port: with the default port, two runs on one machine fail.
        TORCHRUN: ["torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0", script],
        OURS: ["zero_plugin", "launch", "--cpu", f"--num_processes={processes}", script],
    }
    if installed("accelerate"):
        # Without mpirun, `--cpu` starts one process, whatever number is requested.
        options = [
            "--cpu" if processes == 1 else "--multi_gpu",
            f"--num_processes={processes}",
            "--num_machines=1",
            "--mixed_precision=no",
        ]
        options += ["--dynamo_backend=no", "--num_cpu_threads_per_process=1", "--main_process_port=0"]
        commands[ACCELERATE] = ["accelerate.commands.accelerate_cli", "launch", *options, script]
    return {name: [sys.executable, "-m", *command] for name, command in commands.items()}


def run_quietly(command: list[str], folder: str) -> None:
    """Run a command to its end; show its output only if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="rounds per number of processes (default 10)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="numbers of workers (default 1 2)")
    arguments = parser.parse_args()
    console = Console(width=WIDTH)
    if not installed("accelerate"):
        console.print("accelerate is not installed: pip install accelerate")

    table = Table(
        title="launch of an empty script, seconds",
        caption=describe_run("zero-plugin", "torch", "accelerate"),
        caption_justify="left",
        box=MARKDOWN,
    )
    for column in ("processes", "launcher", "time", "beyond torchrun", "ratio", "target"):
        table.add_column(column, justify="left" if column == "launcher" else "right")
    for processes in arguments.processes:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "empty.py")
            script.touch()
            commands = launch_commands(str(script), processes)
            contenders = {name: partial(run_quietly, command, folder) for name, command in commands.items()}
            timings = take_turns(contenders, arguments.pairs)
        for name in commands:
            table.add_row(
                str(processes),
                name,
                f"{timings.seconds(name):.2f}",
                "" if name == TORCHRUN else f"{timings.extra(name, TORCHRUN):+.2f}",
                ""
                if name == TORCHRUN
                else f"{timings.ratio(name, TORCHRUN):.2f} ± {timings.spread(name, TORCHRUN):.2f}",
                "<= +0.25" if name == OURS else "",
            )
    console.print(table)


if __name__ == "__main__":
    main()
