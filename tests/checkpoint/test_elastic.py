"""A checkpoint of any layout goes on in any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zero_plugin.checkpoint.manifest import find_damage

WORKER = Path(__file__).parent / "elastic_worker.py"

# Each saves after three steps of six: name → (processes, path, precision).
SOURCES = {
    "single": (1, "single", "no"),
    "zero3@1": (1, "zero3", "no"),
    "zero2-bf16@1": (1, "zero2", "bf16"),
    "ddp": (2, "ddp", "no"),
    "zero0": (2, "zero0", "no"),
    "zero1": (2, "zero1", "no"),
    "zero2": (2, "zero2", "no"),
    "zero2-cpu": (2, "zero2-cpu", "no"),
    "zero3": (2, "zero3", "no"),
    "zero3-cpu": (2, "zero3-cpu", "no"),
    "zero3-bf16": (2, "zero3", "bf16"),
    "zero1-bf16": (2, "zero1", "bf16"),
}
# (source, processes, path, precision): the paths of one process go on from both, those of two from all.
PAIRS = [
    ("single", 1, "single", "no"),
    ("single", 2, "zero3", "no"),
    ("single", 2, "zero1", "no"),
    ("zero3@1", 2, "zero2-cpu", "no"),
    ("zero2-bf16@1", 2, "zero3", "bf16"),
    ("ddp", 1, "single", "no"),
    ("ddp", 2, "ddp", "no"),
    ("ddp", 2, "zero2", "no"),
    ("zero1", 2, "zero0", "no"),
    ("zero2", 1, "zero3", "no"),
    ("zero2", 2, "zero2", "no"),
    ("zero2-cpu", 2, "zero2-cpu", "no"),
    ("zero3", 2, "ddp", "no"),
    ("zero3", 2, "zero2-cpu", "no"),
    ("zero3", 2, "zero3", "no"),
    ("zero3", 1, "zero2", "no"),
    ("zero3-cpu", 1, "single", "no"),
    ("zero3-bf16", 2, "zero3", "bf16"),
    ("zero3-bf16", 1, "zero2", "bf16"),
    ("zero1-bf16", 2, "zero1", "bf16"),
]


def name_of(pair: tuple[str, int, str, str]) -> str:
    """How a continuation is called."""
    source, world, path, _ = pair
    return f"{source} to {path} on {world}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all checkpoints and results are."""
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture
def finished(folder: Path, run_processes: Callable[..., list[str]], built_ops: None) -> Path:
    """The folder, after one process, two, and one again have run."""
    if any(folder.iterdir()):
        return folder

    def sources(world: int) -> list[dict[str, Any]]:
        return [
            {"name": name, "path": path, "precision": precision, "load": None}
            for name, (count, path, precision) in SOURCES.items()
            if count == world
        ]

    def pairs(world: int) -> list[dict[str, Any]]:
        return [
            {"name": name_of(pair), "path": pair[2], "precision": pair[3], "load": pair[0]}
            for pair in PAIRS
            if pair[1] == world
        ]

    for world, tasks in ((1, sources(1)), (2, sources(2) + pairs(2)), (1, pairs(1))):
        run_processes(WORKER, world, folder, json.dumps(tasks), seconds=240)
    return folder


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_goes_on_as_if_uninterrupted(pair: tuple[str, int, str, str], finished: Path) -> None:
    """Losses, rates and weights are those of one process uninterrupted; on the same layout bitwise its own."""
    source, world, path, precision = pair
    went_on = result_of(finished, name_of(pair))
    whole = result_of(finished, "single" if precision == "no" else "zero2-bf16@1")
    tolerance = 1e-2 if precision == "bf16" else 1e-4 if "cpu" in source + path else 1e-6
    assert went_on["losses"] == pytest.approx(whole["losses"], rel=tolerance)
    assert went_on["lrs"] == pytest.approx(whole["lrs"], rel=1e-12)
    assert went_on["weights"].keys() == whole["weights"].keys()
    for name, tensor in whole["weights"].items():
        got = went_on["weights"][name].float()
        assert torch.allclose(got, tensor.float(), rtol=0, atol=max(100 * tolerance, 1e-5)), name
    if SOURCES[source] == (world, path, precision):
        uninterrupted = result_of(finished, source)
        assert went_on["losses"] == uninterrupted["losses"]
        assert all(torch.equal(went_on["weights"][name], t) for name, t in uninterrupted["weights"].items())


def result_of(finished: Path, name: str) -> dict[str, Any]:
    """What a task has written."""
    result = json.loads((finished / name / "result.json").read_text())
    return {**result, "weights": load_file(finished / name / "weights.safetensors")}


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES)
def test_holds_no_pickle(source: str, finished: Path) -> None:
    """Every file is safetensors or JSON, and the manifest names them all."""
    checkpoint = finished / source / "checkpoint"
    assert find_damage(checkpoint) is None
    files = [file for file in checkpoint.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".json":
            json.loads(content)
        else:
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            load_file(file)
