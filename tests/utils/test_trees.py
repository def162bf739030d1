"""Containers of tensors keep their types, and leaves that do not fit are named."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import nn

from zero_plugin.tensors.nested import (
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from zero_plugin.tensors.wrappers import extract_model

Point = namedtuple("Point", "x y")
META = torch.device("meta")


def test_kinds_of_leaves() -> None:
    """A tensor, its description and a named tuple are distinguished from all other values."""
    assert is_torch_tensor(torch.ones(1))
    assert not is_torch_tensor([1])
    assert is_tensor_information(TensorInformation(torch.Size([1]), torch.int8))
    assert is_namedtuple(Point(1, 2))
    assert not is_namedtuple((1, 2))


def test_honor_type() -> None:
    """A list, tuple or named tuple is rebuilt from items."""
    for made in ([1, 2], (1, 2), Point(1, 2)):
        again = honor_type(made, iter([1, 2]))
        assert again == made
        assert type(again) is type(made)


def test_recursively_apply_keeps_containers_and_other_leaves() -> None:
    """Each tensor is replaced. Dict-likes, named tuples and other values keep their types."""
    tree = {
        "a": [torch.ones(1), (2, Point(torch.ones(2), "s"))],
        "b": UserDict(c=torch.ones(1)),
        "d": defaultdict(list, e=torch.ones(1)),
        "f": MappingProxyType({"g": torch.ones(1)}),
    }
    got = recursively_apply(lambda tensor, factor, *, plus: tensor * factor + plus, tree, 2, plus=1)
    assert [type(value) for value in got.values()] == [type(value) for value in tree.values()]
    assert got["a"][0].tolist() == [3]
    assert got["a"][1][0] == 2
    assert isinstance(got["a"][1][1], Point)
    assert (got["a"][1][1].x.tolist(), got["a"][1][1].y) == ([3, 3], "s")
    assert got["b"]["c"].tolist() == got["d"]["e"].tolist() == got["f"]["g"].tolist() == [3]
    assert got["d"].default_factory is list


def test_recursively_apply_on_other_leaves() -> None:
    """`test_type` chooses the leaves, a dataclass is a leaf, and a leaf that does not fit can raise an error."""

    @dataclass
    class Record:
        tensor: torch.Tensor

    record = Record(torch.ones(1))
    assert recursively_apply(torch.neg, [record])[0] is record
    assert recursively_apply(len, ["ab", [3]], test_type=lambda leaf: isinstance(leaf, str)) == [2, [3]]
    with pytest.raises(TypeError) as caught:
        recursively_apply(torch.tensor, (1, torch.ones(1)), error_on_other_type=True)
    assert str(caught.value).startswith("Unsupported types (<class 'int'>) passed to `tensor`. Only nested ")
    assert "`is_torch_tensor`" in str(caught.value)


def test_send_to_device() -> None:
    """Tensors and objects with `to` move, in containers that keep their type. Named keys stay."""

    class Movable:
        def to(self, device: object) -> str:  # knows no non_blocking
            return f"on {device}"

    batch = UserDict(x=torch.ones(1), y=Point(torch.ones(1), 1), own=Movable(), keep=torch.ones(1), inner={})
    batch["inner"]["keep"] = torch.ones(1)
    moved = send_to_device(batch, "meta", non_blocking=True, skip_keys="keep")
    assert isinstance(moved, UserDict)
    assert isinstance(moved["y"], Point)
    assert (moved["x"].device, moved["y"].x.device, moved["y"].y) == (META, META, 1)
    assert moved["own"] == "on meta"
    assert moved["keep"] is batch["keep"]
    assert moved["inner"]["keep"] is batch["inner"]["keep"]
    assert batch["x"].device.type == "cpu"


def test_send_to_device_compiles() -> None:
    """send_to_device causes no graph break in a compiled function."""
    assert torch.compile(send_to_device, fullgraph=True, backend="eager")(torch.zeros(1), "cpu").tolist() == [0]


def test_structure_and_back() -> None:
    """A description of every tensor makes tensors of the same shapes and dtypes."""
    tree = {"a": torch.ones(2, 3, dtype=torch.int8), "b": [torch.tensor(1.0), "s"]}
    told = get_data_structure(tree)
    assert told["a"] == TensorInformation(torch.Size([2, 3]), torch.int8)
    made = initialize_tensors(told)
    assert (made["a"].shape, made["a"].dtype) == (torch.Size([2, 3]), torch.int8)
    assert (made["b"][0].shape, made["b"][1]) == (torch.Size([]), "s")
    assert get_shape(tree) == {"a": [2, 3], "b": [[], "s"]}


def test_batch_size_is_the_first_tensors() -> None:
    """The first leaf decides. If it is no tensor, this is an error, or None on request."""
    assert find_batch_size({"a": [(torch.ones(3, 2), torch.ones(5))]}) == 3
    for nothing, error in (([], ValueError), ({"a": {}}, ValueError), ([1], TypeError)):
        with pytest.raises(error, match="batch size"):
            find_batch_size(nothing)
        assert ignorant_find_batch_size(nothing) is None
    assert ignorant_find_batch_size([torch.ones(4)]) == 4


def test_device_of_the_first_tensor() -> None:
    """Leaves that are no tensors are skipped."""
    assert find_device([1, "a", {"b": torch.ones(1, device="meta")}, torch.ones(1)]) == META
    assert find_device([1, "a"]) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float32])
def test_listify(dtype: torch.dtype) -> None:
    """Tensors become numbers, in any dtype."""
    tree = {"a": torch.tensor([[1, 2]], dtype=dtype), "b": (torch.tensor(3, dtype=dtype), "s")}
    assert listify(tree) == {"a": [[1, 2]], "b": (3, "s")}


def test_slicing_and_joining() -> None:
    """A container cut in two and joined is unchanged. Values that cannot be joined are named."""
    whole = {"a": torch.arange(4), "b": Point(torch.arange(8).view(4, 2), [torch.arange(4)])}
    parts = [slice_tensors(whole, slice(0, 3)), slice_tensors(whole, slice(3, 4), 0, 1)]
    assert parts[1]["b"].x.tolist() == [[6, 7]]
    joined = concatenate(parts)
    assert isinstance(joined["b"], Point)
    assert joined["a"].tolist() == [0, 1, 2, 3]
    assert joined["b"].y[0].tolist() == [0, 1, 2, 3]
    assert concatenate([torch.ones(2, 1), torch.ones(2, 2)], dim=1).shape == (2, 3)
    assert concatenate(["alone"]) == "alone"
    with pytest.raises(TypeError, match="Can only concatenate tensors but got <class 'str'>"):
        concatenate(["a", "b"])


def test_convert_to_fp32() -> None:
    """16-bit tensors become fp32. All other values stay."""
    tree = OrderedDict(a=torch.ones(1, dtype=torch.float16), b=[torch.ones(1, dtype=torch.bfloat16), 1])
    tree["c"] = torch.ones(1, dtype=torch.int32)
    got = convert_to_fp32(tree)
    assert (got["a"].dtype, got["b"][0].dtype, got["b"][1], got["c"].dtype) == (
        *(torch.float32, torch.float32),
        1,
        torch.int32,
    )


def test_converted_outputs_and_back() -> None:
    """A decorated forward returns fp32 and is not pickled. Without the decorator the model is as before."""
    model = nn.Linear(2, 2).to(torch.bfloat16)
    model.forward = convert_outputs_to_fp32(model.forward)
    assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert model.forward.__name__ == "forward"
    with pytest.raises(pickle.PicklingError, match="unwrap_model"):
        pickle.dumps(model.forward.__wrapped__)
    plain = extract_model(model, keep_fp32_wrapper=False)
    assert plain(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    pickle.dumps(plain)
