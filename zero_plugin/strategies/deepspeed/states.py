"""Where the weights, masters and optimizer states of an engine lie in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.strategies.deepspeed.bias_correction import replay_bias_correction
from zero_plugin.strategies.fragments import WEIGHT, Fragment, share_of, whole_fragment
from zero_plugin.strategies.named_tensors import persistent_tensors
from zero_plugin.strategies.optimizer_states import OptimizedPiece, whole_pieces

__all__ = [
    "engine_blocks",
    "engine_pieces",
    "engine_weights",
    "fetched_weights",
    "find_written_weights",
    "follow_written_weights",
    "reading_engine",
    "refuse_unreachable",
    "unreachable_by",
]


_REPLACED = (
    "the values of {name} were replaced after prepare() (p.data = …, model.to(…), model.half()): ZeRO steps the memory "
    "that they were in, so that the model would train no more.\n"
    "Convert the model before prepare(). Write values in place, inside `with accelerator.whole_weights(model):`."
)


def refuse_unreachable(engine: Any, what: str = "save_state and load_state") -> None:
    """Raise where states lie that cannot be told apart, or reached, by parameter name.

    Args:
        engine: whose states.
        what: would have to reach them.

    Raises:
        CheckpointError: see above; it says which setting is the cause.
    """
    if cause := unreachable_by(engine):
        raise CheckpointError(
            f"{what} cannot reach {cause} yet; nothing was written or read.\n"
            "Train without it, or save the weights alone with accelerator.save_model()."
        )


def unreachable_by(engine: Any) -> str:
    """The setting by which states cannot be told apart, or reached, by parameter name; "" where they can."""
    wrapper = engine.optimizer
    causes = {
        "DeepSpeed's own expert parallelism (deepspeed.moe)": getattr(engine, "has_moe_layers", False),
        "zenflow": getattr(wrapper, "zenflow", False),
        "super_offload": type(wrapper).__name__ == "SuperOffloadOptimizer_Stage3",  # another process has its states
        "Muon at stage 3": getattr(wrapper, "use_muon", False),
        "mics_shard_size": type(wrapper).__name__ == "MiCS_Optimizer",
        "torch_autocast in fp16": engine.torch_autocast_enabled() and engine.fp16_enabled(),
    }
    return next((cause for cause, holds in causes.items() if holds), "")


def engine_weights(engine: Any) -> Iterator[Fragment]:
    """See `Session.weight_fragments`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, tensor in persistent_tensors(engine.module):
        if not hasattr(tensor, "ds_id"):
            yield whole_fragment(name, tensor, rank, world_size)
            continue
        partitioned: Any = tensor
        start, count = _partition(partitioned)
        # What stands in for a partition on NVMe is in half precision, whatever the model's type.
        values = tensor.new_empty(0) if _is_swapped_out(tensor) else partitioned.ds_tensor.detach().view(-1)[:count]
        yield Fragment(WEIGHT, name, tuple(partitioned.ds_shape), start, values, (0, count))


def fetched_weights(engine: Any, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:
    """See `Session.fetched`: from NVMe one after another, as many bytes in memory as a forward needs for one layer."""
    swapped: dict[str, Any] = {name: p for name, p in engine.module.named_parameters() if _is_swapped_out(p)}
    for fragment in fragments:
        parameter = swapped.get(fragment.name)
        if parameter is None:
            yield fragment
            continue
        swapper = parameter.nvme_swapper
        swapper.swap_in([parameter], async_op=False)
        try:
            yield replace(fragment, values=parameter.ds_tensor.detach().view(-1)[: fragment.written[1]])
            if changing:
                swapper.swap_out_and_release([parameter])
        finally:
            if not _is_swapped_out(parameter):
                swapper.remove_partition_and_release_buffers([parameter])


def engine_pieces(engine: Any) -> list[OptimizedPiece]:
    """See `Session.optimized_pieces`."""
    wrapper, base = engine.optimizer, engine.basic_optimizer
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    if base is None:
        return []
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage3_pieces(wrapper, names))
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        groups = zip(
            wrapper.bit16_groups, wrapper.bit16_groups_flat, wrapper.single_partition_of_fp32_groups, strict=True
        )
        return list(_flat_pieces(wrapper, groups, names))
    if isinstance(wrapper, BF16_Optimizer):
        groups = zip(wrapper.bf16_groups, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition, strict=True)
        return list(_flat_pieces(wrapper, groups, names))
    if isinstance(wrapper, FP16_Optimizer):
        return list(_joined_pieces(wrapper, names))
    if isinstance(wrapper, FP16_UnfusedOptimizer):
        return list(_separate_pieces(wrapper, names))
    return whole_pieces(base, engine.module, dist.get_rank(), dist.get_world_size())


def engine_blocks(engine: Any, *, changing: bool) -> Iterator[list[OptimizedPiece]]:
    """See `Session.blocks`: with NVMe, one sub-group of stage 3 after another, as in a step."""
    wrapper, pieces = engine.optimizer, engine_pieces(engine)
    swaps = getattr(wrapper, "swap_optimizer", False)
    if not swaps and not getattr(wrapper, "params_in_nvme_and_cpu", False):
        yield pieces
        return
    if changing and swaps:
        wrapper.optimizer_swapper.purge_state()  # the states that there are now; those to come are made anew
    for index, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        is_swapped = wrapper._swappable_optimizer_subgroup(index)
        if is_swapped:
            if changing:
                wrapper.optimizer.state.pop(flat, None)
            wrapper._optimizer_states_and_gradient_swap_in(index)
        yield [piece for piece in pieces if piece.stepped is flat]
        if changing:
            wrapper._reassign_or_swap_out_partitioned_parameters(index)
        if is_swapped and changing:
            wrapper._optimizer_states_and_gradient_swap_out(index)
        elif is_swapped:
            wrapper._release_swap_buffers(index)


