"""Measure the time and the lines until a wrong configuration is reported, against `accelerate launch`.

Both launchers get the same twenty wrong configurations and the same script, which differs in one import. The script
prepares a linear model and trains eight steps in one process on the CPU, because Accelerate runs DeepSpeed there only
in one process. The time is measured until the line that names the error. Runs alternate; the table shows medians.
Accelerate needs transformers for any DeepSpeed run, so both must be installed. A second table shows the time of
`zero-plugin check` for one file.

    python benchmarks/errors.py --pairs 3
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from pairs import describe_run, installed, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

OURS, ACCELERATE = "zero_plugin", "accelerate"
LIMIT_S = 60
WIDEST = 76  # characters of a message in the table

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from {library} import Accelerator
from {library}.{placeholders} import DummyOptim
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = {optimizer}(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randn(32, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""

LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 1\nnum_machines: 1\nmachine_rank: 0\nmain_process_port: 0\n"
FIELDS = LAUNCH + "mixed_precision: 'no'\ndeepspeed_config:\n"
NAMED = LAUNCH + "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
MICRO = '"train_micro_batch_size_per_gpu": 4'
ZERO = '"zero_optimization": {"stage": 2}'

# (the mistake, the YAML, the DeepSpeed JSON that the YAML names)
WRONG = (
    ("a mistyped launch key", FIELDS.replace("num_processes", "num_proceses") + "  zero_stage: 2\n", ""),
    ("a mistyped short field", FIELDS + "  zero_stag: 3\n", ""),
    ("a stage that does not exist", FIELDS + "  zero_stage: 4\n", ""),
    ("a mistyped precision", FIELDS.replace("'no'", "bf61") + "  zero_stage: 2\n", ""),
    ("accumulation of a word", FIELDS + "  zero_stage: 2\n  gradient_accumulation_steps: four\n", ""),
    ("parameter offload at stage 2", FIELDS + "  zero_stage: 2\n  offload_param_device: cpu\n", ""),
    ("NVMe offload at stage 2", FIELDS + "  zero_stage: 2\n  offload_optimizer_device: nvme\n", ""),
    ("a tab in the YAML", FIELDS + "\tzero_stage: 2\n", ""),
    ("a JSON that is not there", NAMED, ""),
    ("a comma missing in the JSON", NAMED, "{" + ZERO + " " + MICRO + "}"),
    (
        "a key twice in the JSON",
        NAMED,
        '{"gradient_clipping": 1.0, "gradient_clipping": 0.1, ' + ZERO + ", " + MICRO + "}",
    ),
    ("a mistyped section", NAMED, '{"zero_optimisation": {"stage": 2}, ' + MICRO + "}"),
    ("a mistyped key at the top", NAMED, '{"gradient_clippin": 0.5, ' + ZERO + ", " + MICRO + "}"),
    (
        "a mistyped key deep inside",
        NAMED,
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}, ' + MICRO + "}",
    ),
    ("fp16 with bf16", NAMED, '{"fp16": {"enabled": true}, "bf16": {"enabled": true}, ' + ZERO + ", " + MICRO + "}"),
    ("batch sizes that do not multiply", NAMED, '{"train_batch_size": 10, ' + ZERO + ", " + MICRO + "}"),
    (
        "partial offload at stage 2",
        NAMED,
        '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, ' + MICRO + "}",
    ),
    ("a negative clipping norm", NAMED, '{"gradient_clipping": -1.0, ' + ZERO + ", " + MICRO + "}"),
    ("a removed section", NAMED, '{"amp": {"enabled": false}, ' + ZERO + ", " + MICRO + "}"),
    (
        "clipping in the optimizer",
        NAMED,
        '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}, ' + ZERO + ", " + MICRO + "}",
    ),
)

# The line of a traceback that contains the exception, after torchrun's mark of the rank.
_EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|NotFound)\b.*)")


@dataclass(frozen=True)
class Seen:
    """The output of one run: seconds until the message (None: no message), the message, and the number of lines."""

    seconds: float | None
    message: str
    lines: int


def run(library: str, folder: Path) -> Seen:
    """Launch the script in `folder` with one of the two libraries and read its output until it ends."""
    start = [OURS] if library == OURS else ["accelerate.commands.accelerate_cli"]
    command = [sys.executable, "-m", *start, "launch", "--config_file", "c.yaml", f"{library}_train.py"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    assert process.stdout is not None
    lines = [(time.perf_counter() - began, line.rstrip()) for line in process.stdout if line.strip()]
    code = process.wait()
    limit.cancel()
    if code == 0:
        return Seen(None, "**trains, reports nothing**", len(lines))
    if code < 0:
        return Seen(None, f"**nothing within {LIMIT_S} s**", len(lines))
    when, message = our_message(lines) if library == OURS else their_message(lines)
    return Seen(when, message, len(lines))


def our_message(lines: list[tuple[float, str]]) -> tuple[float, str]:
    """Return the first problem: the line below `error: 1 problem in the configuration:`."""
    index = next(n for n, (_, line) in enumerate(lines) if line.startswith("error:"))
    when, line = lines[min(index + 1, len(lines) - 1)]
    return when, line.strip()


def their_message(lines: list[tuple[float, str]]) -> tuple[float, str]:
    """Return the last exception before torchrun's own; without an exception, the last line."""
    found = [(when, match[1]) for when, line in lines if (match := _EXCEPTION.fullmatch(line))]
    own = [(when, text) for when, text in found if "ChildFailedError" not in text and "CalledProcessError" not in text]
    return (own or found or lines)[-1]


