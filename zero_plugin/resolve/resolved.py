"""The resolved configuration: no open field, every value with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zero_plugin.config.tree import Tree

__all__ = ["OptimizerSection", "Resolved", "SchedulerSection"]


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    """A config's `optimizer` section, resolved: `type` as written, `params` with every default written out."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SchedulerSection:
    """A config's `scheduler` section, resolved. Step numbers are applied optimizer steps."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What `prepare` runs.

    Attributes:
        tree: the whole training configuration under DeepSpeed's key names; no leaf holds AUTO but where AUTO is
            DeepSpeed's own value.
        precision: computation type: "no" is fp32.
        accumulation: micro-batches per optimizer step, at least 1.
        clipping: largest gradient norm, None for no clipping.
        optimizer, scheduler: the sections, None where the config has none.
        scheduler_counts: how a prepared schedule counts: applied optimizer steps, or Accelerate's way, W per step.
    """

    tree: Tree
    precision: Literal["no", "fp16", "bf16"]
    accumulation: int
    clipping: float | None
    optimizer: OptimizerSection | None
    scheduler: SchedulerSection | None
    scheduler_counts: Literal["steps", "processes"]

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage asked for; 0 where there is no ZeRO."""
        return int(self.tree.value("zero_optimization", "stage", default=0))

    def offload_device(self, what: Literal["optimizer", "param"]) -> Literal["none", "cpu", "nvme"]:
        """Where the optimizer states (or the parameters) live."""
        device = self.tree.value("zero_optimization", f"offload_{what}", "device", default="none")
        return device or "none"
