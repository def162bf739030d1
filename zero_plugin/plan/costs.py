"""What a strategy costs: memory of one device, of one node's CPU and of its NVMe drive, and the time of a step.

Memory. First the model states of one process, which outlast a step. The formulas are those of DeepSpeed 0.19's engine
as this package sets it up, read off its source and compared with the live tensors of real engines
(tests/plan/test_live_states.py). They begin with how many elements each process has: flat groups, partitions and
sub-groups, with their padding. Then what comes beside them in each phase of a step: buckets, gathered parameters,
transients, and buffers of the NVMe drive.

Time, by a roofline: what must pass through each resource, and what runs beside what. Every term is work over speed.
Sources of the amounts: the code of DeepSpeed 0.19's stages as this package runs them, torch's DDP; for the bytes of a
step, ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857). DDP reduces beside the last backward. Under
ZeRO, copies of gradients and weights over PCIe, and reads of weights from NVMe, run beside the computation of their
micro-batch. Between devices, stages 1 and 2 reduce in the computation's own stream unless `overlap_comm` is on, with
which stage 2 reduces beside its backwards. Stage 3, which has it on, gathers ahead beside each pass and reduces beside
each backward: such a pass takes as long as its computation or what it sends, whichever takes longer. Processes that
share samples exchange heads in the computation's own stream. The step begins when the last gradient is there, and the
next forward when the last weight is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import gcd
from typing import Final

from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, OptimizerSizes, ParameterSize, Setup, Workload

_FP32: Final = 4
_FP64: Final = 8
_NORMED: Final = 250_000_000  # elements of a gradient whose norm DeepSpeed computes at a time

Parameters = tuple[ParameterSize, ...]


def flat_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters as stages 1 and 2 lay them out: one flat tensor, cut into equal partitions.

    DeepSpeed aligns every partition to two elements, for NCCL: `nccl_start_alignment_factor`. Each further parameter
    group adds at most `2 × processes` elements.
    """
    trained = sum(p.elements * p.count for p in parameters if p.trainable)
    return _ceil(trained, 2 * processes) * 2 * processes


