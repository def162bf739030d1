"""What optimizers keep for each parameter, by the name that a configuration gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.plan.situation import OptimizerSizes
from zero_plugin.resolve.facts import OptimizerFacts
from zero_plugin.resolve.resolved import OptimizerSection

__all__ = ["asked_optimizer", "is_known", "optimizer_sizes"]

# Tensors of a parameter's size, by DeepSpeed's type name in lower case; momentum adds one where it is not built in.
_STATES: Final[Mapping[str, int]] = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "adagrad": 1, "rmsprop": 1, "sgd": 0}
_UNKNOWN: Final = 2  # as many as Adam, the most of the common ones


def is_known(name: str) -> bool:
    """Whether it is known what the optimizer of that name, in any case, keeps."""
    return name.lower() in _STATES


def optimizer_sizes(name: str, arguments: Mapping[str, Any] | None = None, *, fused: bool = False) -> OptimizerSizes:
    """What an optimizer keeps; one that is not known is taken to keep as much as Adam.

    Args:
        name: as DeepSpeed or torch calls its class, in any case.
        arguments: `momentum`, `centered` and `amsgrad` count.
        fused: whether its step runs in one kernel that needs no working copy.
    """
    kind, given = name.lower(), arguments or {}
    states = _STATES.get(kind, _UNKNOWN)
    if kind in ("sgd", "rmsprop"):
        states += bool(given.get("momentum")) + bool(given.get("centered"))
    states += kind in ("adam", "adamw") and bool(given.get("amsgrad"))
    return OptimizerSizes(kind or "adamw", states, 0 if fused else 1)


def asked_optimizer(section: OptimizerSection | None, facts: OptimizerFacts | None, *, on_gpu: bool) -> OptimizerSizes:
    """The optimizer that a run steps with: the loop's own, else the section's, else the AdamW that stands for none.

    Args:
        section: of the configuration.
        facts: of what the loop prepares.
        on_gpu: where DeepSpeed's own optimizers are fused.
    """
    if facts is not None and not facts.placeholder and facts.name:
        return optimizer_sizes(facts.name, facts.given, fused=bool(facts.given.get("fused")))
    if section is None:
        return optimizer_sizes("adamw", fused=on_gpu)
    return optimizer_sizes(section.type, section.params, fused=on_gpu and not section.params.get("torch_adam"))
