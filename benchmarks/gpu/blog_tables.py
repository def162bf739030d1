"""The three tables of Accelerate's ZeRO announcement beside what this machine gives with 24 GB of each GPU.

https://huggingface.co/blog/accelerate-deepspeed measured on two Titan RTX: the largest micro-batch, seconds per epoch
of training and of evaluating, with DDP and with ZeRO. Here the largest micro-batch is searched for, each try a launch
of its own under `set_per_process_memory_fraction`, beside the plan's own; times are of that micro-batch. Attention is a
fused kernel where transformers has one. Rows that need two GPUs say so where there is one. transformers must be
installed. Without a GPU the script prints what was published and predicted.

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
from training import Figures, Run, measure

sys.path.append(str(Path(__file__).parents[1]))  # of `blog_predicted`

CAP_GIB = 24220 / 1024  # a Titan RTX
ZERO2: dict[str, Any] = {"stage": 2, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
ZERO2_FILE: dict[str, Any] = {
    "stage": 2,
    "reduce_bucket_size": 200_000_000,
    "allgather_bucket_size": 200_000_000,
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
    """One published line: micro-batch, seconds per epoch of training and evaluating; None where nothing is told."""

    model: str
    method: str
    run: Run
    micro: int
    train: float | None
    evaluate: float | None
    samples: tuple[int, int] = (0, 0)  # of an epoch of each


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
    for row in PUBLISHED:
        if row.model not in args.models:
            continue
        published = (str(row.micro or "fails at 1"), shown(row.train), shown(row.evaluate))
        table.add_row(row.model, row.method, *published, str(predict(row) or "fails at 1"), *run_here(row, gpus))
    console = Console(width=150)
    console.print(table)
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
    """The plan's largest micro-batch, with attention as it runs here."""
    from blog_predicted import DDP, TASKS, TITAN, largest, measure

    task = next(task for task in TASKS if task.build.__name__ == row.model)
    setup = DDP if row.run.zero is None else task.zero
    return largest(*measure(task, "sdpa"), setup, replace(TITAN, devices=task.devices))


def run_here(row: Row, gpus: int) -> tuple[str, ...]:
    """Largest micro-batch, seconds per epoch, samples per second; or why nothing was run."""
    if gpus < row.run.processes:
        needed = "a GPU" if row.run.processes == 1 else f"{row.run.processes} GPUs"
        return (f"not run: needs {needed}", "", "", "")
    micro, found = search_largest(row.run)
    if found is None:
        return ("fails at 1", "", "", "")
    per_sample = found.seconds / found.samples
    train, evaluate = row.samples
    times = shown(train * per_sample or None), shown(evaluate * found.eval_seconds / found.samples or None)
    return (str(micro), *times, f"{1 / per_sample:,.0f}")


def search_largest(run: Run) -> tuple[int, Figures | None]:
    """By doubling, then by halving what is left to a sixteenth of it."""
    fitting, best, too_many = 0, None, LARGEST + 1
    tried = 1
    while too_many - fitting > max(1, fitting // 16) and tried <= LARGEST:
        found = measure(replace(run, micro_batch=tried, cap_gib=CAP_GIB, evaluate=True))
        if isinstance(found, str):
            if found != "out of memory":
                return fitting, best
            too_many = tried
        else:
            fitting, best = tried, found
        tried = 2 * fitting if too_many > LARGEST and fitting else (fitting + too_many) // 2
        if tried == fitting:
            break
    return fitting, best


def shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    main()
