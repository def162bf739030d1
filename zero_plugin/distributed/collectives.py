"""Operations over all processes, and steps that all take or none; with one process they return what it would see."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.distributed.collective_check import collective
from zero_plugin.errors import CheckpointError, DamagedError, LoopError, ZeroPluginError
from zero_plugin.tensors.nested import list_leaves, map_leaves

_log = logging.getLogger(__name__)

_HEADER = 8  # numbers that processes exchange before tensors travel
_LENGTHS = 5  # first dimensions among them

T = TypeVar("T")

_FULL: Final = ". Make room there, or use another disk."
_CURES: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: ". Systems also turn a disk read-only after an error of its own: `dmesg` tells.",
}

Reduction = Literal["sum", "mean", "max", "none"]


def num_processes() -> int:
    """Processes in the default group; 1 without a group."""
    return int(dist.get_world_size()) if _has_group() else 1


def process_index() -> int:
    """This process's place in the default group; 0 without a group."""
    return int(dist.get_rank()) if _has_group() else 0


@collective("gather")
def gather(tree: Any) -> Any:
    """The processes' tensors one after another along the first dimension, on every process.

    Each tensor keeps its place in the containers, its dtype and its device, and leaves autograd. First dimensions may
    differ between the processes: the result has their sum and no padding. A 0-dimensional tensor counts as one row, so
    the result has shape (processes,).

    Raises:
        LoopError: a leaf is no tensor, or dtypes or the other dimensions differ between the processes.
    """
    leaves = [leaf.detach().reshape(1) if leaf.ndim == 0 else leaf.detach() for leaf in _tensors(tree, "gather")]
    if num_processes() > 1:
        lengths = [leaf.shape[0] for leaf in leaves]
        kinds = _fingerprint([(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in leaves])
        headers = _exchange("gather", [len(leaves), kinds, *lengths[:_LENGTHS]])
        if any(header[:2] != headers[0][:2] for header in headers):
            _raise_mismatch(
                leaves,
                "gather: the processes' tensors differ in number, in dtype or beyond the first dimension:",
                "give as many on each; call pad_across_processes(tensor, dim=1) where they differ beyond the first",
            )
        by_process = [header[2:] for header in headers]
        if len(lengths) > _LENGTHS:
            rest = _gather_equal(torch.tensor(lengths[_LENGTHS:])).tolist()
            by_process = [[*first, *later] for first, later in zip(by_process, rest, strict=True)]
        leaves = [_concatenate(leaf, [own[i] for own in by_process]) for i, leaf in enumerate(leaves)]
    gathered = iter(leaves)
    return map_leaves(lambda _: next(gathered), tree)


@collective("gather_values")
def gather_values(value: Any) -> list[Any]:
    """Every process's value, process 0's first, on every process.

    Values travel as JSON, so that nothing of a peer is run: None, booleans, numbers, text, lists, and dicts whose keys
    are text. A tuple arrives as a list.
    """
    own = _encoded(value)
    lengths = _gather_equal(torch.tensor([own.numel()])).flatten().tolist()
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own
    return [_decoded(line[:length]) for line, length in zip(_gather_equal(padded), lengths, strict=True)]


@collective("broadcast_value")
def broadcast_value(value: Any, from_process: int = 0) -> Any:
    """Process `from_process`'s value on every process; see `gather_values` for what it may be."""
    own = _encoded(value if process_index() == from_process else None)
    if num_processes() == 1:
        return _decoded(own)
    length = torch.tensor([own.numel()])
    length = length.to(_wire_device(length))
    dist.broadcast(length, from_process)
    wire = own if process_index() == from_process else own.new_empty(int(length))
    wire = wire.to(_wire_device(wire))
    dist.broadcast(wire, from_process)
    return _decoded(wire.cpu())


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


@collective("gather_object")
def gather_object(items: list[Any]) -> list[Any]:
    """The processes' lists of picklable objects as one list, process 0's first, on every process.

    For objects of the script alone: who can join the group can have its processes run code by what is unpickled.
    """
    if not isinstance(items, list):
        raise LoopError(f"gather_object: found a {type(items).__name__}; give a list, e.g. gather_object([value])")
    if num_processes() == 1:
        return list(items)
    lists: list[list[Any]] = [[]] * num_processes()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


@collective("reduce")
def reduce(tree: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Elementwise sum, mean or maximum of the processes' tensors, on every process; `none` gives each its own.

    dtypes are kept, except that booleans are counted as int64 and the mean of integers is floating. The result is
    multiplied by `scale`.

    Raises:
        LoopError: a leaf is no tensor, or shapes or dtypes differ between the processes.
    """
    if reduction not in get_args(Reduction):
        raise LoopError(f'reduce: reduction={reduction!r}; write "sum", "mean", "max" or "none"')
    leaves = _tensors(tree, "reduce")
    if reduction != "none":
        _refuse_mismatch(leaves, "reduce")

    def reduce_one(tensor: Tensor) -> Tensor:
        total = tensor.detach().to(torch.int64 if tensor.dtype == torch.bool else tensor.dtype, copy=True)
        if num_processes() > 1 and reduction != "none":
            wire = total.to(_wire_device(tensor)).contiguous()
            dist.all_reduce(wire, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            total = wire.to(tensor.device)
        total = total / num_processes() if reduction == "mean" else total
        return total if scale == 1.0 else total * scale

    return map_leaves(reduce_one, tree)


def start_sum(numbers: Sequence[int]) -> Callable[[], list[int]]:
    """Begin to sum integers over the processes; what is returned waits for the sums and gives them."""
    sums = torch.tensor(numbers, dtype=torch.int64)
    if num_processes() == 1:
        return sums.tolist
    wire = sums.to(_wire_device(sums))
    work = dist.all_reduce(wire, async_op=True)
    return partial(_finish_sum, work, wire)


@collective("next batch of a stream")
def _finish_sum(work: Any, sums: Tensor) -> list[int]:
    work.wait()
    return list(sums.tolist())


@collective("broadcast")
def broadcast(tree: Any, from_process: int = 0) -> Any:
    """Process `from_process`'s tensors on every process.

    Raises:
        LoopError: a leaf is no tensor, or shapes or dtypes differ between the processes.
    """
    _refuse_mismatch(_tensors(tree, "broadcast"), "broadcast")

    def broadcast_one(tensor: Tensor) -> Tensor:
        if num_processes() == 1 or tensor.numel() == 0:
            return tensor.detach()
        wire = _as_bytes(tensor.detach().to(_wire_device(tensor), copy=True))
        dist.broadcast(wire, from_process)
        return wire.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    return map_leaves(broadcast_one, tree)


@collective("broadcast_object_list")
def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of `objects`, in place, by process `from_process`'s; returns `objects`.

    For objects of the script alone, as `gather_object`.
    """
    if num_processes() > 1:
        dist.broadcast_object_list(objects, src=from_process)
    return objects


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor has no size along a dimension to pad to."""


@collective("pad_across_processes")
def pad_across_processes(tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` with `pad_index` to the largest size on any process, behind or in front.

    A tensor that has no dimension `dim` is returned as it is, and so is a nested tensor, with a warning.

    Raises:
        LoopError: a leaf is no tensor, or the number of dimensions differs between the processes.
    """
    tensors = _tensors(tree, "pad_across_processes")
    if any(tensor.is_nested for tensor in tensors):
        message = "pad_across_processes: a nested tensor is left as it is; turn it into a padded one first"
        warnings.warn(message, CannotPadNestedTensorWarning, stacklevel=3)
    _refuse_mismatch(tensors, "pad_across_processes", lambda tensor: tensor.ndim)

    def has_dim(tensor: Tensor) -> bool:
        return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim

    own = [tensor.shape[dim] if has_dim(tensor) else -1 for tensor in tensors]
    largest = iter(_gather_equal(torch.tensor(own, dtype=torch.int64)).amax(0).tolist() if tensors else [])

    def pad_one(tensor: Tensor) -> Tensor:
        size = next(largest)
        if not has_dim(tensor) or tensor.shape[dim] == size:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = size
        padded = tensor.new_full(shape, pad_index)
        padded.narrow(dim, size - tensor.shape[dim] if pad_first else 0, tensor.shape[dim]).copy_(tensor)
        return padded

    return map_leaves(pad_one, tree)


class Peers(Protocol):
    """All processes, as one thread of each reaches them; its calls are collective.

    Here it is the script's own thread, over the group that it trains with; a thread beside it needs a group of its own.
    """

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return process_index() == 0

    def gather(self, text: str | None) -> list[str | None]:
        """Every process' text, process 0's first."""
        return gather_values(text)


class _Script(Peers): ...


SCRIPT: Final[Peers] = _Script()


_DAMAGED: Final = "\0"  # before the message of a DamagedError, for the other processes


def all_or_none(step: Callable[[], T], peers: Peers = SCRIPT) -> T:
    """Run `step`, which waits for no other process; what it returns here. Collective.

    Raises:
        CheckpointError: on every process, with the first failing one's message. That process raises its own error,
            unless it is the system's, which becomes a CheckpointError there too.
        DamagedError: on every process, where one has raised that.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001 - raised below, when no process waits for this one any more
        error = caught
    own = None if error is None else f"{_DAMAGED * isinstance(error, DamagedError)}{describe_error(error)}"
    failed = [(rank, message) for rank, message in enumerate(peers.gather(own)) if message is not None]
    damaged = [(rank, message.removeprefix(_DAMAGED)) for rank, message in failed if message.startswith(_DAMAGED)]
    if damaged and not isinstance(error, DamagedError):
        raise DamagedError("process {}: {}".format(*damaged[0])) from error
    if isinstance(error, OSError):
        raise CheckpointError(describe_error(error)) from error
    if error is not None:
        raise error
    if failed:
        raise CheckpointError("process {}: {}".format(*failed[0]))
    return result


def on_main(step: Callable[[], T]) -> T:
    """Run `step` on the main process; what it returned, on every process. Collective; raises as `all_or_none`.

    See `gather_values` for what it may return.
    """
    result: T = broadcast_value(all_or_none(lambda: step() if SCRIPT.is_main else None))
    return result


def taken_out(all_of: Sequence[Any], left: Sequence[Any]) -> list[int]:
    """Places of the items that are in `left` no more, as the main process sees it. Collective."""
    gone = [index for index, item in enumerate(all_of) if not any(item is other for other in left)]
    places: list[int] = broadcast_value(gone)
    return places


def describe_error(error: Exception) -> str:
    """An error in a sentence for people: this package's messages say it all, others need their kind."""
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os.strerror(error.errno)}{_CURES.get(error.errno, '.')}"
    return str(error) if isinstance(error, ZeroPluginError) else f"{type(error).__name__}: {error}"


def announce(line: str, *, by_each: bool = False) -> None:
    """Log a warning on the main process only, or by each process that comes here, with its rank."""
    rank = process_index()
    if by_each and num_processes() > 1:
        line = f"process {rank}: {line}"
    if by_each or rank == 0:
        _log.warning(line)


def _has_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def _tensors(tree: Any, call: str) -> list[Tensor]:
    leaves = list_leaves(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise LoopError(
                f"{call}: found a {type(leaf).__name__}; give tensors in dicts, lists or tuples, "
                "or gather_object for anything else"
            )
    return leaves


def _wire_device(tensor: Tensor) -> torch.device:
    """Where the tensor must be for the group's backends: NCCL alone cannot carry a CPU tensor."""
    served = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    if tensor.device.type in served:
        return tensor.device
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.get_device_module(served[0]).current_device())


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat uint8 view: backends differ in the dtypes that they carry, none refuses bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _gather_equal(tensor: Tensor) -> Tensor:
    """Tensors of one shape and dtype, stacked: shape (processes, *tensor.shape), on the tensor's device."""
    processes = num_processes()
    if processes == 1 or tensor.numel() == 0:
        return tensor.expand(processes, *tensor.shape)
    wire = _as_bytes(tensor.to(_wire_device(tensor)))
    stacked = wire.new_empty(processes, wire.numel())
    dist.all_gather(list(stacked), wire)  # the one spelling that no release of torch has renamed
    return stacked.view(tensor.dtype).view(processes, *tensor.shape).to(tensor.device)


def _exchange(call: str, numbers: Sequence[int]) -> list[list[int]]:
    """Every process' `numbers`, at most 7, filled up with zeros.

    It has one size in all calls, since backends abort where sizes differ: so one that is in another call is found.

    Raises:
        LoopError: it is.
    """
    header = [_fingerprint(call), *numbers]
    headers = _gather_equal(torch.tensor(header + [0] * (_HEADER - len(header)))).tolist()
    if any(other[0] != header[0] for other in headers):
        calls = gather_values(call)
        places = ", ".join(f"process {rank} is in {name}()" for rank, name in enumerate(calls))
        raise LoopError(
            f"{places}.\n"
            "Both calls are collective: every process has to make the same collective calls in the same order."
        )
    return [other[1:] for other in headers]


def _fingerprint(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


def _refuse_mismatch(leaves: list[Tensor], call: str, of: Callable[[Tensor], Any] = _shape_and_dtype) -> None:
    """Raise where `of` the leaves differs between the processes: backends would abort, wait, or mix up numbers."""
    if num_processes() == 1:
        return
    headers = _exchange(call, [_fingerprint([of(leaf) for leaf in leaves])])
    if any(header != headers[0] for header in headers):
        _raise_mismatch(leaves, f"{call}: the processes' tensors differ:")


def _raise_mismatch(leaves: list[Tensor], *message: str) -> None:
    found = gather_values([str(_shape_and_dtype(leaf)) for leaf in leaves])
    lines = [f"  process {index}: [{', '.join(shapes)}]" for index, shapes in enumerate(found)]
    raise LoopError("\n".join([message[0], *lines, *message[1:]]))


def _concatenate(tensor: Tensor, lengths: list[int]) -> Tensor:
    longest = max(lengths)
    if longest * math.prod(tensor.shape[1:]) == 0:
        return tensor.new_empty((sum(lengths), *tensor.shape[1:]))
    if tensor.shape[0] < longest:
        tensor = torch.cat([tensor, tensor.new_empty((longest - tensor.shape[0], *tensor.shape[1:]))])
    stacked = _gather_equal(tensor)
    if min(lengths) == longest:
        return stacked.flatten(0, 1)
    return torch.cat([part[:length] for part, length in zip(stacked, lengths, strict=True)])


@collective("check_trigger")
def any_process(flag: bool) -> bool:
    """Whether `flag` is true on any process; collective."""
    return int(reduce(torch.tensor(int(flag)), "sum")) > 0
