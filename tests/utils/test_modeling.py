"""Names, sizes and places of a model's tensors."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from zero_plugin.big_models.placement import check_device_map, compute_module_sizes, convert_file_size_to_int
from zero_plugin.tensors.modules import (
    dtype_byte_size,
    find_tied_parameters,
    named_module_tensors,
    set_module_tensor_to_device,
)
from zero_plugin.utils.modeling import id_tensor_storage, is_peft_model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(2))
        self.norm.register_buffer("passing", torch.ones(5), persistent=False)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (10, 10),
        ("1KB", 1000),
        ("1.5MB", 1_500_000),
        ("2GiB", 2 * 2**30),
        ("1 mib", 2**20),
        ("8Gb", 8 * 10**9),
        ("0GiB", 0),
        (0, 0),
        (".5KiB", 512),
        ("1TB", 10**12),
    ],
)
def test_sizes(size: int | str, expected: int) -> None:
    """Numbers are bytes. Units are decimal, or binary with an i. A GPU that takes no part has no size."""
    assert convert_file_size_to_int(size) == expected


@pytest.mark.parametrize("size", ["5", "GB", "5 pounds", "-1GB", -1, "1.2.3GB"])
def test_what_is_no_size(size: int | str) -> None:
    """The message for an invalid size shows a valid one."""
    with pytest.raises(ValueError, match="is no size; write a number of bytes"):
        convert_file_size_to_int(size)


def test_bytes_of_an_element() -> None:
    """The bytes of an element are those in memory."""
    sizes = [dtype_byte_size(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn)]
    assert sizes == [4, 2, 8, 1]


def test_named_tensors() -> None:
    """Tensors are listed for the module alone or recursively, with or without buffers."""
    model = Model()
    assert [name for name, _ in named_module_tensors(model)] == ["scale"]
    assert [name for name, _ in named_module_tensors(model.norm, remove_non_persistent=True)] == [
        *("weight", "bias", "running_mean", "running_var"),
        "num_batches_tracked",
    ]
    assert len(list(named_module_tensors(model, recurse=True))) == 9
    kept = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert sorted(kept) == sorted(model.state_dict())
    assert len(list(named_module_tensors(model, include_buffers=False, recurse=True))) == 5


def test_another_type_without_values() -> None:
    """Floating-point tensors get the dtype, on the meta device too."""
    model = Model()
    set_module_tensor_to_device(model, "linear.weight", "meta", dtype="bfloat16")
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", dtype="bfloat16")
    assert (model.linear.weight.dtype, model.norm.num_batches_tracked.dtype) == (torch.bfloat16, torch.int64)


def test_tied_parameters() -> None:
    """Every group of names of one parameter is listed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_tied_parameters(model) == []
    model[2].weight = model[0].weight
    model[1].bias = model[2].bias = model[0].bias
    assert find_tied_parameters(model) == [["0.weight", "2.weight"], ["0.bias", "1.bias", "2.bias"]]


def test_module_sizes() -> None:
    """Bytes add up from tensors to the model. Floating-point tensors can be counted in another dtype."""
    sizes = compute_module_sizes(Model())
    assert sizes["linear.weight"] == 48
    assert sizes["linear"] == 64
    assert sizes["norm"] == 4 * (4 * 4 + 5) + 8
    assert sizes[""] == 64 + sizes["norm"] + 8
    half = compute_module_sizes(Model(), dtype="float16", special_dtypes={"scale": torch.float64})
    assert (half["linear"], half["norm.num_batches_tracked"], half["scale"]) == (32, 8, 16)
    assert compute_module_sizes(Model(), dtype=torch.float64)["linear"] == 64
    assert compute_module_sizes(Model(), buffers_only=True)[""] == 4 * (4 + 4 + 5) + 8


def test_placing_a_tensor() -> None:
    """A nested parameter or buffer gets a device and values, and keeps its type."""
    model = Model().to("meta")
    model.scale.requires_grad_(False)
    set_module_tensor_to_device(model, "linear.weight", "cpu", value=torch.ones(4, 3, dtype=torch.float64))
    assert (model.linear.weight.dtype, model.linear.weight.sum().item()) == (torch.float32, 12)
    assert model.linear.weight.requires_grad
    set_module_tensor_to_device(model, "scale", "cpu", value=torch.ones(2), dtype="bfloat16")
    assert (model.scale.dtype, model.scale.requires_grad) == (torch.bfloat16, False)
    set_module_tensor_to_device(model, "norm.running_mean", "cpu", value=torch.ones(4))
    assert "norm.running_mean" in dict(model.named_buffers())
    kept = model.scale
    set_module_tensor_to_device(model, "scale", "cpu")
    assert model.scale is kept
    set_module_tensor_to_device(model, "scale", "meta", tied_params_map={}, non_blocking=True)
    assert model.scale.is_meta


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linear.nothing", None, "Linear does not have a parameter or a buffer named nothing"),
        ("linear.bias", None, "on the meta device and has no values"),
        ("linear.bias", torch.ones(3), r"shape \(4,\); the value has \(3,\)"),
    ],
)
def test_what_cannot_be_placed(name: str, value: torch.Tensor | None, message: str) -> None:
    """Names, values and shapes that do not fit are errors."""
    with pytest.raises(ValueError, match=message):
        set_module_tensor_to_device(Model().to("meta"), name, "cpu", value=value)


def test_device_maps() -> None:
    """Every tensor needs a place, its own or a module's. A name without a module is a warning."""
    model = Model()
    check_device_map(model, {"": 0})
    check_device_map(nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}), {"a": 0, "b": "cpu"})
    with pytest.warns(UserWarning, match=r"\['lin'\]"), pytest.raises(ValueError, match=r"parameters: scale, norm\."):
        check_device_map(model, {"linear": 0, "lin": 1})


def test_storages() -> None:
    """Tensors that share memory have one storage id. Others have different ids."""
    whole = torch.ones(4)
    assert id_tensor_storage(whole[:2]) == id_tensor_storage(whole[2:])
    assert id_tensor_storage(whole) != id_tensor_storage(torch.ones(4))


def test_peft_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with PEFT's adapters is a PEFT model, inside DataParallel too."""
    plain = nn.Sequential(nn.Linear(2, 2))
    assert not is_peft_model(plain)
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["0"]))
    assert is_peft_model(nn.DataParallel(adapted))
    monkeypatch.delitem(sys.modules, "peft")
    assert not is_peft_model(plain)
