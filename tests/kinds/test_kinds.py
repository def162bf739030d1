"""Kinds of training code on every path, against plain torch in one process over the same global batches.

`make campaign` prints the table: kind | path | processes | relative difference of the final weights, or the refusal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # the kinds import each other by name, here and in the worker

from kinds import FAILS, REFUSED  # noqa: E402

ZERO = "zero1,zero2,zero3,zero2-cpu,zero3-cpu"
PATHS = {1: f"single,{ZERO}", 2: f"ddp,{ZERO}", 3: f"ddp,{ZERO}"}
PLAIN, KERNELS = 3e-6, 1e-4  # the second with DeepSpeed's own kernels, under offload


def judge(kind: str, path: str, outcomes: list[tuple[float | None, str]]) -> tuple[str, bool]:
    """What the table says of a kind on a path, and whether it is as it must be.

    Args:
        kind: its name.
        path: where it was trained.
        outcomes: each process' difference, or None, and its error.
    """
    texts = [text for _, text in outcomes]
    refused, fails = REFUSED.get(kind, {}).get(path), FAILS.get(kind, {}).get(path)
    if any(texts):
        told = next(filter(None, texts))
        own = told.startswith("refused: ")
        words = refused if own else fails
        as_must = words is not None and all(words in text and text.startswith("refused: ") is own for text in texts)
        return " ".join(told.split()) if own else f"fails: {told.strip().splitlines()[-1]}", as_must
    largest = max(difference for difference, _ in outcomes if difference is not None)
    limit = KERNELS if path.endswith("-cpu") else PLAIN
    return f"{largest:.1e}", not (refused or fails) and largest <= limit


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("world", PATHS)
def test_kinds_train_as_in_plain_torch(
    world: int, run_processes: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Final weights are plain torch's, for each kind on each path, or the path refuses it on every process."""
    run_processes(HERE / "kinds_worker.py", world, PATHS[world], tmp_path, seconds=300)
    found: dict[tuple[str, str], list[Any]] = {}
    for file in sorted(tmp_path.glob("rank-*.jsonl")):
        for kind, path, _, *outcome in map(json.loads, file.read_text().splitlines()):
            found.setdefault((kind, path), []).append(outcome)
    rows = {
        f"{kind} | {path} | {world} | {told}": right
        for (kind, path), (told, right) in ((key, judge(*key, outcomes)) for key, outcomes in found.items())
    }
    with capsys.disabled():
        print("\nkind | path | ranks | relative difference", *rows, sep="\n")
    wrong = [row for row, right in rows.items() if not right]
    assert not wrong, "\n".join(wrong)
    assert all(len(outcomes) == world for outcomes in found.values())
