"""Mixture-of-experts layers: processes may call different experts, but must reduce the same gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_ROUTER = re.compile(r"gat(e|ing)|rout|switch", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|expts", re.IGNORECASE)


def find_expert_layers(model: nn.Module, class_names: Collection[str]) -> Iterator[nn.Module]:
    """Find the modules of `model` whose forward calls only some of several similar submodules, depending on the data.

    The structure and the names identify these layers:

    * the layer holds a ModuleList or ModuleDict of at least two modules of one class, and
    * it has another parameter with one row or column for each of these modules: the router's parameter, and
    * the name of the list matches experts, or the name of the router matches a router.

    A layer that has all experts in one stacked tensor, as in transformers since version 5, is not affected.

    Args:
        model: a model that DeepSpeed has not wrapped yet; its parameters may be partitioned.
        class_names: class names of further layers, from the configuration.
    """
    for module in model.modules():
        if type(module).__name__ in class_names or _calls_some(module):
            yield module


def reach_every_expert(layer: nn.Module, *, with_gradients: bool) -> Callable[[], None]:
    """Make each backward through `layer` reach all of its trained parameters, in the same order on every process.

    Otherwise DDP raises if a process did not call an expert, and DeepSpeed, at stages 1 and 2, silently adds up the
    gradients of different parameters. An expert that no process called gets a zero gradient, whereas plain PyTorch has
    no gradient: momentum and weight decay still apply.

    Args:
        layer: the layer.
        with_gradients: False if the engine itself completes the gradients of these layers at the end of its backward
            (stage 3). Then only the layer's input takes part in the backward, which notifies the engine.

    Returns:
        A function that undoes this.
    """
    opener = torch.zeros((), requires_grad=True)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if not torch.is_grad_enabled():
            return None
        reached = [p for p in layer.parameters() if p.requires_grad] if with_gradients else [opener]
        for i, value in enumerate(args):
            if _is_floating(value):
                return (*args[:i], _Enter.apply(value, *reached), *args[i + 1 :]), kwargs  # type: ignore[no-untyped-call]
        for name, value in kwargs.items():
            if _is_floating(value):
                return args, {**kwargs, name: _Enter.apply(value, *reached)}  # type: ignore[no-untyped-call]
        return None

    return layer.register_forward_pre_hook(hook, with_kwargs=True).remove


class _Enter(torch.autograd.Function):
    """The first input. The others get a zero gradient, after the backward of all that depends on the first one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *reached: Tensor) -> Tensor:
        ctx.reached = [(p.shape, p.dtype, p.device) for p in reached]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.reached)
        return gradients[0], *zeros


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _calls_some(module: nn.Module) -> bool:
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList | nn.ModuleDict) or len(child) < 2:
            continue
        if len({type(expert) for expert in child.children()}) > 1:
            continue
        if any(_EXPERTS.search(name) or _ROUTER.search(router) for router in _routers(module, name, len(child))):
            return True
    return False


def _routers(module: nn.Module, experts: str, count: int) -> Iterator[str]:
    """List the parameters outside of `experts` with a dimension of size `count`, at most two levels deep."""
    for name, parameter in module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if name.split(".")[0] != experts and name.count(".") <= 2 and len(shape) == 2 and count in shape:
            yield name
