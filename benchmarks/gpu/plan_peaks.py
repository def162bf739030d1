"""Compare the plan's peak memory of a GPU with `torch.cuda.max_memory_allocated`, over 24 configurations.

Every row is a separate launch: GPT-2 of some size, AdamW, four steps. The target is 10 %.

A second table trains GPT-2 XL (1.5 billion parameters, blocks of 128 tokens, fp16) with 24 GB of the device. Its rows
are the announcement's stage 3 with everything offloaded and 16 samples, the choice of `auto`, and one sample without
ZeRO. The target for `auto` is 1.5 times the announcement's tokens per second.

transformers must be installed. Each row is printed as soon as it is measured, and after SIGTERM the table has the rows
measured by then. A launch takes about half a minute. Without a GPU only `--cpu` runs, which tries the script and
measures no peaks.

    python benchmarks/gpu/plan_peaks.py
    python benchmarks/gpu/plan_peaks.py --only cap
    python benchmarks/gpu/plan_peaks.py --only peaks --rows 12:24
    python benchmarks/gpu/plan_peaks.py --cpu --rows 0:3
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from training import OUT_OF_MEMORY, Figures, Run, file_of, measure

GIB = 2**30
HOST: dict[str, Any] = {"device": "cpu"}
ZERO: dict[str, dict[str, Any] | None] = {
    "no ZeRO": None,
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2 + CPU": {"stage": 2, "offload_optimizer": HOST},
    "stage 3": {"stage": 3},
    "stage 3 + CPU": {"stage": 3, "offload_optimizer": HOST},
    "stage 3 + all on CPU": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST},
}
SMALL, LARGE = "gpt2:768x12", "gpt2:1280x36"  # 124 and 774 million parameters
AUTO = {
    "stage": "auto",
    "offload_optimizer": {"device": "auto", "ratio": "auto"},
    "offload_param": {"device": "auto"},
    "sub_group_size": "auto",
}
ROWS = (
    # every path in bf16, at two micro-batches; then fp16, fp32, accumulation, recomputation and long blocks
    *((path, Run(LARGE, zero=zero, micro_batch=micro, length=512)) for path, zero in ZERO.items() for micro in (1, 8)),
    ("no ZeRO", Run(LARGE, "fp16", micro_batch=8, length=512)),
    ("stage 2", Run(LARGE, "fp16", ZERO["stage 2"], micro_batch=8, length=512)),
    ("stage 3", Run(LARGE, "fp16", ZERO["stage 3"], micro_batch=8, length=512)),
    ("no ZeRO", Run(LARGE, "no", micro_batch=4, length=512)),
    ("stage 3", Run(LARGE, "no", ZERO["stage 3"], micro_batch=4, length=512)),
    ("no ZeRO", Run(LARGE, micro_batch=4, length=512, accumulation=4)),
    ("stage 2", Run(LARGE, zero=ZERO["stage 2"], micro_batch=4, length=512, accumulation=4)),
    ("no ZeRO", Run(LARGE, micro_batch=16, length=1024, checkpointing=True)),
    ("stage 3 + CPU", Run(LARGE, zero=ZERO["stage 3 + CPU"], micro_batch=16, length=1024, checkpointing=True)),
    ("no ZeRO", Run(SMALL, micro_batch=64, length=1024)),
)
XL = Run("gpt2_xl", "fp16", cap_gib=24)
CAPPED = (
    ("the announcement's", replace(XL, zero=ZERO["stage 3 + all on CPU"], micro_batch=16, steps=4)),
    ("auto", replace(XL, zero=AUTO, micro_batch=16, steps=4)),
    ("no ZeRO, one sample", XL),
)


def main() -> None:
    args = read_arguments()
    if not args.cpu and not has_gpu():
        sys.exit("This machine has no GPU. --cpu tries the script without one.")
    console = Console(width=160)
    if args.only in (None, "peaks"):
        console.print(compare_peaks(ROWS[args.rows], args))
    if args.only in (None, "cap"):
        console.print(compare_speed(args))


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("peaks", "cap"), help="one of the two tables")
    parser.add_argument("--rows", type=read_rows, default=slice(None), help="of the first table, FROM:TO, from 0")
    parser.add_argument("--together", type=int, default=1, help="launches at a time, for the peaks (default 1)")
    parser.add_argument("--kept", type=Path, help="folder of rows: measured ones are read, new ones are written")
    parser.add_argument("--cpu", action="store_true", help="with tiny models and without a GPU, to try the script")
    return parser.parse_args()


def read_rows(text: str) -> slice:
    first, last = text.split(":")
    return slice(int(first or 0), int(last) if last else None)


def tell(*cells: str) -> None:
    """Print a row immediately: an interrupted session keeps its printed rows."""
    print(" | ".join(cells), file=sys.stderr, flush=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def measure_all(
    runs: list[Run], together: int, kept: Path | None, show: Callable[[int, dict[int, Figures | str]], tuple[str, ...]]
) -> dict[int, Figures | str]:
    """Return the numbers of the runs, or the reasons why there are none; SIGTERM leaves some unmeasured.

    Args:
        runs: the runs to measure.
        together: launches at a time. A run that had too little memory next to others is repeated alone.
        kept: a folder of numbers from earlier sessions.
        show: the row of a run, from the measurements so far; it is printed immediately.
    """
    from pairs import LATE, until_stopped

    retried = f"{OUT_OF_MEMORY} next to others"
    found: dict[int, Figures | str] = dict.fromkeys(range(len(runs)), LATE)
    # Kept rows come first, and runs that need C++ ops last: on a new machine the ops are still being built.
    is_kept = [kept is not None and file_of(run, kept).exists() for run in runs]
    order = sorted(range(len(runs)), key=lambda i: (not is_kept[i], "offload" in str(runs[i].zero)))
    pool = ThreadPoolExecutor(together)
    with until_stopped():
        futures = {pool.submit(measure, runs[i], kept): i for i in order}
        for future in as_completed(futures):
            i = futures[future]
            found[i] = retried if future.result() == OUT_OF_MEMORY and together > 1 else future.result()
            tell(*show(i, found))
        for i in [i for i in order if found[i] == retried]:
            found[i] = pool.submit(measure, runs[i], kept).result()
            tell(*show(i, found))
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def compare_peaks(rows: tuple[tuple[str, Run], ...], args: argparse.Namespace) -> Table:
    table = Table(box=MARKDOWN)
    for column in (
        "path",
        "model",
        "precision",
        "samples × tokens",
        "predicted, GiB",
        "measured, GiB",
        "off by",
        "terms",
    ):
        table.add_column(column)
    # Each launch takes its part of the cores. Otherwise threads that wait by spinning would block all launches.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.together)))
    runs = [toy(run) if args.cpu else run for _, run in rows]

    def show(i: int, found: dict[int, Figures | str]) -> tuple[str, ...]:
        run, one = runs[i], found[i]
        what = f"{run.micro_batch} × {run.length}{f' × {run.accumulation} a step' if run.accumulation > 1 else ''}"
        name = run.model + (", recomputing" if run.checkpointing else "")
        if isinstance(one, str):
            return rows[i][0], name, run.precision, what, "", "", one, ""
        off = f"{one.peak / one.predicted - 1:+.1%}" if one.peak else "needs a GPU"
        sizes = f"{one.predicted / GIB:.2f}", f"{one.peak / GIB:.2f}"
        return rows[i][0], name, run.precision, what, *sizes, off, most(one)

    found = measure_all(runs, args.together, args.kept, show)
    for i in range(len(rows)):
        table.add_row(*show(i, found))
    errors = [abs(one.peak / one.predicted - 1) for one in found.values() if isinstance(one, Figures)]
    table.caption = f"{len(errors)} of {len(rows)} rows measured"
    if not args.cpu and errors:
        table.caption += f"; off by at most {max(errors):.1%}; target 10 %"
    return table


def toy(run: Run) -> Run:
    """Return the run at a size for a CPU."""
    return replace(run, model="gpt2:64x2", micro_batch=2, length=16, steps=2, cpu=True, precision="bf16", cap_gib=None)


def compare_speed(args: argparse.Namespace) -> Table:
    table = Table(box=MARKDOWN)
    for column in ("GPT-2 XL in 24 GB", "chosen", "peak, GiB", "predicted, GiB", "step, s", "tokens/s", "against it"):
        table.add_column(column)
    runs = [toy(run) if args.cpu else run for _, run in CAPPED]

    def show(i: int, found: dict[int, Figures | str]) -> tuple[str, ...]:
        one, against = found[i], found[0]  # the announcement's
        if isinstance(one, str):
            return CAPPED[i][0], "", "", "", "", one, ""
        speed = one.samples * runs[i].length / one.seconds
        ratio = ""
        if isinstance(against, Figures):
            ratio = f"{speed * against.seconds / against.samples / runs[0].length:.2f}×"
        sizes = f"{one.peak / GIB:.2f}", f"{one.predicted / GIB:.2f}"
        return CAPPED[i][0], one.chosen, *sizes, f"{one.seconds:.3f}", f"{speed:,.0f}", ratio

    found = measure_all(runs, 1, args.kept, show)
    for i in range(len(CAPPED)):
        table.add_row(*show(i, found))
    table.caption = "target: auto at least 1.5× the announcement's"
    return table


def most(found: Figures) -> str:
    terms = sorted(found.terms.items(), key=lambda term: -term[1])[:3]
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in terms)


if __name__ == "__main__":
    main()
