"""Operations on a script's tensors, local or over all processes, under the names of `accelerate.utils.operations`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.distributed import collectives
from zero_plugin.distributed.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from zero_plugin.distributed.collectives import Reduction
from zero_plugin.errors import LoopError
from zero_plugin.loop.state import PartialState
from zero_plugin.tensors.nested import ConvertOutputsToFp32 as ConvertOutputsToFp32
from zero_plugin.tensors.nested import concatenate as concatenate
from zero_plugin.tensors.nested import convert_outputs_to_fp32 as convert_outputs_to_fp32
from zero_plugin.tensors.nested import convert_to_fp32 as convert_to_fp32
from zero_plugin.tensors.nested import find_batch_size as find_batch_size
from zero_plugin.tensors.nested import find_device as find_device
from zero_plugin.tensors.nested import get_data_structure as get_data_structure
from zero_plugin.tensors.nested import get_shape as get_shape
from zero_plugin.tensors.nested import honor_type as honor_type
from zero_plugin.tensors.nested import ignorant_find_batch_size as ignorant_find_batch_size
from zero_plugin.tensors.nested import initialize_tensors as initialize_tensors
from zero_plugin.tensors.nested import is_namedtuple as is_namedtuple
from zero_plugin.tensors.nested import is_tensor_information as is_tensor_information
from zero_plugin.tensors.nested import is_torch_tensor as is_torch_tensor
from zero_plugin.tensors.nested import list_leaves
from zero_plugin.tensors.nested import listify as listify
from zero_plugin.tensors.nested import recursively_apply as recursively_apply
from zero_plugin.tensors.nested import send_to_device as send_to_device
from zero_plugin.tensors.nested import slice_tensors as slice_tensors
from zero_plugin.utils.lazy import stand_in

# Every collective raises this if the processes' tensors do not match, with and without debug mode.
DistributedOperationException = LoopError


def gather(tensor: Any) -> Any:
    """Concatenate the processes' tensors along the first dimension, on every process; one process returns its own.

    A 0-dimensional tensor counts as one row. First dimensions may differ between the processes.

    Raises:
        TypeError: a leaf is no tensor.
        LoopError: dtypes or the other dimensions differ between the processes.
    """
    if PartialState().num_processes == 1:
        return tensor
    return collectives.gather(_only_tensors(tensor, "gather"))


def gather_object(object: Any) -> Any:  # noqa: A002 - Accelerate's name for it
    """Join the processes' lists of picklable objects, process 0's first; one process returns its own.

    Raises:
        LoopError: `object` is no list, tuple or set, and cannot be joined.
    """
    if PartialState().num_processes == 1:
        return object
    return collectives.gather_object(list(object) if isinstance(object, tuple | set | frozenset) else object)


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Return the elementwise sum, mean or maximum of the processes' tensors on every process.

    Args:
        tensor: a tensor, or containers of tensors.
        reduction: `sum`, `mean`, `max`, or `none`: each process keeps its own values.
        scale: the factor on the result.

    Raises:
        TypeError: a leaf is no tensor.
        LoopError: shapes or dtypes differ between the processes, or `reduction` is another word.
    """
    PartialState()
    return collectives.reduce(_only_tensors(tensor, "reduce"), reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite the tensors in place by those of process `from_process`, and return them; one process keeps its own.

    Raises:
        TypeError: a leaf is no tensor.
        LoopError: shapes or dtypes differ between the processes.
    """
    if PartialState().num_processes == 1:
        return tensor
    received = iter(list_leaves(collectives.broadcast(_only_tensors(tensor, "broadcast"), from_process)))

    def overwrite(leaf: Tensor) -> Tensor:
        with torch.no_grad():
            return leaf.copy_(next(received))

    return recursively_apply(overwrite, tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of the list in place by those of process `from_process`, and return the list."""
    PartialState()
    return collectives.broadcast_object_list(object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` with `pad_index` to the largest size on any process, at the end or at the start.

    A tensor without a dimension `dim` is returned unchanged. A nested tensor is also unchanged, with a warning.

    Raises:
        TypeError: a leaf is no tensor.
        LoopError: the number of dimensions differs between the processes.
    """
    PartialState()
    return collectives.pad_across_processes(_only_tensors(tensor, "pad_across_processes"), dim, pad_index, pad_first)


@contextmanager
def GatheredParameters(  # noqa: N802 - DeepSpeed's name for it
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """Gather parameters that ZeRO-3 has partitioned: inside, every process has them complete. Collective.

    Args:
        params: parameters, or a parameter.
        modifier_rank: the process whose changes are kept; None if no process changes them.
        fwd_module: see DeepSpeed: the module whose forward gathers parameters that are registered as external.
        enabled: False does nothing.
    """
    given: Iterable[Tensor] = [params] if isinstance(params, Tensor) else list(params)
    if not (enabled and any(hasattr(p, "ds_id") for p in given)):
        yield
        return
    from zero_plugin.strategies.deepspeed.partitioned_models import gathered_parameters  # imports deepspeed

    with gathered_parameters(given, modifier_rank, fwd_module):
        yield


def _only_tensors(tree: Any, call: str) -> Any:
    def same(leaf: Tensor) -> Tensor:
        return leaf

    same.__name__ = call  # `recursively_apply` shows this name in its error
    return recursively_apply(same, tree, error_on_other_type=True)


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
