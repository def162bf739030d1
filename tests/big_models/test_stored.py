"""Weights in files are read on use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zero_plugin.errors import CheckpointError
from zero_plugin.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    retie_parameters,
)

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_one_tensor(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    """A tensor of any dtype, shape and layout is read. Writing to it leaves the file unchanged."""
    weight = torch.randn(shape).to(dtype)
    weight = weight.T if weight.ndim == 2 else weight
    index = offload_weight(weight, "weight", tmp_path, {})
    assert index == {"weight": {"dtype": str(dtype).split(".")[1], "shape": list(weight.shape)}}
    for _ in range(2):
        read = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
        assert (read.dtype, read.shape) == (dtype, weight.shape)
        assert torch.equal(
            read.float() if dtype != torch.complex64 else read, weight.float() if dtype != torch.complex64 else weight
        )
        read.zero_()


def test_from_memory_and_files(tmp_path: Path) -> None:
    """One map covers memory and files, memory first. A mapped file can be rewritten."""
    state = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).state_dict()
    first, second = (
        extract_submodules_state_dict(state, ["0"]),
        extract_submodules_state_dict(state, ["1.weight", "1.bias"]),
    )
    offload_state_dict(tmp_path / "new", second)
    weights = OffloadedWeightsLoader(first, tmp_path / "new")
    assert sorted(weights) == sorted(state)
    assert len(weights) == 4
    assert all(torch.equal(weights[name], tensor) for name, tensor in state.items())
    read = weights["1.weight"]
    offload_state_dict(tmp_path / "new", {"1.weight": torch.zeros(5, 4), "2.weight": torch.ones(1)})
    assert torch.equal(read, state["1.weight"])
    assert not weights["1.weight"].any()
    assert json.loads((tmp_path / "new/index.json").read_text()).keys() == {"1.weight", "1.bias", "2.weight"}
    under = PrefixedDataset(weights, "1.")
    assert dict(under).keys() == {"weight", "bias"}
    assert "weight" in under
    assert len(under) == 2
    with pytest.raises(ValueError, match="needs a state_dict, a save_folder or an index"):
        OffloadedWeightsLoader()


def test_out_of_safetensors(tmp_path: Path) -> None:
    """Tensors are read under other names and dtypes. A file is mapped once, so equal tensors share memory."""
    file = tmp_path / "some.safetensors"
    save_file({"a": torch.ones(3)}, file)
    entry = {"safetensors_file": str(file), "weight_name": "a"}
    weights = OffloadedWeightsLoader(index={"x": entry, "y": {**entry, "dtype": "float16"}})
    assert weights["x"].data_ptr() == weights["x"].data_ptr()
    assert weights["y"].dtype == torch.float16


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """Missing files are named."""
    with pytest.raises(CheckpointError, match=r"gone\.dat"):
        load_offloaded_weight(tmp_path / "gone.dat", {"dtype": "float32", "shape": [3]})
    (tmp_path / "short.dat").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match=r"short\.dat"):
        load_offloaded_weight(tmp_path / "short.dat", {"dtype": "float32", "shape": [3]})


def test_into_a_model(tmp_path: Path) -> None:
    """Values are loaded on the CPU, and broken ties are restored."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("meta")
    values = {f"{i}.{name}": torch.ones(shape) for i in (0, 1) for name, shape in (("weight", (3, 3)), ("bias", (3,)))}
    offload_state_dict(tmp_path, values)
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    assert all(bool(p.all()) for p in model.parameters())
    load_offloaded_weights(model, {}, tmp_path)
    retie_parameters(model, [["0.weight", "1.weight"]])
    assert model[0].weight is model[1].weight
