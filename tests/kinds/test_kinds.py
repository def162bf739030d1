"""Kinds of training code on every path, against plain torch in one process over the same global batches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the kinds import each other by name

from kinds import FAILS, KINDS, REFUSED
from loops import ZERO, Plain, outcome_of
from on_paths import on_rows, row
from paths import tolerance_of

PATHS = {1: ("single", *ZERO), 2: ("ddp", *ZERO), 3: ("ddp", *ZERO)}


def is_right(kind: str, path: str, difference: float | None, text: str) -> bool:
    """Whether a kind ends on a path as it must: with plain torch's weights, or with the words of its refusal."""
    refused, fails = REFUSED.get(kind, {}).get(path), FAILS.get(kind, {}).get(path)
    if difference is None:
        words = refused if text.startswith("refused: ") else fails
        return words is not None and words in text
    return not (refused or fails) and difference <= tolerance_of(path, exact=3e-6)


@on_rows(("kind",), [row("", world, kind, daily=False) for world in PATHS for kind in KINDS])
def test_a_kind_trains_as_in_plain_torch(world: int, kind: str) -> None:
    """Final weights are plain torch's on each path, or the path refuses the kind on every process."""
    run = KINDS[kind]
    outcomes = {path: outcome_of(path, lambda: [run(Plain(world))], lambda loop: [run(loop)]) for path in PATHS[world]}
    for path, outcome in outcomes.items():
        print(kind, path, world, *outcome, sep=" | ", flush=True)
    wrong = {path: outcome for path, outcome in outcomes.items() if not is_right(kind, path, *outcome)}
    assert not wrong, "\n".join(f"{path}: {difference} {text}" for path, (difference, text) in wrong.items())
