"""The costs of a strategy: memory of one device, of one node's CPU and of its NVMe drive, and the time of a step.

Memory. `ProcessMemory` first computes the model states of one process, which outlast a step. Its formulas follow
DeepSpeed 0.19's engine as this package sets it up. They come from DeepSpeed's source, and a test compares them with the
live tensors of real engines (tests/plan/test_live_states.py). They begin with the elements of each process: flat
groups, partitions and sub-groups, with their padding. Each phase of a step then adds its own terms: buckets, gathered
parameters, transients, and buffers for the NVMe drive.

Time follows a roofline model: the amount that each resource must process, divided by the resource's speed, and which of
these run at the same time. Sources of the amounts are the code of DeepSpeed 0.19's stages as this package runs them and
torch's DDP. For the bytes of a step they are ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857).

* DDP reduces gradients during the last backward.
* Under ZeRO, copies of gradients and weights over PCIe, and reads of weights from NVMe, overlap with the computation of
  their micro-batch.
* Stages 1 and 2 reduce between devices in the computation's own stream. With `overlap_comm`, stage 2 reduces during its
  backwards.
* Stage 3 runs with `overlap_comm`. It gathers ahead during each pass and reduces during each backward. A pass takes as
  long as its computation or its communication, whichever takes longer.
* Processes that share samples exchange heads in the computation's own stream.
* The step begins when the last gradient has arrived, and the next forward when the last weight has.
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
_NORMED: Final = 250_000_000  # elements of a gradient whose norm DeepSpeed computes in one piece

Parameters = tuple[ParameterSize, ...]


def flat_elements(parameters: Parameters, processes: int) -> int:
    """Return the elements of the flat tensor that stages 1 and 2 cut into equal partitions.

    It holds all trained parameters. DeepSpeed aligns every partition to two elements, for NCCL:
    `nccl_start_alignment_factor`. Each further parameter group adds at most `2 × processes` elements.
    """
    trained = sum(p.elements * p.count for p in parameters if p.trainable)
    return _ceil(trained, 2 * processes) * 2 * processes


@lru_cache(maxsize=256)
def touched_elements(parameters: Parameters, processes: int) -> int:
    """Return the elements of all trained parameters that one process's flat partition contains, completely or in part.

    The result is that of the process with the most. Gradients that are not accumulated in fp32 stay unpartitioned for
    each of these parameters.
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
    """Return one process's elements at stage 3, which pads each parameter to a multiple of the processes."""
    return sum(_ceil(p.elements, processes) * p.count for p in parameters if p.trainable == trainable)


