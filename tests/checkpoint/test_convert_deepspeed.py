"""DeepSpeed's own checkpoints are imported, and ours exported as universal checkpoints, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import tolerance_of
from safetensors.torch import load_file

from zero_plugin.checkpoint.convert import open_source
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT

WORKER = Path(__file__).parent / "convert_worker.py"

STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 600}
CASES: list[dict[str, Any]] = [
    {"name": "0", "zero": {"stage": 0}, "precision": "no", "groups": 2, "path": "zero2"},
    {"name": "1-bf16", "zero": {"stage": 1}, "precision": "bf16", "groups": 2, "path": "zero1"},
    {
        "name": "2",
        "zero": {"stage": 2, "round_robin_gradients": True},
        "precision": "no",
        "groups": 2,
        "path": "zero3",
        "universal": [1],
    },
    {
        "name": "2-cpu",
        "zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "precision": "no",
        "groups": 2,
        "path": "ddp",
    },
    {"name": "3", "zero": STAGE_3, "precision": "no", "groups": 1, "path": "zero1", "universal": [3]},
    {"name": "3-bf16", "zero": STAGE_3, "precision": "bf16", "groups": 2, "path": "zero3"},
]
NAMES = [case["name"] for case in CASES]
MORE: list[dict[str, Any]] = [
    {"name": "0-bf16", "zero": {"stage": 0}, "precision": "bf16", "groups": 2, "path": "zero1"},
    {"name": "2-bf16", "zero": {"stage": 2}, "precision": "bf16", "groups": 1, "path": "zero3", "universal": [2, 3]},
    {
        "name": "3-cpu",
        "zero": {**STAGE_3, "offload_optimizer": {"device": "cpu"}},
        "precision": "no",
        "groups": 1,
        "path": "zero2",
        "universal": [1],
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all checkpoints and results."""
    return tmp_path_factory.mktemp("convert")


@pytest.fixture
def finished(folder: Path, run_processes: Callable[..., list[str]], built_ops: None) -> Path:
    """Run all cases on two processes and return the folder."""
    if not any(folder.iterdir()):
        run_processes(WORKER, 2, folder, json.dumps(CASES))
    return folder


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_processes(
    world: int, run_processes: Callable[..., list[str]], built_ops: None, tmp_path: Path
) -> None:
    """Every case, and more, passes all tests below on any number of processes."""
    results = tmp_path / "results"
    results.mkdir()
    run_processes(WORKER, world, results, json.dumps(CASES + MORE), seconds=1000)
    for case in CASES + MORE:
        test_goes_on_as_the_engine_does(case, results)
        test_values_are_the_engines_own(case, results)
        for stage in case.get("universal", ()):
            test_an_engine_goes_on_from_the_universal_export(case["name"], stage, results)


def result_of(finished: Path, name: str) -> dict[str, Any]:
    """Return the results of a case."""
    result: dict[str, Any] = json.loads((finished / name / "result.json").read_text())
    return result


@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_goes_on_as_the_engine_does(case: dict[str, Any], finished: Path) -> None:
    """The imported checkpoint resumes elsewhere with the losses of the engine that wrote it."""
    result = result_of(finished, case["name"])
    tolerance = tolerance_of(case["name"], half=case["precision"] == "bf16", exact=1e-6)
    assert result["imported"] == pytest.approx(result["engine"], rel=tolerance)
    assert result["notes"] == []
    assert result["not_restored"] == ["random states: there are none in the checkpoint"]
    assert result["engine"][-1] != result["engine"][0]


@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_values_are_the_engines_own(case: dict[str, Any], finished: Path) -> None:
    """Each weight, master and state equals `safe_get_full_*` bitwise. Tied weights are stored once."""
    checkpoint = finished / case["name"] / "imported"
    assert find_damage(checkpoint) is None
    assert read_manifest(checkpoint).models[0].tied == {"two.weight": "one.weight"}
    tensors = open_source(checkpoint).tensors
    values = load_file(finished / case["name"] / "values.safetensors")
    assert len(values) > 8
    for key, value in values.items():
        kind, name = key.split("/")
        stored = tensors.get((kind, name)) or tensors[WEIGHT, name]  # in fp32 the weights are the masters
        assert torch.equal(stored.unpartitioned(), value), key
    assert {name for kind, name in tensors if kind == WEIGHT} == {
        key.removeprefix("weight/") for key in values if key.startswith("weight/")
    }
    if case["precision"] == "bf16":
        assert tensors[WEIGHT, "one.weight"].dtype == torch.bfloat16
        assert tensors[MASTER_WEIGHT, "one.weight"].dtype == torch.float32


@pytest.mark.processes
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "stage"), [(case["name"], stage) for case in CASES for stage in case.get("universal", ())]
)
def test_an_engine_goes_on_from_the_universal_export(name: str, stage: int, finished: Path) -> None:
    """DeepSpeed's own loader reads the export at another stage and gives the same losses."""
    result = result_of(finished, name)
    tolerance = tolerance_of(name, half="bf16" in name, exact=1e-6)
    assert result["universal"][str(stage)] == pytest.approx(result["engine"], rel=tolerance)
