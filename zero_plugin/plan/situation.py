"""The inputs of a plan: a model's sizes, its activations, its optimizer, the machines, and the setup of a strategy.

A table holds what optimizers keep for each parameter, by the name that a configuration gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.resolve.facts import OptimizerFacts, OptimizerSection, Precision

Device = Literal["none", "cpu", "nvme"]
CPU: Final = "CPU"  # device name if the device is the CPU
Stage = Literal[0, 1, 2, 3] | None  # of ZeRO; None trains without


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """Parameter tensors of one kind.

    Attributes:
        elements: of each tensor.
        count: number of tensors of this kind; a tensor that several modules share counts once.
        trainable: whether they require gradients.
        expert: whether they belong to an expert of a mixture, which only some samples use.
        width: bytes of one element as the model is built; without ZeRO, frozen weights keep this width.
    """

    elements: int
    count: int = 1
    trainable: bool = True
    expert: bool = False
    width: int = 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model.

    Attributes:
        name: for display, e.g. "gpt2" or "LlamaForCausalLM".
        parameters: all of them.
        buffer_bytes: bytes of its buffers.
        largest_module: most elements of parameters that one module's forward uses at the same time; 0 if unknown.
        hidden_size, layers, vocabulary, heads: None if unknown.
        source: origin of these numbers, e.g. "config.json" or "--params 7B".
    """

    name: str
    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int = 0
    largest_module: int = 0
    hidden_size: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    heads: int | None = None
    source: str = ""

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(p.elements * p.count for p in self.parameters)

    @property
    def trainable(self) -> int:
        """Elements that require gradients."""
        return sum(p.elements * p.count for p in self.parameters if p.trainable)


