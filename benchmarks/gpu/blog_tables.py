"""Compare the three tables of Accelerate's ZeRO announcement with this machine at 24 GB of each GPU.

https://huggingface.co/blog/accelerate-deepspeed measured on two Titan RTX: the largest micro-batch, and seconds per
epoch of training and of evaluating, with DDP and with ZeRO.

This script searches the largest micro-batch. Each try is a separate launch under `set_per_process_memory_fraction`, and
its result is printed immediately. The table also has the plan's prediction; times are of the largest micro-batch.
Attention is a fused kernel if transformers has one. Rows that need two GPUs show that if the machine has only one.
transformers must be installed. Without a GPU the script prints the published and predicted numbers.

    python benchmarks/gpu/blog_tables.py
    python benchmarks/gpu/blog_tables.py --models gpt2_xl
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from training import OUT_OF_MEMORY, Figures, Run, measure

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `blog_predicted`

CAP_GIB = 24220 / 1024  # the memory of a Titan RTX
ZERO2: dict[str, Any] = {"stage": 2, "reduce_bucket_size": 500_000_000}
ZERO2_FILE: dict[str, Any] = {
    "stage": 2,
    "reduce_bucket_size": 200_000_000,
    "overlap_comm": True,
}
ZERO3: dict[str, Any] = {
    "stage": 3,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "overlap_comm": True,
}
LARGEST = 512


@dataclass(frozen=True)
class Row:
    """One published line: micro-batch, seconds per epoch of training and evaluating; None if not published."""

    model: str
    method: str
    run: Run
    micro: int
    train: float | None
    evaluate: float | None
    samples: tuple[int, int] = (0, 0)  # samples of an epoch of training and of evaluating


PUBLISHED = (
    Row("deberta", "DDP", Run("deberta", "fp16", processes=2), 8, 103.57, 2.04, (3668, 408)),
    Row("deberta", "stage 2", Run("deberta", "fp16", ZERO2, processes=2), 40, 28.98, 1.79, (3668, 408)),
    Row("blenderbot", "DDP", Run("blenderbot", "fp16", processes=2), 100, 27.36, None, (10_000, 0)),
    Row("blenderbot", "stage 2", Run("blenderbot", "fp16", ZERO2_FILE, processes=2), 200, 19.06, None, (10_000, 0)),
    Row("gpt2_xl", "no ZeRO", Run("gpt2_xl", "fp16"), 0, None, None),
    Row("gpt2_xl", "stage 3 + CPU", Run("gpt2_xl", "fp16", ZERO3), 16, None, None),
)
NOTE = (
    "BlenderBot's evaluation (48.41 s and 39.27 s) generates with ten beams, which is not repeated here. Published "
    "speed-ups: 3.5× (DeBERTa), 1.44× training and 1.23× evaluating (BlenderBot)."
)


def main() -> None:
    args = read_arguments()
    gpus = count_gpus()
    table = Table(box=MARKDOWN)
    for column in ("model", "method", "published: batch", "train, s", "eval, s"):
        table.add_column(column)
    for column in ("predicted: batch", "here: batch", "train, s", "eval, s", "samples/s"):
        table.add_column(column)
    measured: dict[str, list[Figures]] = {}
    for row in PUBLISHED:
        if row.model not in args.models:
            continue
        published = (str(row.micro or "fails at 1"), shown(row.train), shown(row.evaluate))
        here, found = run_here(row, gpus)
        table.add_row(row.model, row.method, *published, str(predict(row) or "fails at 1"), *here)
        if found is not None:
            measured.setdefault(row.model, []).append(found)
    console = Console(width=150)
    console.print(table)
    for model, both in measured.items():
        if len(both) == 2:
            console.print(f"Speed-up here, {model}: {compare(*both)}", highlight=False)
    console.print(NOTE, highlight=False)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = sorted({row.model for row in PUBLISHED})
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    return parser.parse_args()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def predict(row: Row) -> int:
    """Return the plan's largest micro-batch, with the attention that runs here."""
    from blog_predicted import DDP, TASKS, TITAN, largest, measure

    task = next(task for task in TASKS if task.build.__name__ == row.model)
    setup = DDP if row.run.zero is None else task.zero
    return largest(*measure(task, "sdpa"), setup, replace(TITAN, devices=task.devices))


def run_here(row: Row, gpus: int) -> tuple[tuple[str, ...], Figures | None]:
    """Return largest micro-batch, seconds per epoch, samples per second, and their source; or why there are none."""
    if gpus < row.run.processes:
        needed = "a GPU" if row.run.processes == 1 else f"{row.run.processes} GPUs"
        return (f"not run: needs {needed}", "", "", ""), None
    micro, found = search_largest(row.run, row.micro or 1)
    if isinstance(found, str):
        return ("fails at 1" if found == OUT_OF_MEMORY else found, "", "", ""), None
    per_sample = found.seconds / found.samples
    train, evaluate = row.samples
    times = shown(train * per_sample or None), shown(evaluate * found.eval_seconds / found.samples or None)
    return (str(micro), *times, f"{1 / per_sample:,.0f}"), found


def compare(ddp: Figures, zero: Figures) -> str:
    """Return the ratios of the time per sample, DDP over ZeRO."""
    train = ddp.seconds / ddp.samples / (zero.seconds / zero.samples)
    evaluate = ddp.eval_seconds / ddp.samples / (zero.eval_seconds / zero.samples)
    return f"{train:.2f}× training, {evaluate:.2f}× evaluating"


def search_largest(run: Run, first: int) -> tuple[int, Figures | str]:
    """Return the largest micro-batch that fits and its numbers, or the reason in words if nothing has numbers.

    The search doubles from `first`, then halves the remaining range down to a sixteenth of the largest that fits.
    """
    fitting, too_many = 0, LARGEST + 1
    best: Figures | str = OUT_OF_MEMORY
    tried = first
    while too_many - fitting > max(1, fitting // 16):
        found = measure(replace(run, micro_batch=tried, cap_gib=CAP_GIB, evaluate=True))
        told = found if isinstance(found, str) else f"peak {found.peak / 2**30:.2f} GiB, step {found.seconds:.3f} s"
        print(f"{run.model}, {run.processes} GPUs, micro-batch {tried}: {told}", file=sys.stderr, flush=True)
        if isinstance(found, Figures):
            fitting, best = tried, found
        elif found == OUT_OF_MEMORY:
            too_many = tried
        else:
            return fitting, best if fitting else found
        tried = min(2 * fitting, LARGEST) if too_many > LARGEST and fitting else (fitting + too_many) // 2
        if tried == fitting:
            break
    return fitting, best


def shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    main()
