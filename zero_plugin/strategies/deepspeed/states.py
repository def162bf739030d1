"""Find an engine's weights, fp32 master weights and optimizer states in this process, and overwrite them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.strategies.optimizer_states import OptimizedPiece, unpartitioned_pieces
from zero_plugin.tensors.modules import (
    WEIGHT,
    Fragment,
    partition_of,
    persistent_tensors,
    unpartitioned_fragment,
)

_NEGLIGIBLE: Final = 2.0**-26  # below it, 1 - βᵗ is 1 in fp32, whichever way βᵗ was computed


def replay_bias_correction(optimizer: Any) -> None:
    """Repeat the past steps of DeepSpeed's CPU Adam on an unused element, to restore the bias correction bitwise.

    The kernel multiplies βᵗ by β in each step. If the step number is not the next one, as after loading, the kernel
    computes βᵗ as a power. The two differ in the last digit, so a resumed run would not be bitwise identical.
    Args:
        optimizer: any optimizer; only DeepSpeed's CPU Adam is changed.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)
    groups = optimizer.param_groups
    if max(max(group["betas"]) ** steps for group in groups) < _NEGLIGIBLE:
        return
    unused = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        for group in groups:  # the kernel shares one βᵗ, and uses a power again if β changes between groups
            betas = group["betas"]
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, step, 0.0, *betas, 1.0, 0.0, group["bias_correction"], *unused
            )


_REPLACED = (
    "the values of {name} were replaced after prepare() (p.data = …, model.to(…), model.half()): ZeRO updates the "
    "previous memory, so the model would no longer be trained.\n"
    "Convert the model before prepare(). Write values in place, inside `with accelerator.whole_weights(model):`."
)


def refuse_unreachable(engine: Any, what: str = "save_state and load_state") -> None:
    """Raise if the states of an engine are not accessible by parameter name.

    Args:
        engine: the engine.
        what: the operation that needs them, for the message.

    Raises:
        CheckpointError: the states are not accessible; the message names the setting that causes this.
    """
    if cause := unreachable_by(engine):
        raise CheckpointError(
            f"{what} does not support {cause} yet; nothing was written or read.\n"
            "Train without it, or save the weights alone with accelerator.save_model()."
        )


def unreachable_by(engine: Any) -> str:
    """Return the setting that makes states inaccessible by parameter name; "" if they are accessible."""
    wrapper = engine.optimizer
    causes = {
        "DeepSpeed's own expert parallelism (deepspeed.moe)": getattr(engine, "has_moe_layers", False),
        "zenflow": getattr(wrapper, "zenflow", False),
        "super_offload": type(wrapper).__name__ == "SuperOffloadOptimizer_Stage3",  # its states are in another process
        "Muon with offload to NVMe": getattr(wrapper, "use_muon", False) and wrapper.swap_optimizer,
        "torch_autocast in fp16": engine.torch_autocast_enabled() and engine.fp16_enabled(),
    }
    return next((cause for cause, holds in causes.items() if holds), "")


def engine_weights(engine: Any) -> Iterator[Fragment]:
    """Iterate over this process's fragments of the parameters and buffers of the engine's module."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for name, tensor in persistent_tensors(engine.module):
        if not hasattr(tensor, "ds_id"):
            yield unpartitioned_fragment(name, tensor, rank, world_size)
            continue
        partitioned: Any = tensor
        start, count = _partition(partitioned)
        # The placeholder of a partition on NVMe has half precision, whatever the model's dtype.
        values = tensor.new_empty(0) if _is_swapped_out(tensor) else partitioned.ds_tensor.detach().view(-1)[:count]
        yield Fragment(WEIGHT, name, tuple(partitioned.ds_shape), start, values, (0, count))


def fetched_weights(engine: Any, fragments: Iterable[Fragment], *, changing: bool) -> Iterator[Fragment]:
    """Load fragments as `Session.fetched`, weights on NVMe one after another."""
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


class _Names(dict[int, str]):
    """The names of a module's parameters by id. A stepped parameter without a name is an error."""

    module = ""

    def __missing__(self, _: int) -> str:
        raise LoopError(
            f"a parameter of the {self.module} was replaced or removed after prepare() (module.weight = "
            "nn.Parameter(…)): ZeRO updates the previous one, so the model would no longer be trained.\n"
            "Write values in place, inside `with accelerator.whole_weights(model):`. If the forward replaces a "
            "tensor, e.g. a codebook, make it a buffer: module.register_buffer(name, tensor)."
        )


