"""Random lives of a model, trained, left mid-loop, freed, changed and prepared again, equal plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lives import PlainLife, PreparedLife, draw, live
from loops import outcome_of
from on_paths import on_rows, row
from paths import tolerance_of

PATHS = {
    1: ("single", "zero2", "zero3"),
    2: ("ddp", "zero0", "zero1", "zero2", "zero3-gathered", "zero3", "zero2-cpu", "zero3-cpu"),
}
DAILY = {1: ("single", "zero3"), 2: ("ddp", "zero2", "zero3")}
ROWS = [row("", world, seed, daily=seed < 3) for world in PATHS for seed in (*range(3), *range(100, 160))]


@on_rows(("seed",), ROWS)
def test_a_life(world: int, seed: int, folder: Path) -> None:
    """Weights are plain torch's after each training of a life. The first three seeds run daily, on a few paths."""
    life = draw(seed)
    for path in (DAILY if seed < 3 else PATHS)[world]:
        difference, text = outcome_of(
            path,
            lambda: live(life, PlainLife(world), folder),
            lambda loop, path=path: live(life, PreparedLife(loop.accelerator), folder / path),
        )
        assert difference is not None, f"{path}, {life}\n{text}"
        assert difference <= tolerance_of(path), f"{path}, {life}\ndiffers by {difference:.1e}"