@dataclass(frozen=True, slots=True)
class Affine:
    """A number of bytes that grows with the micro-batch: `fixed + per_sample × samples`."""

    fixed: int = 0
    per_sample: int = 0

    def at(self, samples: int) -> int:
        """Return the bytes for a micro-batch of `samples`."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, slots=True)
class Highest:
    """A number of bytes that is the maximum of several lines in the size of the micro-batch."""

    lines: tuple[Affine, ...]

    def at(self, samples: int) -> int:
        """Return the bytes for a micro-batch of `samples`, which is at least 1."""
        return max(line.at(samples) for line in self.lines)


def highest(lines: Iterable[Affine]) -> Highest:
    """Keep only the lines that are the maximum at some size of the micro-batch, in the order of their slope."""
    found = set(lines)
    kept = [max(found, key=lambda line: (line.at(1), line.per_sample))]
    while steeper := [line for line in found if line.per_sample > kept[-1].per_sample]:
        last = kept[-1]

        def overtakes(line: Affine, last: Affine = last) -> tuple[float, int]:
            return (last.fixed - line.fixed) / (line.per_sample - last.per_sample), -line.per_sample

        kept.append(min(steeper, key=overtakes))
    return Highest(tuple(kept))


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that one forward keeps for its backward in one precision, and the backward's working space.

    Attributes:
        saved: bytes kept from the forward to the backward, logits and loss included.
        transient: the largest working space on top of `saved`.
        late: the largest working space from the first weight's gradient on, when gradients begin to be reduced. The
            loss's memory is mostly freed by then, so the number may be negative. None if it equals `transient`.
        checkpointed, checkpointed_transient, checkpointed_late: the same with activation checkpointing of every block;
            the working space is then the backward's. None if the model has no blocks to checkpoint, recomputes them
            already, or uses `save_on_cpu`.
        checkpointed_forward: the forward's working space with checkpointing. It includes autocast's copies of all
            blocks' weights, which the backward does not hold. None if it is no larger than the backward's.
        flops_per_sample: floating-point operations of one forward of one sample (a multiplication and an addition are
            two).
        sample_length: tokens of one sample, 1 if a sample is not a sequence.
        source: origin of these numbers, e.g. "traced at micro-batches 2 and 3".
        margin: the fraction of memory that a plan leaves free, depending on `source`.
        autocast: the same with fp32 weights and operations under autocast, which is how DDP runs in 16 bits; None if
            there is no difference.
        moved: bytes that torch's `save_on_cpu` keeps in CPU memory in addition to `saved`.
    """

    saved: Affine = field(default_factory=Affine)
    transient: Affine | Highest = field(default_factory=Affine)
    late: Affine | Highest | None = None
    checkpointed: Affine | None = None
    checkpointed_transient: Affine | Highest | None = None
    checkpointed_late: Affine | Highest | None = None
    checkpointed_forward: Affine | Highest | None = None
    flops_per_sample: float = 0.0
    sample_length: int = 1
    source: str = ""
    margin: float = 0.1
    autocast: Activations | None = None
    moved: Affine = field(default_factory=Affine)

    @property
    def knowledge(self) -> str:
        """The source and the length of a sample, for a sentence's parentheses."""
        tokens = f", {self.sample_length:,} tokens a sample" if self.sample_length > 1 else ""
        return f"activations: {self.source}{tokens}"

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Activations:
        """Return the object from the result of `dataclasses.asdict`."""

        def rebuilt(value: Any) -> Any:
            if not isinstance(value, Mapping):
                return value
            if "lines" in value:
                return Highest(tuple(Affine(**line) for line in value["lines"]))
            return cls.from_dict(value) if "saved" in value else Affine(**value)

        return cls(**{name: rebuilt(value) for name, value in found.items()})

    def under(self, stage: Stage) -> Activations:
        """Return the activations under a ZeRO stage, in one dtype, or under DDP (None), with autocast."""
        return self.autocast if stage is None and self.autocast else self

    def at(self, samples: int, *, checkpointing: bool) -> tuple[int, int, int, int]:
        """Return the bytes kept from a forward to its backward, and three working spaces on top of them.

        These are the largest, the largest once gradients are reduced, and the one at the very end. At the backward's
        end, the first block's own activations exist with and without recomputation.
        """
        recomputing = (self.checkpointed_transient or Affine()).at(samples)
        if checkpointing and self.checkpointed is not None:
            forward = (self.checkpointed_forward or Affine()).at(samples)
            late = recomputing if self.checkpointed_late is None else self.checkpointed_late.at(samples)
            return self.checkpointed.at(samples), max(forward, recomputing), late, recomputing
        transient = self.transient.at(samples)
        late = transient if self.late is None else self.late.at(samples)
        return self.saved.at(samples), transient, late, max(transient, recomputing)

    def mapped(self, lines: Callable[[Affine], Affine], flops: float = 1.0) -> Activations:
        """Return the activations with each line mapped, and the operations multiplied by `flops`."""

        def changed(amount: Any) -> Any:
            return Highest(tuple(map(lines, amount.lines))) if isinstance(amount, Highest) else amount and lines(amount)

        plain, recomputing = ("saved", "transient", "late"), ("", "_transient", "_late", "_forward")
        names = (*plain, *(f"checkpointed{kind}" for kind in recomputing))
        found = {name: changed(getattr(self, name)) for name in names}
        found["moved"] = self.moved if self.moved == Affine() else lines(self.moved)
        autocast = self.autocast and self.autocast.mapped(lines, flops)
        return replace(self, flops_per_sample=self.flops_per_sample * flops, autocast=autocast, **found)

    def with_logits_in_chunks(self, logits: int, chunks: int) -> Activations:
        """Return the activations with a loss that computes its logits chunk by chunk, and again in the backward.

        Args:
            logits: bytes per sample of the logits and their log-softmax, and as many of their gradients.
            chunks: number of chunks.
        """
        less = logits - logits // chunks

        def line(amount: Affine) -> Affine:
            """Subtract the logits from a line that contains them; otherwise undo what freeing them gains."""
            return Affine(amount.fixed, amount.per_sample + (-less if amount.per_sample >= less else less // 2))

        return self.mapped(line)

    def of_a_part(self, processes: int) -> Activations:
        """Return the activations of one of the processes that share each sample; each computes a part of the heads."""
        return self.mapped(lambda line: Affine(line.fixed, -(-line.per_sample // processes)), 1 / processes)

    def of_length(self, tokens: int) -> Activations:
        """Return the activations of samples of another length, assuming that attention does not keep its scores."""
        share = tokens / self.sample_length
        shorter = self.mapped(lambda line: Affine(line.fixed, int(line.per_sample * share)), share)
        return replace(shorter, sample_length=tokens)


@dataclass(frozen=True, slots=True)
class OptimizerSizes:
    """The tensors that an optimizer keeps.

    Attributes:
        name: DeepSpeed's type name in lower case, e.g. `adamw`.
        states: tensors of a parameter's size that it keeps for each parameter (Adam 2, Lion 1, SGD with momentum 1).
        step_copies: temporary tensors of a parameter's size in its step on a device (torch's Adam 1, a fused one 0).
    """

    name: str = "adamw"
    states: int = 2
    step_copies: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """The training: a model, what its forward keeps in the training's precision, and its optimizer."""

    model: ModelSizes
    activations: Activations
    optimizer: OptimizerSizes = OptimizerSizes()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines, all alike. Sizes are in bytes, bandwidths in bytes per second of one device or one node.

    Attributes:
        nodes, devices: machines, and devices (processes) on each.
        device_name: e.g. "NVIDIA A100 80GB"; `CPU` without a GPU; "" if only the GPU's memory is stated.
        device_bytes: memory of one device.
        host_bytes: memory of one node that the processes may use.
        nvme_bytes: free bytes on one node's NVMe disk, 0 without one.
        memlock_bytes: bytes that one process may pin, None without a limit.
        flops: floating-point operations per second that one device reaches in training, by precision.
        memory_bandwidth: of one device's memory.
        link_bandwidth: between two devices of a node.
        network_bandwidth: between two nodes, of each node.
        pcie_bandwidth: between CPU memory and one device, each way.
        adam_bandwidth: bytes per second of CPU memory that DeepSpeed's CPU optimizer moves on one node, all its
            processes together.
        nvme_read, nvme_write: of one node's disk.
        sources: the origin of each constant, by its name here.
        shared_by: number of processes that share each sample (`sequence_parallel_size`).
    """

    device_bytes: int
    host_bytes: int
    nodes: int = 1
    devices: int = 1
    device_name: str = ""
    nvme_bytes: int = 0
    memlock_bytes: int | None = None
    flops: Mapping[Precision, float] = field(default_factory=dict)
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    pcie_bandwidth: float = 0.0
    adam_bandwidth: float = 0.0
    nvme_read: float = 0.0
    nvme_write: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)
    shared_by: int = 1

    @classmethod
    def from_constants(cls, constants: Mapping[str, tuple[Any, str]], device_name: str = "") -> Cluster:
        """Return the machines from constants that are each given with their source, "" if the source is obvious."""
        values = {name: value for name, (value, _) in constants.items()}
        sources = {name: source for name, (_, source) in constants.items() if source}
        return cls(**values, device_name=device_name, sources=sources)

    @property
    def processes(self) -> int:
        """Number of all processes, among which ZeRO partitions."""
        return self.nodes * self.devices

    @property
    def groups(self) -> int:
        """Data-parallel world size: the number of micro-batches computed at the same time."""
        return self.processes // self.shared_by

    @property
    def is_of_cpus(self) -> bool:
        """Whether the devices are CPUs, whose memory all processes of a node share."""
        return self.device_name == CPU


def budget(capacity: int, margin: float) -> int:
    """Return the bytes of a memory that a plan may use: all but the fraction that stays free."""
    return int((1 - margin) * capacity)


def describe_budget(capacity: int, margin: float) -> str:
    """Describe a capacity and its budget, e.g. "capacity 80 GiB, budget 72 GiB"."""
    return f"capacity {show_bytes(capacity)}, budget {show_bytes(budget(capacity, margin))}"


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of one strategy.

    Attributes:
        stage: the ZeRO stage; None is plain DDP (one device alone included).
        precision: of the computation.
        gradient_bytes: bytes of one element of accumulated gradients: in bf16 this package chooses 4, in fp16 2. Not
            read without ZeRO, at stage 0 and in fp32, where gradients have the weights' own dtype.
        offload_optimizer, offload_param: device of optimizer states and of parameters; `none` is the GPU itself.
        ratio: the fraction of the optimizer's elements that is updated on the CPU, 1.0 for all.
        sub_group_size: elements that stage 3's optimizer updates at a time.
        micro_batch: samples per process and backward.
        accumulation: micro-batches per optimizer step.
        activation_checkpointing: whether every block is recomputed in the backward.
        reduce_bucket, prefetch_bucket: elements.
        persistence_threshold: stage 3 keeps parameters with no more elements unpartitioned on every device.
        max_live_parameters: elements up to which stage 3 gathers ahead.
        max_reuse_distance: stage 3 does not release parameters that are used again within this many elements.
        param_buffer: elements of each of the five buffers between CPU memory and NVMe for parameters.
        overlap_comm: whether reductions overlap with the backward, with a second bucket.
        pin_memory: whether offloaded tensors are pinned.
        gradient_views: whether DDP's gradients are views of its buckets (`gradient_as_bucket_view`) instead of copies.
    """

    stage: Stage = 2
    precision: Precision = "bf16"
    gradient_bytes: int = 4
    offload_optimizer: Device = "none"
    offload_param: Device = "none"
    ratio: float = 1.0
    sub_group_size: int = 1_000_000_000
    micro_batch: int = 1
    accumulation: int = 1
    activation_checkpointing: bool = False
    reduce_bucket: int = 25_000_000
    prefetch_bucket: int = 25_000_000
    persistence_threshold: int = 10_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    param_buffer: int = 100_000_000
    overlap_comm: bool = False
    pin_memory: bool = True
    gradient_views: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of one element of the weights: without ZeRO they stay fp32, and forwards run under autocast."""
        return 4 if self.stage is None or self.precision == "no" else 2

    @property
    def sums_on_every_device(self) -> bool:
        """Whether DeepSpeed uses its BF16_Optimizer, which keeps fp32 gradients of all parameters on every device."""
        sums_in_fp32 = self.precision == "bf16" and self.gradient_bytes == 4
        return self.stage == 1 and sums_in_fp32 and self.offload_optimizer == "none"


def name_setup(setup: Setup) -> str:
    """Return a name without the micro-batch, e.g. "stage 3, optimizer 40 % on cpu, checkpointing"."""
    parts = ["DDP" if setup.stage is None else f"stage {setup.stage}"]
    if setup.offload_optimizer != "none":
        share = "" if setup.ratio == 1.0 else f" {setup.ratio:.0%}"
        parts.append(f"optimizer{share} on {setup.offload_optimizer}")
    if setup.offload_param != "none":
        parts.append(f"parameters on {setup.offload_param}")
    if setup.stage == 2 and setup.overlap_comm:
        parts.append("overlap_comm")
    if setup.activation_checkpointing:
        parts.append("checkpointing")
    return ", ".join(parts)


# Tensors of a parameter's size, by DeepSpeed's type name in lower case. Momentum adds one to the optimizers that make
# it optional.
_STATES: Final[Mapping[str, int]] = {"adam": 2, "adamw": 2, "lamb": 2, "lion": 1, "adagrad": 1, "rmsprop": 1, "sgd": 0}
_UNKNOWN: Final = 2  # as many as Adam, the most of the common ones


def is_known(name: str) -> bool:
    """Return whether the states of the optimizer of that name, in any case, are known."""
    return name.lower() in _STATES


def optimizer_sizes(name: str, arguments: Mapping[str, Any] | None = None, *, fused: bool = False) -> OptimizerSizes:
    """Return the tensors that an optimizer keeps; an unknown one is assumed to keep as many as Adam.

    Args:
        name: DeepSpeed's or torch's name of the class, in any case.
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
    """Return the sizes of the run's optimizer: the loop's own, otherwise the section's, otherwise AdamW's.

    Args:
        section: of the configuration.
        facts: of what the loop prepares.
        on_gpu: whether the run uses GPUs, on which DeepSpeed's own optimizers are fused.
    """
    if facts is not None and not facts.placeholder and facts.name:
        return optimizer_sizes(facts.name, facts.given, fused=bool(facts.given.get("fused")))
    if section is None:
        return optimizer_sizes("adamw", fused=on_gpu)
    return optimizer_sizes(section.type, section.params, fused=on_gpu and not section.params.get("torch_adam"))