def follow_written_weights(engine: Any) -> None:
    """Have the masters take over what a script has written into the weights, and nothing else.

    A master whose rounding is what the weight is has not been written: it keeps the digits that 16 bits do not hold.
    """
    for _, master, weight in _masters_beside_weights(engine):
        master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))


def find_written_weights(engine: Any) -> list[str]:
    """Names of the weights that are not the rounding of this process' masters, as they are after each step."""
    beside = _masters_beside_weights(engine)
    return [name for name, master, weight in beside if not torch.equal(master.to(weight.dtype), weight)]


def _masters_beside_weights(engine: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, masters and weights, flat, of what this process steps; both where the masters are."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    for piece in engine_pieces(engine):
        parameter = parameters[piece.name]
        is_partitioned = hasattr(parameter, "ds_id")
        start, values = (0, parameter.ds_tensor) if is_partitioned else (piece.start, parameter)
        master = piece.stepped.detach().view(-1)[piece.offset : piece.offset + piece.count]
        yield piece.name, master, values.detach().view(-1)[start : start + piece.count].to(master.device)


@contextmanager
def reading_engine(engine: Any) -> Iterator[None]:
    """See `Session.reading`."""
    wrapper = engine.optimizer
    offload = getattr(wrapper, "parameter_offload", wrapper)
    partitions = hasattr(offload, "partition_all_parameters")
    if partitions:
        offload.partition_all_parameters()  # else the next forward would use what small parameters were gathered to
    yield
    for optimizer in (engine.basic_optimizer, getattr(wrapper, "backup_optimizer", None)):
        replay_bias_correction(optimizer)
    if partitions:
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            wrapper.invalidate_secondary_tensor()
        if kept := offload.persistent_parameters:
            kept[0].all_gather(kept)
    elif hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        if wrapper.optimizer.state:
            wrapper._lazy_init_hp_params_optimizer_state()  # for DeepSpeed's safe_get_full_optimizer_state


def _is_swapped_out(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE


def _partition(parameter: Any) -> tuple[int, int]:
    """Start and length of this process' part of a partitioned parameter; the last parts are padded."""
    size = parameter.partition_numel()
    start = min(size * dist.get_rank(group=parameter.ds_process_group), parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


def _stage3_pieces(wrapper: Any, names: dict[int, str]) -> Iterator[OptimizedPiece]:
    for index, parameters in enumerate(wrapper.fp16_groups):
        on_host = not wrapper.offload_optimizer or wrapper.subgroup_to_device[index] == "cpu"
        optimizer = wrapper.optimizer if on_host else wrapper.backup_optimizer
        offset = 0
        for p in parameters:
            start, count = _partition(p)
            yield OptimizedPiece(
                name=names[id(p)],
                shape=tuple(p.ds_shape),
                group=wrapper.sub_group_to_group_id[index],
                start=start,
                count=count,
                stepped=wrapper.fp32_partitioned_groups_flat[index],
                offset=offset,
                written=(0, count),
                optimizer=optimizer,
            )
            offset += p.partition_numel()


def _flat_pieces(wrapper: Any, groups: Any, names: dict[int, str]) -> Iterator[OptimizedPiece]:
    """Stages 1 and 2: each process steps its part of a flat buffer that joins a group's parameters in some order."""
    for index, (parameters, flat, part) in enumerate(groups):
        part_start = part.numel() * dist.get_rank(group=wrapper.real_dp_process_group[index])
        for p in parameters:
            begin = _offset_in(flat, p)
            if not 0 <= begin <= flat.numel() - p.numel():
                raise LoopError(_REPLACED.format(name=names[id(p)]))
            start = min(max(part_start - begin, 0), p.numel())
            count = max(0, min(part_start + part.numel(), begin + p.numel()) - (begin + start))
            offset = begin + start - part_start if count else 0
            yield OptimizedPiece(
                names[id(p)], tuple(p.shape), index, start, count, part, offset, (0, count), wrapper.optimizer
            )


def _joined_pieces(wrapper: Any, names: dict[int, str]) -> Iterator[OptimizedPiece]:
    """Stage 0 in 16 bits with an elementwise optimizer: every process steps one flat buffer per group."""
    for index, (parameters, flat) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups_flat, strict=True)):
        offset = 0
        for p in parameters:
            share = _share(p)
            yield OptimizedPiece(
                names[id(p)], tuple(p.shape), index, 0, p.numel(), flat, offset, share, wrapper.optimizer
            )
            offset += p.numel()


def _separate_pieces(wrapper: Any, names: dict[int, str]) -> Iterator[OptimizedPiece]:
    """Stage 0 in 16 bits with any other optimizer: every process steps a master of each parameter."""
    for index, (parameters, masters) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)):
        for p, master in zip(parameters, masters, strict=True):
            yield OptimizedPiece(
                names[id(p)], tuple(p.shape), index, 0, p.numel(), master, 0, _share(p), wrapper.optimizer
            )


def _offset_in(flat: Tensor, parameter: nn.Parameter) -> int:
    # The addresses tell it for every order and padding that a configuration can ask for (round_robin_gradients, …).
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size() if parameter.numel() else 0


def _share(parameter: nn.Parameter) -> tuple[int, int]:
    return share_of(parameter.numel(), dist.get_rank(), dist.get_world_size())
