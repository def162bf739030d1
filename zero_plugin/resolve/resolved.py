"""The resolved configuration: no open field, every value with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zero_plugin.config.tree import AUTO, Path, Tree

__all__ = ["PLACEMENT", "OptimizerSection", "Resolved", "SchedulerSection", "plain"]

# Where parameters, gradients and optimizer states are: what a plan of the memory chooses.
PLACEMENT: Final[tuple[Path, ...]] = (
    ("zero_optimization", "stage"),
    ("zero_optimization", "offload_optimizer", "device"),
    ("zero_optimization", "offload_param", "device"),
)


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
    """What `prepare` runs; everything else is read off the two trees, so that there is one source of truth.

    Attributes:
        tree: the whole training configuration under DeepSpeed's key names; no leaf holds AUTO but where AUTO is
            DeepSpeed's own value.
        launch: the launch keys that change training: `mixed_precision` and `scheduler_counts`.
        said_aloud: one sentence for each choice made for the user that changes training, to print once at start.
        missing: where the facts were not complete, the fields that a run may still fill, each with what would: they
            hold AUTO or are absent. A run has none.
    """

    tree: Tree
    launch: Tree = field(default_factory=Tree)
    said_aloud: tuple[str, ...] = ()
    missing: Mapping[Path, str] = field(default_factory=dict)

    @property
    def precision(self) -> Literal["no", "fp16", "bf16"]:
        """Computation type; "no" is fp32."""
        if self.tree.value("fp16", "enabled"):
            return "fp16"
        return "bf16" if self.tree.value("bf16", "enabled") else "no"

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step, at least 1."""
        return int(self.tree.value("gradient_accumulation_steps", default=1))

    @property
    def clipping(self) -> float | None:
        """Largest gradient norm, None for no clipping."""
        return float(self.tree.value("gradient_clipping") or 0.0) or None

    @property
    def optimizer(self) -> OptimizerSection | None:
        """The optimizer that the configuration describes, None where it describes none."""
        kind = self.tree.value("optimizer", "type")
        return None if kind is None else OptimizerSection(kind, self._params("optimizer"))

    @property
    def scheduler(self) -> SchedulerSection | None:
        """The schedule that the configuration describes, None where it describes none."""
        kind = self.tree.value("scheduler", "type")
        return None if kind is None else SchedulerSection(kind, self._params("scheduler"))

    @property
    def scheduler_counts(self) -> Literal["steps", "processes"]:
        """How a prepared schedule counts: once per applied optimizer step, or Accelerate's way, W times."""
        return "steps" if self.launch.value("scheduler_counts") == "steps" else "processes"

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage asked for; 0 where there is no ZeRO."""
        return int(self.tree.value("zero_optimization", "stage", default=0))

    def offload_device(self, what: Literal["optimizer", "param"]) -> Literal["none", "cpu", "nvme"]:
        """Where the optimizer states (or the parameters) live."""
        device = self.tree.value("zero_optimization", f"offload_{what}", "device", default="none")
        return device or "none"

    def deepspeed_config(self) -> dict[str, Any]:
        """The dict for `deepspeed.initialize`: plain JSON values, `"auto"` only where it is DeepSpeed's own value.

        It holds no `scheduler` section: this package builds and steps the schedule itself on every path, and an
        engine that found the section would step a second one.
        """
        config: dict[str, Any] = plain(self.tree.without("scheduler").nested())
        return config

    def _params(self, section: str) -> dict[str, Any]:
        params: dict[str, Any] | None = self.tree.section(section).nested().get("params")
        return params or {}


def plain(value: Any) -> Any:
    """A value of a tree as JSON has it; AUTO is `"auto"`."""
    if value is AUTO:
        return "auto"
    if isinstance(value, Mapping):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value
