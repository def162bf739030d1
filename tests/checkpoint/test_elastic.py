"""A checkpoint of any layout can be loaded in any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from paths import tolerance_of
from safetensors.torch import load_file

from zero_plugin.checkpoint.verify import find_damage

WORKER = Path(__file__).parent / "elastic_worker.py"
LAYOUTS = ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", "zero3-nvme")


@dataclass(frozen=True, order=True)
class Run:
    """A training run: on `world` processes, with one of LAYOUTS, in a `mixed_precision`."""

    world: int
    layout: str
    precision: str = "no"

    def __str__(self) -> str:
        return f"{self.layout}@{self.world}" + ("" if self.precision == "no" else f"-{self.precision}")


Pair = tuple[Run, Run]

ZERO2, NVME, HALF = Run(2, "zero2"), Run(2, "zero3-nvme"), Run(2, "zero3", "bf16")
SINGLE, CPU, ZERO3, DDP = Run(1, "single"), Run(1, "zero3-cpu"), Run(3, "zero3"), Run(3, "ddp")
DAILY: tuple[Pair, ...] = (  # each layout is on one side, and each change of size and precision occurs once
    (ZERO2, ZERO2),
    (ZERO2, NVME),
    (NVME, SINGLE),
    (NVME, Run(3, "zero0")),
    (HALF, Run(1, "zero2-cpu", "bf16")),
    (SINGLE, ZERO3),
    (CPU, DDP),
    (HALF, Run(3, "zero1", "bf16")),
)
MORE: tuple[Pair, ...] = (
    (HALF, Run(2, "zero3-nvme", "bf16")),
    (SINGLE, SINGLE),
    (ZERO3, ZERO3),
    (DDP, DDP),
    (ZERO2, Run(3, "zero3-cpu")),
)


def all_pairs() -> Iterator[Pair]:
    """Return every pair of layouts. Sizes and precisions rotate; equal layouts keep their size."""
    for i, source in enumerate(LAYOUTS):
        for j, target in enumerate(LAYOUTS):
            before, after = 1 + (i + j) % 4, 1 + (3 * i + 2 * j + j // 4) % 4
            if source == target:
                after = before
            precision = "bf16" if (i + 2 * j) % 3 == 2 else "no"
            yield (
                Run(1 if source == "single" else before, source, precision),
                Run(1 if target == "single" else after, target, precision),
            )


ALL = tuple(all_pairs())
IN_CAMPAIGN = tuple(dict.fromkeys((*ALL, *MORE)))


def name_of(pair: Pair) -> str:
    """Return the name of a continuation."""
    return f"{pair[0]} to {pair[1]}"


def launches(pairs: Iterable[Pair], worlds: Iterable[int], **model: Any) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the tasks of one launch after another, with its number of processes: first saves, then loads of saved ones.

    Args:
        pairs: all pairs.
        worlds: numbers of processes of the launches. After the last launch no pair is left.
        **model: model settings of every task.
    """
    waiting, saved = list(pairs), set[Run]()
    for world in worlds:
        new = sorted({source for source, _ in waiting if source.world == world} - saved)
        saved.update(new)
        loads = [pair for pair in waiting if pair[1].world == world and pair[0] in saved]
        waiting = [pair for pair in waiting if pair not in loads]
        runs = [(str(source), source, None) for source in new] + [(name_of(pair), pair[1], pair[0]) for pair in loads]
        yield (
            world,
            [
                {"name": name, "layout": run.layout, "precision": run.precision, "load": load and str(load), **model}
                for name, run, load in runs
            ],
        )
    assert not waiting


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Create a folder by name for all checkpoints and results."""
    root = tmp_path_factory.mktemp("elastic")
    return lambda name: root / name


@pytest.fixture
def finished(folders: Callable[[str], Path], run_processes: Callable[..., list[str]], built_ops: None) -> Path:
    """Run the daily pairs and return their folder."""
    folder = folders("daily")
    if not folder.exists():
        folder.mkdir()
        for world, tasks in launches(DAILY, (2, 1, 3), width=1024, lora=False):
            run_processes(WORKER, world, folder, json.dumps(tasks), seconds=600)
    return folder


@pytest.fixture
def campaign(folders: Callable[[str], Path], run_processes: Callable[..., list[str]], built_ops: None) -> Path:
    """Run all pairs and return their folder. The model has LoRA and is large enough for four processes to swap."""
    folder = folders("all")
    if not folder.exists():
        folder.mkdir()
        for world, tasks in launches(IN_CAMPAIGN, (1, 2, 3, 4, 1, 2, 3), width=2048, lora=True):
            run_processes(WORKER, world, folder, json.dumps(tasks), seconds=1800)
    return folder


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", DAILY, ids=name_of)
def test_goes_on_as_if_uninterrupted(pair: Pair, finished: Path) -> None:
    """After a load all values equal the saved ones bitwise. Then the losses equal the uninterrupted run's.

    On the same layout, losses and final weights are bitwise equal.
    """
    assert_continuation(pair, finished)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("pair", IN_CAMPAIGN, ids=name_of)
def test_every_layout_goes_on_in_every_layout(pair: Pair, campaign: Path) -> None:
    """All pairs of layouts pass, and more pairs on one layout or between sizes."""
    assert_continuation(pair, campaign)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_holds_no_pickle(finished: Path) -> None:
    """Every file is safetensors or JSON, and the manifest lists all of them."""
    assert_files(finished, {source for source, _ in DAILY})


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(7200)
def test_no_layout_writes_pickle(campaign: Path) -> None:
    """Every checkpoint of the campaign is safetensors and JSON only."""
    assert_files(campaign, {source for source, _ in IN_CAMPAIGN})


def test_rotation_is_complete() -> None:
    """All 81 pairs occur once. Each distributed layout saves and loads on 1 to 4 processes, in both precisions."""
    assert len({(source.layout, target.layout) for source, target in ALL}) == len(ALL) == 81
    for side in (0, 1):
        for layout in LAYOUTS:
            runs = [pair[side] for pair in ALL if pair[side].layout == layout]
            assert {run.world for run in runs} == ({1} if layout == "single" else {1, 2, 3, 4})
            assert {run.precision for run in runs} == {"no", "bf16"}


def assert_continuation(pair: Pair, folder: Path) -> None:
    """Assert what `test_goes_on_as_if_uninterrupted` states."""
    went_on, whole = (json.loads((folder / name / "result.json").read_text()) for name in (name_of(pair), str(pair[0])))
    assert went_on["problems"] == whole["problems"] == []
    assert went_on["lrs"] == pytest.approx(whole["lrs"], rel=1e-12)
    tolerance = tolerance_of(*(run.layout for run in pair), half=pair[0].precision == "bf16", exact=1e-6)
    assert went_on["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    if pair[0] == pair[1]:
        assert went_on["losses"] == whole["losses"]
        assert went_on["digests"] == whole["digests"]


def assert_files(folder: Path, sources: Iterable[Run]) -> None:
    """Assert what `test_holds_no_pickle` states."""
    for source in sources:
        checkpoint = folder / str(source) / "checkpoint"
        assert find_damage(checkpoint) is None
        files = [file for file in checkpoint.rglob("*") if file.is_file()]
        assert {file.suffix for file in files} == {".json", ".safetensors"}
        for file in files:
            json.loads(file.read_text()) if file.suffix == ".json" else load_file(file)
