"""Random lives of a model: trained, left in the middle, freed, changed and prepared again, as in plain torch.

`make campaign` prints how many are right, refused and wrong: by path, and by each value of each dimension.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from lives import draw  # noqa: E402

PATHS = {1: "single,zero2,zero3", 2: "ddp,zero0,zero1,zero2,zero3-gathered,zero3,zero2-cpu,zero3-cpu"}
DAILY = {1: "single,zero3", 2: "ddp,zero0,zero2,zero3-gathered,zero3"}
PLAIN, KERNELS = 1e-5, 1e-4  # the second with DeepSpeed's own kernels, under offload

Rows = dict[tuple[int, str], str]


@pytest.fixture
def outcomes(run_processes: Callable[..., list[str]], tmp_path: Path) -> Callable[[int, str, range], Rows]:
    """How each seed's life went on each path: "right", or what was wrong with it."""

    def run(world: int, paths: str, seeds: range) -> Rows:
        run_processes(HERE / "lives_worker.py", world, paths, tmp_path, seeds.start, len(seeds), seconds=300)
        found: Rows = {}
        files = sorted(tmp_path.glob("rank-*.jsonl"))
        assert len(files) == world
        for file in files:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            assert len(lines) == len(seeds) * len(paths.split(","))
            for seed, path, difference, text in lines:
                limit = KERNELS if path.endswith("-cpu") else PLAIN
                is_right = difference is not None and difference <= limit
                outcome = "right" if is_right else text or f"differs by {difference:.1e}"
                if found.get((seed, path), "right") == "right":
                    found[seed, path] = outcome
        return found

    return run


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", DAILY)
def test_a_few_lives(world: int, outcomes: Callable[[int, str, range], Rows]) -> None:
    """Weights are plain torch's after each training of a life."""
    _assert_right(outcomes(world, DAILY[world], range(3)))


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.usefixtures("built_ops")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world", PATHS)
def test_many_lives(
    world: int, outcomes: Callable[[int, str, range], Rows], capsys: pytest.CaptureFixture[str]
) -> None:
    """The same of sixty; it prints what they were."""
    found = outcomes(world, PATHS[world], range(100, 160))
    counts: dict[str, Counter[str]] = {}
    for (seed, path), outcome in found.items():
        what = outcome if outcome == "right" else "refused" if outcome.startswith("refused: ") else "wrong"
        for row in {f"path | {path}", *(f"{name} | {value}" for name, value in draw(seed).values())}:
            counts.setdefault(row, Counter())[what] += 1
    with capsys.disabled():
        print(f"\n{world} processes: dimension | value | lives | right | refused | wrong")
        for row, count in sorted(counts.items()):
            print(f"{row} | {count.total()} | {count['right']} | {count['refused']} | {count['wrong']}")
    _assert_right(found)


def _assert_right(found: Rows) -> None:
    wrong = [f"{path}, {draw(seed)}\n{outcome}" for (seed, path), outcome in found.items() if outcome != "right"]
    assert not wrong, "\n\n".join(wrong)
