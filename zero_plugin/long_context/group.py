"""`SequenceGroup`: the processes that share the samples of a batch; cut, exchange and join tensors among them.

Gradients: all processes of a group compute the same loss, and the strategy averages the gradients of all processes. A
parameter between `cut` and `gather` gets a part of its gradient on each process.

In the backward, `gather` and `total` sum the gradients of their results over the group. Each part is then multiplied by
the size of the group, so the average over the group is the sum of the parts. `cut` undoes the multiplication: tensors
before `cut` get complete gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from zero_plugin.errors import LoopError

_OfTensor = Callable[[Tensor], Tensor]
_SAME = 1e-5  # relative: processes may round the same sum differently.
_SAME_LOSS = 1e-6  # fp32 rounds a loss to 1e-7. Not larger: even a small term of a part of the tokens has gradients.


class SequenceGroup:
    """The group of processes that share this process's samples.

    Args:
        size: the number of processes of each group; consecutive ranks are one group.

    Attributes:
        size: the number of processes of the group.
        rank: the index of this process in the group, and of its part in each sequence.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._group, _ = dist.new_subgroups(group_size=size)  # type: ignore[no-untyped-call]
        self.rank = dist.get_rank(self._group)

    def exchange(self, parts: Tensor) -> Tensor:
        """Send `parts[i]` to process i of the group.

        Args:
            parts: of shape (size, …).

        Returns:
            The parts that each process has sent to this one, in the same shape.
        """
        return _apply(parts, self._exchange, self._exchange)

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Concatenate the parts of all processes along `dim`."""
        parts = _apply(part, self._gather, lambda gradients: self._exchange(gradients).sum(0))
        return torch.cat(parts.unbind(), dim)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum over the processes."""
        return _apply(part, self._total, self._total)

    def part_of(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's part of `whole` along `dim`. The size along `dim` must be a multiple of the group's.

        In the backward every process gets the gradient of the complete `whole`.
        """
        length = whole.shape[dim] // self.size
        return _apply(
            whole,
            lambda tensor: tensor.narrow(dim, self.rank * length, length).contiguous(),
            lambda gradient: torch.cat(self._gather(gradient).unbind(), dim) / self.size,
        )

    def _exchange(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self._group)
        return received

    def _gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty((self.size, *part.shape))
        dist.all_gather(list(parts.unbind()), part.contiguous(), group=self._group)
        return parts

    def _total(self, part: Tensor) -> Tensor:
        summed = part.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self._group)
        return summed

    def is_same(self, numbers: Tensor, tolerance: float = _SAME) -> bool:
        """Return whether all processes have the same `numbers`; not differentiable, and waits for the device."""
        both = torch.stack([numbers, -numbers]).detach()
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        largest, smallest = both[0], -both[1]
        if not both.is_floating_point():
            return bool((largest == smallest).all())
        return bool(torch.isclose(largest, smallest, rtol=tolerance, atol=0.0, equal_nan=True).all())

    def check_same_loss(self, loss: Tensor) -> None:
        """Check that all processes of the group have the same loss, not their parts' losses; collective in the group.

        Raises:
            LoopError: the losses differ.
        """
        if not self.is_same(loss.double(), _SAME_LOSS):
            raise LoopError(
                f"the loss of this backward() differs among the {self.size} processes that share their samples. It is "
                "the loss of a part of the tokens, so the gradients would be wrong.\nUse the loss that the model "
                "returns for labels, or compute the loss from complete logits, which model(**batch) returns without "
                "labels. In a model of your own, add up the parts with zero_plugin.long_context.total()."
            )


class _Linear(Function):
    """A linear function of one tensor, with an explicit function for its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: _OfTensor, backwards: _OfTensor) -> Tensor:
        ctx.backwards = backwards
        return function(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return ctx.backwards(gradients[0]), None, None


def _apply(tensor: Tensor, function: _OfTensor, backwards: _OfTensor) -> Tensor:
    result: Tensor = _Linear.apply(tensor, function, backwards)  # type: ignore[no-untyped-call]
    return result


class _Current:
    """The sequence group of the newest run, for the functions that a model calls.

    Attributes:
        find: returns the group of the newest run that has not ended; None without sequence parallelism.
    """

    def __init__(self) -> None:
        self.find: Callable[[], SequenceGroup | None] = lambda: None


CURRENT = _Current()


def cut(whole: Tensor, dim: int = 1) -> Tensor:
    """Return this process's part of a tensor that all processes of its group have.

    Args:
        whole: the same on all processes, e.g. embeddings of shape (batch, sequence, hidden).
        dim: the dimension of the sequence.

    Returns:
        The part. Its size along `dim` is the size of `whole` divided by the number of processes of the group.

    Raises:
        LoopError: the size along `dim` is not a multiple of the group's, or `whole` has no dimension `dim`.
    """
    _check_tensor("cut()", whole, dim)
    group = CURRENT.find()
    if group is None:
        return whole
    if whole.shape[dim] % group.size:
        raise LoopError(
            f"cut(): {whole.shape[dim]} positions along dimension {dim} do not divide among the {group.size} processes "
            f"of sequence_parallel_size. Pad them to a multiple of {group.size}."
        )
    return group.part_of(whole, dim)


def gather(part: Tensor, dim: int = 1) -> Tensor:
    """Return the complete tensor from the equally sized parts of all processes of the group; collective in the group.

    Args:
        part: this process's part, e.g. hidden states of shape (batch, part of the sequence, hidden).
        dim: the dimension of the sequence.

    Raises:
        LoopError: `part` has no dimension `dim`.
    """
    _check_tensor("gather()", part, dim)
    group = CURRENT.find()
    return part if group is None else group.gather(part, dim)


def total(part: Tensor) -> Tensor:
    """Sum the parts of all processes of the group, e.g. of a loss summed over tokens; collective in the group.

    Args:
        part: this process's part, of any shape. The shape is the same on all processes.

    Raises:
        LoopError: `part` is not a tensor.
    """
    _check_tensor("total()", part)
    group = CURRENT.find()
    return part if group is None else group.total(part)


def _check_tensor(call: str, given: Any, dim: int | None = None) -> None:
    """Check the arguments, with one process too: with several, torch would raise an unclear error."""
    if not isinstance(given, Tensor):
        raise LoopError(f"{call}: it got a {type(given).__name__}; give a tensor.")
    if dim is not None and not -given.ndim <= dim < given.ndim:
        raise LoopError(f"{call}: a tensor of shape {tuple(given.shape)} has no dimension {dim}; name the sequence's.")


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Draw different random numbers on each process of the group inside this context.

    Use it for random numbers between `cut` and `gather`, e.g. of a dropout. Outside, all processes of the group draw
    the same numbers, as they must on complete samples. If the code inside draws no random numbers, the generators stay
    unchanged, so a following shuffle is the same as with one process.
    """
    group = CURRENT.find()
    if group is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        seed = int(torch.randint(2**62, ()))  # the same on all processes of the group, if the script seeded them alike
        torch.manual_seed(seed + group.rank)
        before = _generators(devices)
        yield
        has_drawn = not all(map(torch.equal, before, _generators(devices)))
    if has_drawn:
        torch.randint(2**62, ())  # advance the generator that `fork_rng` restored, so the next context has a new seed


def _generators(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
