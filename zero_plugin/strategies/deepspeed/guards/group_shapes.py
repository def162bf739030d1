"""Refuse parameter groups that were split by the shape of partitioned parameters, which is (0,)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError


def refuse_groups_by_empty_shape(optimizer: Optimizer | DummyOptim | None, model: nn.Module) -> None:
    """Refuse groups of a partitioned model that result from a split by `p.ndim`.

    Mistake: `[p for p in params if p.ndim >= 2]` gets the weight decay (nanoGPT, timm, many recipes). Stage 3 has
    partitioned the model when it was built, so every `p.ndim` is 1, and every weight is trained without decay.
    Cost: one pass over the groups, once per `prepare` at stage 3.

    The sign: the group for matrices is empty, and a group without its weight decay (or `use_muon`) holds matrices and
    vectors. An empty group alone proves nothing: names split groups too, and LoRA has no vectors. If other options,
    such as `lr`, differ, a warning names the possible cause. A script that leaves empty groups out is not found.

    Raises:
        LoopError: the groups show this split.
    """
    if optimizer is None or not any(hasattr(p, "ds_id") for p in model.parameters()):
        return
    split = [(group, _true_ranks(group["params"])) for group in optimizer.param_groups]
    mixed = [group for group, ranks in split if min(ranks, default=2) < 2 <= max(ranks, default=0)]
    if not any(_is_for_matrices(group, other) for group, ranks in split if not ranks for other in mixed):
        if any(_differs(group, other) for group in optimizer.param_groups if not group["params"] for other in mixed):
            announce(
                "a parameter group is empty, and another one has matrices and vectors. A split by p.ndim, p.shape or "
                "p.numel() does that: ZeRO stage 3 has partitioned the model when it was built, so the shapes are "
                "those of empty tensors. Build the groups inside `with accelerator.whole_weights(model):`."
            )
        return
    raise LoopError(
        f"prepare() got an optimizer of a {type(model).__name__} with an empty parameter group for matrices, and "
        "matrices in a group for vectors. ZeRO stage 3 has partitioned the model when it was built, so `p.ndim` and "
        "`p.shape` are those of an empty tensor.\n"
        "Build the groups inside `with accelerator.whole_weights(model):`, or by the parameters' names. If the groups "
        "are intended, leave the empty one out."
    )


def _true_ranks(given: Any) -> list[int]:
    """Return the numbers of dimensions of a group's trained parameters."""
    parameters: list[Any] = [given] if isinstance(given, Tensor) else list(given)
    return [len(getattr(p, "ds_shape", p.shape)) for p in parameters if p.requires_grad]


def _differs(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether options other than the weight decay differ; groups by names often lack it for few parameters."""
    return any(value != other.get(key) for key, value in group.items() if key not in ("params", "weight_decay"))


def _is_for_matrices(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a recipe that splits by shape gives matrices the options of `group`, and vectors `other`'s."""
    decays = group.get("weight_decay", 0) > other.get("weight_decay", 0)
    return bool(decays or (group.get("use_muon") and not other.get("use_muon")))
