"""The launch config that is written without questions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zero_plugin import write_basic_config
from zero_plugin.config.check import find_problems
from zero_plugin.config.find import default_config_file
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError
from zero_plugin.launch.flags import basic_values, best_precision
from zero_plugin.machine.hardware import Machine, look_at_machine


def test_what_suits_a_machine() -> None:
    """ZeRO-2 over several GPUs, otherwise one process, on the GPU if there is one, and no more keys."""
    assert basic_values(Machine(gpus=8, cores=64), "bf16") == {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"},
    }
    for gpus in (0, 1):
        assert basic_values(Machine(gpus=gpus, cores=4), "no") == {
            "distributed_type": "NO",
            "mixed_precision": "no",
            "num_processes": 1,
            "use_cpu": gpus == 0,
        }


def test_what_suits_a_tpu() -> None:
    """All devices of the TPU in bf16. If the machine also has GPUs, they come first, as in a launch."""
    tpu = "4 TPU chips on the PCI bus"
    assert best_precision(Machine(0, 96, tpu)) == "bf16"
    values = basic_values(Machine(0, 96, tpu), "bf16")
    assert values == {"distributed_type": "XLA", "mixed_precision": "bf16"}
    assert basic_values(Machine(1, 96, tpu), "no")["distributed_type"] == "NO"


def test_precision_is_of_the_gpus() -> None:
    """Without a GPU it is `no`, even if the processor has bf16, which is no faster there."""
    assert best_precision(Machine(gpus=0, cores=4)) == "no"
    machine = look_at_machine()
    assert best_precision(machine) in (("bf16", "no") if machine.gpus else ("no",))


def test_write_basic_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It returns the path. If a file exists, it returns False, warns, and leaves the file."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    file = write_basic_config()
    assert file == default_config_file(os.environ)
    assert find_problems(read_document(file)) == []
    assert caplog.text == ""
    assert write_basic_config(mixed_precision="bf16") is False
    assert str(file) in caplog.text
    assert read_document(file).launch.value("mixed_precision") == "no"
    other = write_basic_config("FP16", str(tmp_path / "deep" / "other.json"))
    assert read_document(str(other)).launch.value("mixed_precision") == "fp16"


def test_an_unknown_precision(tmp_path: Path) -> None:
    """The check refuses it and suggests the likely one. No file is written."""
    with pytest.raises(ConfigError, match=r"(?s)mixed_precision: .*bf17.*bf16"):
        write_basic_config("bf17", tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="fp8"):
        write_basic_config("fp8", tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []
