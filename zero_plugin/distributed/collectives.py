"""Operations over all processes, and steps that all processes take or none. They also work with one process."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from zero_plugin.distributed.collective_check import collective, pass_together
from zero_plugin.distributed.messages import once
from zero_plugin.distributed.mismatch import SAME_ORDER
from zero_plugin.errors import CheckpointError, DamagedError, LoopError, ZeroPluginError
from zero_plugin.tensors.nested import list_leaves, map_leaves

_log = logging.getLogger(__name__)

# Frame that processes exchange before tensors, of one size in all calls: numbers, and the tensors themselves if small.
_FRAME: Final = 1024  # bytes
_NUMBERS: Final = struct.Struct("9q")
_LENGTHS: Final = 5  # the most first dimensions among the numbers
_ALIGNED: Final = 16  # alignment of tensors in a frame, in bytes
_FEW: Final = 8  # the most processes at which each one sums the small tensors of all others itself

T = TypeVar("T")

_FULL: Final = ". Make room there, or use another disk."
_CURES: Final = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: ". `ulimit -f` or the file system limits files; a smaller max_shard_size makes smaller ones.",
    errno.EROFS: ". Systems also turn a disk read-only after a disk error: see `dmesg`.",
}

Reduction = Literal["sum", "mean", "max", "none"]


def num_processes() -> int:
    """Return the number of processes in the default group; 1 without a group."""
    return int(dist.get_world_size()) if _has_group() else 1


def process_index() -> int:
    """Return this process's rank in the default group; 0 without a group."""
    return int(dist.get_rank()) if _has_group() else 0


@collective("gather")
def gather(tree: Any) -> Any:
    """Concatenate the processes' tensors along the first dimension, on every process.

    Each tensor keeps its place in the containers, its dtype and its device. With one process it keeps its graph. With
    several processes the result has no graph, with one warning if the script seems to train through it. First
    dimensions may differ between the processes: the result has their sum and no padding. A 0-dimensional tensor counts
    as one row, so the result has shape (processes,).

    Raises:
        LoopError: a leaf is not a tensor, or dtypes or the other dimensions differ between the processes.
    """
    leaves = [leaf.reshape(1) if leaf.ndim == 0 else leaf for leaf in _dense_tensors(tree, "gather")]
    if num_processes() > 1:
        leaves = _without_graphs(leaves, "gather")
        lengths = [leaf.shape[0] for leaf in leaves]
        kinds = _fingerprint((_structure(tree), [(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in leaves]))
        headers, frames = _exchange("gather", [len(leaves), kinds, *lengths[:_LENGTHS]], leaves)
        if any(header[:2] != headers[0][:2] for header in headers):
            _raise_mismatch(
                leaves,
                "gather: the processes' tensors differ in number, in names, in dtype or beyond the first dimension:",
                "give as many on each; call pad_across_processes(tensor, dim=1) if they differ beyond the first",
            )
        by_process = [list(header[2 : 2 + len(leaves)]) for header in headers]
        if frames is not None:
            return _filled(tree, map(torch.cat, _received(frames, leaves, by_process)))
        if len(lengths) > _LENGTHS:
            rest = _gather_equal(torch.tensor(lengths[_LENGTHS:])).tolist()
            by_process = [[*first, *later] for first, later in zip(by_process, rest, strict=True)]
        leaves = [_concatenate(leaf, [own[i] for own in by_process]) for i, leaf in enumerate(leaves)]
    return _filled(tree, leaves)


def _filled(tree: Any, leaves: Iterable[Tensor]) -> Any:
    """Return the containers with their tensors replaced by these."""
    following = iter(leaves)
    return map_leaves(lambda _: next(following), tree)


@collective("gather_values")
def gather_values(value: Any) -> list[Any]:
    """Return every process's value, process 0's first, on every process.

    Values are sent as JSON, so no code of a peer is run: None, booleans, numbers, text, lists, and dicts whose keys are
    text. A tuple arrives as a list.
    """
    own = _encoded(value)
    if num_processes() == 1:
        return [_decoded(own)]
    headers, frames = _exchange("gather_values", [own.numel()], [own])
    lengths = [header[0] for header in headers]
    if frames is None:
        return [_decoded(part) for part in torch.split(_concatenate(own, lengths), lengths)]
    return [_decoded(part) for part in next(_received(frames, [own], [[length] for length in lengths]))]


@collective("broadcast_value")
def broadcast_value(value: Any, from_process: int = 0) -> Any:
    """Return process `from_process`'s value on every process. See `gather_values` for the supported types."""
    own = _encoded(value if process_index() == from_process else None)
    if num_processes() == 1:
        return _decoded(own)
    headers, frames = _exchange("broadcast_value", [own.numel()], [own])
    length = headers[from_process][0]
    if frames is not None:
        return _decoded(next(_received(frames[from_process, None], [own], [[length]]))[0])
    wire = own if process_index() == from_process else own.new_empty(length)
    wire = wire.to(_wire_device(wire))
    dist.broadcast(wire, from_process)
    return _decoded(wire.cpu())


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


@collective("gather_object")
def gather_object(items: list[Any]) -> list[Any]:
    """Join the processes' lists of picklable objects into one list, process 0's first, on every process.

    Use this only for the script's own objects: unpickling lets every member of the group run code on its processes.
    """
    if not isinstance(items, list):
        raise LoopError(f"gather_object: found a {type(items).__name__}; give a list, e.g. gather_object([value])")
    if num_processes() == 1:
        return list(items)
    _exchange("gather_object", [])
    lists: list[list[Any]] = [[]] * num_processes()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


@collective("reduce")
def reduce(tree: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Return the elementwise sum, mean or maximum of the processes' tensors, on every process.

    With `none`, each process gets its own tensors. dtypes are kept, except that booleans are counted as int64 and the
    mean of integers is floating. The maximum of nan and any number is nan. The result is multiplied by `scale`. With
    one process it keeps its graph, see `gather`.

    Raises:
        LoopError: a leaf is not a tensor, or shapes or dtypes differ between the processes.
    """
    if reduction not in get_args(Reduction):
        raise LoopError(f'reduce: reduction={reduction!r}; write "sum", "mean", "max" or "none"')
    leaves = _dense_tensors(tree, "reduce")
    if num_processes() > 1:
        leaves = _without_graphs(leaves, "reduce")
    own = [leaf.to(torch.int64 if leaf.dtype == torch.bool else leaf.dtype, copy=True) for leaf in leaves]
    how = (_structure(tree), reduction, float(scale))
    frames = _refuse_mismatch(own, "reduce", how=how, sends=num_processes() <= _FEW and reduction != "none")
    if num_processes() > 1 and reduction != "none":
        join = _joined if frames is None else partial(_joined_here, _received(frames, own))
        own = [join(total, is_max=reduction == "max") for total in own]
    if reduction == "mean":
        own = [total / num_processes() for total in own]
    return _filled(tree, own if scale == 1.0 else [total * scale for total in own])


def _joined(total: Tensor, *, is_max: bool) -> Tensor:
    """Compute the sum or maximum over the processes by the backend."""
    wire = total.to(_wire_device(total)).contiguous()
    if not is_max:
        dist.all_reduce(wire, dist.ReduceOp.SUM)
        return wire.to(total.device)
    is_nan = wire.isnan().to(torch.uint8)  # backends lose nan in a maximum, or keep it on some processes only
    dist.all_reduce(wire, dist.ReduceOp.MAX)
    if wire.is_floating_point():
        dist.all_reduce(is_nan, dist.ReduceOp.MAX)
        wire.masked_fill_(is_nan.bool(), math.nan)
    return wire.to(total.device)


def _joined_here(received: Iterator[tuple[Tensor, ...]], _: Tensor, *, is_max: bool) -> Tensor:
    """Compute the sum or maximum of the next tensor here. Every process adds in the order of ranks."""
    first, *others = next(received)
    joined = first.clone()
    for other in others:
        joined = torch.maximum(joined, other) if is_max else joined.add_(other)
    return joined


def is_same_on_all(text: str) -> bool:
    """Return whether every process has the same text, compared by a digest.

    For places where all processes train together: this counts as a pass, not as a collective call, see `pass_together`.
    """
    if num_processes() == 1:
        return True
    pass_together()
    digest = _fingerprint(text)
    both = torch.tensor([digest, -digest])
    wire = both.to(_wire_device(both))
    dist.all_reduce(wire, dist.ReduceOp.MAX)
    largest, negated_smallest = wire.tolist()
    return bool(largest == -negated_smallest)


def start_sum(numbers: Sequence[int]) -> Callable[[], list[int]]:
    """Begin to sum integers over the processes. Return a function that waits for the sums and returns them."""
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
    """Return process `from_process`'s tensors on every process.

    Raises:
        LoopError: a leaf is not a tensor, or shapes or dtypes differ between the processes.
    """
    if not 0 <= from_process < num_processes():
        raise LoopError(f"broadcast: from_process={from_process}; there are processes 0 to {num_processes() - 1}")
    leaves = [leaf.detach() for leaf in _dense_tensors(tree, "broadcast")]
    frames = _refuse_mismatch(leaves, "broadcast", how=(_structure(tree), from_process), sends=True)
    if frames is not None:
        return _filled(tree, [sent.clone() for [sent] in _received(frames[from_process, None], leaves)])

    def broadcast_one(tensor: Tensor) -> Tensor:
        if num_processes() == 1 or tensor.numel() == 0:
            return tensor
        wire = _as_bytes(tensor.to(_wire_device(tensor), copy=True))
        dist.broadcast(wire, from_process)
        return wire.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    return _filled(tree, map(broadcast_one, leaves))


@collective("broadcast_object_list")
def broadcast_object_list(objects: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of `objects` in the list itself by process `from_process`'s. Return `objects`.

    Use this only for the script's own objects, see `gather_object`.
    """
    if num_processes() > 1:
        _exchange("broadcast_object_list", [len(objects), from_process])
        dist.broadcast_object_list(objects, src=from_process)
    return objects


class CannotPadNestedTensorWarning(UserWarning):
    """A warning that nested tensors are not padded: they have no common size along a dimension."""


@collective("pad_across_processes")
def pad_across_processes(tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` with `pad_index` to the largest size on any process, at the end or in front.

    A tensor without a dimension `dim` is returned unchanged. So is a nested tensor, with a warning.

    Raises:
        LoopError: a leaf is not a tensor, or the number of dimensions differs between the processes.
    """
    tensors = _tensors(tree, "pad_across_processes")
    if any(tensor.is_nested for tensor in tensors):
        message = "pad_across_processes: a nested tensor is left unchanged; turn it into a padded one first"
        warnings.warn(message, CannotPadNestedTensorWarning, stacklevel=3)
    how = (_structure(tree), dim, float(pad_index), pad_first)
    _refuse_mismatch(tensors, "pad_across_processes", lambda tensor: tensor.ndim, how=how)

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
    """The connection of one thread to the same thread in all other processes. Its calls are collective.

    This implementation is for the script's own thread and uses the training's group. Another thread needs a group of
    its own.
    """

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return process_index() == 0

    def gather(self, text: str | None) -> list[str | None]:
        """Return every process's text, process 0's first."""
        return gather_values(text)


class _Script(Peers): ...


SCRIPT: Final[Peers] = _Script()


class _Failure(NamedTuple):
    """The part of an error that is sent to the other processes."""

    message: str
    is_damage: bool
    lost_peer: bool


def all_or_none(step: Callable[[], T], peers: Peers = SCRIPT) -> T:
    """Run `step`, which must not wait for other processes. Return its result. Collective.

    Raises:
        CheckpointError: on every process, with the message of the first process that failed. A failed process raises
            its own error instead; an OSError becomes a CheckpointError.
        DamagedError: on every process, if one process has raised it.
    """
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001 - raised below, after the gather that the other processes wait for
        error = caught
    own = None
    if error is not None:
        lost_peer = isinstance(error, ZeroPluginError) and error.lost_peer
        own = json.dumps(_Failure(describe_error(error), isinstance(error, DamagedError), lost_peer))
    texts = peers.gather(own)
    failed = [(rank, _Failure(*json.loads(text))) for rank, text in enumerate(texts) if text is not None]
    damaged = [(rank, failure) for rank, failure in failed if failure.is_damage]
    if damaged and not isinstance(error, DamagedError):
        raise _repeated(DamagedError, *damaged[0]) from error
    if isinstance(error, OSError):
        raise CheckpointError(describe_error(error)) from error
    if error is not None:
        raise error
    if failed:
        raise _repeated(CheckpointError, *failed[0])
    return result


def _repeated(kind: type[CheckpointError], rank: int, failure: _Failure) -> CheckpointError:
    """Return the error of another process in a form to raise here."""
    error = kind(f"process {rank}: {failure.message}")
    error.repeats, error.lost_peer = failure.message, failure.lost_peer
    return error


def on_main(step: Callable[[], T]) -> T:
    """Run `step` on the main process. Return its result on every process. Collective.

    See `gather_values` for the supported types of the result, and `all_or_none` for errors.
    """
    result: T = broadcast_value(all_or_none(lambda: step() if SCRIPT.is_main else None))
    return result


def taken_out(all_of: Sequence[Any], left: Sequence[Any]) -> list[int]:
    """Return indices of the items that are no longer in `left` on the main process. Collective."""
    gone = [index for index, item in enumerate(all_of) if not any(item is other for other in left)]
    places: list[int] = broadcast_value(gone)
    return places


def describe_error(error: Exception) -> str:
    """Describe an error in a sentence. Errors of other packages get their class name, ours need none."""
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{os.strerror(error.errno)}{_CURES.get(error.errno, '.')}"
    return str(error) if isinstance(error, ZeroPluginError) else f"{type(error).__name__}: {error}"


def announce(line: str, *, by_each: bool = False) -> None:
    """Log a warning on the main process only, or on each process that calls this, with its rank."""
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
                "or use gather_object for other objects"
            )
    return leaves


def _without_graphs(leaves: list[Tensor], call: str) -> list[Tensor]:
    """Return the tensors without graphs. Warn once about matrices with a graph, which contrastive losses need.

    Tensors of less than two dimensions cause no warning: they are usually losses, gathered to be logged.
    """
    if torch.is_grad_enabled() and any(leaf.requires_grad and leaf.ndim > 1 for leaf in leaves) and once(_log, call):
        _log.warning(
            "%s() of tensors that require gradients: the result has no gradients, so a loss made of it trains nothing. "
            "torch.distributed.nn.functional.all_gather passes gradients; to log values, write "
            "%s(tensor.detach()).",
            call,
            call,
        )
    return [leaf.detach() for leaf in leaves]


def _dense_tensors(tree: Any, call: str) -> list[Tensor]:
    """Return the tensors in a form whose memory can be sent directly.

    Raises:
        LoopError: a leaf is not a dense tensor.
    """
    leaves = _tensors(tree, call)
    for leaf in leaves:
        if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_quantized or leaf.is_nested:
            kind = "nested" if leaf.is_nested else "meta" if leaf.is_meta else "quantized" if leaf.is_quantized else ""
            raise LoopError(f"{call}: found a {kind or leaf.layout} tensor; give dense ones, e.g. tensor.to_dense()")
    return [leaf.resolve_conj().resolve_neg() for leaf in leaves]


def _structure(tree: Any) -> str:
    """Return the containers of a tree, with the keys of dicts, as text."""
    # Remove addresses from the texts of objects: they differ between processes.
    return "" if isinstance(tree, Tensor) else re.sub(" at 0x[0-9a-f]+", "", repr(map_leaves(lambda _: 0, tree)))


def _wire_device(tensor: Tensor) -> torch.device:
    """Return the device on which the group's backends can send the tensor: NCCL alone cannot send a CPU tensor."""
    served = [pair.split(":")[0] for pair in dist.get_backend_config().split(",")]
    if tensor.device.type in served:
        return tensor.device
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.get_device_module(served[0]).current_device())


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as flat uint8: backends support different dtypes, but all support bytes."""
    flat = tensor.contiguous().view(-1)
    if flat.stride(0) != 1:  # a single element counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _gather_equal(tensor: Tensor) -> Tensor:
    """Stack the processes' tensors of one shape and dtype: shape (processes, *tensor.shape), on the tensor's device."""
    processes = num_processes()
    if processes == 1 or tensor.numel() == 0:
        return tensor.expand(processes, *tensor.shape)
    wire = _as_bytes(tensor.to(_wire_device(tensor)))
    stacked = wire.new_empty(processes, wire.numel())
    dist.all_gather(list(stacked), wire)  # the only variant that no release of torch has renamed
    return stacked.view(tensor.dtype).view(processes, *tensor.shape).to(tensor.device)


def _exchange(
    call: str, numbers: Sequence[int], tensors: Sequence[Tensor] = ()
) -> tuple[list[tuple[int, ...]], Tensor | None]:
    """Exchange at most 7 numbers of every process, padded with zeros, and small tensors with them.

    The exchange has the same size in all calls, since backends abort if sizes differ. So it also detects a process that
    is in another call. Tensors are used from here only if those of all processes fit.

    Args:
        call: the call's name.
        numbers: this process's numbers.
        tensors: this process's tensors; sent here only from CPU memory.

    Returns:
        The numbers by process; and the frames by process, see `_starts`, or None if some process's tensors do not fit.

    Raises:
        LoopError: a process is in another call.
    """
    frame = bytearray(_FRAME)
    starts = _starts([tensor.numel() * tensor.element_size() for tensor in tensors])
    fits = len(tensors) <= _LENGTHS and starts[-1] <= _FRAME and all(tensor.is_cpu for tensor in tensors)
    filled = [_fingerprint(call), bool(tensors) and fits, *numbers, *[0] * 7][:9]
    _NUMBERS.pack_into(frame, 0, *filled)
    sent = torch.frombuffer(frame, dtype=torch.uint8)
    if filled[1]:
        for tensor, start in zip(tensors, starts, strict=False):
            data = _as_bytes(tensor)
            sent[start : start + data.numel()] = data
    frames = _gather_equal(sent)
    headers = [_NUMBERS.unpack_from(row) for row in frames.numpy()]
    if any(header[0] != filled[0] for header in headers):
        calls = gather_values(call)
        places = ", ".join(f"process {rank} is in {name}()" for rank, name in enumerate(calls))
        raise LoopError(f"{places}.\n{SAME_ORDER}")
    return [header[2:] for header in headers], frames if all(header[1] for header in headers) else None


def _starts(sizes: Iterable[int]) -> list[int]:
    """Return the offsets of tensors of these sizes in a frame, and the end of the last one."""
    starts = [-(-_NUMBERS.size // _ALIGNED) * _ALIGNED]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
    return starts


def _received(
    frames: Tensor, tensors: Sequence[Tensor], lengths: Sequence[Sequence[int]] | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Yield each tensor as the processes have sent it in their frames.

    Args:
        frames: the frames of one or several processes, see `_exchange`.
        tensors: this process's tensors. Those of others may differ in the first dimension only.
        lengths: the first dimensions by process; None if they do not differ.
    """

    def unpack(frame: Tensor, own: Sequence[int] | None) -> list[Tensor]:
        shapes = [tensor.shape if own is None else (own[i], *tensor.shape[1:]) for i, tensor in enumerate(tensors)]
        sizes = [math.prod(shape) * tensor.element_size() for shape, tensor in zip(shapes, tensors, strict=True)]
        return [
            frame[start : start + size].view(tensor.dtype).view(shape)
            for start, size, shape, tensor in zip(_starts(sizes), sizes, shapes, tensors, strict=False)
        ]

    return zip(*map(unpack, frames, lengths or repeat(None)), strict=True)


def _fingerprint(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def _shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)


def _refuse_mismatch(
    leaves: Sequence[Tensor],
    call: str,
    of: Callable[[Tensor], Any] = _shape_and_dtype,
    *,
    how: Any = None,
    sends: bool = False,
) -> Tensor | None:
    """Raise LoopError if `of` the leaves differs between the processes: backends would abort, hang or mix up numbers.

    Args:
        leaves: the tensors.
        call: the call's name.
        of: returns the property of a tensor that must be the same.
        how: arguments of the call that must be the same too.
        sends: whether small tensors are sent in the same exchange.

    Returns:
        With `sends`, the frames with all processes' leaves; None if these were not sent, see `_exchange`.
    """
    if num_processes() == 1:
        return None
    own = [_fingerprint([of(leaf) for leaf in leaves]), _fingerprint(how)]
    headers, frames = _exchange(call, own, leaves if sends else ())
    if any(header[0] != headers[0][0] for header in headers):
        _raise_mismatch(leaves, f"{call}: the processes' tensors differ:")
    if any(header[1] != headers[0][1] for header in headers):
        lines = [f"  process {rank}: {found}" for rank, found in enumerate(gather_values(str(how)))]
        raise LoopError("\n".join([f"{call}: the processes' containers or arguments differ:", *lines]))
    return frames


def _raise_mismatch(leaves: Sequence[Tensor], *message: str) -> None:
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
    """Return whether `flag` is true on any process. Collective."""
    return int(reduce(torch.tensor(int(flag)), "sum")) > 0