@lru_cache(maxsize=256)
def sub_groups(parameters: Parameters, processes: int, size: int) -> tuple[int, ...]:
    """Return one process's elements in each sub-group of parameters that the stage-3 optimizer updates at a time.

    As in DeepSpeed's `_create_fp16_sub_groups`, parameters are added to a sub-group until it has at least `size`
    elements.
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


# DeepSpeed keeps tensors below this size in memory, and writes files in blocks of 1 KiB for each of the threads:
# MIN_AIO_BYTES and AIO_ALIGNED_BYTES of its swap_tensor/utils.py, with the `aio` section's defaults.
_NVME_LEAST = 2**20
_NVME_BLOCK = 1024
_STAGE0_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
_PARAM_BUFFERS, _OPTIMIZER_BUFFERS = 5, 4  # `buffer_count` of the two offload sections


@dataclass(frozen=True)
class ProcessMemory:
    """The bytes that one process takes of each memory, by term.

    Attributes:
        model: sizes of the model.
        optimizer: sizes of its states.
        setup: the strategy.
        processes: number of processes among which ZeRO partitions.
    """

    model: ModelSizes
    optimizer: OptimizerSizes
    setup: Setup
    processes: int

    @property
    def has_master_weights(self) -> bool:
        """Whether the optimizer updates fp32 copies; otherwise it updates the weights themselves."""
        return self.setup.stage is not None and (self.setup.stage > 0 or self.setup.weight_bytes != _FP32)

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer states are offloaded from the device, completely or in part."""
        return bool(self.setup.stage) and self.setup.offload_optimizer != "none"

    @property
    def sums_are_wider(self) -> bool:
        """Whether gradients are computed in 16 bits and accumulated in fp32."""
        return self.setup.gradient_bytes == _FP32 != self.setup.weight_bytes

    @property
    def flat(self) -> int:
        """Elements of all partitions of stages 1 and 2 together."""
        return flat_elements(self.model.parameters, self.processes)

    @property
    def touched(self) -> int:
        """Elements of the trained parameters that one process's flat partition overlaps, at most."""
        return touched_elements(self.model.parameters, self.processes)

    @cached_property
    def updated(self) -> tuple[int, ...]:
        """Elements that this process's optimizer updates; at stage 3 those of each sub-group."""
        if self.setup.stage == 3:
            return sub_groups(self.model.parameters, self.processes, self.setup.sub_group_size)
        return (self.flat // self.processes if self.setup.stage else self.model.trainable,)

    @property
    def updated_on_device(self) -> tuple[int, ...]:
        """The part of `updated` that is updated on the device.

        A `ratio` below 1 leaves the first `int((1 - ratio) × groups)` sub-groups there.
        """
        if not self.offloads_optimizer:
            return self.updated
        return self.updated[: int((1 - self.setup.ratio) * len(self.updated))] if self.setup.stage == 3 else ()

    @property
    def _largest_trained(self) -> int:
        return max((p.elements for p in self.model.parameters if p.trainable), default=0)

    def partitions(self, width: int) -> Iterator[tuple[int, ParameterSize]]:
        """Yield each parameter with the bytes of this process's partition at stage 3, for elements of `width` bytes."""
        return ((_ceil(p.elements, self.processes) * width, p) for p in self.model.parameters)

    def device_states(self) -> dict[str, int]:
        """Return the bytes on one device that outlast a step: weights, optimizer states, kept gradient buffers."""
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
            buckets = model.trainable * _FP32 if self.processes > 1 else 0  # DDP's; zero_grad frees gradients
            found |= {"gradients": buckets} if setup.gradient_views else {"gradients": 0, "buckets": buckets}
        elif setup.sums_on_every_device:
            found["gradients"] = self.flat * _FP32
        return found

    def _stage3_device(self) -> dict[str, int]:
        setup, width, found = self.setup, self.setup.weight_bytes, {}
        if setup.offload_param == "none":
            found["parameters"] = sum(size * p.count for size, p in self.partitions(width))
        if self.processes > 1 or setup.offload_param != "none":
            # All small parameters with their padding, trained or not.
            small = (size * p.count for size, p in self.partitions(width) if p.elements <= setup.persistence_threshold)
            found["persistent parameters"] = sum(small) * self.processes
        found["buckets"] = setup.reduce_bucket * width
        on_device = sum(self.updated_on_device)
        found["gradients"] = on_device * (_FP32 if self.offloads_optimizer else setup.gradient_bytes)
        found["master weights"] = on_device * _FP32  # also in fp32
        found["optimizer states"] = self.optimizer.states * on_device * _FP32
        return found

    def window_gradients(self) -> int:
        """Return the bytes of gradients on one device when an accumulation window ends, without the kept buffers."""
        setup, width, trained = self.setup, self.setup.weight_bytes, self.model.trainable
        if setup.stage is None:
            return 0 if self.processes > 1 and setup.gradient_views else trained * width
        if setup.stage == 3:
            return 0
        if setup.stage == 0 or setup.sums_on_every_device:
            return trained * width  # stage 1 adds them to the sums, and does not free them before the step
        if setup.stage == 1:
            return trained * setup.gradient_bytes
        if self.sums_are_wider:
            return sum(self.updated) * _FP32  # also under offload, until the step
        return 0 if self.offloads_optimizer else self.touched * width

    def carried_gradients(self) -> int:
        """Return the bytes of gradients at the start of a window's last backward, without the kept buffers."""
        if self.setup.accumulation == 1:
            return 0
        if self.setup.stage is None and self.processes > 1:
            # Views too are separate from DDP's buckets until the last backward.
            return self.model.trainable * self.setup.weight_bytes
        return self.window_gradients()

    def host_tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the bytes of each tensor in CPU memory that outlasts a step, without buffers for the NVMe drive."""
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
        # The updated weights that return to the device, and one gradient that arrives from it.
        found["staging"] = (own * width, self._largest_trained * width)
        if setup.stage == 2 and setup.gradient_bytes == width:
            # Every backward adds to a copy in CPU memory, since stage 2 learns only in the step that the accumulation
            # window ends.
            found["gradients"] += (self.touched * width,)
        return found

    def nvme_states(self) -> dict[str, int]:
        """Return the bytes of one process's files on NVMe: tensors of 1 MiB or more."""
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
        """Return the bytes on the device for reducing gradients: from the first gradient on, and per full bucket.

        From a backward's first gradient on, at stages 1 and 2: the contiguous bucket, and a second one with
        `overlap_comm`. Stage 2 with sums in the weights' own dtype also holds the reduced gradients that it adds to the
        sums. Whenever a bucket is full, at stage 2: the flattened copy that is all-reduced. At stage 3, whose bucket is
        among the states: the reordered copy that is reduce-scattered, and its result in the dtype of the sums.
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
        """Return the bytes of gradients, without the kept buffers, when a backward's first bucket is reduced."""
        if self.setup.stage == 2 and self.sums_are_wider:
            return sum(self.updated) * _FP32  # stage 2 allocates all sums together and keeps them until the step
        return self.carried_gradients()

    def gathered_parameters(self) -> int:
        """Return the bytes of gathered parameters that stage 3 holds on a device at the same time.

        Parameters that always stay unpartitioned do not count. Gathering ahead starts again at every module, so it
        continues until `max_live_parameters` are gathered.

        A module's parameters are not released after its forward if the backward needs them within `max_reuse_distance`
        elements of the trace. The trace visits what follows a module once in the forward and once in the backward, or
        three times if blocks are recomputed. At the end of a forward, the last half (or third) of that distance is
        therefore gathered. Parameters that are gathered together arrive in one flat buffer and are copied out of it.
        """
        model, setup = self.model, self.setup
        if setup.stage != 3 or (self.processes == 1 and setup.offload_param == "none"):
            return 0
        passing = sum(p.elements * p.count for p in model.parameters if p.elements > setup.persistence_threshold)
        # This package makes stage 3 gather all experts of a layer together, whichever expert a process selects.
        experts = sum(p.elements * p.count for p in model.parameters if p.expert) // (model.layers or 1)
        largest = max(model.largest_module, experts, *(p.elements for p in model.parameters))
        ahead = setup.max_live_parameters if setup.prefetch_bucket else 0
        held = max(ahead, setup.max_reuse_distance // (3 if setup.activation_checkpointing else 2)) + largest
        in_flight = setup.prefetch_bucket + largest
        return (min(held, passing) + min(in_flight, passing)) * setup.weight_bytes

    def autocast_copies(self) -> int:
        """Return the bytes of the 16-bit copies of fp32 weights that autocast makes for forward and backward."""
        if self.setup.stage is not None or self.setup.precision == "no":
            return 0
        return sum(p.elements * p.count * 2 for p in self.model.parameters if p.trainable or p.width == _FP32)

    def flat_copy(self) -> int:
        """Return the bytes of the flat copy of all trained parameters, made while the originals still exist."""
        return self.flat * self.setup.weight_bytes if self.has_master_weights and self.setup.stage != 3 else 0

    def step_moments(self) -> tuple[dict[str, int], ...]:
        """Return the bytes on the device during a step that do not outlast it, moment by moment.

        The moments are reducing (stages 0 and 1 delay this to the step), building the flat fp32 gradients, and
        updating.
        """
        setup, width = self.setup, self.setup.weight_bytes
        gradients = {"gradients": self.window_gradients()}
        own = max(self.updated_on_device, default=0)  # elements that one call of the optimizer updates
        update = own * self.optimizer.step_copies * _FP32
        if setup.sums_on_every_device or not self.has_master_weights:
            # At stage 1 the sums are reduced in 16 bits, in one piece, and the step reads them in their place.
            elements = {None: 0, 0: min(_STAGE0_BUCKET, self.model.trainable)}.get(setup.stage, self.flat)
            return {**gradients, "reduction buffers": elements * width}, {**gradients, "step transient": update}
        if setup.stage == 0:
            # A fused kernel takes flat fp32 gradients, built from separate ones. torch's optimizer works next to
            # separate ones.
            return ({**gradients, "step transient": own * _FP32 + (update or own * _FP32)},)
        if setup.stage == 3 and self.offloads_optimizer:
            # Gradients are copied to CPU memory one by one, or to NVMe by sub-groups, and the norm of each is computed
            # in fp64.
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
            return ({**gradients, "step transient": update},)  # the sums are already flat and in fp32
        kept = self.touched * width
        if setup.stage == 1:
            reduced["gradients"] += kept
        made, updating = _casting(own * width, own, width, update)
        return reduced, {"gradients": kept, "step transient": made}, {"step transient": updating}

    def swap_buffers(self) -> int:
        """Return the bytes of pinned CPU memory that NVMe offload of parameters and optimizer states needs."""
        setup, found = self.setup, 0
        largest_group = max(self.updated, default=0)
        if setup.offload_param == "nvme":
            # The parameter buffers, plus the buffer from which updated parameters are written to NVMe. DeepSpeed sizes
            # the latter for unpartitioned parameters (`reserve_partitioned_swap_space`).
            found += (_PARAM_BUFFERS * setup.param_buffer + largest_group * self.processes) * setup.weight_bytes
        if setup.offload_optimizer == "nvme":
            found += _OPTIMIZER_BUFFERS * largest_group * _FP32
        return found


def _is_swapped(size: int) -> bool:
    return size >= _NVME_LEAST


def _in_blocks(size: int) -> int:
    return _ceil(size, _NVME_BLOCK) * _NVME_BLOCK


def _casting(flattened: int, elements: int, width: int, update: int) -> tuple[int, int]:
    """Return the bytes while flattened gradients are cast to fp32, and while the optimizer reads the result."""
    return flattened + (elements * _FP32 if width != _FP32 else 0), elements * _FP32 + update


# Rules of thumb: CUDA's context with the kernels that torch loads and cuBLAS's workspace; NCCL's channels.
CONTEXT_BYTES = 700 * 2**20
COMMUNICATION_BYTES = 300 * 2**20
# The part of short-lived memory that torch's allocator reserves and cannot use.
FRAGMENTED = 0.05
# CPU memory of each process for Python, torch, DeepSpeed and CUDA.
PROCESS_BYTES = 2**30

_OUTSIDE = ("context", "fragmentation")


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory by term.

    Attributes:
        device: of one device, in the phase that takes the most.
        device_phase: the name of this phase. "initialisation"; "forward" (its end, when all activations exist, and the
            loss's backward); "reduction" (the first gradients are computed and reduced); "backward" (its end, when all
            gradients exist); or "step".
        host: of one node's CPU memory.
        pinned: page-locked bytes of `host` that one process holds.
        locked: the part of `pinned` that counts against `memlock`: the buffers for the NVMe drive.
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
        """The most that torch's allocator hands out on one device: `torch.cuda.max_memory_allocated`."""
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
        """Return the fraction of a device's memory that is needed, or of CPU memory if that is larger."""
        return max(self.device_bytes / cluster.device_bytes, self.host_bytes / max(1, cluster.host_bytes))


def footprint(work: Workload, setup: Setup, cluster: Cluster) -> Footprint:
    """Return the memory that training needs: of a device at its peak, of one node's CPU memory, and of its NVMe drive.

    Args:
        work: the training, in `setup.precision`. If its activations are not those of autocast, autocast's copies of the
            weights are added.
        setup: the strategy.
        cluster: the machines. Only their number of processes matters, and at stages 1 and 2 the device's memory:
            DeepSpeed flattens parameters in CPU memory if the device is too small.
    """
    if cluster.is_of_cpus:  # the system provides a bucket's pages only as they are written
        setup = replace(setup, reduce_bucket=min(setup.reduce_bucket, work.model.trainable))
    memory = ProcessMemory(work.model, work.optimizer, setup, cluster.processes)
    states = {"buffers": work.model.buffer_bytes, **memory.device_states()}
    kept = work.activations.under(setup.stage)
    saved, forward, reducing, backward = kept.at(setup.micro_batch, checkpointing=setup.activation_checkpointing)
    moved = kept.moved.at(setup.micro_batch)
    if cluster.is_of_cpus:  # CPU memory is the device's memory
        saved, moved = saved + moved, 0
    gathered = {"gathered parameters": memory.gathered_parameters()}
    buckets, copied = memory.reduction_buffers()
    at_end_of_forward = {
        "gradients": memory.carried_gradients(),
        "transient": forward,
        "activations": saved,
        # A trace under autocast already counts the copies among the saved bytes.
        "autocast copies": 0 if work.activations.autocast else memory.autocast_copies(),
    }
    at_first_gradient = {**at_end_of_forward, "transient": max(reducing, 0), "activations": saved + min(reducing, 0)}
    at_first_gradient["reduction buffers"] = buckets
    # When a bucket is full, its part of the backward is done.
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
    """Return all terms; terms of the same name are added."""
    found: Counter[str] = Counter()
    for terms in groups:
        found.update(terms)
    return dict(found)


def _with_margins(terms: Mapping[str, int], states: Mapping[str, int], cluster: Cluster) -> dict[str, int]:
    found = {name: size for name, size in terms.items() if size}
    if cluster.is_of_cpus:
        return found  # no CUDA, and the C library returns freed memory to the system
    comes_and_goes = sum(terms.values()) - sum(min(size, terms.get(name, 0)) for name, size in states.items())
    found["context"] = CONTEXT_BYTES + (COMMUNICATION_BYTES if cluster.processes > 1 else 0)
    found["fragmentation"] = int(FRAGMENTED * comes_and_goes)
    return found


def _host(memory: ProcessMemory, devices: int, moved: int) -> tuple[dict[str, int], int, int]:
    """Return the terms of one node, and the bytes that one process page-locks: in total, and for NVMe buffers alone.

    Args:
        memory: of one process.
        devices: processes of a node.
        moved: bytes of activations that each process keeps there, without torch's rounding of page-locked memory.
    """
    setup, locked, tensors = memory.setup, memory.swap_buffers(), memory.host_tensors()
    found = {"processes": PROCESS_BYTES, "NVMe buffers": locked, "activations": moved}
    found |= {name: sum(tensors[name]) for name in tensors}
    pinned = {}
    if setup.pin_memory:
        # The optimizer allocates its states in pageable memory, and stage 3 its fp32 master weights too.
        plain = ("optimizer states", "master weights") if setup.stage == 3 else ("optimizer states",)
        pinned = {name: sum(map(_power_of_two, tensors[name])) for name in tensors if name not in plain}
        if setup.offload_param == "cpu":
            # zero.Init pins each partition, then moves all into one tensor, and torch never releases memory that it has
            # pinned.
            sizes = memory.partitions(setup.weight_bytes)
            pinned["pinned before"] = sum(_power_of_two(size) * p.count for size, p in sizes if p.trainable)
    found |= pinned
    return {k: v * devices for k, v in found.items() if v}, sum(pinned.values()) + locked, locked


def _power_of_two(size: int) -> int:
    """Return the page-locked bytes for `size` bytes: torch's CachingHostAllocator rounds up."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


# CPU time of DeepSpeed's hooks for each parameter tensor and pass, measured on an EPYC core with 100 linear layers at
# stages 2 and 3. The hooks run ahead of the device and overlap with its work.
_HOOK_S: Final = 80e-6
# The optimizers for which DeepSpeed has a CPU kernel. For others torch loops over the tensors, which took ten times as
# long (0.13 versus 1.37 billion elements per second).
_HOST_KERNELS: Final = ("adam", "adamw", "lion", "adagrad")
_WITHOUT_KERNEL: Final = 10.0
_UNPINNED: Final = 0.5  # of PCIe's bandwidth: for pageable memory the driver copies through its own pinned buffer


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step.

    Attributes:
        terms: the parts of the step, one after the other.
        hidden: work that overlaps with `terms`, as far as it is hidden.
    """

    terms: Mapping[str, float]
    hidden: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time of the complete step."""
        return sum(self.terms.values())


def step_time(work: Workload, setup: Setup, cluster: Cluster) -> StepTime:
    """Return the time of `setup.accumulation` micro-batches on every process, plus the update.

    Args:
        work: the training. If the operations of a forward are unknown, two per parameter and token are assumed.
        setup: the strategy.
        cluster: the machines.

    Raises:
        ValueError: the cluster lacks a speed that this setup needs.
    """
    model, micro_batches = work.model, setup.accumulation
    forward, backward = _compute(model, work.activations, setup, cluster)
    compute = micro_batches * (forward + backward)
    overlapped = {
        "PCIe": _pcie_overlapped(model, setup, cluster),
        "NVMe": _seconds(_weights_from(model, setup, "nvme") / cluster.nodes, cluster.nvme_read, "nvme_read"),
    }
    if setup.stage == 3:
        overlapped["hooks"] = micro_batches * 2 * _HOOK_S * sum(p.count for p in model.parameters)
    between = _collectives(model, setup, cluster)
    waited = _waited_for(between, setup, micro_batches * forward, (micro_batches if setup.stage else 1) * backward)
    # They use different resources, so the step waits for the slowest one alone.
    slowest = max(overlapped, key=lambda name: overlapped[name])
    wait = max(0.0, overlapped[slowest] - compute)
    if setup.stage == 3 and setup.overlap_comm:
        if sum(waited.values()) > wait:
            wait = 0.0
        else:
            waited = dict.fromkeys(between, 0.0)
    hidden = {name: min(seconds, compute) for name, seconds in overlapped.items()}
    hidden |= {name: between[name] - waited[name] for name in between}
    heads = micro_batches * _heads_between_devices(work, setup, cluster)
    terms = {"compute": compute, slowest: wait, **waited, "heads between devices": heads}
    update = _update(model, work.optimizer, setup, cluster)
    # `save_on_cpu` copies activations in the computation's own stream, in both directions.
    moved = 2 * micro_batches * work.activations.under(setup.stage).moved.at(setup.micro_batch)
    for name, seconds in (*update.items(), ("PCIe", _seconds(moved, cluster.pcie_bandwidth, "pcie_bandwidth"))):
        terms[name] = terms.get(name, 0.0) + seconds
    return StepTime(_above_zero(terms), _above_zero(hidden))


def _waited_for(between: Mapping[str, float], setup: Setup, forward: float, backward: float) -> dict[str, float]:
    """Return the seconds per step of communication between devices that no computation hides.

    Args:
        between: all communication, by term.
        setup: the strategy.
        forward, backward: seconds per step of the forwards, and of the backwards during which gradients are reduced.
    """
    gradients, weights = between.values()
    if setup.stage is None or (setup.stage == 2 and setup.overlap_comm):
        gradients = max(0.0, gradients - backward)
    elif setup.stage == 3 and setup.overlap_comm:  # half of the weights is gathered for the forwards
        free = max(0.0, backward - weights / 2)
        weights = max(0.0, weights / 2 - forward) + max(0.0, weights / 2 - backward)
        gradients = max(0.0, gradients - free)
    return dict(zip(between, (gradients, weights), strict=True))


def _compute(model: ModelSizes, activations: Activations, setup: Setup, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of one micro-batch's forward and backward: computing, or reading the weights if slower.

    A backward computes the gradients of the inputs, with as many operations as the forward. It also computes those of
    the trained weights, with their fraction of as many operations. With activation checkpointing it repeats the
    forward.
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
    """Return the seconds per step of reducing gradients and of gathering weights, each in rings.

    In a ring of N, a reduce-scatter or an all-gather of S bytes takes `S·(N-1)/N` over the slowest link, an all-reduce
    twice that.

    * DDP reduces fp32 gradients. DeepSpeed reduces in the computation's dtype.
    * Stages 0 to 2 use all-reduces (`use_multi_rank_bucket_allreduce`), stage 2 after every micro-batch. Stages 1 and 2
      gather the new weights once per step.
    * Stage 3 uses reduce-scatters after every micro-batch, and gathers all weights for each forward and each backward.
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
    """Return the seconds per micro-batch in which processes exchange parts of a shared sample for heads.

    For N tokens of h elements, each layer's attention sends queries, keys, values and its result: 4·N·h elements. Each
    of P processes has 4·N·h/P of them and keeps 1/P of its own part (DeepSpeed-Ulysses, Jacobs et al. 2023,
    arXiv:2309.14509, section 3). The backward sends the same amount again, and so does the second forward with
    activation checkpointing. A node's processes share its network, so their outgoing bytes are added. Keys with fewer
    heads count as though they had all.
    """
    sharing, model = cluster.shared_by, work.model
    passes = (3 if setup.activation_checkpointing else 2) * (model.layers or 0)
    item = _FP32 if setup.precision == "no" else 2
    tokens = setup.micro_batch * work.activations.sample_length
    own = passes * 4 * tokens * (model.hidden_size or 0) * item / sharing
    in_node = gcd(sharing, cluster.devices)  # processes of a group on this node, if the group spans nodes
    outside = cluster.devices * own * (sharing - in_node) / sharing
    return max(
        _seconds(own * (in_node - 1) / sharing, cluster.link_bandwidth, "link_bandwidth"),
        _seconds(outside, cluster.network_bandwidth, "network_bandwidth"),
    )


def _pcie_overlapped(model: ModelSizes, setup: Setup, cluster: Cluster) -> float:
    """Return the seconds per step of PCIe copies that overlap with the computation.

    Gradients go to CPU memory, and offloaded weights come from there. Gradients that accumulate in CPU memory return
    for every further micro-batch: at stage 2 in `async_accumulate_grad_in_cpu_via_gpu`, at stage 3 in
    `partition_grads`. Stage 2 with fp32 sums keeps gradients on the device.
    """
    size = _weights_from(model, setup, "cpu") + _weights_from(model, setup, "nvme")
    if setup.offload_optimizer != "none" and (
        setup.stage == 3 or (setup.stage == 2 and setup.gradient_bytes == setup.weight_bytes)
    ):
        size += (2 * setup.accumulation - 1) * model.trainable * setup.gradient_bytes
    return _over_pcie(size / cluster.processes, setup, cluster)


def _weights_from(model: ModelSizes, setup: Setup, device: str) -> int:
    """Return the bytes of offloaded weights that all processes read in a step: for each forward and each backward."""
    return 2 * setup.accumulation * model.elements * setup.weight_bytes if setup.offload_param == device else 0


def _update(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of the step itself, which overlaps with nothing: the optimizer, and the copies to it and back.

    An optimizer with s states reads the master weight, the gradient and the states, and writes all but the gradient:
    `4·(3 + 2s)` bytes per element, 28 for Adam. The 16-bit copy adds 2.
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
    # Stage 3 copies the sums into the gradients of the master weights, in CPU memory. Stages 1 and 2 copy them from the
    # device.
    passes = _WITHOUT_KERNEL if optimizer.name not in _HOST_KERNELS else 1.0
    moved = on_host * each * passes + (own * 2 * _FP32 if in_stage3 else 0.0)
    found["optimizer on the CPU"] = _seconds(moved * cluster.devices, cluster.adam_bandwidth, "adam_bandwidth")
    down, up = (0.0 if in_stage3 else own * _FP32), (on_device * _FP32 if in_stage3 else 0.0)
    # Offloaded weights stay in CPU memory, but no weights are prefetched for the first forward.
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
