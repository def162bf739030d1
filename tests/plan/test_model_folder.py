"""A model's folder gives its sizes without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from zero_plugin.errors import ConfigError
from zero_plugin.plan.model_source import probe_model_folder


def test_config_and_weights(tmp_path: Path) -> None:
    """The hidden size is the config's, the sizes are the files'. A file that is not in the index does not count."""
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 6}}')
    save_file({"a": np.zeros((6, 10), np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros((6,), np.float32), "c": np.zeros((), np.float32)}, tmp_path / "model-2.safetensors")
    save_file({"d": np.zeros((50, 50), np.float32)}, tmp_path / "old.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    facts = probe_model_folder(tmp_path, "--model")
    assert (facts.hidden_size, facts.hidden_size_reason) == (6, "config.json.text_config.hidden_size")
    assert (facts.parameters, facts.largest_parameter) == (67, 60)


def test_one_of_the_two_is_enough(tmp_path: Path) -> None:
    """Without weights the sizes are unknown. Without a config the shapes give the hidden size."""
    (tmp_path / "config.json").write_text('{"d_model": 12}')
    facts = probe_model_folder(tmp_path, "--model")
    assert (facts.hidden_size, facts.parameters, facts.largest_parameter) == (12, 0, 0)
    (tmp_path / "config.json").unlink()
    save_file({"a": np.zeros((4, 10), np.float32), "b": np.zeros((4, 4), np.float32)}, tmp_path / "model.safetensors")
    assert probe_model_folder(tmp_path, "--model").hidden_size == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds neither config.json nor"),
        ({"config.json": b"{"}, "config.json cannot be read"),
        ({"config.json": b"[]"}, "holds no keys"),
        ({"model.safetensors": b"short"}, "is not a readable safetensors file"),
        ({"model.safetensors": b"\xff" * 8}, "a header of 18,446,744,073,709,551,615 bytes"),
        ({"model.safetensors": b"\x02" + b"\0" * 7 + b"[]"}, "is not a readable safetensors file"),
        ({"model.safetensors": b"\x08" + b"\0" * 7 + b'{"a": 1}'}, "is not a readable safetensors file"),
        ({"model.safetensors.index.json": b"{}"}, "has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'}, "gone.safetensors"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    """An empty folder and every broken file are errors that name it, and the flag."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        probe_model_folder(tmp_path, "--model")
    assert caught.value.problems[0].where == "--model"


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """A hub's name is not looked up."""
    with pytest.raises(ConfigError, match="is not a folder"):
        probe_model_folder(tmp_path / "gpt2", "--model")


def test_no_torch() -> None:
    """The command line reads a folder in milliseconds."""
    code = "import sys, zero_plugin.plan.model_source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