def write_case(folder: Path, yaml: str, json: str) -> None:
    """Write the files of one case and the two scripts."""
    (folder / "c.yaml").write_text(yaml)
    if json:
        (folder / "ds.json").write_text(json)
    optimizer = "DummyOptim" if '"optimizer":' in json else "torch.optim.AdamW"
    for library, placeholders in ((OURS, "placeholders"), (ACCELERATE, "utils")):
        text = SCRIPT.format(library=library, placeholders=placeholders, optimizer=optimizer)
        (folder / f"{library}_train.py").write_text(text)


def cell(text: str) -> str:
    """Return a message in a form that fits a table cell."""
    text = text.replace("|", "\\|")
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--checks", type=int, default=11, help="runs of `zero-plugin check` (default 11)")
    arguments = parser.parse_args()
    console = Console(width=260)
    libraries = [OURS, ACCELERATE] if installed("accelerate") and installed("transformers") else [OURS]
    if len(libraries) == 1:
        console.print("accelerate or transformers is not installed: pip install accelerate transformers")

    conditions = describe_run("zero-plugin", "torch", "deepspeed", "accelerate", "transformers")
    table = Table(box=MARKDOWN)
    table.add_column("wrong")
    for library in libraries:
        table.add_column(f"{library}, s", justify="right")
        table.add_column("lines", justify="right")
        table.add_column("message")
    times: dict[str, list[float]] = {library: [] for library in libraries}
    for name, yaml, json in WRONG:
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write_case(folder, yaml, json)
            seen: dict[str, list[Seen]] = {library: [] for library in libraries}
            for index in range(arguments.pairs):
                for library in libraries if index % 2 == 0 else reversed(libraries):
                    seen[library].append(run(library, folder))
        row = [name]
        for library in libraries:
            took = [one.seconds for one in seen[library] if one.seconds is not None]
            times[library] += [median(took)] if took else []
            last = seen[library][-1]
            row += [f"{median(took):.2f}" if took else "", str(last.lines), cell(last.message)]
        table.add_row(*row)
    of = sum(arguments.only in name for name, _, _ in WRONG)
    summary = [part for n in libraries for part in (f"{median(times[n]):.2f}", "", f"{len(times[n])} of {of} reported")]
    table.add_row("median", *summary)
    console.print(table, conditions)
    print_check_times(console, arguments.checks)


def print_check_times(console: Console, runs: int) -> None:
    """Print wall and processor time of `zero-plugin check` for one file, next to a Python that does nothing."""
    configs = Path(__file__).resolve().parent.parent / "ds_configs"
    commands = {"python -c pass": ["-c", "pass"]}
    for name in ("zero2.yaml", "zero3_nvme.json"):
        commands[f"zero-plugin check {name}"] = ["-m", "zero_plugin", "check", str(configs / name)]
    contenders = {
        name: partial(subprocess.run, [sys.executable, *command], check=True, capture_output=True)
        for name, command in commands.items()
    }
    conditions = describe_run("zero-plugin")
    wall = take_turns(contenders, runs)
    processor = take_turns(contenders, runs, clock=lambda: sum(os.times()[2:4]))  # of finished child processes
    table = Table(box=MARKDOWN)
    for column in ("command", "seconds", "of the processor", "target"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for name in commands:
        target = "< 0.5" if "check" in name else ""
        table.add_row(name, f"{wall.seconds(name):.2f}", f"{processor.seconds(name):.2f}", target)
    console.print(table, conditions)


if __name__ == "__main__":
    main()
