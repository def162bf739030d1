"""`split_model`: split a model's layers among the processes of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero_plugin.distributed.tensor_group import TensorGroup
from zero_plugin.errors import LoopError
from zero_plugin.tensor_parallel import layers
from zero_plugin.tensor_parallel.causal_models import keep_logits_apart
from zero_plugin.tensor_parallel.plan import find_plan
from zero_plugin.tensors.cuts import Cut
from zero_plugin.tensors.modules import NAMES_ALONE

_SPLIT = "_zero_plugin_split"  # attribute of a split model


@dataclass(frozen=True)
class Split:
    """The record of a split model.

    Attributes:
        group: the processes that share the model's layers.
        cuts: the cut of each split parameter, by the id of the parameter.
        partial: unsplit parameters whose gradients are a part of a sum over the group.
        repeated: split parameters whose part several processes hold, each with a part of the gradient.
        named: the cuts of each split parameter by the processes of the group, by the parameter's names.
    """

    group: TensorGroup
    cuts: Mapping[int, Cut]
    partial: tuple[nn.Parameter, ...]
    repeated: tuple[nn.Parameter, ...]
    named: Mapping[str, Sequence[Cut]]

    def counts(self, parameter: Tensor) -> bool:
        """Return whether a sum over all elements of the model counts this process's elements of a parameter.

        The other processes of the group have the same elements, or other elements that they count themselves.
        """
        cut = self.cuts.get(id(parameter))
        return self.group.rank == 0 if cut is None else cut.is_first_copy


def split_of(model: nn.Module) -> Split | None:
    """Return how a model has been split; None if it has not."""
    return getattr(model, _SPLIT, None)


def split_model(model: nn.Module, group: TensorGroup) -> Split:
    """Split a model in place. Its parameters stay the same objects, with a part of their values. Collective.

    Args:
        model: contains a transformers model, or a model with a `tensor_parallel_plan`.
        group: the processes that share the layers.

    Raises:
        UnsplittableError: the model cannot be split among so many processes.
    """
    plan = find_plan(model, group.size)
    layers.share_initial_values(model, group)
    cutter = layers.Cutter(group)
    for name, layer in plan.layers.items():
        module: Any = model.get_submodule(name)
        if layer.style == "column":
            in_region = name.rpartition(".")[0] in plan.regions
            layers.split_column(module, layer.sections, cutter, in_region=in_region)
        elif layer.style == "row":
            layers.split_row(module, layer.sections, cutter)
        elif layer.style == "vocabulary":
            layers.split_words(module, cutter)
        else:
            cutter.partial += list(module.parameters())
    for name in plan.regions:
        layers.enter_region(model.get_submodule(name), group)
    for owner, attribute, value in plan.sizes:
        setattr(owner, attribute, value)
    for name in plan.heads:
        head: Any = model.get_submodule(name)
        keep_logits_apart(model, head, cutter.cuts[id(head.weight)].shape[0], group)
    for parameter in model.parameters():
        if id(parameter) in cutter.cuts:
            parameter.tensor_model_parallel = cutter.cuts[id(parameter)].is_first_copy  # type: ignore[attr-defined]
    repeated = tuple(p for p in model.parameters() if id(p) in cutter.cuts and cutter.cuts[id(p)].copies > 1)
    named = {name: cutter.everyones[id(p)] for name, p in _named(model) if id(p) in cutter.cuts}
    split = Split(group, cutter.cuts, tuple(cutter.partial), repeated, named)
    setattr(model, _SPLIT, split)
    for module in model.modules():
        if any(id(p) in split.cuts for p in module.parameters(recurse=False)):
            module.register_state_dict_pre_hook(_refuse_parts)
    return split


def _refuse_parts(module: nn.Module, *_: Any) -> None:
    """Refuse to hand out parts of weights under the names of complete ones; a hook of `state_dict`.

    Raises:
        LoopError: unless only the names are read.
    """
    if not NAMES_ALONE.get():
        raise LoopError(
            f"state_dict() of a {type(module).__name__} whose weights tensor_parallel_size has split: no process has "
            "all of them.\nUse accelerator.get_state_dict(model), or accelerator.save_model(model, folder); to resume "
            "training later, accelerator.save_state(folder)."
        )


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over the parameters by all of their names."""
    return model.named_parameters(remove_duplicate=False)
