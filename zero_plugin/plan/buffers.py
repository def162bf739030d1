"""What a process needs beside its model states: buckets, gathered parameters, transients, buffers of the NVMe drive."""

from __future__ import annotations

from zero_plugin.plan.partitions import flat_elements, sub_groups, touched_elements
from zero_plugin.plan.situation import ModelSizes, OptimizerSizes, ParameterSize, Setup
from zero_plugin.plan.states import sub_groups_on_device, sums_on_every_device, weight_bytes, window_gradients

__all__ = [
    "autocast_copies",
    "carried_gradients",
    "flattening",
    "gathered_parameters",
    "host_swap_buffers",
    "reduction_buffers",
    "step_moments",
]

_FP32 = 4
_STAGE0_BUCKET = 500_000_000  # elements: DeepSpeed's MEMORY_OPT_ALLREDUCE_SIZE
_PARAM_BUFFERS, _OPTIMIZER_BUFFERS = 5, 4  # `buffer_count` of the two offload sections


def reduction_buffers(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes on the device that reducing gradients takes beside a backward.

    Stages 1 and 2: the contiguous bucket, a second one with `overlap_comm`, and at stage 2 the flattened copy that is
    all-reduced and, where sums are in the weights' own type, the reduced gradients that are to be added to them.
    Stage 3: the reordered copy that is reduce-scattered; its bucket is among the states.
    """
    width = weight_bytes(setup)
    filled = min(setup.reduce_bucket, model.trainable) * width
    if setup.stage in (None, 0) or sums_on_every_device(setup):
        return 0
    if setup.stage == 1:
        return setup.reduce_bucket * setup.gradient_bytes
    if setup.stage == 2:
        sums = setup.gradient_bytes == width and setup.offload_optimizer == "none" and setup.accumulation > 1
        reduced = touched_elements(model.parameters, processes) * width if sums else 0
        return setup.reduce_bucket * width * (2 if setup.overlap_comm else 1) + filled + reduced
    return filled


def gathered_parameters(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of whole parameters that stage 3 holds on a device at once, beside those that stay whole.

    Gathering ahead starts anew at every module, so it runs ahead until `max_live_parameters` are there. And a module's
    parameters are not released after its forward where the backward needs them within `max_reuse_distance` elements of
    the trace, which visits what follows a module once on the way forth and once on the way back (three times where
    blocks are recomputed): at the end of a forward the last half (third) of that distance is whole. Parameters gathered
    together come in one flat buffer and are copied out of it.
    """
    if setup.stage != 3 or (processes == 1 and setup.offload_param == "none"):
        return 0
    passing = model.elements - sum(p.elements * p.count for p in model.parameters if _stays_whole(p, setup))
    largest = max(model.largest_module, _expert_layer(model), *(p.elements for p in model.parameters))
    ahead = setup.max_live_parameters if setup.prefetch_bucket else 0
    held = max(ahead, setup.max_reuse_distance // (3 if setup.activation_checkpointing else 2)) + largest
    in_flight = setup.prefetch_bucket + largest
    return (min(held, passing) + min(in_flight, passing)) * weight_bytes(setup)


def _expert_layer(model: ModelSizes) -> int:
    """Elements of one layer's experts: this package has stage 3 gather them together, whichever a process chooses."""
    return sum(p.elements * p.count for p in model.parameters if p.expert) // (model.layers or 1)


def _stays_whole(parameter: ParameterSize, setup: Setup) -> bool:
    return parameter.elements <= setup.persistence_threshold


def carried_gradients(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of gradients that the last backward of a window begins with, and that are not among the states."""
    if setup.accumulation == 1:
        return 0
    if setup.stage is None and processes > 1:
        return model.trainable * weight_bytes(setup)  # views too are outside DDP's buckets until the last backward
    return window_gradients(model, setup, processes)


def autocast_copies(model: ModelSizes, setup: Setup) -> int:
    """Bytes of the 16-bit copies of fp32 weights that autocast makes in a forward and its backward reads."""
    if setup.stage is not None or setup.precision == "no":
        return 0
    return sum(p.elements * p.count * 2 for p in model.parameters if p.trainable or p.width == _FP32)


def flattening(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of the flat copy of all trained parameters that is made while the parameters themselves still exist."""
    if setup.stage in (None, 3) or (setup.stage == 0 and setup.precision == "no"):
        return 0
    return flat_elements(model.parameters, processes) * weight_bytes(setup)


def step_moments(
    model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int
) -> tuple[dict[str, int], ...]:
    """Bytes on the device in the course of a step that do not outlast it, moment by moment.

    Reducing (stages 0 and 1 wait for it until the step), making the flat fp32 gradients, updating.
    """
    gradients, width = window_gradients(model, setup, processes), weight_bytes(setup)
    own = _updated_at_once(model, setup, processes)
    update = own * optimizer.step_copies * _FP32
    if setup.stage is None or (setup.stage == 0 and width == _FP32):
        reducing = 0 if setup.stage is None else min(_STAGE0_BUCKET, model.trainable) * width
        return (
            {"gradients": gradients, "reduction buffers": reducing},
            {"gradients": gradients, "step transient": update},
        )
    if setup.stage == 0:
        # A fused kernel gets flat fp32 gradients, made of separate ones; torch's optimizer works beside separate ones.
        return ({"gradients": gradients, "step transient": own * _FP32 + (update or own * _FP32)},)
    if sums_on_every_device(setup):
        # The sums are reduced in 16 bits, in one piece, and the step reads them where they are.
        return (
            {"gradients": gradients, "reduction buffers": flat_elements(model.parameters, processes) * width},
            {"gradients": gradients, "step transient": update},
        )
    if setup.stage == 3:
        flattened = own * setup.gradient_bytes if setup.offload_optimizer == "none" else 0
        return tuple({"step transient": size} for size in _casting(flattened, own, setup.gradient_bytes, update))
    reduced = {
        "gradients": gradients,
        "reduction buffers": reduction_buffers(model, setup, processes) if setup.stage == 1 else 0,
    }
    if setup.offload_optimizer != "none":
        return (reduced,)
    if setup.stage == 2 and setup.gradient_bytes != width:
        return ({"gradients": gradients, "step transient": update},)  # the sums are flat and in fp32 by now
    kept = touched_elements(model.parameters, processes) * width
    if setup.stage == 1:
        reduced["gradients"] += kept
    made, updating = _casting(own * width, own, width, update)
    return (reduced, {"gradients": kept, "step transient": made}, {"step transient": updating})


def _casting(flattened: int, elements: int, width: int, update: int) -> tuple[int, int]:
    """Bytes while gradients that were flattened become fp32, and while the optimizer reads these."""
    if not flattened:
        return 0, update
    return flattened + (elements * _FP32 if width != _FP32 else 0), elements * _FP32 + update


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
        # The pool; and for a sub-group on its way from the step to its files, room for whole parameters, not partitions
        # (`reserve_partitioned_swap_space`).
        found += (_PARAM_BUFFERS * setup.param_buffer + largest_group * processes) * weight_bytes(setup)
    if setup.offload_optimizer == "nvme":
        found += _OPTIMIZER_BUFFERS * largest_group * _FP32
    return found
