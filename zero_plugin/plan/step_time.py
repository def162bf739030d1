"""How long one optimizer step takes, by a roofline: what must pass through each resource, and what runs beside what.

Every term is work over speed. Sources of the amounts: the code of DeepSpeed 0.19's stages as this package runs them,
torch's DDP; for the bytes of a step, ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857).

What runs beside what. DDP reduces beside the last backward. Under ZeRO, copies of gradients and weights over PCIe, and
reads of weights from NVMe, run beside the computation of their micro-batch. Everything else waits: stages 1 and 2
reduce in the computation's own stream unless `overlap_comm` is on, the step begins when the last gradient is there,
and the next forward when the last weight is. Stage 3 fetches ahead, but is counted as if it waited for every gather:
what another schedule of the same gathers gains over it (1.28 to 1.5 times, DeepCompile) is at least as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zero_plugin.plan.footprint import sub_groups_on_device, weight_bytes
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, OptimizerSizes, Setup

_FP32: Final = 4
# CPU time of DeepSpeed's hooks for each parameter tensor and pass, as measured on an EPYC core by 100 linear layers at
# stages 2 and 3; they run ahead of the device, beside its work.
_HOOK_S: Final = 80e-6
_HOST_KERNELS: Final = ("adam", "adamw", "lion", "adagrad")  # DeepSpeed's; for others torch loops over the tensors,
_WITHOUT_KERNEL: Final = 10.0  # which took ten times as long (0.13 against 1.37 billion elements per second)
_UNPINNED: Final = 0.5  # of PCIe's bandwidth: the driver copies through a pinned buffer of its own


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        terms: what the step takes, one after the other.
        hidden: what runs beside them, for as long as it is hidden.
    """

    terms: Mapping[str, float]
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.terms.values())


def step_time(
    model: ModelSizes, activations: Activations, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster
) -> StepTime:
    """The time of `setup.accumulation` micro-batches on every process, and the update.

    Args:
        model: its sizes.
        activations: operations of a forward; where they are unknown, two per parameter and token.
        optimizer: what it keeps.
        setup: the strategy.
        cluster: the machines.

    Raises:
        ValueError: a speed that this setup needs is not known of the cluster.
    """
    windows, weights = setup.accumulation, weight_bytes(setup)
    forward, backward = _compute(model, activations, setup, cluster)
    compute = windows * (forward + backward)
    reduction, gather = _collectives(model, setup, cluster)
    beside = {
        "PCIe": _pcie_beside(model, setup, cluster),
        "NVMe": _seconds(_weights_from(model, setup, "nvme") / cluster.nodes, cluster.nvme_read, "nvme_read"),
    }
    if setup.stage == 3:
        beside["hooks"] = windows * 2 * _HOOK_S * sum(p.count for p in model.parameters)
    hidden = {name: min(seconds, compute) for name, seconds in beside.items()}
    # They use different resources, so the slowest one alone is waited for.
    slowest = max(beside, key=lambda name: beside[name])
    terms = {"compute": compute, slowest: max(0.0, beside[slowest] - compute)}
    if setup.stage is None or (setup.stage == 2 and setup.overlap_comm):
        free = backward * (1 if setup.stage is None else windows)
        hidden["gradients between devices"] = min(reduction, free)
        reduction = max(0.0, reduction - free)
    terms |= {"gradients between devices": reduction, "weights between devices": gather}
    for name, seconds in _update(model, optimizer, setup, cluster, weights).items():
        terms[name] = terms.get(name, 0.0) + seconds
    return StepTime(_above_zero(terms), _above_zero(hidden))


