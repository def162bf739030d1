"""Trainings equal one process's losses, weights and logits: models, samples, accumulation, clipping, stages."""

from __future__ import annotations

from on_paths import on_rows, row
from sharing import Case, assert_trains_alike

CASES = {
    "llama": Case(),
    "llama-right-padded": Case(samples="right", accumulation=2),
    "llama-left-padded": Case(samples="left", clip=0.1),
    "llama-labelled-padding": Case(samples="labelled"),
    "llama-packed": Case(samples="packed", accumulation=2, clip=0.1),
    "llama-half-without-labels": Case(samples="half", accumulation=2),
    "llama-length-15": Case(samples="right", length=15),
    "llama-packed-length-13": Case(samples="packed", length=13),
    "llama-short-last-batch": Case(count=15, samples="half"),
    "llama-adam": Case(adam=True, accumulation=2, clip=0.5),
    "gpt2": Case(model="gpt2", accumulation=2),
    "gpt2-packed": Case(model="gpt2", samples="packed"),
    "gpt2-left-padded": Case(model="gpt2", samples="left", length=14),
    "mistral-window": Case(model="mistral"),
    "mistral-window-packed": Case(model="mistral", samples="packed", clip=0.1),
    "mistral-window-padded": Case(model="mistral", samples="right"),
}
# Every case runs on one path. Some run on all, also with two groups of two processes. Daily, those run on three.
PATHS = ("ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu")
EVERYWHERE = ("llama-packed", "gpt2")
_DAILY = ("ddp", "zero2", "zero3")
_ROWS = [
    row(path, world, name, size, daily=daily)
    for turn, path in enumerate(PATHS)
    for number, name in enumerate(CASES)
    for size, world, daily in (
        (2, 2, number % len(PATHS) == turn or (name in EVERYWHERE and path in _DAILY)),
        (2, 4, path == "zero3"),
        (4, 4, path == "zero3" and name == "gpt2"),
    )
    if (size, world) != (2, 4) or name in EVERYWHERE
]


@on_rows(("name", "size"), _ROWS)
def test_groups_train_as_one_process(path: str, name: str, size: int) -> None:
    """Losses, weights and logits equal one process's, in groups of `size` processes."""
    assert_trains_alike(path, size, CASES[name])