def engine_pieces(engine: Any) -> list[OptimizedPiece]:
    """List the trained parameters' pieces in the tensors that the engine's optimizer steps."""
    wrapper, base = engine.optimizer, engine.basic_optimizer
    if base is None:
        return []
    names = _Names({id(parameter): name for name, parameter in engine.module.named_parameters()})
    names.module = type(engine.module).__name__
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        return list(_stage3_pieces(wrapper, names))
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        groups = wrapper.bit16_groups, wrapper.bit16_groups_flat, wrapper.single_partition_of_fp32_groups
        return list(_flat_pieces(wrapper, groups, names))
    if isinstance(wrapper, BF16_Optimizer):
        groups = wrapper.bf16_groups, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition
        return list(_flat_pieces(wrapper, groups, names))
    if isinstance(wrapper, FP16_Optimizer | FP16_UnfusedOptimizer):
        return list(_replicated_pieces(wrapper, names))
    return unpartitioned_pieces(base, engine.module, dist.get_rank(), dist.get_world_size())


def engine_blocks(engine: Any, *, changing: bool) -> Iterator[list[OptimizedPiece]]:
    """Iterate as `Session.blocks`; with NVMe, over one sub-group of stage 3 after another, as in a step."""
    wrapper, pieces = engine.optimizer, engine_pieces(engine)
    swaps = getattr(wrapper, "swap_optimizer", False)
    if not swaps and not getattr(wrapper, "params_in_nvme_and_cpu", False):
        yield pieces
        return
    if changing and swaps:
        wrapper.optimizer_swapper.purge_state()  # drop the current states; the load creates the checkpoint's
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


@contextmanager
def loading_into_engine(engine: Any) -> Iterator[None]:
    """Allow loading as `Session.loading`. Drop or recompute the values that DeepSpeed derives from the weights."""
    wrapper = engine.optimizer
    partitions = hasattr(_offload_of(engine), "partition_all_parameters")
    if partitions:
        release_gathered(engine)  # otherwise the next forward uses old values
    yield
    for optimizer in (engine.basic_optimizer, getattr(wrapper, "backup_optimizer", None)):
        replay_bias_correction(optimizer)
    if partitions:
        if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
            wrapper.invalidate_secondary_tensor()
        gather_persistent(engine)
    elif hasattr(wrapper, "_hp_optimizer_states_linked"):
        wrapper._hp_optimizer_states_linked = False
        if wrapper.optimizer.state:
            wrapper._lazy_init_hp_params_optimizer_state()  # for DeepSpeed's safe_get_full_optimizer_state


def release_gathered(engine: Any) -> None:
    """Release all gathered parameters of stage 3, including persistent ones."""
    _offload_of(engine).partition_all_parameters()


def gather_persistent(engine: Any) -> None:
    """Gather the persistent parameters of stage 3. Collective."""
    if kept := _offload_of(engine).persistent_parameters:
        kept[0].all_gather(kept)


def _offload_of(engine: Any) -> Any:
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def _is_swapped_out(parameter: Any) -> bool:
    return hasattr(parameter, "ds_id") and parameter.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE


