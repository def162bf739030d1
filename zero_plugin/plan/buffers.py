"""What a process needs beside its model states: buckets, gathered parameters, transients, buffers of the NVMe drive."""

from __future__ import annotations

from zero_plugin.plan.partitions import flat_elements, persistent_elements, sub_groups
from zero_plugin.plan.situation import ModelSizes, OptimizerSizes, Setup
from zero_plugin.plan.states import sub_groups_on_device, weight_bytes

__all__ = [
    "autocast_copies",
    "flattening",
    "gathered_parameters",
    "host_swap_buffers",
    "reduction_buffers",
    "step_transient",
]

_FP32 = 4
_STAGE0_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
_PARAM_BUFFERS, _OPTIMIZER_BUFFERS = 5, 4  # `buffer_count` of the two offload sections


def reduction_buffers(model: ModelSizes, setup: Setup) -> int:
    """Bytes on the device that reducing gradients takes beside a backward.

    Stages 1 and 2: the contiguous bucket, a second one with `overlap_comm`, and the flattened copy that is all-reduced.
    Stage 3: the reordered copy that is reduce-scattered; its bucket is among the states.
    """
    bucket = min(setup.reduce_bucket, model.trainable)
    width = weight_bytes(setup)
    if setup.stage is None or (setup.stage == 1 and setup.precision == "bf16" and setup.gradient_bytes == _FP32):
        return 0
    if setup.stage == 0:
        return min(_STAGE0_BUCKET, model.trainable) * width
    if setup.stage == 3:
        return bucket * width
    return setup.reduce_bucket * width * (2 if setup.overlap_comm else 1) + bucket * width


def gathered_parameters(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of whole parameters that stage 3 holds on a device at once, beside those that stay whole.

    A module's parameters are released after its forward unless the backward needs them within `max_reuse_distance`
    elements of the trace. The trace visits what follows a module once on the way forth and once on the way back (three
    times where blocks are recomputed), so at the end of a forward the last half (third) of that distance is whole. What
    is fetched ahead comes as one flat buffer, and is copied out of it.
    """
    if setup.stage != 3 or (processes == 1 and setup.offload_param == "none"):
        return 0
    width = weight_bytes(setup)
    passing = model.elements - persistent_elements(model.parameters, setup.persistence_threshold)
    visits = 3 if setup.activation_checkpointing else 2
    largest = model.largest_module or max((p.elements for p in model.parameters), default=0)
    kept = setup.max_reuse_distance // visits + largest + setup.prefetch_bucket
    copied = min(setup.prefetch_bucket + largest, passing)
    return (min(kept, passing) + copied) * width


def autocast_copies(model: ModelSizes, setup: Setup) -> int:
    """Bytes of the 16-bit copies of fp32 weights that autocast makes in a forward and its backward reads."""
    return model.elements * 2 if setup.stage is None and setup.precision != "no" else 0


def flattening(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of the flat copy of all trained parameters that is made while the parameters themselves still exist."""
    if setup.stage in (None, 3) or (setup.stage == 0 and setup.precision == "no"):
        return 0
    return flat_elements(model.parameters, processes) * weight_bytes(setup)


def step_transient(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int) -> int:
    """Bytes on the device that live only during a step: the fp32 gradients that it reads, and the optimizer's own."""
    width, own = weight_bytes(setup), _updated_at_once(model, setup, processes)
    if own == 0:
        return 0
    scratch = optimizer.step_copies * own * _FP32
    if setup.stage is None or (setup.stage == 0 and width == _FP32):
        return scratch
    if setup.stage == 0:
        return scratch + own * (width + _FP32)
    if setup.stage == 3:
        flattened = own * setup.gradient_bytes if setup.offload_optimizer == "none" else 0
        return scratch + flattened + (own * _FP32 if flattened and setup.gradient_bytes != _FP32 else 0)
    if setup.gradient_bytes == _FP32 != width:
        return scratch
    return scratch + own * width + (own * _FP32 if width != _FP32 else 0)


def _updated_at_once(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Elements that one call of the optimizer updates on a device."""
    if setup.stage in (None, 0):
        return model.trainable
    if setup.stage == 3:
        return max(sub_groups_on_device(model, setup, processes), default=0)
    return flat_elements(model.parameters, processes) // processes if setup.offload_optimizer == "none" else 0


def host_swap_buffers(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of one process' page-locked buffers in host memory between NVMe and the rest."""
    if setup.stage != 3:
        return 0
    largest_group = max(sub_groups(model.parameters, processes, setup.sub_group_size), default=0)
    found = 0
    if setup.offload_param == "nvme":
        # The pool, and one sub-group's parameters on their way from the step to their files.
        found += (_PARAM_BUFFERS * setup.param_buffer + largest_group) * weight_bytes(setup)
    if setup.offload_optimizer == "nvme":
        found += _OPTIMIZER_BUFFERS * largest_group * _FP32
    return found