def _compute(model: ModelSizes, activations: Activations, setup: Setup, cluster: Cluster) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward: operations, or reading the weights where that takes longer.

    A backward computes the gradients of the inputs, as many operations as the forward, and of the trained weights, in
    their share as many again; with activation checkpointing it repeats the forward.
    """
    flops = setup.micro_batch * (activations.flops_per_sample or 2.0 * model.elements * activations.sample_length)
    speed = cluster.flops.get(setup.precision, 0.0)
    # Autocast reads fp32 weights, writes 16-bit copies and reads these.
    bytes_each = 8 if setup.stage is None and setup.precision != "no" else weight_bytes(setup)
    read = _seconds(model.elements * bytes_each, cluster.memory_bandwidth, "memory_bandwidth")
    write = _seconds(model.trainable * bytes_each, cluster.memory_bandwidth, "memory_bandwidth")
    share = model.trainable / model.elements if model.elements else 1.0
    forward = max(_seconds(flops, speed, "flops"), read)
    backward = max(_seconds(flops * (1 + share), speed, "flops"), read + write)
    return forward, backward + (forward if setup.activation_checkpointing else 0.0)


def _collectives(model: ModelSizes, setup: Setup, cluster: Cluster) -> tuple[float, float]:
    """Seconds per step of reducing gradients and of gathering weights, each in rings.

    Around a ring of N, a reduce-scatter or an all-gather of S bytes takes `S·(N-1)/N` over the slowest link, an
    all-reduce twice that. DDP reduces fp32 gradients. DeepSpeed reduces in the computation's type: stages 0 to 2 by
    all-reduces (`use_multi_rank_bucket_allreduce`), stage 2 after every micro-batch, stage 3 by reduce-scatters after
    every micro-batch. Stages 1 and 2 gather the new weights once per step, stage 3 all weights for each forward and
    each backward.
    """
    processes, windows, weights = cluster.processes, setup.accumulation, weight_bytes(setup)

    def ring(size: float) -> float:
        sent = size * (processes - 1) / processes
        between_nodes = _seconds(sent * (cluster.nodes > 1), cluster.network_bandwidth, "network_bandwidth")
        return max(_seconds(sent * (cluster.devices > 1), cluster.link_bandwidth, "link_bandwidth"), between_nodes)

    trained = model.trainable * weights
    if setup.stage is None:
        return 2 * ring(model.trainable * _FP32), 0.0
    if setup.stage == 3:
        return windows * ring(trained), windows * 2 * ring(model.elements * weights)
    return (windows if setup.stage == 2 else 1) * 2 * ring(trained), ring(trained) if setup.stage else 0.0


def _pcie_beside(model: ModelSizes, setup: Setup, cluster: Cluster) -> float:
    """Seconds per step in which gradients go to the host, and offloaded weights come from it, beside the computation.

    Gradients that accumulate in the host come back for every further micro-batch, at stage 2 by
    `async_accumulate_grad_in_cpu_via_gpu`, at stage 3 by `partition_grads`. Stage 2 with fp32 sums keeps them on the
    device.
    """
    size = _weights_from(model, setup, "cpu") + _weights_from(model, setup, "nvme")
    if setup.offload_optimizer != "none" and (
        setup.stage == 3 or (setup.stage == 2 and setup.gradient_bytes == weight_bytes(setup))
    ):
        size += (2 * setup.accumulation - 1) * model.trainable * setup.gradient_bytes
    return _over_pcie(size / cluster.processes, setup, cluster)


def _weights_from(model: ModelSizes, setup: Setup, device: str) -> int:
    """Bytes of offloaded weights that all processes together read in a step: for each forward and each backward."""
    return 2 * setup.accumulation * model.elements * weight_bytes(setup) if setup.offload_param == device else 0


def _update(
    model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster, weights: int
) -> dict[str, float]:
    """Seconds of the step itself, nothing beside it: the optimizer where its states are, and the way there and back.

    An optimizer with s states reads the master, the gradient and the states, and writes all but the gradient:
    `4·(3 + 2s)` bytes per element, 28 for Adam; the copy in 16 bits is 2 more.
    """
    shards = 1 if setup.stage in (None, 0) else cluster.processes
    own = model.trainable / shards
    on_device = float(own)
    if setup.offload_optimizer != "none":
        on_device = float(sum(sub_groups_on_device(model, setup, shards))) if setup.stage == 3 else 0.0
    on_host = max(0.0, own - on_device)
    each = _FP32 * (3 + 2 * optimizer.states) + (weights if weights != _FP32 else 0)
    found = {"optimizer": _seconds(on_device * each, cluster.memory_bandwidth, "memory_bandwidth")}
    if setup.offload_optimizer == "none":
        return found
    in_stage3 = setup.stage == 3
    # Stage 3 copies the sums into the gradients of the master weights, in host memory; stages 1 and 2 bring them down.
    passes = _WITHOUT_KERNEL if optimizer.name not in _HOST_KERNELS else 1.0
    moved = on_host * each * passes + (own * 2 * _FP32 if in_stage3 else 0.0)
    found["optimizer on the host"] = _seconds(moved * cluster.devices, cluster.adam_bandwidth, "adam_bandwidth")
    down, up = (0.0 if in_stage3 else own * _FP32), (on_device * _FP32 if in_stage3 else 0.0)
    # Offloaded weights stay there, but the first forward finds none of them fetched ahead.
    up += on_host * weights + (on_device * weights if setup.offload_param != "none" else 0.0)
    found["PCIe"] = _over_pcie(down + up, setup, cluster)
    swapped = on_host * _FP32 * (2 + optimizer.states) if setup.offload_optimizer == "nvme" else 0.0
    stored = own * weights if setup.offload_param == "nvme" else 0.0
    found["NVMe"] = _seconds(swapped * cluster.devices, cluster.nvme_read, "nvme_read")
    found["NVMe"] += _seconds((swapped + stored) * cluster.devices, cluster.nvme_write, "nvme_write")
    return found


def _over_pcie(size: float, setup: Setup, cluster: Cluster) -> float:
    bandwidth = cluster.pcie_bandwidth * (1.0 if setup.pin_memory else _UNPINNED)
    return _seconds(size, bandwidth, "pcie_bandwidth")


def _seconds(amount: float, speed: float, name: str) -> float:
    if amount <= 0:
        return 0.0
    if speed <= 0:
        raise ValueError(f"the cluster's {name} is not known")
    return amount / speed


def _above_zero(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in seconds.items() if value > 0}