def gathered_parts(module: nn.Module, *, recurse: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, values and partition of this process's part of each gathered parameter.

    DeepSpeed leaves parameters of up to `stage3_param_persistence_threshold` elements gathered between the steps. But
    DeepSpeed keeps, steps and gathers the partitions: values that a script writes are not in them.
    """
    for name, p in module.named_parameters(recurse=recurse):
        parameter: Any = p
        if hasattr(p, "ds_id") and p.numel() == parameter.ds_numel:
            yield name, *own_part(parameter)


def own_part(parameter: Any) -> tuple[Tensor, Tensor]:
    """Return this process's part of a gathered parameter, and its partition."""
    start, count = _partition(parameter)
    return parameter.detach().reshape(-1)[start : start + count], parameter.ds_tensor.detach().view(-1)[:count]


def _partition(parameter: Any) -> tuple[int, int]:
    """Return the start and length of this process's partition of a parameter, without padding."""
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
    """Yield the pieces of stages 1 and 2: each process steps a partition of a flat buffer of a group, in any order."""
    for index, (parameters, flat, part) in enumerate(zip(*groups, strict=True)):
        whole_at = _momentums_at(wrapper, index)
        part_start = part.numel() * dist.get_rank(group=wrapper.real_dp_process_group[index])
        for p in parameters:
            begin = _offset_in(flat, p)
            if not 0 <= begin <= flat.numel() - p.numel():
                raise LoopError(_REPLACED.format(name=names[id(p)]))
            start = min(max(part_start - begin, 0), p.numel())
            count = max(0, min(part_start + part.numel(), begin + p.numel()) - (begin + start))
            offset = begin + start - part_start if count else 0
            at = None if whole_at is None else whole_at.get(id(p), 0)
            yield OptimizedPiece(
                names[id(p)], tuple(p.shape), index, start, count, part, offset, (0, count), wrapper.optimizer, at
            )


def _momentums_at(wrapper: Any, index: int) -> dict[int, int] | None:
    """Return the start of Muon's momentum of each parameter of a group, by the parameter's id; None if not needed.

    At stages 1 and 2, the momentum buffer holds complete parameters one after the other: all parameters of which this
    process steps a piece. With offload, and for other optimizers, states have the layout of the stepped tensor.
    """
    of_matrices = wrapper.optimizer.param_groups[index].get("use_muon", False)
    if not of_matrices or not isinstance(wrapper, DeepSpeedZeroOptimizer) or wrapper.cpu_offload:
        return None
    parameters = wrapper.params_in_partition[index]
    ends = accumulate((p.numel() for p in parameters), initial=0)
    return dict(zip(map(id, parameters), ends, strict=False))


def _replicated_pieces(wrapper: Any, names: dict[int, str]) -> Iterator[OptimizedPiece]:
    """Yield the pieces of stage 0 in 16 bits: every process steps the fp32 master weights of all parameters.

    An elementwise optimizer has one flat buffer for each group. With any other, each parameter has its own tensor.
    """
    is_flat = isinstance(wrapper, FP16_Optimizer)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for index, parameters in enumerate(wrapper.fp16_groups):
        offset = 0
        for position, p in enumerate(parameters):
            master = wrapper.fp32_groups_flat[index] if is_flat else wrapper.fp32_groups[index][position]
            written = partition_of(p.numel(), rank, world_size)
            yield OptimizedPiece(
                names[id(p)], tuple(p.shape), index, 0, p.numel(), master, offset, written, wrapper.optimizer
            )
            offset += p.numel() if is_flat else 0


def _offset_in(flat: Tensor, parameter: nn.Parameter) -> int:
    # Addresses work for any order and padding that a configuration can cause (round_robin_gradients, …).
    return (parameter.data_ptr() - flat.data_ptr()) // flat.element_size() if parameter.numel() else 0


def partitions_to_fill(module: nn.Module, names: Collection[str]) -> Iterator[Fragment]:
    """Iterate as `Strategy.fragments_to_fill`; a partition on NVMe is in its swapper's buffer meanwhile.

    Raises:
        CheckpointError: a partition is quantized.
    """
    for name, tensor in persistent_tensors(module, names):
        if not hasattr(tensor, "ds_id"):
            yield unpartitioned_fragment(name, tensor, 0, 1)
            continue
        parameter: Any = tensor
        partition, size = parameter.ds_tensor, parameter.ds_tensor.ds_numel
        if hasattr(partition, "ds_quant_scale"):
            raise CheckpointError(f"{name} is partitioned and quantized, so it cannot be loaded from a file.")
        start, count = _partition(parameter)
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
