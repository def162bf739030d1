"""The partitions of a model that is not prepared yet: their memory, and writing into them wherever they lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import nn

from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.fragments import WEIGHT, Fragment, whole_fragment
from zero_plugin.strategies.named_tensors import persistent_tensors

__all__ = ["give_partition", "partitions_to_fill"]


def give_partition(parameter: Any, init: Any) -> None:
    """Give a parameter its `ds_tensor`, as zero.Init would when it partitions one that is whole, but without values.

    Args:
        parameter: converted by `init`.
        init: the zero.Init that knows where partitions are.
    """
    size = parameter.ds_numel_aligned // init._partition_world_size(parameter)
    on_nvme = init.param_swapper is not None and init.param_swapper.swappable_tensor(numel=size)
    if on_nvme:
        partition = torch.empty(0, dtype=parameter.dtype)
    elif parameter.ds_persist:
        partition = torch.empty(size, dtype=parameter.dtype, device=init.local_device)
    else:
        host = init.remote_device in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme)
        partition = torch.empty(size, dtype=parameter.dtype, device="cpu" if host else init.local_device)
        if host and init.pin_memory:
            partition = get_accelerator().pin_memory(partition)
    partition.ds_numel = size  # type: ignore[attr-defined]
    partition.status = (  # type: ignore[attr-defined]
        PartitionedParamStatus.NOT_AVAILABLE if on_nvme else PartitionedParamStatus.AVAILABLE
    )
    partition.final_location = OffloadDeviceEnum.nvme if on_nvme else None  # type: ignore[attr-defined]
    parameter.ds_tensor = partition


def partitions_to_fill(module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
    """See `Strategy.fragments_to_fill`; a partition on NVMe is in one of its swapper's buffers while it is filled.

    Raises:
        CheckpointError: a partition is quantized.
    """
    for name, tensor in persistent_tensors(module, names):
        if not hasattr(tensor, "ds_id"):
            yield whole_fragment(name, tensor, 0, 1)
            continue
        parameter: Any = tensor
        partition, size = parameter.ds_tensor, parameter.ds_tensor.ds_numel
        if hasattr(partition, "ds_quant_scale"):
            raise CheckpointError(f"{name} is partitioned in quantized form, which no file can be read into.")
        start = min(size * dist.get_rank(group=parameter.ds_process_group), parameter.ds_numel)
        count = min(size, parameter.ds_numel - start)
        shape = tuple(parameter.ds_shape)
        parameter.ds_secondary_tensor = None  # a second copy (zero_hpz_partition_size), which the next gather renews
        if partition.final_location != OffloadDeviceEnum.nvme:
            yield Fragment(WEIGHT, name, shape, start, partition.detach().view(-1)[:count], (0, count))
            continue
        swapper = parameter.nvme_swapper
        values = swapper.get_buffer(parameter, size)
        values[count:].zero_()
        try:
            yield Fragment(WEIGHT, name, shape, start, values[:count], (0, count))
            swapper.swap_out_and_release([parameter])
        finally:
            swapper.remove_partition_and_release_buffers([parameter])
