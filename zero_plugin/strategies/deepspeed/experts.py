"""Finds mixture-of-experts layers, which ZeRO-3 has to gather whole: each process may call other experts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from torch import nn

__all__ = ["find_expert_layers"]

_ROUTER = re.compile(r"gat(e|ing)|rout|switch", re.IGNORECASE)
_EXPERTS = re.compile(r"expert|expts", re.IGNORECASE)


def find_expert_layers(model: nn.Module, class_names: Collection[str]) -> Iterator[nn.Module]:
    """The modules of `model` whose forward calls some of several alike submodules, chosen by the data.

    Where processes choose differently, one would wait in gathering an expert that another does not call. Such a layer
    is told by its structure and its names together, since a wrong guess costs memory only one way and hangs the other:

    * it holds a ModuleList or ModuleDict of at least two modules of one class, and
    * beside the list it has a parameter with one row or column for each of them: the router's, and
    * the list is named like experts, or the router like a router.

    Layers that keep all experts in one stacked tensor, as transformers' own do since version 5, are gathered whole
    anyway.

    Args:
        model: not yet given to DeepSpeed; its parameters may be partitioned.
        class_names: classes of further layers, by name, as the configuration says.
    """
    for module in model.modules():
        if type(module).__name__ in class_names or _calls_some(module):
            yield module


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
