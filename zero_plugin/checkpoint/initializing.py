"""Draws values for parameters that no file has, each as the module's own class does, and leaves all others alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.bigmodel.tensors import Slot, tensor_slots
from zero_plugin.checkpoint.weight_names import as_pretrained, whole_shape
from zero_plugin.errors import CheckpointError

__all__ = ["initialize_tensors"]


def initialize_tensors(
    module: nn.Module, names: Collection[str], whole: Callable[[Iterable[Tensor]], AbstractContextManager[Any]]
) -> None:
    """Initialise tensors as if the model were new: transformers' `_init_weights`, else the layer's `reset_parameters`.

    Args:
        module: the whole model.
        names: of floating tensors in it, which hold NaN so far.
        whole: a context in which tensors are whole on every process, and what process 0 writes into them stays.

    Raises:
        CheckpointError: of a tensor's class neither is known, or it leaves the tensor as it was.
    """
    slots = list(tensor_slots(module, recurse=True))
    by_owner: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.name in names:
            by_owner.setdefault(slot.name.rpartition(".")[0], []).append(slot)
    left: list[str] = []
    for owner, own in by_owner.items():
        ids = {id(slot.tensor) for slot in own}
        others = [slot for slot in slots if id(slot.tensor) not in ids]
        with whole([slot.tensor for slot in own]), _set_aside(others), torch.no_grad():
            _draw(module, owner)
            left += [slot.name for slot in own if bool(torch.isnan(slot.tensor).any())]
    if left:
        raise CheckpointError(
            f"{', '.join(left)}: not in the file, and the modules that hold them do not say how to initialise them (a "
            "method reset_parameters()).\nAdd it; or build the model inside `with accelerator.init_model():`, where it "
            "gets the values of a new one, then call accelerator.load_weights(model, …, strict=False)."
        )


@contextmanager
def _set_aside(slots: Iterable[Slot]) -> Iterator[None]:
    """Inside, other tensors without values are in these places, so that nothing that is written reaches theirs."""
    held: list[tuple[dict[str, Any], str]] = [
        (slot.owner._buffers if slot.is_buffer else slot.owner._parameters, slot.key) for slot in slots
    ]
    tensors = [where[key] for where, key in held]
    for (where, key), tensor in zip(held, tensors, strict=True):
        stand_in = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        where[key] = nn.Parameter(stand_in, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stand_in
    try:
        yield
    finally:
        for (where, key), tensor in zip(held, tensors, strict=True):
            where[key] = tensor


def _draw(root: nn.Module, owner: str) -> None:
    """Have a module in `root` initialise itself, then those around it, which may do so for what is in them."""
    path = owner.split(".") if owner else []
    around = [root]
    for name in path:
        around.append(around[-1].get_submodule(name))
    for depth in range(len(path), -1, -1):
        module: Any = around[depth]
        model = next((held for part in reversed(around[: depth + 1]) if (held := as_pretrained(part))), None)
        if model is not None:
            model._init_weights(module)
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
            return
