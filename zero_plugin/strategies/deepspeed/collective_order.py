"""What all ranks of an engine must have alike: the order of gradients, and buffers.

Finds processes that take different branches of a model at ZeRO stages 2 and 3, before a step applies the mixture.

Gives every process the first one's buffers, as DDP does: running statistics are of one process' batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.errors import LoopError

# Until so many windows have ended, each of DeepSpeed's collectives is compared before it is made: branches of unequal
# size would hang in it, or abort under gloo. Most models that have branches take them from the start; afterwards a
# comparison is rare. An evaluation before the training, at stage 3, has so many of them at most.
_CAREFUL: Final = 10
_COMPARED: Final = 5000
_KEPT: Final = 5000  # notes, to name what differs
_SHOWN: Final = 4  # names


class CollectiveOrder:
    """The order in which this process gives gradients, and at stage 3 weights, to the process group.

    There DeepSpeed sums gradients in the order in which they come, and trusts that it is the same on every process:
    those of different parameters would be added up, without a word. A digest of the order is compared in one small
    collective before a step, and in the first windows before each of DeepSpeed's own.

    Args:
        names: of the parameters, by DeepSpeed's number.
        device: where the comparison is made.
        stage: of ZeRO, for messages.

    Attributes:
        reduced: numbers of the parameters whose gradients were summed since `begin_window`.
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
        """The gradients of these parameters are about to be summed together."""
        note = tuple(numbers)
        self.reduced.update(note)
        self._note(note)

    def note_gathering(self, numbers: Iterable[int]) -> None:
        """The weights of these parameters are about to be gathered together."""
        self._note(tuple(sorted(-1 - number for number in numbers)))

    def begin_window(self) -> None:
        """A step was taken, or gradients were dropped."""
        self.reduced.clear()
        self._notes.clear()
        self._digest = 0

    def compare(self) -> None:
        """At the end of a window, or more often: compare with the other processes. Collective.

        Raises:
            LoopError: on every process, where they differ; it names the first difference.
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
        self._digest = hash((self._digest, note)) >> 1  # of integers it is the same in every process; it can be negated
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
        told = ", where ".join(f"process {rank} {self._say(note)}" for note, rank in list(ranks.items())[:_SHOWN])
        return (
            f"the processes take different branches of the model in one accumulation window: {told}. At ZeRO stage "
            f"{self._stage} they would be mixed up.\n"
            "Have every process reach the same parameters in the same order (the same random choice, the loss of an "
            "unused branch times 0), or use stage 1, where a parameter that a process does not reach counts as 0."
        )

    def _say(self, note: tuple[int, ...]) -> str:
        if not note:
            return "does not"
        gathers = note[0] < 0
        names = [self._names.get(-1 - n if gathers else n, "?") for n in note]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = "the weights" if gathers else "gradients"
        return f"{'gathers' if gathers else 'sums'} {what} of {', '.join(names[:_SHOWN])}{more}"


def preceded(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """`method`, with a call of `note` before it that gets the same arguments."""

    def call(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class SharedBuffers:
    """The persistent buffers of a module, which each process would change by its own batches.

    DDP sends them before each forward. Here they are sent where all processes come anyway, so that a forward on one
    process alone stays possible: what the first process has, which is what counts, is the same.

    Args:
        module: the user's own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name in part._buffers
            if name not in part._non_persistent_buffers_set
        ]

    def send(self) -> None:
        """From the first process to the others, in one broadcast per device. Collective."""
        if not self._places or dist.get_world_size() == 1:
            return
        found = [part._buffers.get(name) for part, name in self._places]  # a forward may have put new tensors there
        unique = {id(b): b for b in found if b is not None and b.layout == torch.strided and b.numel()}
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in unique.values():
            by_device.setdefault(buffer.device, []).append(buffer.data)  # a graph may be kept
        for buffers in by_device.values():
            pieces = [buffer.reshape(-1).view(torch.uint8) for buffer in buffers]  # of any type, together
            joined = torch.cat(pieces)
            dist.broadcast(joined, 0)
            if dist.get_rank() > 0:
                for buffer, sent in zip(buffers, torch.split(joined, [len(p) for p in pieces]), strict=True):
                    buffer.copy_(sent.clone().view(buffer.dtype).view(buffer.shape))
