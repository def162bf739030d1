"""Hooks run around a forward and leave no trace when removed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_plugin import cpu_offload_with_hook
from zero_plugin.big_modeling import attach_layerwise_casting_hooks
from zero_plugin.big_models.module_hooks import get_state_dict_from_offload
from zero_plugin.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from zero_plugin.utils import align_module_device, has_offloaded_params


class Before(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs


class After(ModelHook):
    def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
        return output + 1


def test_arguments_and_output() -> None:
    """Arguments and output pass through the hook, also by the name `forward`. Name and signature stay."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    expected = layer(x + 1)
    assert add_hook_to_module(layer, Before()) is layer
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.forward(x), expected)
    assert layer.forward.__name__ == "forward"
    assert list(inspect.signature(layer.forward).parameters) == ["input"]
    remove_hook_from_module(layer)
    assert torch.equal(layer(x + 1), expected)
    assert not {"forward", "_hf_hook", "_old_forward"} & layer.__dict__.keys()


def test_a_second_hook() -> None:
    """A second hook replaces the first, or follows it."""
    layer, x = nn.Linear(3, 3), torch.randn(2, 3)
    plain = layer(x)
    add_hook_to_module(layer, After())
    add_hook_to_module(layer, After())
    assert torch.equal(layer(x), plain + 1)
    add_hook_to_module(layer, After(), append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert torch.equal(layer(x), plain + 1 + 1)


def test_a_forward_of_the_modules_own() -> None:
    """A module's own forward returns when the hook is removed."""
    layer = nn.Linear(3, 3)
    own = layer.forward = lambda x: x * 3
    add_hook_to_module(layer, After())
    assert layer(torch.ones(1)) == 4
    remove_hook_from_module(layer)
    assert layer.forward is own


def test_no_grad() -> None:
    """no_grad applies if the hook sets it."""
    layer = nn.Linear(3, 3)
    hook = After()
    hook.no_grad = True
    add_hook_to_module(layer, hook)
    assert not layer(torch.ones(3)).requires_grad
    hook.no_grad = False
    assert layer(torch.ones(3)).requires_grad


def test_a_traced_graph() -> None:
    """A traced graph can be changed after the hook is removed."""
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    before = graph(x)
    add_hook_to_module(graph, After())
    assert torch.equal(graph(x), before + 1)
    remove_hook_from_module(graph, recurse=True)
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]
    with graph.graph.inserting_before(output):
        output.args = (graph.graph.call_function(torch.sigmoid, output.args),)
    graph.recompile()
    assert torch.equal(graph(x), torch.sigmoid(before))


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("with_map", [False, True])
def test_hooks_on_every_module(offload_buffers: bool, with_map: bool) -> None:
    """Weights are on the meta device between forwards, and return when the hooks are removed."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    x = torch.randn(2, 3)
    expected = model(x)
    weights = model.state_dict() if with_map else None
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, offload_buffers=offload_buffers)
    assert model[0].weight.is_meta
    assert model[1].running_mean.is_meta == offload_buffers
    assert torch.equal(model(x), expected)
    with align_module_device(model[0], "cpu"):
        assert not model[0].weight.is_meta
    assert model[0].weight.is_meta
    filled = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": "", "2.weight": ""})
    assert filled["0.weight"].shape == (4, 3)
    assert filled["2.weight"] == ""
    alone = nn.Linear(3, 2)
    attach_align_device_hook(alone, "cpu", offload=True)
    assert get_state_dict_from_offload(alone, "weight", {"weight": "", "other": ""})["weight"].shape == (2, 3)
    remove_hook_from_submodules(model)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(model(x), expected)


def test_one_hook() -> None:
    """A hook takes Accelerate's arguments and exposes them."""
    layer = nn.Linear(3, 3)
    hook = AlignDevicesHook(execution_device="cpu", offload=True)
    add_hook_to_module(layer, hook)
    assert has_offloaded_params(layer)
    assert repr(hook).startswith("AlignDevicesHook(execution_device='cpu', offload=True, io_same_device=False")
    assert layer(torch.ones(3)).shape == (3,)
    layer.weight = nn.Parameter(torch.zeros(3, 3))  # stays, because the user wants the hook
    assert torch.equal(layer(torch.ones(3)), layer._hf_hook.weights_map["bias"])
    wrong = nn.Linear(3, 3)
    add_hook_to_module(
        wrong, AlignDevicesHook("cpu", True, weights_map={"weight": torch.ones(2), "bias": torch.ones(3)})
    )
    with pytest.raises(ValueError, match=r"weight of Linear has shape \(3, 3\); the stored weight has \(2,\)"):
        wrong(torch.ones(3))


def test_modules_without_hooks_are_aligned_too() -> None:
    """Values written inside stay, in modules without hooks too."""
    layer = nn.Linear(2, 2)
    assert not has_offloaded_params(layer)
    weight = layer.weight
    with align_module_device(layer, "cpu"), torch.no_grad():
        layer.weight.zero_()
    assert layer.weight is weight
    assert not weight.any()


def test_a_pipeline_of_models() -> None:
    """The previous model returns to CPU memory. On the CPU alone nothing moves and values are equal."""
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    expected = second(first(x))
    first, hook = cpu_offload_with_hook(first, "cpu")
    second, other = cpu_offload_with_hook(second, "cpu", prev_module_hook=hook)
    assert torch.equal(second(first(x)), expected)
    other.offload()
    other.remove()
    assert not hasattr(second, "_hf_hook")
    meta, hook = cpu_offload_with_hook(nn.Linear(3, 3), "meta")
    assert not meta.weight.is_meta
    assert meta(x).is_meta
    assert meta.weight.is_meta


def test_layers_stored_in_a_small_type() -> None:
    """Layers are computed in the large dtype. Named ones, and modules without own weights, stay unchanged."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    stored = model[0].weight.detach().to(torch.float8_e4m3fn).float()
    attach_layerwise_casting_hooks(
        model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern="2", skip_modules_classes=None
    )
    types = [model[0].weight.dtype, model[1].weight.dtype, model[2][0].weight.dtype, model[3].weight.dtype]
    assert types == [torch.float8_e4m3fn, torch.float32, torch.float32, torch.float8_e4m3fn]
    assert torch.equal(model[0](torch.eye(4)), stored.T + model[0].bias.float())
    assert model(torch.randn(2, 4)).dtype == torch.float32
    assert model[0].weight.dtype == torch.float8_e4m3fn
