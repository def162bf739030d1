"""Measure what a shuffled epoch costs one of a thousand processes: drawing the order and selecting batches.

Each process draws the order of torch's own samplers itself, with process 0's generator. For comparison, the table shows
the time of torch's sampler in one process, whose order is a list of Python's numbers.

    python benchmarks/shuffled.py --samples 1000000 100000000
"""

from __future__ import annotations

import argparse
import itertools
import time
from statistics import median
from typing import Any

import torch
from pairs import WIDTH, describe_run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch.utils.data import BatchSampler, RandomSampler

from zero_plugin.data.sharing import Sharing, draw_order, share_order

WORLD, RANK, BATCH = 1000, 700, 8
TAKEN = 1000  # most steps to time; the table shows their median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument(
        "--without_torch", action="store_true", help="do not draw torch's lists, which take 40 bytes a sample"
    )
    options = parser.parse_args()
    table = Table(
        title=f"one of {WORLD} processes, batches of {BATCH}; targets: a step <= 20 µs, a resume <= randperm + 1 s",
        caption=describe_run("zero-plugin", "torch"),
        caption_justify="left",
        box=MARKDOWN,
    )
    for column in (
        "samples",
        "randperm, s",
        "order, s",
        "checksum, s",
        "order, MB",
        "a step, µs",
        "torch's sampler, s",
    ):
        table.add_column(column, justify="right")
    for samples in options.samples:
        sampler: Any = RandomSampler(range(samples))
        permuted = seconds_of(lambda samples=samples: torch.randperm(samples))
        began = time.perf_counter()
        order = draw_order(sampler, torch.Generator().manual_seed(0))
        drawn = time.perf_counter() - began
        checked = seconds_of(order.digest)
        batches: Any = BatchSampler(sampler, BATCH, drop_last=False)
        half = samples // (WORLD * BATCH) // 2
        shares = share_order(order, batches, Sharing(RANK, WORLD, BATCH), None, skip=half)
        steps = [seconds_of(lambda shares=shares: next(shares)) for _ in range(min(half, TAKEN))]
        theirs = "" if options.without_torch else f"{seconds_of(lambda s=sampler: next(itertools.chain(s))):.2f}"
        table.add_row(
            f"{samples:,}",
            f"{permuted:.2f}",
            f"{drawn:.2f}",
            f"{checked:.2f}",
            f"{order.numbers.nbytes / 1e6:,.0f}",  # type: ignore[union-attr]
            f"{median(steps) * 1e6:.1f}",
            theirs,
        )
    Console(width=WIDTH).print(table)


def seconds_of(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