@lru_cache(maxsize=256)
def touched_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters of which one process' flat partition holds all or a part; of the process with
    the most.

    Gradients that are not accumulated in fp32 are kept unpartitioned for each of those parameters.
    """
    partition = flat_elements(parameters, processes) // processes
    ends = list(accumulate(p.elements for p in parameters if p.trainable for _ in range(p.count)))
    most = 0
    for start in range(0, ends[-1] if ends else 0, max(partition, 1)):
        first = bisect_right(ends, start)
        last = min(bisect_left(ends, start + partition), len(ends) - 1)
        most = max(most, ends[last] - (ends[first - 1] if first else 0))
    return most


@lru_cache(maxsize=256)
def sharded_elements(parameters: Parameters, processes: int, *, trainable: bool) -> int:
    """Elements of one process at stage 3, where each parameter is padded to a multiple of the processes by itself."""
    return sum(_ceil(p.elements, processes) * p.count for p in parameters if p.trainable == trainable)


@lru_cache(maxsize=256)
def sub_groups(parameters: Parameters, processes: int, size: int) -> tuple[int, ...]:
    """Elements, on one process, of each sub-group of parameters that the stage-3 optimizer updates at a time.

    As in DeepSpeed's `_create_fp16_sub_groups`, parameters are added to a sub-group until it has at least `size`.
    """
    everything = sharded_elements(parameters, processes, trainable=True)
    if size >= everything:
        return (everything,)
    groups, filled = [], 0
    for p in parameters:
        if p.trainable:
            for _ in range(p.count):
                filled += _ceil(p.elements, processes)
                if filled >= size:
                    groups.append(filled)
                    filled = 0
    return (*groups, filled) if filled else tuple(groups)


def _ceil(elements: int, divisor: int) -> int:
    return -(-elements // divisor)


# DeepSpeed leaves what is smaller than this in memory, and writes files in blocks of 1 KiB for each of the threads:
# MIN_AIO_BYTES and AIO_ALIGNED_BYTES of its swap_tensor/utils.py, with the `aio` section's defaults.
_NVME_LEAST = 2**20
_NVME_BLOCK = 1024
_STAGE0_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
_PARAM_BUFFERS, _OPTIMIZER_BUFFERS = 5, 4  # `buffer_count` of the two offload sections


@dataclass(frozen=True)
class ProcessMemory:
    """The bytes that one process takes of each memory, by term.

    Attributes:
        model: its sizes.
        optimizer: what it keeps.
        setup: the strategy.
        processes: over which ZeRO partitions.
    """

    model: ModelSizes
    optimizer: OptimizerSizes
    setup: Setup
    processes: int

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer updates fp32 copies; else the weights themselves, with gradients that autograd made."""
        return self.setup.stage is not None and (self.setup.stage > 0 or self.setup.weight_bytes != _FP32)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are elsewhere than on the device, all or a part."""
        return bool(self.setup.stage) and self.setup.offload_optimizer != "none"

    @property
    def sums_are_wider(self) -> bool:
        """Whether gradients are added up in fp32 and computed in 16 bits."""
        return self.setup.gradient_bytes == _FP32 != self.setup.weight_bytes

    @property
    def flat(self) -> int:
        """Elements of all partitions of stages 1 and 2 together."""
        return flat_elements(self.model.parameters, self.processes)

    @property
    def touched(self) -> int:
        """Elements of the trained parameters of which this process' flat partition holds all or a part, at most."""
        return touched_elements(self.model.parameters, self.processes)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """Elements that this process' optimizer updates, at stage 3 those of each sub-group."""
        if self.setup.stage == 3:
            return sub_groups(self.model.parameters, self.processes, self.setup.sub_group_size)
        return (self.flat // self.processes if self.setup.stage else self.model.trainable,)

    @property
    def updated_on_device(self) -> tuple[int, ...]:
        """Those of them that are updated on the device.

        A `ratio` below 1 leaves the first `int((1 - ratio) × groups)` sub-groups there.
        """
        if not self.offloads_optimizer:
            return self.updated
        return self.updated[: int((1 - self.setup.ratio) * len(self.updated))] if self.setup.stage == 3 else ()

    @property
    def _largest_trained(self) -> int:
        return max((p.elements for p in self.model.parameters if p.trainable), default=0)

    def partitions(self, width: int) -> Iterator[tuple[int, ParameterSize]]:
        """The parameters, each with the bytes of this process' partition at stage 3 by elements of `width` bytes."""
        return ((_ceil(p.elements, self.processes) * width, p) for p in self.model.parameters)

    def device_states(self) -> dict[str, int]:
        """Bytes on one device that outlast a step: weights, optimizer states, gradient buffers that are kept."""
        model, setup, width = self.model, self.setup, self.setup.weight_bytes
        if setup.stage == 3:
            return self._stage3_device()
        frozen = (model.elements - model.trainable) * width
        if setup.stage is None:
            frozen = sum(p.elements * p.count * p.width for p in model.parameters if not p.trainable)
        found = {"parameters": (self.flat if setup.stage else model.trainable) * width + frozen}
        if self.offloads_optimizer:
            return found | {"buckets": self._largest_trained * width}  # temp_grad_buffer_for_gpu_offload
        own = sum(self.updated) * _FP32
        found |= {"master weights": own} if self.has_master_weights else {}
        found["optimizer states"] = self.optimizer.states * own
        if setup.stage is None:
            buckets = model.trainable * _FP32 if self.processes > 1 else 0  # DDP's; gradients zero_grad frees
            found |= {"gradients": buckets} if setup.gradient_views else {"gradients": 0, "buckets": buckets}
        elif setup.sums_on_every_device:
            found["gradients"] = self.flat * _FP32
        return found

    def _stage3_device(self) -> dict[str, int]:
        setup, width, found = self.setup, self.setup.weight_bytes, {}
        if setup.offload_param == "none":
            found["parameters"] = sum(size * p.count for size, p in self.partitions(width))
        if self.processes > 1 or setup.offload_param != "none":
            # Each with its padding, trained or not.
            small = (size * p.count for size, p in self.partitions(width) if p.elements <= setup.persistence_threshold)
            found["persistent parameters"] = sum(small) * self.processes
        found["buckets"] = setup.reduce_bucket * width
        on_device = sum(self.updated_on_device)
        found["gradients"] = on_device * (_FP32 if self.offloads_optimizer else setup.gradient_bytes)
        found["master weights"] = on_device * _FP32  # also in fp32
        found["optimizer states"] = self.optimizer.states * on_device * _FP32
        return found

    def window_gradients(self) -> int:
        """Bytes of gradients on one device at the end of an accumulation window that are not among the states kept."""
        setup, width, trained = self.setup, self.setup.weight_bytes, self.model.trainable
        if setup.stage is None:
            return 0 if self.processes > 1 and setup.gradient_views else trained * width
        if setup.stage == 3:
            return 0
        if setup.stage == 0 or setup.sums_on_every_device:
            return trained * width  # at stage 1 added to the sums, and not freed before the step
        if setup.stage == 1:
            return trained * setup.gradient_bytes
        if self.sums_are_wider:
            return sum(self.updated) * _FP32  # also under offload, until the step
        return 0 if self.offloads_optimizer else self.touched * width

    def carried_gradients(self) -> int:
        """Bytes of gradients that the last backward of an accumulation window begins with, beside the states."""
        if self.setup.accumulation == 1:
            return 0
        if self.setup.stage is None and self.processes > 1:
            # Views too are outside DDP's buckets until the last backward.
            return self.model.trainable * self.setup.weight_bytes
        return self.window_gradients()

    def host_tensors(self) -> dict[str, tuple[int, ...]]:
        """Bytes of each tensor in CPU memory that outlasts a step, without buffers of the NVMe drive."""
        setup, width, own = self.setup, self.setup.weight_bytes, sum(self.updated)
        found: dict[str, tuple[int, ...]] = {}
        if setup.offload_param == "cpu":
            frozen = (size for size, p in self.partitions(width) if not p.trainable for _ in range(p.count))
            found["parameters"] = (own * width, *frozen)
        elif setup.offload_param == "nvme":
            kept = (size for size, p in self.partitions(width) if not _is_swapped(size) for _ in range(p.count))
            found["parameters"] = tuple(kept)
        if not self.offloads_optimizer:
            return found
        in_host = [n * _FP32 for n in self.updated[len(self.updated_on_device) :]]
        if setup.offload_optimizer == "nvme":
            in_host = [size for size in in_host if not _is_swapped(size)]
        found["master weights"] = tuple(in_host)
        found["optimizer states"] = tuple(in_host) * self.optimizer.states
        if setup.stage == 3:
            return found | {"gradients": (own * setup.gradient_bytes, *in_host)}
        found["gradients"] = (own * _FP32,)
        # The updated weights on their way back to the device, and one gradient on its way from there.
        found["staging"] = (own * width, self._largest_trained * width)
        if setup.stage == 2 and setup.gradient_bytes == width:
            # Every backward adds to a copy in CPU memory, since only the step tells that the accumulation window ends.
            found["gradients"] += (self.touched * width,)
        return found

    def nvme_states(self) -> dict[str, int]:
        """Bytes of one process' files on NVMe: tensors of 1 MiB or more."""
        found, width = {}, self.setup.weight_bytes
        if self.setup.offload_param == "nvme":
            files = (_in_blocks(size) * p.count for size, p in self.partitions(width) if _is_swapped(size))
            found["parameters"] = sum(files)
        if self.setup.offload_optimizer == "nvme":
            swapped = sum(_in_blocks(n * _FP32) for n in self.updated if _is_swapped(n * _FP32))
            found["master weights"] = swapped
            found["optimizer states"] = swapped * self.optimizer.states
            gradients = ((size, p.count) for size, p in self.partitions(_FP32) if p.trainable)
            found["gradients"] = sum(size * count for size, count in gradients if _is_swapped(size))
        return found

    def reduction_buffers(self) -> tuple[int, int]:
        """Bytes on the device that reducing gradients takes: from a backward's first gradient on, and each time beside.

        From the first gradient on, at stages 1 and 2: the contiguous bucket, with `overlap_comm` a second one, and at
        stage 2, where sums are in the weights' own type, the reduced gradients that are to be added to them. Each time
        that a bucket is full, at stage 2 the flattened copy that is all-reduced; at stage 3, whose bucket is among the
        states, the reordered one that is reduce-scattered, and what comes of it in the type of the sums.
        """
        setup, width = self.setup, self.setup.weight_bytes
        if not setup.stage or setup.sums_on_every_device:
            return 0, 0
        if setup.stage == 1:
            return setup.reduce_bucket * setup.gradient_bytes, 0
        filled = min(setup.reduce_bucket, self.model.trainable)
        if setup.stage == 3:
            return 0, filled * width + (filled // self.processes * _FP32 if self.sums_are_wider else 0)
        sums = setup.gradient_bytes == width and not self.offloads_optimizer and setup.accumulation > 1
        buckets = setup.reduce_bucket * width * (2 if setup.overlap_comm else 1)
        return buckets + (self.touched * width if sums else 0), filled * width

    def gradients_at_full_bucket(self) -> int:
        """Bytes of gradients on the device, not among the states, when a backward's first bucket is reduced."""
        if self.setup.stage == 2 and self.sums_are_wider:
            return sum(self.updated) * _FP32  # all sums are made at once, and stay until the step
        return self.carried_gradients()

    def gathered_parameters(self) -> int:
        """Bytes of gathered parameters that stage 3 holds on a device at once, beside those that stay unpartitioned.

        Gathering ahead starts anew at every module, so it runs ahead until `max_live_parameters` are there. And a
        module's parameters are not released after its forward where the backward needs them within
        `max_reuse_distance` elements of the trace, which visits what follows a module once on the way forth and once on
        the way back (three times where blocks are recomputed): at the end of a forward the last half (third) of that
        distance is gathered. Parameters that are gathered together come in one flat buffer and are copied out of it.
        """
        model, setup = self.model, self.setup
        if setup.stage != 3 or (self.processes == 1 and setup.offload_param == "none"):
            return 0
        passing = sum(p.elements * p.count for p in model.parameters if p.elements > setup.persistence_threshold)
        # This package has stage 3 gather the experts of a layer together, whichever a process chooses.
        experts = sum(p.elements * p.count for p in model.parameters if p.expert) // (model.layers or 1)
        largest = max(model.largest_module, experts, *(p.elements for p in model.parameters))
        ahead = setup.max_live_parameters if setup.prefetch_bucket else 0
        held = max(ahead, setup.max_reuse_distance // (3 if setup.activation_checkpointing else 2)) + largest
        in_flight = setup.prefetch_bucket + largest
        return (min(held, passing) + min(in_flight, passing)) * setup.weight_bytes

    def autocast_copies(self) -> int:
        """Bytes of the 16-bit copies of fp32 weights that autocast makes in a forward and its backward reads."""
        if self.setup.stage is not None or self.setup.precision == "no":
            return 0
        return sum(p.elements * p.count * 2 for p in self.model.parameters if p.trainable or p.width == _FP32)

    def flat_copy(self) -> int:
        """Bytes of the flat copy of all trained parameters that is made while the parameters themselves still exist."""
        return self.flat * self.setup.weight_bytes if self.has_master_weights and self.setup.stage != 3 else 0

    def step_moments(self) -> tuple[dict[str, int], ...]:
        """Bytes on the device in the course of a step that do not outlast it, moment by moment.

        Reducing (stages 0 and 1 wait for it until the step), making the flat fp32 gradients, updating.
        """
        setup, width = self.setup, self.setup.weight_bytes
        gradients = {"gradients": self.window_gradients()}
        own = max(self.updated_on_device, default=0)  # elements that one call of the optimizer updates
        update = own * self.optimizer.step_copies * _FP32
        if setup.sums_on_every_device or not self.has_master_weights:
            # At stage 1 the sums are reduced in 16 bits, in one piece, and the step reads them where they are.
            elements = {None: 0, 0: min(_STAGE0_BUCKET, self.model.trainable)}.get(setup.stage, self.flat)
            return {**gradients, "reduction buffers": elements * width}, {**gradients, "step transient": update}
        if setup.stage == 0:
            # A fused kernel gets flat fp32 gradients, made of separate ones; torch's optimizer works beside separate
            # ones.
            return ({**gradients, "step transient": own * _FP32 + (update or own * _FP32)},)
        if setup.stage == 3 and self.offloads_optimizer:
            # Gradients go to CPU memory one by one, to NVMe by sub-groups, and the norm of each is computed in fp64.
            one = self._largest_trained // self.processes
            swapped = max(self.updated, default=0) * _FP32 if setup.offload_optimizer == "nvme" else 0
            normed = one * setup.gradient_bytes + min(one, _NORMED) * _FP64
            return {"gradients": swapped, "step transient": normed}, {"step transient": update}
        if setup.stage == 3:
            sizes = _casting(own * setup.gradient_bytes, own, setup.gradient_bytes, update)
            return tuple({"step transient": size} for size in sizes)
        reduced = {**gradients, "reduction buffers": self.reduction_buffers()[0] if setup.stage == 1 else 0}
        if self.offloads_optimizer:
            return ({**reduced, "step transient": min(self._largest_trained, sum(self.updated)) * _FP64},)
        if setup.stage == 2 and self.sums_are_wider:
            return ({**gradients, "step transient": update},)  # the sums are flat and in fp32 by now
        kept = self.touched * width
        if setup.stage == 1:
            reduced["gradients"] += kept
        made, updating = _casting(own * width, own, width, update)
        return reduced, {"gradients": kept, "step transient": made}, {"step transient": updating}

    def swap_buffers(self) -> int:
        """Bytes of pinned CPU memory that are allocated as swap buffers for what is offloaded to NVMe.

        These are parameters and optimizer states.
        """
        setup, found = self.setup, 0
        largest_group = max(self.updated, default=0)
        if setup.offload_param == "nvme":
            # The parameter buffers; and the buffer from which updated parameters are written to NVMe, which DeepSpeed
            # sizes for unpartitioned parameters (`reserve_partitioned_swap_space`).
            found += (_PARAM_BUFFERS * setup.param_buffer + largest_group * self.processes) * setup.weight_bytes
        if setup.offload_optimizer == "nvme":
            found += _OPTIMIZER_BUFFERS * largest_group * _FP32
        return found


def _is_swapped(size: int) -> bool:
    return size >= _NVME_LEAST


def _in_blocks(size: int) -> int:
    return _ceil(size, _NVME_BLOCK) * _NVME_BLOCK


def _casting(flattened: int, elements: int, width: int, update: int) -> tuple[int, int]:
    """Bytes while gradients that were flattened become fp32, and while the optimizer reads these."""
    return flattened + (elements * _FP32 if width != _FP32 else 0), elements * _FP32 + update


# Rules of thumb: CUDA's context with the kernels that torch loads and cuBLAS's workspace; NCCL's channels.
CONTEXT_BYTES = 700 * 2**20
COMMUNICATION_BYTES = 300 * 2**20
# The share of what comes and goes that torch's allocator holds and cannot give.
FRAGMENTED = 0.05
# Python, torch, DeepSpeed and CUDA in CPU memory, for each process.
PROCESS_BYTES = 2**30

_OUTSIDE = ("context", "fragmentation")


@dataclass(frozen=True)
class Footprint:
    """Bytes by term.

    Attributes:
        device: of one device, in the phase that takes the most.
        device_phase: that phase: "initialisation", "forward" (its end, when all activations are there, and the loss'
            backward), "reduction" (the first gradients are made and reduced), "backward" (its end, when all gradients
            are there) or "step".
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
        """Bytes on one device."""
        return sum(self.device.values())

    @property
    def allocated_bytes(self) -> int:
        """What torch's allocator hands out at most on one device: `torch.cuda.max_memory_allocated`."""
        return max(sum(v for k, v in terms.items() if k not in _OUTSIDE) for terms in self.phases.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory on one node."""
        return sum(self.host.values())

    @property
    def nvme_bytes(self) -> int:
        """Bytes of NVMe on one node."""
        return sum(self.nvme.values())

    def excess(self, cluster: Cluster) -> float:
        """The fraction of a memory that this needs: of a device's, or of CPU memory if that is larger."""
        return max(self.device_bytes / cluster.device_bytes, self.host_bytes / max(1, cluster.host_bytes))


def footprint(work: Workload, setup: Setup, cluster: Cluster) -> Footprint:
    """The memory that training needs: of a device at its peak, of one node's CPU memory, and of its NVMe drive.

    Args:
        work: what is trained, in `setup.precision`; where its activations are not those of autocast, autocast's copies
            of the weights are added.
        setup: the strategy.
        cluster: the machines. Only their number of processes matters, and at stages 1 and 2 the device's memory, since
            DeepSpeed flattens parameters in CPU memory where it is too small.
    """
    if cluster.is_of_cpus:  # a bucket's pages are there once they are written
        setup = replace(setup, reduce_bucket=min(setup.reduce_bucket, work.model.trainable))
    memory = ProcessMemory(work.model, work.optimizer, setup, cluster.processes)
    states = {"buffers": work.model.buffer_bytes, **memory.device_states()}
    kept = work.activations.under(setup.stage)
    saved, forward, reducing, backward = kept.at(setup.micro_batch, checkpointing=setup.activation_checkpointing)
    moved = kept.moved.at(setup.micro_batch)
    if cluster.is_of_cpus:  # whose memory is the device's
        saved, moved = saved + moved, 0
    gathered = {"gathered parameters": memory.gathered_parameters()}
    buckets, copied = memory.reduction_buffers()
    at_end_of_forward = {
        "gradients": memory.carried_gradients(),
        "transient": forward,
        "activations": saved,
        # What was traced under autocast has the copies among what it saves.
        "autocast copies": 0 if work.activations.autocast else memory.autocast_copies(),
    }
    at_first_gradient = {**at_end_of_forward, "transient": max(reducing, 0), "activations": saved + min(reducing, 0)}
    at_first_gradient["reduction buffers"] = buckets
    # When a bucket is full, its share of the backward is over.
    left = 1 - min(1.0, setup.reduce_bucket / max(1, work.model.trainable))
    at_full_bucket = {
        **at_first_gradient,
        "activations": int(left * at_first_gradient["activations"]),
        "gradients": memory.gradients_at_full_bucket(),
        "reduction buffers": buckets + copied,
    }
    at_end_of_backward = {
        "gradients": memory.window_gradients(),
        "transient": backward,
        "reduction buffers": buckets + copied,
    }
    initial = {"parameters": states.get("parameters", 0), "flat copy": memory.flat_copy()}
    if setup.stage in (1, 2) and sum(_with_margins(initial, states, cluster).values()) > cluster.device_bytes:
        initial["flat copy"] = 0  # then DeepSpeed makes it in CPU memory
    phases = {
        "initialisation": initial,
        "forward": _sum(states, gathered, at_end_of_forward),
        "reduction": _sum(states, gathered, _largest(at_first_gradient, at_full_bucket)),
        "backward": _sum(states, gathered, at_end_of_backward),
        "step": _sum(states, _largest(*memory.step_moments())),
    }
    phases = {name: _with_margins(terms, states, cluster) for name, terms in phases.items()}
    peak = max(phases, key=lambda name: sum(phases[name].values()))
    host, pinned, locked = _host(memory, cluster.devices, moved)
    nvme = {k: v * cluster.devices for k, v in memory.nvme_states().items()}
    return Footprint(phases[peak], peak, host, pinned, locked, nvme, phases)


def _largest(*groups: Mapping[str, int]) -> Mapping[str, int]:
    return max(groups, key=lambda terms: sum(terms.values()))


def _sum(*groups: Mapping[str, int]) -> dict[str, int]:
    """All terms; of those that several groups have, the sum."""
    found: Counter[str] = Counter()
    for terms in groups:
        found.update(terms)
    return dict(found)


def _with_margins(terms: Mapping[str, int], states: Mapping[str, int], cluster: Cluster) -> dict[str, int]:
    found = {name: size for name, size in terms.items() if size}
    if cluster.is_of_cpus:
        return found  # no CUDA, and the C library gives back what is free
    comes_and_goes = sum(terms.values()) - sum(min(size, terms.get(name, 0)) for name, size in states.items())
    found["context"] = CONTEXT_BYTES + (COMMUNICATION_BYTES if cluster.processes > 1 else 0)
    found["fragmentation"] = int(FRAGMENTED * comes_and_goes)
    return found


def _host(memory: ProcessMemory, devices: int, moved: int) -> tuple[dict[str, int], int, int]:
    """Terms of one node, and what one process holds page-locked, by CUDA and by the NVMe drive's buffers.

    Args:
        memory: of one process.
        devices: processes of a node.
        moved: bytes of activations that each keeps there; torch rounds page-locked ones up beside that.
    """
    setup, locked, tensors = memory.setup, memory.swap_buffers(), memory.host_tensors()
    found = {"processes": PROCESS_BYTES, "NVMe buffers": locked, "activations": moved}
    found |= {name: sum(tensors[name]) for name in tensors}
    pinned = {}
    if setup.pin_memory:
        # The optimizer makes its states in plain memory, and stage 3 its master weights.
        plain = ("optimizer states", "master weights") if setup.stage == 3 else ("optimizer states",)
        pinned = {name: sum(map(_power_of_two, tensors[name])) for name in tensors if name not in plain}
        if setup.offload_param == "cpu":
            # zero.Init pins each partition, then all move into one tensor, and torch keeps what it has once pinned.
            sizes = memory.partitions(setup.weight_bytes)
            pinned["pinned before"] = sum(_power_of_two(size) * p.count for size, p in sizes if p.trainable)
    found |= pinned
    return {k: v * devices for k, v in found.items() if v}, sum(pinned.values()) + locked, locked


def _power_of_two(size: int) -> int:
    """What torch's allocator of page-locked memory takes for `size` bytes (CachingHostAllocator rounds up)."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


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
        """The time of the complete step."""
        return sum(self.terms.values())


def step_time(work: Workload, setup: Setup, cluster: Cluster) -> StepTime:
    """The time of `setup.accumulation` micro-batches on every process, and the update.

    Args:
        work: what is trained; where the operations of a forward are unknown, they are two per parameter and token.
        setup: the strategy.
        cluster: the machines.

    Raises:
        ValueError: a speed that this setup needs is not known of the cluster.
    """
    model, micro_batches = work.model, setup.accumulation
    forward, backward = _compute(model, work.activations, setup, cluster)
    compute = micro_batches * (forward + backward)
    beside = {
        "PCIe": _pcie_beside(model, setup, cluster),
        "NVMe": _seconds(_weights_from(model, setup, "nvme") / cluster.nodes, cluster.nvme_read, "nvme_read"),
    }
    if setup.stage == 3:
        beside["hooks"] = micro_batches * 2 * _HOOK_S * sum(p.count for p in model.parameters)
    between = _collectives(model, setup, cluster)
    waited = _waited_for(between, setup, micro_batches * forward, (micro_batches if setup.stage else 1) * backward)
    # They use different resources, so the slowest one alone is waited for.
    slowest = max(beside, key=lambda name: beside[name])
    wait = max(0.0, beside[slowest] - compute)
    if setup.stage == 3 and setup.overlap_comm:
        if sum(waited.values()) > wait:
            wait = 0.0
        else:
            waited = dict.fromkeys(between, 0.0)
    hidden = {name: min(seconds, compute) for name, seconds in beside.items()}
    hidden |= {name: between[name] - waited[name] for name in between}
    heads = micro_batches * _heads_between_devices(work, setup, cluster)
    terms = {"compute": compute, slowest: wait, **waited, "heads between devices": heads}
    update = _update(model, work.optimizer, setup, cluster)
    # Activations that `save_on_cpu` moves go and come in the computation's own stream.
    moved = 2 * micro_batches * work.activations.under(setup.stage).moved.at(setup.micro_batch)
    for name, seconds in (*update.items(), ("PCIe", _seconds(moved, cluster.pcie_bandwidth, "pcie_bandwidth"))):
        terms[name] = terms.get(name, 0.0) + seconds
    return StepTime(_above_zero(terms), _above_zero(hidden))


def _waited_for(between: Mapping[str, float], setup: Setup, forward: float, backward: float) -> dict[str, float]:
    """Seconds per step of what passes between devices that no computation hides.

    Args:
        between: all of it, by term.
        setup: the strategy.
        forward, backward: seconds per step of the forwards, and of those backwards beside which gradients are reduced.
    """
    gradients, weights = between.values()
    if setup.stage is None or (setup.stage == 2 and setup.overlap_comm):
        gradients = max(0.0, gradients - backward)
    elif setup.stage == 3 and setup.overlap_comm:  # a half of the weights comes for the forwards
        free = max(0.0, backward - weights / 2)
        weights = max(0.0, weights / 2 - forward) + max(0.0, weights / 2 - backward)
        gradients = max(0.0, gradients - free)
    return dict(zip(between, (gradients, weights), strict=True))


def _compute(model: ModelSizes, activations: Activations, setup: Setup, cluster: Cluster) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward: operations, or reading the weights where that takes longer.

    A backward computes the gradients of the inputs, as many operations as the forward, and of the trained weights, in
    their share as many again; with activation checkpointing it repeats the forward.
    """
    assumed = 2.0 * model.elements * activations.sample_length / cluster.shared_by
    flops = setup.micro_batch * (activations.flops_per_sample or assumed)
    speed = cluster.flops.get(setup.precision, 0.0)
    # Autocast reads fp32 weights, writes 16-bit copies and reads these.
    bytes_each = 8 if setup.stage is None and setup.precision != "no" else setup.weight_bytes
    read = _seconds(model.elements * bytes_each, cluster.memory_bandwidth, "memory_bandwidth")
    write = _seconds(model.trainable * bytes_each, cluster.memory_bandwidth, "memory_bandwidth")
    share = model.trainable / model.elements if model.elements else 1.0
    forward = max(_seconds(flops, speed, "flops"), read)
    backward = max(_seconds(flops * (1 + share), speed, "flops"), read + write)
    return forward, backward + (forward if setup.activation_checkpointing else 0.0)


def _collectives(model: ModelSizes, setup: Setup, cluster: Cluster) -> dict[str, float]:
    """Seconds per step of reducing gradients and of gathering weights, each in rings.

    Around a ring of N, a reduce-scatter or an all-gather of S bytes takes `S·(N-1)/N` over the slowest link, an
    all-reduce twice that. DDP reduces fp32 gradients. DeepSpeed reduces in the computation's type: stages 0 to 2 by
    all-reduces (`use_multi_rank_bucket_allreduce`), stage 2 after every micro-batch, stage 3 by reduce-scatters after
    every micro-batch. Stages 1 and 2 gather the new weights once per step, stage 3 all weights for each forward and
    each backward.
    """
    processes, micro_batches, weights = cluster.processes, setup.accumulation, setup.weight_bytes

    def ring(size: float) -> float:
        sent = size * (processes - 1) / processes
        between_nodes = _seconds(sent * (cluster.nodes > 1), cluster.network_bandwidth, "network_bandwidth")
        return max(_seconds(sent * (cluster.devices > 1), cluster.link_bandwidth, "link_bandwidth"), between_nodes)

    trained = ring(model.trainable * (_FP32 if setup.stage is None else weights))
    if setup.stage == 3:
        gradients, gathered = micro_batches * trained, micro_batches * 2 * ring(model.elements * weights)
    else:
        gradients, gathered = (micro_batches if setup.stage == 2 else 1) * 2 * trained, trained if setup.stage else 0.0
    return {"gradients between devices": gradients, "weights between devices": gathered}


def _heads_between_devices(work: Workload, setup: Setup, cluster: Cluster) -> float:
    """Seconds of one micro-batch in which processes that share samples exchange parts of the sequence for heads.

    Of N tokens of h elements, each layer's attention sends queries, keys, values and its result, 4·N·h, of which each
    of P processes has 4·N·h/P (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509, section 3); 1/P of that stays
    with it. The backward sends as much, and with activation checkpointing the second forward. What leaves a node is
    the same of all its processes together. Keys with fewer heads count as if they had all.
    """
    sharing, model = cluster.shared_by, work.model
    passes = (3 if setup.activation_checkpointing else 2) * (model.layers or 0)
    item = _FP32 if setup.precision == "no" else 2
    tokens = setup.micro_batch * work.activations.sample_length
    own = passes * 4 * tokens * (model.hidden_size or 0) * item / sharing
    in_node = gcd(sharing, cluster.devices)  # of a group, if some are elsewhere
    outside = cluster.devices * own * (sharing - in_node) / sharing
    return max(
        _seconds(own * (in_node - 1) / sharing, cluster.link_bandwidth, "link_bandwidth"),
        _seconds(outside, cluster.network_bandwidth, "network_bandwidth"),
    )


def _pcie_beside(model: ModelSizes, setup: Setup, cluster: Cluster) -> float:
    """Seconds per step in which gradients go to CPU memory, and offloaded weights come from it, beside the computation.

    Gradients that accumulate in CPU memory come back for every further micro-batch, at stage 2 by
    `async_accumulate_grad_in_cpu_via_gpu`, at stage 3 by `partition_grads`. Stage 2 with fp32 sums keeps them on the
    device.
    """
    size = _weights_from(model, setup, "cpu") + _weights_from(model, setup, "nvme")
    if setup.offload_optimizer != "none" and (
        setup.stage == 3 or (setup.stage == 2 and setup.gradient_bytes == setup.weight_bytes)
    ):
        size += (2 * setup.accumulation - 1) * model.trainable * setup.gradient_bytes
    return _over_pcie(size / cluster.processes, setup, cluster)


def _weights_from(model: ModelSizes, setup: Setup, device: str) -> int:
    """Bytes of offloaded weights that all processes together read in a step: for each forward and each backward."""
    return 2 * setup.accumulation * model.elements * setup.weight_bytes if setup.offload_param == device else 0


def _update(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster) -> dict[str, float]:
    """Seconds of the step itself, nothing beside it: the optimizer where its states are, and the way there and back.

    An optimizer with s states reads the master, the gradient and the states, and writes all but the gradient:
    `4·(3 + 2s)` bytes per element, 28 for Adam; the copy in 16 bits is 2 more.
    """
    shards, weights = cluster.processes if setup.stage else 1, setup.weight_bytes
    own = on_device = model.trainable / shards
    if setup.offload_optimizer != "none":
        on_device = float(sum(ProcessMemory(model, optimizer, setup, shards).updated_on_device))
    on_host = max(0.0, own - on_device)
    each = _FP32 * (3 + 2 * optimizer.states) + (weights if weights != _FP32 else 0)
    found = {"optimizer": _seconds(on_device * each, cluster.memory_bandwidth, "memory_bandwidth")}
    if setup.offload_optimizer == "none":
        return found
    in_stage3 = setup.stage == 3
    # Stage 3 copies the sums into the gradients of the master weights, in CPU memory; stages 1 and 2 bring them down.
    passes = _WITHOUT_KERNEL if optimizer.name not in _HOST_KERNELS else 1.0
    moved = on_host * each * passes + (own * 2 * _FP32 if in_stage3 else 0.0)
    found["optimizer on the CPU"] = _seconds(moved * cluster.devices, cluster.adam_bandwidth, "adam_bandwidth")
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
