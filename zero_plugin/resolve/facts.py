"""What the resolution rules may look at: plain numbers about the loop, the model and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zero_plugin.config.tree import Path

__all__ = ["Facts", "LoopFacts", "MachineFacts", "ModelFacts", "OptimizerFacts", "SchedulerFacts"]

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
        hidden_size: width of the residual stream, None where it could not be found.
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
        intended: processes that the run is meant to have, where it goes on with fewer; 0: as many as there are.
        bf16, fp16: whether the device computes in these types (under DeepSpeed, for fp16).
        deepspeed_version: installed version, "" where DeepSpeed is absent.
    """

    accelerator: Literal["cpu", "cuda", "xla"] = "cpu"
    processes: int = 1
    bf16: bool = True
    fp16: bool = False
    deepspeed_version: str = ""
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
    planned: Mapping[Path, tuple[Any, str]] = field(default_factory=dict)
