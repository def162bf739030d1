"""Availability of packages and devices follows from what is installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from zero_plugin.config.installed import installed_version
from zero_plugin.utils import imports


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove Accelerate's variables that other tests set."""
    monkeypatch.delenv("USE_TORCH_XLA")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a package without code, with a name and version."""
    monkeypatch.syspath_prepend(tmp_path)
    installed_version.cache_clear()

    def install(name: str, version: str) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    yield install
    installed_version.cache_clear()


@pytest.mark.parametrize("name", sorted(imports.PACKAGES))
def test_every_package_is_answered_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each query is True if the package exists in a new enough version, otherwise False."""

    def nothing(asked: str) -> str:
        raise importlib.metadata.PackageNotFoundError(asked)

    ask = getattr(imports, f"is_{name}_available")
    monkeypatch.setattr(importlib.metadata, "version", nothing)
    assert ask() is False
    monkeypatch.setattr(importlib.metadata, "version", lambda asked: "3.0")
    assert ask() is True


def test_versions_count(installed) -> None:
    """A package that is too old or too new is unavailable. A release candidate of a good version is available."""
    installed("aim", "4.0.0")
    installed("torchao", "0.7.0rc1")
    assert imports.is_aim_available() is False
    assert imports.is_torchao_available() is True
    assert imports.is_fp8_available() is True
    assert imports.is_numpy_available(min_version="1.0") is True
    assert imports.is_numpy_available(min_version="99") is False


def test_any_of_several_packages(installed) -> None:
    """mlflow's small distribution counts as mlflow."""
    installed("mlflow-skinny", "2.0")
    assert imports.is_mlflow_available() is True


@pytest.mark.parametrize("name", sorted(set(imports.DEVICES) - {"xpu"}))
def test_devices_without_their_plugin(name: str) -> None:
    """A device that no plugin adds to torch is unavailable, whatever the query."""
    ask = getattr(imports, f"is_{name}_available")
    assert ask() is False
    assert ask(check_device=True) is False


def test_this_machine() -> None:
    """CUDA is available if torch says so. Every supported machine computes in 16 bits."""
    assert imports.is_cuda_available() is torch.cuda.is_available()
    assert imports.is_xpu_available() is torch.xpu.is_available()
    assert imports.is_rocm_available() is (torch.version.hip is not None and torch.cuda.is_available())
    assert imports.is_mps_available() is torch.backends.mps.is_available()
    assert imports.is_fp16_available()
    assert imports.is_weights_only_available()
    assert imports.is_torch_distributed_available()
    assert imports.is_xccl_available() is False
    assert imports.is_bitsandbytes_multi_backend_available() is False
    if not torch.cuda.is_available():
        assert imports.is_bf16_available()


def test_torch_xla_can_be_hidden(monkeypatch: pytest.MonkeyPatch, installed) -> None:
    """`USE_TORCH_XLA=0` runs plain torch although torch_xla is installed."""
    installed("torch-xla", "2.9")
    assert imports.is_torch_xla_available()
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert not imports.is_torch_xla_available()


def test_torch_xla_for_another_torch(installed) -> None:
    """A torch_xla for another torch is installed but runs on nothing: an answer, not an undefined-symbol error."""
    installed("torch-xla", "2.5.0")
    assert imports.is_torch_xla_available()
    assert imports.is_torch_xla_available(check_is_tpu=True) is False
    assert imports.is_torch_xla_available(check_is_gpu=True) is False


def test_rich_is_wanted_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich is always installed. A script uses it if the user's variable requests it."""
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert imports.is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "yes")
    assert imports.is_rich_available() is True
