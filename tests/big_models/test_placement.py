"""The assignment of parts to devices, by bytes."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

from zero_plugin import infer_auto_device_map, init_empty_weights
from zero_plugin.utils import (
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
)


def layers(**widths: tuple[int, int]) -> nn.Sequential:
    return nn.Sequential(OrderedDict((name, nn.Linear(*width)) for name, width in widths.items()))


@pytest.fixture
def three() -> nn.Module:
    """Create modules of 64, 72 (8 of them an integer) and 100 bytes."""
    return nn.Sequential(OrderedDict(linear1=nn.Linear(3, 4), batchnorm=nn.BatchNorm1d(4), linear2=nn.Linear(4, 5)))


def test_room_for_the_largest_layer_is_kept(three: nn.Module) -> None:
    """Memory for the largest layer is reserved on the first GPU and the CPU only. The rest goes to disk."""
    assert compute_module_sizes(three)[""] == 236
    two = {0: 200, 1: 200}
    assert infer_auto_device_map(three, two) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer_auto_device_map(three, {0: 236, 1: 1}) == {"": 0}
    assert infer_auto_device_map(three, {0: 235, 1: 300}) == {"linear1": 0, "batchnorm": 1, "linear2": 1}
    assert infer_auto_device_map(three, {"cpu": 172}) == {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}
    assert infer_auto_device_map(three, {"cpu": 10, "disk": 5}) == {"": "disk"}
    assert infer_auto_device_map(three, {0: "0GB", "cpu": "1KB"}) == {"": "cpu"}


def test_types_that_tensors_will_have(three: nn.Module) -> None:
    """Sizes are those of the requested dtypes."""
    assert infer_auto_device_map(three, {0: 122, "cpu": 1}, dtype="float16") == {"": 0}
    bigger = {"linear1.weight": torch.float64}
    assert infer_auto_device_map(three, {0: 122, "cpu": 999}, dtype="float16", special_dtypes=bigger) != {"": 0}


def test_modules_are_divided_down_to_tensors(make) -> None:
    """A block is split unless its class is listed. Its own tensors and buffers then have a device."""
    model = make()
    sizes = compute_module_sizes(model)
    limits = {0: sizes["embedding"] + sizes["head"] + sizes["blocks.0"] - 1, 1: 10_000}
    divided = infer_auto_device_map(model, limits, clean_result=False)
    check_device_map(model, divided)
    assert {divided["embedding"], divided["head"]} == {0}
    assert {"blocks.0.scale", "blocks.0.shift"} <= divided.keys()
    limits = {0: sizes["embedding"] + sizes["head"] + sizes["blocks.0"] + sizes["blocks.1"] - 1, 1: 10_000}
    whole = infer_auto_device_map(model, limits, no_split_module_classes=["Block"])
    assert whole == {"embedding": 0, "head": 0, "blocks": 1}
    model._no_split_modules = ["Block"]
    assert infer_auto_device_map(model, limits) == whole


def test_tied_weights_go_together() -> None:
    """Tied weights go with their modules and count once. A module with one of them is split before it moves."""
    model = layers(first=(4, 4), middle=(4, 4), last=(4, 4))
    model.last.weight = model.first.weight
    assert infer_auto_device_map(model, {0: 176, 1: 200}) == {"": 0}
    assert infer_auto_device_map(model, {0: 175, 1: 200}) == {"": 1}
    rest = layers(a=(4, 4), b=(4, 4), c=(4, 4))
    nested = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), rest=rest))
    rest.b.weight = nested.first.weight
    assert infer_auto_device_map(nested, {0: 200, 1: 240}) == {"first": 0, "rest.b": 0, "rest.a": 1, "rest.c": 1}


def test_a_later_part_that_fits() -> None:
    """With `fallback_allocation`, a later smaller module fills a device that the next one does not fit."""
    model = nn.Sequential(OrderedDict(module=layers(linear1=(10, 4), linear2=(4, 4), linear3=(4, 8))))
    assert infer_auto_device_map(model, {0: 256}) == {"": "disk"}
    found = infer_auto_device_map(model, {0: 256}, fallback_allocation=True)
    assert found == {"module.linear2": 0, "module.linear1": "disk", "module.linear3": "disk"}
    model.module.linear3.weight = nn.Parameter(torch.ones(8, 4))
    model.module.linear2.weight = model.module.linear1.weight = nn.Parameter(torch.ones(4, 4))
    check_device_map(model, infer_auto_device_map(model, {0: 200}, fallback_allocation=True))


def test_decisions_are_told(three: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Decisions are logged on request."""
    infer_auto_device_map(three, {0: 200, "cpu": 1000}, verbose=True, offload_buffers=True)
    said = capsys.readouterr().out
    assert "linear1 (64 bytes) goes to 0." in said
    assert "batchnorm (72 bytes) does not fit on 0, where 36 are left, and is not divided." in said


