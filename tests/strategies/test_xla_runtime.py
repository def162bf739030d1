"""A torch_xla that is missing, is built for another torch or sees too few devices: an error with the fix."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from zero_plugin.accelerator import Accelerator
from zero_plugin.config.installed import installed_version
from zero_plugin.errors import ConfigError, LaunchError, MachineError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.launch.spec import Program
from zero_plugin.machine.hardware import Machine
from zero_plugin.machine.xla_runtime import check_world_size, import_torch_xla

pytestmark = pytest.mark.skipif(installed_version("torch_xla") is not None, reason="torch_xla is installed here")

TORCH = ".".join(map(str, Version(version("torch")).release[:2]))
UNDEFINED = "_XLAC.so: undefined symbol: _ZN5torch4lazy10deleteNodeE"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a torch_xla whose library does not load with the installed torch, as after an upgrade in place."""
    (tmp_path / f"torch_xla-{TORCH}.0.dist-info").mkdir()
    (tmp_path / f"torch_xla-{TORCH}.0.dist-info" / "METADATA").write_text(f"Name: torch_xla\nVersion: {TORCH}.0\n")
    (tmp_path / "torch_xla").mkdir()
    (tmp_path / "torch_xla" / "__init__.py").write_text(f"raise ImportError({UNDEFINED!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed_version.cache_clear()
    yield
    installed_version.cache_clear()


def test_the_missing_extra(tmp_path: Path) -> None:
    """The launcher says so before anything starts. A script started without the launcher says so too."""
    (tmp_path / "train.py").write_text("def main(): pass\n")
    program, laptop = Program(str(tmp_path / "train.py")), Machine(gpus=0, cores=2)
    with pytest.raises(ConfigError, match=r"--tpu: .*torch_xla, which is not installed\n.*'zero-plugin\[tpu\]'.*--cpu"):
        build_spec(document_from_flags({"tpu": True}), program, laptop, {"PJRT_DEVICE": "CPU"})
    with pytest.raises(MachineError, match=r"torch_xla, which is not installed: pip install 'zero-plugin\[tpu\]'"):
        Accelerator(config={"distributed_type": "TPU"})


@pytest.mark.usefixtures("install")
def test_a_library_of_another_torch() -> None:
    """The message keeps the loader's undefined symbol, below both versions and the command that fixes it."""
    with pytest.raises(MachineError) as caught:
        import_torch_xla()
    assert UNDEFINED in str(caught.value)
    assert f"torch_xla {TORCH}.0, torch {TORCH}." in str(caught.value)
    assert "pip install 'zero-plugin[tpu]'" in str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "4"}])
def test_as_many_as_meant(environ: dict[str, str]) -> None:
    """All configured devices count, or any number if the runtime decides."""
    check_world_size(4, environ)


def test_fewer_than_meant() -> None:
    """The error has both numbers, the runtime, and how to start it instead."""
    with pytest.raises(LaunchError, match=r"8 processes were started, but .* 1 device \(PJRT_DEVICE=CPU\).*\n.*--tpu"):
        check_world_size(1, {"WORLD_SIZE": "8", "PJRT_DEVICE": "CPU"})
