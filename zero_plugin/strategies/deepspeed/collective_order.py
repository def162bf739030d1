"""Keeps the ranks of an engine consistent: checks the order of their gradients, and broadcasts buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.errors import LoopError

# Until so many windows have ended, the order is compared before each of DeepSpeed's collectives, in which branches of
# different size would hang, or abort under gloo. Most models with branches take them from the start; afterwards the
# order is compared once per window. At stage 3 an evaluation before the training compares at most _COMPARED times.
_CAREFUL: Final = 10
_COMPARED: Final = 5000
_KEPT: Final = 5000  # notes, which name the first difference
_SHOWN: Final = 4  # names in a message


class CollectiveOrder:
    """Checks that all processes reduce gradients, and at stage 3 gather weights, in the same order.

    At stages 2 and 3 DeepSpeed reduces gradients in the order in which they are computed. If processes take different
    branches of the model, it would silently add up gradients of different parameters. A digest of the order is compared
    in one small collective before a step, and in the first windows before each of DeepSpeed's collectives.

    Args:
        names: the names of the parameters by DeepSpeed's ids.
        device: the device of the comparison.
        stage: the ZeRO stage, for messages.

    Attributes:
        reduced: ids of the parameters whose gradients were reduced since `begin_window`.
    """

    def __init__(self, names: Mapping[int, str], device: torch.device, stage: int) -> None:
        self._names = names
        self._device = device
        self._stage = stage
        self._is_alone = dist.get_world_size() == 1
        self._careful = _CAREFUL
        self._compared = 0
        self._digest = 0
        self._notes: deque[tuple[int, ...]] = deque(maxlen=_KEPT)
        self.reduced: set[int] = set()

    def note_reduction(self, numbers: Iterable[int]) -> None:
        """Record that the gradients of these parameters are about to be reduced together."""
        note = tuple(numbers)
        self.reduced.update(note)
        self._note(note)

    def note_gathering(self, numbers: Iterable[int]) -> None:
        """Record that the weights of these parameters are about to be gathered together."""
        self._note(tuple(sorted(-1 - number for number in numbers)))

    def begin_window(self) -> None:
        """Start again after a step, or after gradients were dropped."""
        self.reduced.clear()
        self._notes.clear()
        self._digest = 0

    def compare(self) -> None:
        """Compare with the other processes, at least at the end of a window. Collective.

        Raises:
            LoopError: on every process, if the orders differ; it names the first difference.
        """
        self._compare()
        self._careful = max(0, self._careful - 1)

    def _compare(self) -> None:
        if self._is_alone:
            return
        both = torch.tensor([self._digest, -self._digest], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, negated_smallest = both.tolist()
        if largest != -negated_smallest:
            raise LoopError(self._describe())

    def _note(self, note: tuple[int, ...]) -> None:
        if not note:
            return
        self._digest = (
            hash((self._digest, note)) >> 1
        )  # hashes of integers are the same in every process; shifted, it can be negated
        self._notes.append(note)
        if self._careful and self._compared < _COMPARED:
            self._compared += 1
            self._compare()

    def _describe(self) -> str:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(self._notes))
        differing = next((at for at in zip_longest(*everyone, fillvalue=()) if len(set(at)) > 1), ())
        alike = next((i for i, at in enumerate(zip_longest(*differing)) if len(set(at)) > 1), 0)
        ranks: dict[tuple[int, ...], int] = {}
        for rank, note in enumerate(differing):
            ranks.setdefault(note[alike:], rank)
        differences = ", where ".join(
            f"rank {rank} {self._describe_note(note)}" for note, rank in list(ranks.items())[:_SHOWN]
        )
        return (
            f"the processes take different branches of the model in one accumulation window: {differences}. "
            f"At ZeRO stage {self._stage} their gradients would be mixed up.\n"
            "Make every process use the same parameters in the same order (the same random choice, or the loss of an "
            "unused branch times 0), or use stage 1, where the gradient of an unused parameter counts as 0."
        )

    def _describe_note(self, note: tuple[int, ...]) -> str:
        if not note:
            return "does not"
        gathers = note[0] < 0
        names = [self._names.get(-1 - n if gathers else n, "?") for n in note]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = "the weights" if gathers else "gradients"
        return f"{'gathers' if gathers else 'sums'} {what} of {', '.join(names[:_SHOWN])}{more}"


def preceded(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """Wrap `method`, so that `note` is called before it with the same arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class SharedBuffers:
    """Synchronizes the persistent buffers of a module, e.g. running statistics, with rank 0.

    DDP broadcasts them before each forward. Here they are broadcast where all processes communicate anyway, so that a
    forward on one process alone is possible. The values of rank 0 are the same in both cases.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]

    def send(self) -> None:
        """Broadcast the buffers of rank 0, in one operation per device. Collective."""
        if not self._places or dist.get_world_size() == 1:
            return
        found = [part._buffers.get(name) for part, name in self._places]  # a forward may have replaced the tensors
        unique = {id(b): b for b in found if b is not None and b.layout == torch.strided and b.numel()}
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in unique.values():
            by_device.setdefault(buffer.device, []).append(buffer.data)  # without autograd
        for buffers in by_device.values():
            pieces = [
                buffer.reshape(-1).view(torch.uint8) for buffer in buffers
            ]  # bytes, so that all dtypes are sent together
            joined = torch.cat(pieces)
            dist.broadcast(joined, 0)
            if dist.get_rank() > 0:
                for buffer, sent in zip(buffers, torch.split(joined, [len(p) for p in pieces]), strict=True):
                    buffer.copy_(sent.clone().view(buffer.dtype).view(buffer.shape))