def test_buffers_that_no_gpu_has_room_for(three: nn.Module) -> None:
    """A warning for buffers that fit no GPU says what to pass. With that argument no warning appears."""
    three.linear2.register_buffer("large", torch.ones(1000))
    limits = {0: 300, "cpu": "1GB"}
    with pytest.warns(UserWarning, match="take 4040 bytes there.*offload_buffers=True"):
        infer_auto_device_map(three, limits, clean_result=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(three, limits, offload_buffers=True)


def test_a_module_under_two_names() -> None:
    """A module under two names has both in the map."""
    linear = nn.Linear(2, 2)
    model = nn.Sequential(OrderedDict(a=linear, b=linear, c=nn.Linear(2, 2)))
    placed = infer_auto_device_map(model, {"cpu": 48}, clean_result=False)
    assert placed["a"] == placed["b"] == "cpu"
    check_device_map(model, placed)


def test_cleaning() -> None:
    """Parts on one device become their module, at every level. Others stay."""
    assert clean_device_map({"a": 0, "b": 0}) == {"": 0}
    assert clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 2, "c.z": 3}) == {
        "a": 0,
        "b.x": 1,
        "b.y": 2,
        "c.z": 3,
    }
    assert clean_device_map({"h.1.a": 0, "h.1.b": 0, "h.10.a": 1}) == {"h.1": 0, "h.10.a": 1}


def test_balanced(three: nn.Module) -> None:
    """All GPUs but the last get equal parts plus a layer. Devices with 0 take no part."""
    for limits, expected in (
        ({0: 200, 1: 200}, {0: 200, 1: 200}),
        ({0: 300, 1: 500}, {0: 215, 1: 500}),
        ({0: 300, "cpu": 1000}, {0: 300, "cpu": 1000}),
        ({0: 0, 1: 300, 2: 300}, {0: 0, 1: 215, 2: 300}),
        ({0: 0, "cpu": 100}, {0: 0, "cpu": 100}),
        ({"disk": 5, "cpu": "1KB"}, {"cpu": 1000, "disk": 5}),
    ):
        assert get_balanced_memory(three, limits) == expected
    assert get_balanced_memory(three, {0: 500, 1: 100, 2: 100}, low_zero=True) == {0: 36, 1: 100, 2: 100}
    assert get_balanced_memory(three, {0: 999, 1: 999}, no_split_module_classes=["Linear"])[0] == 118 + 125


def test_limits(caplog: pytest.LogCaptureFixture) -> None:
    """Free memory is the default, texts are sizes, a missing GPU is a warning, any other key an error."""
    assert get_max_memory()["cpu"] > 2**20
    given = {"cpu": "1KB", 5: 7}
    with caplog.at_level(logging.WARNING):
        assert list(get_max_memory(given).items()) == [(5, 7), ("cpu", 1000)]
    assert "GPU 5, which this machine does not have; it has none." in caplog.text
    assert given == {"cpu": "1KB", 5: 7}
    with pytest.raises(ValueError, match="max_memory has 'gpu'; places are GPU indices"):
        get_max_memory({"gpu": 3})


def test_a_model_of_a_hundred_layers_on_the_meta_device() -> None:
    """A model of a hundred layers on the meta device takes no memory, and little time."""
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(100)])
    placed = infer_auto_device_map(model, {0: "1GB", 1: "2GB", "cpu": "1GB"})
    each = 4096 * 4096 * 4
    counts = {place: sum(1 for value in placed.values() if value == place) for place in (0, 1, "cpu", "disk")}
    assert counts == {0: 10**9 // each - 1, 1: 2 * 10**9 // each, "cpu": 10**9 // each - 1, "disk": 100 - 13 - 29 - 13}


def test_the_largest_layer(three: nn.Module) -> None:
    """The largest layer is a tensor, a module without children, or one of the listed classes."""
    sizes = compute_module_sizes(three)
    assert get_max_layer_size(list(three.named_children()), sizes, []) == (100, ["linear2"])
    assert calculate_maximum_sizes(three) == (236, (100, ["linear2"]))
    outer = nn.Sequential(OrderedDict(inner=three))
    sizes = compute_module_sizes(outer)
    assert get_max_layer_size(list(outer.named_children()), sizes, ["Sequential"]) == (236, ["inner"])
