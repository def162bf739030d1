"""Kinds of training code on every path, against plain torch in one process over the same global batches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the kinds import each other by name

from kinds import FAILS, KINDS, REFUSED
from loops import ZERO, Plain, outcome_of
from on_paths import on_rows, row
from paths import tolerance_of

# Kinds that no other daily test has. They run daily on ZeRO-2, in two processes.
DAILY = (
    "OneCycle with betas",
    "LSTM, weight and spectral norm",
    "dropout by seeds, checkpointed",
    "tied weights, padding, smoothed labels",
    "hooks after gradients",
    "accumulated by context, a shorter last window",
    "weighted sampler",
    "sharded evaluation",
    "AveragedModel of the prepared one",
    "GAN",
    "two models, one loss",
    "contrast with gathered gradients",
)
PATHS = {1: ("single", *ZERO), 2: ("ddp", *ZERO), 3: ("ddp", *ZERO)}


def is_right(kind: str, path: str, difference: float | None, text: str) -> bool:
    """Check that a kind ends on a path as it must: with plain torch's weights, or with the expected error."""
    refused, fails = REFUSED.get(kind, {}).get(path), FAILS.get(kind, {}).get(path)
    if difference is None:
        words = refused if text.startswith("refused: ") else fails
        return words is not None and words in text
    return not (refused or fails) and difference <= tolerance_of(path, exact=3e-6)


ROWS = [
    row(path, world, kind, daily=(path, world) == ("zero2", 2) and kind in DAILY)
    for world in PATHS
    for path in PATHS[world]
    for kind in KINDS
]


@on_rows(("kind",), ROWS)
def test_a_kind_trains_as_in_plain_torch(path: str, world: int, kind: str) -> None:
    """Final weights are plain torch's, or the path refuses the kind on every process."""
    run = KINDS[kind]
    difference, text = outcome_of(path, lambda: [run(Plain(world))], lambda loop: [run(loop)])
    print(kind, path, world, difference, text, sep=" | ", flush=True)
    assert is_right(kind, path, difference, text), f"{difference} {text}"
