"""What a way of training takes of one device, of one node's host memory, and of its NVMe drive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero_plugin.plan.buffers import (
    autocast_copies,
    carried_gradients,
    flattening,
    gathered_parameters,
    host_swap_buffers,
    reduction_buffers,
    step_moments,
)
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, OptimizerSizes, Setup
from zero_plugin.plan.states import device_states, host_tensors, nvme_states, weight_bytes, window_gradients

__all__ = ["Footprint", "footprint"]

# Rules of thumb: CUDA's context with the kernels that torch loads and cuBLAS's workspace; NCCL's channels.
CONTEXT_BYTES = 700 * 2**20
COMMUNICATION_BYTES = 300 * 2**20
# The share of what comes and goes that torch's allocator holds and cannot give.
FRAGMENTED = 0.05
# Python, torch, DeepSpeed and CUDA in host memory, for each process.
PROCESS_BYTES = 2**30

_OUTSIDE = ("context", "fragmentation")


@dataclass(frozen=True)
class Footprint:
    """Bytes by term.

    Attributes:
        device: of one device, in the phase that takes the most.
        device_phase: that phase: "initialisation", "forward" (its end, when all activations are there), "backward" (its
            end, when all gradients are there) or "step".
        host: of one node.
        pinned: page-locked bytes of `host` that one process holds.
        locked: of those, the ones that count against `memlock`: the buffers of the NVMe drive.
        nvme: of one node's drive.
        phases: the terms of every phase.
    """

    device: Mapping[str, int]
    device_phase: str
    host: Mapping[str, int] = field(default_factory=dict)
    pinned: int = 0
    locked: int = 0
    nvme: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        """Of one device."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> int:
        """What torch's allocator hands out at most on one device: `torch.cuda.max_memory_allocated`."""
        return max(sum(v for k, v in terms.items() if k not in _OUTSIDE) for terms in self.phases.values())

    @property
    def host_bytes(self) -> int:
        """Of one node."""
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        """Of one node."""
        return sum(self.nvme.values())


def footprint(
    model: ModelSizes, activations: Activations, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster
) -> Footprint:
    """The memory that training takes at its peak.

    Args:
        model: its sizes.
        activations: what a forward keeps, fp32 or 16-bit as `setup.precision` says; where they do not tell it of
            autocast, its copies of the weights are added.
        optimizer: what it keeps.
        setup: the way of training.
        cluster: the machines; of them count the processes, and the device's size where DeepSpeed looks at it.
    """
    processes = cluster.processes
    states = {"buffers": model.buffer_bytes, **device_states(model, optimizer, setup, processes)}
    saved, forward, backward = _activations(activations.under(setup.stage), setup)
    gradients = window_gradients(model, setup, processes)
    gathered = gathered_parameters(model, setup, processes)
    reducing = reduction_buffers(model, setup, processes)
    # What was traced under autocast has the copies among what it saves.
    copies = 0 if activations.autocast else autocast_copies(model, setup)
    beside = {"gathered parameters": gathered, "reduction buffers": reducing}
    carried = carried_gradients(model, setup, processes)
    initial = {"parameters": states.get("parameters", 0), "flat copy": flattening(model, setup, processes)}
    if setup.stage in (1, 2) and sum(_with_margins(initial, states, processes).values()) > cluster.device_bytes:
        initial["flat copy"] = 0  # then DeepSpeed makes it in host memory
    step = max(step_moments(model, optimizer, setup, processes), key=lambda terms: sum(terms.values()))
    phases = {
        "initialisation": initial,
        "forward": {
            **_with(states, gradients=carried),
            **beside,
            "transient": forward,
            "activations": saved,
            "autocast copies": copies,
        },
        "backward": {**_with(states, gradients=gradients), **beside, "transient": backward},
        "step": {**states, **step, "gradients": states.get("gradients", 0) + step.get("gradients", 0)},
    }
    phases = {name: _with_margins(terms, states, processes) for name, terms in phases.items()}
    peak = max(phases, key=lambda name: sum(phases[name].values()))
    host, pinned, locked = _host(model, optimizer, setup, cluster)
    nvme = {k: v * cluster.devices for k, v in nvme_states(model, optimizer, setup, processes).items()}
    return Footprint(phases[peak], peak, host, pinned, locked, nvme, phases)


def _activations(activations: Activations, setup: Setup) -> tuple[int, int, int]:
    """Bytes kept from a forward to its backward, the working space beside all of them, and the one at the very end.

    The first block's own activations are there at the backward's end whether it runs once more for them or not.
    """
    samples = setup.micro_batch
    recomputing = (activations.checkpointed_transient or Affine()).at(samples)
    if setup.activation_checkpointing and activations.checkpointed is not None:
        forward = (activations.checkpointed_forward or Affine()).at(samples)
        return activations.checkpointed.at(samples), max(forward, recomputing), recomputing
    transient = activations.transient.at(samples)
    return activations.saved.at(samples), transient, max(transient, recomputing)


def _with(states: Mapping[str, int], *, gradients: int) -> dict[str, int]:
    return {**states, "gradients": states.get("gradients", 0) + gradients}


def _with_margins(terms: Mapping[str, int], states: Mapping[str, int], processes: int) -> dict[str, int]:
    found = {name: size for name, size in terms.items() if size}
    comes_and_goes = sum(terms.values()) - sum(min(size, terms.get(name, 0)) for name, size in states.items())
    found["context"] = CONTEXT_BYTES + (COMMUNICATION_BYTES if processes > 1 else 0)
    found["fragmentation"] = int(FRAGMENTED * comes_and_goes)
    return found


def _host(
    model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster
) -> tuple[dict[str, int], int, int]:
    """Terms of one node, and what one process holds page-locked, by CUDA and by the NVMe drive's buffers."""
    locked = host_swap_buffers(model, setup, cluster.processes)
    tensors = host_tensors(model, optimizer, setup, cluster.processes)
    found = {
        "processes": PROCESS_BYTES,
        "NVMe buffers": locked,
        **{name: sum(sizes) for name, sizes in tensors.items()},
    }
    pinned = 0
    if setup.pin_memory:
        # The optimizer makes its states in plain memory, and stage 3 its masters.
        plain = ("optimizer states", "master weights") if setup.stage == 3 else ("optimizer states",)
        found |= {n: sum(map(_power_of_two, sizes)) for n, sizes in tensors.items() if n not in plain}
        if setup.offload_param == "cpu":
            # zero.Init pins each partition, then all move into one tensor, and torch keeps what it has once pinned.
            sizes = [(-(-p.elements // cluster.processes) * weight_bytes(setup), p) for p in model.parameters]
            found["pinned before"] = sum(_power_of_two(size) * p.count for size, p in sizes if p.trainable)
        pinned = sum(size for name, size in found.items() if name not in (*plain, "processes", "NVMe buffers"))
    return {k: v * cluster.devices for k, v in found.items() if v}, pinned + locked, locked


def _power_of_two(size: int) -> int:
    """What torch's allocator of page-locked memory takes for `size` bytes (CachingHostAllocator rounds up)."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
