"""The same script on every path gives plain torch's losses, learning rates, norms and weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the reference uses DeepSpeed's schedule classes

from cases import (
    DAILY,
    PAIRWISE,
    PATHS,
    WITHOUT_CHECKS,
    WITHOUT_CHECKS_DAILY,
    WITHOUT_CHECKS_DAILY_PATHS,
    case_for,
    cases_for,
    cover_pairs,
    every_pair,
    is_daily,
    pairs_of,
)
from device import DEVICE, ON_GPU
from paths import assert_near, assert_numbers
from reference import run_reference

WORKER = Path(__file__).parent / "worker.py"
# On a GPU each path runs as one process over NCCL, and as its processes, which share the GPU, over gloo.
RUNS = [(device, path) for device in (("cuda", "cuda-shared") if ON_GPU else ("cpu",)) for path in PATHS]


def _marks(device: str, path: str, name: str | None = None) -> list[pytest.MarkDecorator]:
    runs_daily = path in DAILY and (name is None or device != "cpu" or is_daily(path, name))
    return [] if runs_daily else [pytest.mark.campaign]


_folders: dict[tuple[str, str], Path] = {}


@pytest.fixture
def results(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    run_processes: Callable[..., list[str]],
) -> Callable[[str, str], Path]:
    """Return the folder of one path's results on one device. Its processes run once, for all chosen cases."""
    if "offload_optimizer" in PATHS[request.node.callspec.params["path"]][1].get("zero_optimization", {}):
        request.getfixturevalue("built_ops")

    if request.config.getoption("--unpooled") is not None:
        _folders.clear()

    def folder_of(device: str, path: str) -> Path:
        if (device, path) not in _folders:
            folder = _folders[device, path] = tmp_path_factory.mktemp(f"{device}-{path}")
            world = 1 if device == "cuda" else PATHS[path][0]
            cases = ",".join(_chosen_cases(request, device, path))
            run_processes(WORKER, world, device, path, cases, folder, folder / "nvme")
        return _folders[device, path]

    return folder_of


def test_every_pair_of_choices_is_in_a_case() -> None:
    """Path, precision, accumulation, clipping, schedule, data and skipped steps: each two choices run together."""
    rows = cover_pairs()
    assert set().union(*map(pairs_of, rows)) >= every_pair()
    assert len(rows) == len(PAIRWISE) <= 34


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device", "path"), [pytest.param(*run, marks=_marks(*run)) for run in RUNS])
def test_path_runs(device: str, path: str, results: Callable[[str, str], Path], request: pytest.FixtureRequest) -> None:
    """The cases of a path run to their end in one group of processes, which exits with 0 and leaves no NVMe file."""
    folder = results(device, path)
    assert {file.stem for file in folder.glob("*.pt")} == set(_chosen_cases(request, device, path))
    assert [file for file in folder.glob("nvme/**/*") if file.is_file()] == []


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("device", "path", "name"),
    [
        pytest.param(device, path, name, marks=_marks(device, path, name))
        for device, path in RUNS
        for name in cases_for(path, device)
    ],
)
def test_case_equals_plain_torch(device: str, path: str, name: str, results: Callable[[str, str], Path]) -> None:
    """Losses, norms, learning rates as applied, and final weights equal the single-process reference."""
    file = results(device, path) / f"{name}.pt"
    assert file.exists(), f"{path} did not run to its end; see test_path_runs"
    case, result = case_for(path, name), torch.load(file)
    assert "error" not in result, result["error"]
    expected = run_reference(path, case, DEVICE)

    kernels = ("cpu" in path or "nvme" in path) and case.optimizer[0] in ("Adam", "AdamW", "Lion", "Adagrad")
    # Tight enough to find a lost clip, weight decay or group, or a learning rate 1 % off; in 16 bit, a lost clip.
    half = case.precision != "no"
    loss_tolerance = 5e-3 if half else 1e-4 if kernels else 1e-5
    assert_numbers("losses", result["losses"], expected["losses"], loss_tolerance)
    assert_numbers("norms", result["norms"], expected["norms"], 1e-2 if half else 1e-4)
    assert_numbers("loss scales", result["scales"], expected["scales"], 0.0)
    assert_numbers("learning rates", result["rates"], expected["rates"], 1e-12)
    assert_near(result["state"], expected["state"], 2.5e-2 if half else 1e-4)


def _marks_of_checks(device: str, path: str, name: str) -> list[pytest.MarkDecorator]:
    runs_daily = path in WITHOUT_CHECKS_DAILY_PATHS and DEVICE == device == "cpu" and name == WITHOUT_CHECKS_DAILY
    return [] if runs_daily else [pytest.mark.campaign]


@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("device", "path", "name"),
    [
        pytest.param(device, path, name, marks=_marks_of_checks(device, path, name))
        for device, path in RUNS
        for name in cases_for(path, device)
    ],
)
def test_guards_change_no_number(device: str, path: str, name: str, results: Callable[[str, str], Path]) -> None:
    """With `checks: off` losses, norms, learning rates and final weights are the same to the last bit."""
    guarded, bare = (torch.load(results(device, path) / f"{name}{suffix}.pt") for suffix in ("", WITHOUT_CHECKS))
    assert "error" not in guarded, guarded["error"]
    assert "error" not in bare, bare["error"]
    for what in ("losses", "norms", "rates", "scales"):
        assert repr(bare[what]) == repr(guarded[what]), what
    assert bare["state"].keys() == guarded["state"].keys()
    for key, value in guarded["state"].items():
        assert torch.equal(bare["state"][key], value), key


def _chosen_cases(request: pytest.FixtureRequest, device: str, path: str) -> list[str]:
    """Return the cases of a path that the session selects by name, or all if it selects `test_path_runs` alone."""
    items = request.session.items if request.config.getoption("--unpooled") is None else [request.node]
    asked = [(item, getattr(item, "callspec", None)) for item in items if item.path == Path(__file__)]
    here = [
        (item, call.params)
        for item, call in asked
        if call and (call.params["device"], call.params["path"]) == (device, path)
    ]
    chosen = [params["name"] for _, params in here if "name" in params]
    chosen += [
        f"{params['name']}{WITHOUT_CHECKS}"
        for item, params in here
        if item.name.startswith(test_guards_change_no_number.__name__)
    ]
    return list(dict.fromkeys(chosen)) or cases_for(path, device)
