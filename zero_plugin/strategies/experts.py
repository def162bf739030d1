"""Mixture-of-experts layers: each process may call other experts, and yet all have to reduce the same gradients."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_ROUTER = re.compile(r"gat(e|ing)|rout|switch", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|expts", re.IGNORECASE)


def find_expert_layers(model: nn.Module, class_names: Collection[str]) -> Iterator[nn.Module]:
    """The modules of `model` whose forward calls some of several alike submodules, chosen by the data.

    Such a layer is told by its structure and its names together:

    * it holds a ModuleList or ModuleDict of at least two modules of one class, and
    * beside the list it has a parameter with one row or column for each of them: the router's, and
    * the list is named like experts, or the router like a router.

    A layer that keeps all experts in one stacked tensor, as transformers' own do since version 5, calls no submodule
    and needs no care.

    Args:
        model: not yet given to DeepSpeed; its parameters may be partitioned.
        class_names: classes of further layers, by name, as the configuration says.
    """
    for module in model.modules():
        if type(module).__name__ in class_names or _calls_some(module):
            yield module


def reach_every_expert(layer: nn.Module, *, with_gradients: bool) -> None:
    """Make each backward through `layer` reach all of its trained parameters, in one order on every process.

    Otherwise DDP raises where a process did not call an expert; DeepSpeed, at stages 1 and 2, adds up the gradients of
    different parameters, without a word. An expert that nobody called has a zero gradient, where plain torch has none:
    momentum and weight decay go on.

    Args:
        layer: not called yet.
        with_gradients: false where the engine itself completes the gradients of such a layer when a backward leaves it
            (stage 3): the layer's input then takes part in the backward, which tells the engine that it has left.
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

    layer.register_forward_pre_hook(hook, with_kwargs=True)


class _Enter(torch.autograd.Function):
    """Its first input; the others get a zero gradient, after all that was computed from the first."""

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
    """Names of the parameters outside of `experts` with a dimension of `count`, at most two levels down."""
    for name, parameter in module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if name.split(".")[0] != experts and name.count(".") <= 2 and len(shape) == 2 and count in shape:
            yield name
