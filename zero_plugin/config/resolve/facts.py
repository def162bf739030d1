"""What resolution starts from, and what it comes to.

What the resolution rules may look at: plain numbers about the loop, the model and the machine.

The resolved configuration: no open field, every value with its origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zero_plugin.config.tree import KeyPath, Tree

Precision = Literal["no", "fp16", "bf16"]
StrategyName = Literal["deepspeed", "ddp", "single", "xla"]


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """What the training loop says.

    Attributes:
        micro_batch: samples per process and backward, None where no training loader tells.
        micro_batch_reason: how `micro_batch` was found, e.g. "the training DataLoader's batch_size".
        micro_batch_fixed: whether the loader states that size; false where it was only seen on one batch.
        batches_per_epoch: length of the prepared training loader on one process, None where unknown.
        batches_given: length of the training loader as the script gave it, in micro-batches, None where unknown.
    """

    micro_batch: int | None = None
    micro_batch_reason: str = ""
    micro_batch_fixed: bool = True
    batches_per_epoch: int | None = None
    batches_given: int | None = None


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """The optimizer handed to `prepare`.

    Attributes:
        name: DeepSpeed's type name in lower case (`adamw`, `sgd`, …); "" for a placeholder, which has none.
        given: the arguments that the user gave (placeholder: only what was typed; real optimizer: its defaults dict).
        group_lrs: learning rate of each parameter group, empty where none is known.
        placeholder: whether it is a DummyOptim.
        given_by: who gave the arguments, where it is neither a placeholder nor the loop's optimizer.
    """

    name: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    group_lrs: tuple[float, ...] = ()
    placeholder: bool = False
    given_by: str = ""

    @property
    def giver(self) -> str:
        """Who gave the arguments, for sentences."""
        return self.given_by or ("DummyOptim" if self.placeholder else f"the loop's {self.name}")


@dataclass(frozen=True, slots=True)
class SchedulerFacts:
    """The scheduler handed to `prepare`.

    Attributes:
        placeholder: whether it is a DummyScheduler without a callable.
        total_num_steps, warmup_num_steps: as typed, in the user's own counting; None where not given.
        given: further keyword arguments of the placeholder.
        given_by: who gave all of them, for sentences.
    """

    placeholder: bool = False
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    given_by: str = "DummyScheduler"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of the model without touching its data.

    Attributes:
        hidden_size: of the residual stream, None where it could not be found.
        hidden_size_reason: how it was found, e.g. "model.config.text_config.hidden_size".
        largest_parameter: elements of the largest parameter tensor, 0 where unknown.
        parameters: elements of all parameters, shared ones counted once; 0 where unknown.
    """

    hidden_size: int | None = None
    hidden_size_reason: str = ""
    largest_parameter: int = 0
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What the processes run on.

    Attributes:
        accelerator: device kind of this run.
        processes: data-parallel world size.
        intended: processes that the run is meant to have, where it resumes with fewer; 0: as many as there are.
        bf16, fp16: whether the device computes in these types (under DeepSpeed, for fp16).
    """

    accelerator: Literal["cpu", "cuda", "xla"] = "cpu"
    processes: int = 1
    bf16: bool = True
    fp16: bool = False
    intended: int = 0

    @property
    def counted(self) -> int:
        """By how many processes a schedule counts: as many all along, so that its curve stays."""
        return self.intended or self.processes


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts of one `prepare`; None where that part does not exist in the call.

    Attributes:
        complete: false before a run, when a loop, a model or an optimizer that is absent here may still come.
        planned: what the plan of the memory has chosen for open fields: by path, the value and why; empty where no plan
            was made.
    """

    loop: LoopFacts = field(default_factory=LoopFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    model: ModelFacts | None = None
    optimizer: OptimizerFacts | None = None
    scheduler: SchedulerFacts | None = None
    split_batches: bool = False
    strategy: StrategyName = "deepspeed"
    complete: bool = True
    planned: Mapping[KeyPath, tuple[Any, str]] = field(default_factory=dict)


# Where parameters, gradients and optimizer states are: what a plan of the memory chooses.
PLACEMENT: Final[tuple[KeyPath, ...]] = (
    ("zero_optimization", "stage"),
    ("zero_optimization", "offload_optimizer", "device"),
    ("zero_optimization", "offload_param", "device"),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A config's `optimizer` or `scheduler` section, resolved: `type` as written, `params` with every default written
    out. A schedule's step numbers are applied optimizer steps."""

    type: str
    params: Mapping[str, Any]


OptimizerSection = Section
SchedulerSection = Section


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
    missing: Mapping[KeyPath, str] = field(default_factory=dict)

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
    def optimizer(self) -> Section | None:
        """The optimizer that the configuration describes, None where it describes none."""
        return self._section("optimizer")

    @property
    def scheduler(self) -> Section | None:
        """The schedule that the configuration describes, None where it describes none."""
        return self._section("scheduler")

    @property
    def scheduler_counts(self) -> Literal["steps", "processes"]:
        """How a prepared schedule counts: once per applied optimizer step, or Accelerate's way, W times."""
        return "steps" if self.launch.value("scheduler_counts") == "steps" else "processes"

    @property
    def zero_stage(self) -> int:
        """The configured ZeRO stage; 0 where there is no ZeRO."""
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
        return self.tree.without("scheduler").nested(auto="auto")

    def _section(self, name: Literal["optimizer", "scheduler"]) -> Section | None:
        section = self.tree.section(name).nested()
        return None if section.get("type") is None else Section(section["type"], section.get("params") or {})
