"""A dict of tensors is written as safetensors, whatever memory the tensors share."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from zero_plugin.checkpoint.objects import (
    encode_nested,
    read_nested,
    tensor_storage,
    without_shared_tensors,
    write_object,
)
from zero_plugin.errors import CheckpointError, DamagedError


def test_the_same_tensor_is_written_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first name of a tensor is kept. One warning names the others."""
    weight = torch.arange(4.0)
    with caplog.at_level(logging.WARNING):
        write_object({"a": weight, "b": weight, "c": weight.view(4)}, tmp_path / "m", safe_serialization=True)
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "m").items()} == {"a": [0, 1, 2, 3]}
    assert len(caplog.records) == 1
    assert "Removed shared tensors ['b', 'c']" in caplog.text


def test_parts_of_one_memory_are_all_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Slices and transposes of one tensor are different tensors, and none is lost."""
    whole = torch.arange(6.0)
    parts = {"head": whole[:2], "tail": whole[2:], "turned": whole.view(2, 3).t(), "strided": whole[::2]}
    write_object(parts, tmp_path / "m", safe_serialization=True)
    loaded = load_file(tmp_path / "m")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in parts.items()
    }
    assert not caplog.records


def test_what_holds_no_memory_is_left_alone() -> None:
    """Empty tensors, meta tensors and other values share no memory and stay as they are."""
    meta = torch.ones(2, device="meta")
    tensors = {"a": torch.empty(0), "b": torch.empty(0), "c": meta, "d": meta, "e": "text"}
    assert without_shared_tensors(tensors).keys() == tensors.keys()


def test_the_given_dict_is_left_alone() -> None:
    """Cleaning returns a new dict of contiguous tensors and leaves the given dict unchanged."""
    turned = torch.ones(2, 3).t()
    given = {"a": turned, "b": turned}
    assert without_shared_tensors(given)["a"].is_contiguous()
    assert given == {"a": turned, "b": turned}
    assert tensor_storage(given["a"]) == tensor_storage(given["b"])


def test_numpy_of_every_kind(tmp_path: Path) -> None:
    """NumPy arrays of any byte order, and bytes, are kept. Masked or unsupported arrays are named with their place."""
    given = {"big": np.arange(3, dtype=">f4"), "text": np.bytes_(b"ab")}
    encode_nested(given, what="state").write(tmp_path / "state")
    read = read_nested(tmp_path / "state")
    assert read["big"].tolist() == [0.0, 1.0, 2.0]
    assert read["text"] == b"ab"
    with pytest.raises(CheckpointError, match=r"state\['m'\] is a masked NumPy array"):
        encode_nested({"m": np.ma.masked_array([1, 2], mask=[False, True])}, what="state")
    with pytest.raises(CheckpointError, match=r"state\['t'\] has the NumPy dtype <U1.*\n.*tolist"):
        encode_nested({"t": np.array(["a"])}, what="state")


def test_the_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """An error names which of the two files, JSON or tensors, cannot be read."""
    encode_nested({"a": torch.zeros(2)}, what="state").write(tmp_path / "state")
    (tmp_path / "state.safetensors").write_bytes(b"no")
    with pytest.raises(DamagedError, match=r"state\.safetensors cannot be read"):
        read_nested(tmp_path / "state")
