"""The exact model states of one process between two steps, on the device, in CPU memory and on NVMe.

The formulas are those of DeepSpeed 0.19's engine as this package sets it up, read off its source and compared with the
live tensors of real engines (tests/plan/test_live_states.py). They begin with how many elements each process has: flat
groups, partitions and sub-groups, with their padding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache
from itertools import accumulate

from zero_plugin.plan.situation import ModelSizes, OptimizerSizes, ParameterSize, Setup

Parameters = tuple[ParameterSize, ...]


def flat_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters as stages 1 and 2 lay them out: one flat tensor, cut into equal partitions.

    DeepSpeed aligns every partition to two elements, for NCCL: `nccl_start_alignment_factor`. Each further parameter
    group adds at most `2 × processes` elements.
    """
    return _ceil(_trained(parameters), 2 * processes) * 2 * processes


@lru_cache(maxsize=256)
def touched_elements(parameters: Parameters, processes: int) -> int:
    """Elements of the trained parameters of which one process' flat partition holds all or a part; of the process with
    the most.

    Gradients that are not accumulated in fp32 are kept whole for each of those parameters.
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
    """Elements of each sub-group that one process' stage-3 optimizer updates at a time: `_create_fp16_sub_groups`.

    A sub-group is closed by the parameter that brings it to `size` elements or more.
    """
    if size >= sharded_elements(parameters, processes, trainable=True):
        return (sharded_elements(parameters, processes, trainable=True),)
    groups, filled = [], 0
    for p in parameters:
        if p.trainable:
            for _ in range(p.count):
                filled += _ceil(p.elements, processes)
                if filled >= size:
                    groups.append(filled)
                    filled = 0
    return (*groups, filled) if filled else tuple(groups)


def persistent_elements(parameters: Parameters, processes: int, threshold: int) -> int:
    """Elements that stage 3 keeps whole on every device, trained or not, each parameter with its padding."""
    return sum(_ceil(p.elements, processes) * processes * p.count for p in parameters if p.elements <= threshold)


def _trained(parameters: Parameters) -> int:
    return sum(p.elements * p.count for p in parameters if p.trainable)


def _ceil(elements: int, divisor: int) -> int:
    return -(-elements // divisor)


_FP32 = 4
# DeepSpeed leaves what is smaller than this in memory, and writes files in blocks of 1 KiB for each of the threads:
# MIN_AIO_BYTES and AIO_ALIGNED_BYTES of its swap_tensor/utils.py, with the `aio` section's defaults.
_NVME_LEAST = 2**20
_NVME_BLOCK = 1024


def weight_bytes(setup: Setup) -> int:
    """Bytes of one element of the weights: without ZeRO they stay fp32, and forwards run under autocast."""
    return _FP32 if setup.stage is None or setup.precision == "no" else 2


def device_states(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int) -> dict[str, int]:
    """Bytes on one device that outlast a step: weights, optimizer states, gradient buffers that are kept.

    Args:
        model: its sizes.
        optimizer: what it keeps.
        setup: the strategy.
        processes: data-parallel world size.
    """
    width, trained, frozen = weight_bytes(setup), model.trainable, model.elements - model.trainable
    if setup.stage is None or (setup.stage == 0 and width == _FP32):
        buckets = trained * _FP32 if setup.stage is None and processes > 1 else 0  # DDP's; gradients zero_grad frees
        kept = {"gradients": buckets} if setup.gradient_views else {"gradients": 0, "buckets": buckets}
        own = sum(p.elements * p.count * p.width for p in model.parameters if not p.trainable)
        whole = trained * width + (own if setup.stage is None else frozen * width)
        return {"parameters": whole, "optimizer states": optimizer.states * trained * _FP32, **kept}
    if setup.stage == 0:
        states = optimizer.states * trained * _FP32
        return {"parameters": (trained + frozen) * width, "master weights": trained * _FP32, "optimizer states": states}
    if setup.stage == 3:
        return _stage3_device(model, optimizer, setup, processes)
    flat = flat_elements(model.parameters, processes)
    own = flat // processes
    found = {"parameters": (flat + frozen) * width}
    if setup.offload_optimizer == "none":
        found |= {"master weights": own * _FP32, "optimizer states": optimizer.states * own * _FP32}
        if sums_on_every_device(setup):
            found["gradients"] = flat * _FP32
    else:
        found["buckets"] = _largest_trained(model) * width  # temp_grad_buffer_for_gpu_offload
    return found


def _stage3_device(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int) -> dict[str, int]:
    width = weight_bytes(setup)
    own = sharded_elements(model.parameters, processes, trainable=True)
    frozen = sharded_elements(model.parameters, processes, trainable=False)
    found = {}
    if setup.offload_param == "none":
        found["parameters"] = (own + frozen) * width
    if processes > 1 or setup.offload_param != "none":
        found["persistent parameters"] = (
            persistent_elements(model.parameters, processes, setup.persistence_threshold) * width
        )
    found["buckets"] = setup.reduce_bucket * width
    on_device = own
    if setup.offload_optimizer == "none":
        found["gradients"] = own * setup.gradient_bytes
    else:
        on_device = sum(sub_groups_on_device(model, setup, processes))
        found["gradients"] = on_device * _FP32
    found["master weights"] = on_device * _FP32  # also in fp32
    found["optimizer states"] = optimizer.states * on_device * _FP32
    return found


def sub_groups_on_device(model: ModelSizes, setup: Setup, processes: int) -> tuple[int, ...]:
    """Elements of the sub-groups that a `ratio` below 1 leaves on the device: the first `int((1 - ratio) × groups)`."""
    groups = sub_groups(model.parameters, processes, setup.sub_group_size)
    if setup.stage != 3 or setup.offload_optimizer == "none":
        return groups
    return groups[: int((1 - setup.ratio) * len(groups))]


def window_gradients(model: ModelSizes, setup: Setup, processes: int) -> int:
    """Bytes of gradients on one device at the end of a window that are not among the states kept."""
    width, trained = weight_bytes(setup), model.trainable
    if setup.stage is None:
        return 0 if processes > 1 and setup.gradient_views else trained * width
    if setup.stage == 0:
        return trained * width
    if setup.stage == 3:
        return 0
    if sums_on_every_device(setup):
        return trained * width  # added to the sums, and not freed before the step
    if setup.stage == 1:
        return trained * setup.gradient_bytes
    if setup.gradient_bytes == _FP32 != width:
        return flat_elements(model.parameters, processes) // processes * _FP32  # also under offload, until the step
    return 0 if setup.offload_optimizer != "none" else touched_elements(model.parameters, processes) * width


def host_tensors(
    model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int
) -> dict[str, tuple[int, ...]]:
    """Bytes of each tensor of one process in host memory that outlasts a step, without buffers of the NVMe drive."""
    if setup.stage == 3:
        return _stage3_host(model, optimizer, setup, processes)
    if setup.stage in (None, 0) or setup.offload_optimizer == "none":
        return {}
    width = weight_bytes(setup)
    own = flat_elements(model.parameters, processes) // processes
    found = {
        "master weights": (own * _FP32,),
        "optimizer states": (own * _FP32,) * optimizer.states,
        "gradients": (own * _FP32,),
        # The updated weights on their way back to the device, and one gradient on its way from there.
        "staging": (own * width, _largest_trained(model) * width),
    }
    if setup.stage == 2 and setup.gradient_bytes == width:
        # Every backward adds to a host copy, since only the step tells that the window ends.
        found["gradients"] = (own * _FP32, touched_elements(model.parameters, processes) * width)
    return found


def _stage3_host(
    model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int
) -> dict[str, tuple[int, ...]]:
    width = weight_bytes(setup)
    own = sharded_elements(model.parameters, processes, trainable=True)
    found: dict[str, tuple[int, ...]] = {}
    if setup.offload_param == "cpu":
        frozen = (_sizes(p, processes, width) for p in model.parameters if not p.trainable)
        found["parameters"] = (own * width, *(size for sizes in frozen for size in sizes))
    elif setup.offload_param == "nvme":
        sizes = (size for p in model.parameters for size in _sizes(p, processes, width))
        found["parameters"] = tuple(size for size in sizes if not _is_swapped(size))
    if setup.offload_optimizer != "none":
        groups = sub_groups(model.parameters, processes, setup.sub_group_size)
        in_host = [n * _FP32 for n in groups[len(sub_groups_on_device(model, setup, processes)) :]]
        if setup.offload_optimizer == "nvme":
            in_host = [size for size in in_host if not _is_swapped(size)]
        found["master weights"] = tuple(in_host)
        found["optimizer states"] = tuple(in_host) * optimizer.states
        found["gradients"] = (own * setup.gradient_bytes, *in_host)
    return found


def _sizes(parameter: ParameterSize, processes: int, width: int) -> tuple[int, ...]:
    return (-(-parameter.elements // processes) * width,) * parameter.count


def nvme_states(model: ModelSizes, optimizer: OptimizerSizes, setup: Setup, processes: int) -> dict[str, int]:
    """Bytes of one process' files on NVMe: tensors of 1 MiB or more."""
    if setup.stage != 3:
        return {}
    width = weight_bytes(setup)
    found = {}
    if setup.offload_param == "nvme":
        sizes = ((-(-p.elements // processes) * width, p.count) for p in model.parameters)
        found["parameters"] = sum(_in_blocks(size) * count for size, count in sizes if _is_swapped(size))
    if setup.offload_optimizer == "nvme":
        groups = sub_groups(model.parameters, processes, setup.sub_group_size)
        swapped = sum(_in_blocks(n * _FP32) for n in groups if _is_swapped(n * _FP32))
        found["master weights"] = swapped
        found["optimizer states"] = swapped * optimizer.states
        gradients = ((-(-p.elements // processes) * _FP32, p.count) for p in model.parameters if p.trainable)
        found["gradients"] = sum(size * count for size, count in gradients if _is_swapped(size))
    return found


def sums_on_every_device(setup: Setup) -> bool:
    """Whether DeepSpeed takes its BF16_Optimizer, which keeps fp32 gradients of all parameters on every device."""
    sums_in_fp32 = setup.precision == "bf16" and setup.gradient_bytes == _FP32
    return setup.stage == 1 and sums_in_fp32 and setup.offload_optimizer == "none"


def _largest_trained(model: ModelSizes) -> int:
    return max((p.elements for p in model.parameters if p.trainable), default=0)


def _is_swapped(size: int) -> bool:
    return size >= _NVME_LEAST


def _in_blocks(size: int) -> int:
    return -(-size // _NVME_BLOCK) * _NVME_BLOCK
