"""The same script on every path gives plain torch's losses, learning rates, norms and weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the reference uses DeepSpeed's schedule classes

from cases import PATHS, case_for, cases_for
from reference import run_reference

WORKER = Path(__file__).parent / "worker.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a path's results; its processes run once for all cases."""

    @cache
    def folder_of(path: str) -> Path:
        return tmp_path_factory.mktemp(path)

    return folder_of


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PATHS)
def test_path_runs(path: str, run_processes: Callable[..., list[str]], results: Callable[[str], Path]) -> None:
    """Every case of a path runs to its end in one group of processes, and that group exits with 0."""
    folder = results(path)
    world = PATHS[path][0]
    run_processes(WORKER, world, path, ",".join(cases_for(path)), folder, folder / "nvme", seconds=560)
    missing = [name for name in cases_for(path) if not (folder / f"{name}.pt").exists()]
    assert not missing
    left = [file for file in (folder / "nvme").rglob("*") if file.is_file()] if (folder / "nvme").exists() else []
    assert not left, "NVMe files must not outlive the run"


@pytest.mark.processes
@pytest.mark.parametrize(("path", "name"), [(path, name) for path in PATHS for name in cases_for(path)])
def test_case_equals_plain_torch(path: str, name: str, results: Callable[[str], Path]) -> None:
    """Losses, norms, learning rates as applied, and final weights equal the single-process reference."""
    file = results(path) / f"{name}.pt"
    if not file.exists():
        pytest.skip(f"test_path_runs[{path}] did not run or failed")
    case, result = case_for(path, name), torch.load(file)
    assert "error" not in result, result["error"]
    expected = run_reference(path, case)

    kernels = ("cpu" in path or "nvme" in path) and case.optimizer[0] in ("Adam", "AdamW", "Lion", "Adagrad")
    loss_tolerance = 1e-2 if case.precision == "bf16" else 1e-4 if kernels else 1e-5
    _assert_close("losses", result["losses"], expected["losses"], loss_tolerance)
    _assert_close("norms", result["norms"], expected["norms"], 5e-2 if case.precision == "bf16" else 1e-4)
    _assert_close("learning rates", result["rates"], expected["rates"], 1e-9)
    assert result["state"].keys() == expected["state"].keys()
    for key, value in expected["state"].items():
        difference = (result["state"][key].float() - value.float()).norm() / value.float().norm().clamp_min(1e-8)
        assert difference < (5e-2 if case.precision == "bf16" else 1e-4), f"{key}: off by {difference:.2e}"


def _assert_close(what: str, got: Any, wanted: Any, tolerance: float) -> None:
    assert len(got) == len(wanted), f"{what}: {len(got)} values, {len(wanted)} expected"
    error = (torch.tensor(got) - torch.tensor(wanted)).abs().max().item() if got else 0.0
    assert error <= tolerance, f"{what}: off by {error:.2e}\n got {got}\n expected {wanted}"
