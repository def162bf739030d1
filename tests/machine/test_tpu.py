"""A TPU is detected by the environment, the PCI bus or its device nodes, and no other device is taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.machine.xla_runtime import find_tpu


def chip(root: Path, slot: str, vendor: str = "0x1ae0", device: str = "0x0063") -> None:
    folder = root / "sys" / "bus" / "pci" / "devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def node(root: Path, name: str) -> None:
    path = root / "dev" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@pytest.mark.parametrize(
    ("chosen", "found"), [("TPU", "PJRT_DEVICE is TPU"), ("TPU_C_API", "PJRT_DEVICE is TPU_C_API"), ("CPU", "")]
)
def test_the_users_choice_decides(tmp_path: Path, chosen: str, found: str) -> None:
    """`PJRT_DEVICE` decides, as in torch_xla, even if chips are present."""
    chip(tmp_path, "0000:00:04.0")
    assert find_tpu({"PJRT_DEVICE": chosen}, tmp_path) == found


def test_chips_on_the_bus(tmp_path: Path) -> None:
    """Google's vendor number with a TPU's device number is a TPU. Other devices and vendors are not."""
    chip(tmp_path, "0000:00:01.0", device="0x001f")  # a network card
    chip(tmp_path, "0000:00:02.0", vendor="0x10de")
    assert find_tpu({}, tmp_path) == ""
    chip(tmp_path, "0000:00:04.0")
    assert find_tpu({}, tmp_path) == "1 TPU chip on the PCI bus"
    chip(tmp_path, "0000:00:05.0")
    assert find_tpu({}, tmp_path) == "2 TPU chips on the PCI bus"


@pytest.mark.parametrize("name", ["accel0", "vfio/0"])
def test_a_container_that_hides_the_bus(tmp_path: Path, name: str) -> None:
    """A TPU's device node together with a TPU variable is a TPU. Either alone is not."""
    assert find_tpu({"TPU_WORKER_ID": "0"}, tmp_path) == ""
    node(tmp_path, name)
    assert find_tpu({}, tmp_path) == ""
    assert find_tpu({"TPU_WORKER_ID": "0"}, tmp_path) == f"{tmp_path}/dev/{name} is there and TPU_WORKER_ID is set"


def test_nothing_is_imported_to_look() -> None:
    """Detection imports nothing and takes milliseconds, because the launcher and `env` run before any worker."""
    code = "import sys, os, zero_plugin.machine.xla_runtime as t; t.find_tpu(os.environ); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n"
