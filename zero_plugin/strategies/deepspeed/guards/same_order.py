"""Checks that all processes reduce gradients, and gather weights, of the same parameters together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Final

import torch
import torch.distributed as dist

from zero_plugin.distributed.collectives import gather_values
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import describe_second_gradient

# Until so many windows have ended, the order is compared before each of DeepSpeed's collectives, in which branches of
# different size would hang, or abort under gloo. Most models with branches take them from the start; afterwards the
# order is compared once per window. At stage 3 an evaluation before the training compares at most _COMPARED times.
_CAREFUL: Final = 10
_COMPARED: Final = 5000
_KEPT: Final = 5000  # notes, which name the first difference
_DROPS: Final = (2**60,)  # the note of gradients that are dropped; no parameter has this number
_SHOWN: Final = 4  # names in a message
_OTHER_FORWARDS: Final = (
    " The cause may also be a forward that only some processes run, as an evaluation or generate() under "
    "`if accelerator.is_main_process:`: call the model on every process."
)


class SecondGradientError(LoopError):
    """A parameter got two gradients in one backward; the session, which knows the loss, explains it."""


class CollectiveOrder:
    """Checks that all processes reduce gradients, and at stage 3 gather weights, in the same order.

    At stages 2 and 3 DeepSpeed reduces gradients in the order in which they are computed. If processes take different
    branches of the model, it would silently add up gradients of different parameters. A digest of the order is compared
    in one small collective before a step, and in the first windows before each of DeepSpeed's collectives.

    Mistake: only some processes have an image, an expert or another backward.
    Cost: a hash for each collective of DeepSpeed; one small collective a step, at stage 3 one a backward.

    Args:
        names: the names of the parameters by DeepSpeed's ids, of frozen ones too.
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
        self._backwards = 0  # of the window
        self.reduced: set[int] = set()
        self._in_backward: set[int] = set()  # those of them that were reduced in this backward

    def begin_backward(self) -> None:
        """Called before a backward."""
        self._in_backward.clear()
        self._backwards += 1

    def note_reduction(self, numbers: Iterable[int]) -> None:
        """Record that the gradients of these parameters are about to be reduced together.

        Raises:
            SecondGradientError: one of them was reduced in this backward already; stage 3 would overwrite its gradient.
        """
        note = tuple(numbers)
        before = len(self._in_backward)
        self._in_backward.update(note)
        if len(self._in_backward) < before + len(note):
            raise SecondGradientError(
                describe_second_gradient(f"At ZeRO stage {self._stage} only one of them would count")
            )
        self.reduced.update(note)
        self._note(note)

    def note_gathering(self, numbers: Iterable[int]) -> None:
        """Record that the weights of these parameters are about to be gathered together."""
        self._note(tuple(sorted(-1 - number for number in numbers)))

    def relax(self) -> None:
        """Count one of the first windows, or at stage 3 backwards, in which it compares before each collective."""
        self._careful = max(0, self._careful - 1)

    def begin_window(self) -> None:
        """Start again after a step, or after gradients were dropped."""
        self.reduced.clear()
        self._notes.clear()
        self._digest = self._backwards = 0

    def compare(self, *, ends: bool = False, drops: bool = False) -> None:
        """Compare with the other processes, at least at the end of a window. Collective.

        Args:
            ends: whether the window ends, which an error names.
            drops: whether this process is about to drop the gradients in place of a step.

        Raises:
            LoopError: on every process, if the orders differ, or some drop what others apply; it names the first
                difference.
        """
        if drops:
            self._add(_DROPS)
        if self._is_alone:
            return
        both = torch.tensor([self._digest, -self._digest], device=self._device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, negated_smallest = both.tolist()
        if largest != -negated_smallest:
            raise LoopError(self._describe(ends=ends))

    def _note(self, note: tuple[int, ...]) -> None:
        if not note:
            return
        self._add(note)
        if self._careful and self._compared < _COMPARED:
            self._compared += 1
            self.compare()

    def _add(self, note: tuple[int, ...]) -> None:
        # Hashes of integers are the same in every process; shifted, it can be negated.
        self._digest = hash((self._digest, note)) >> 1
        self._notes.append(note)

    def _describe(self, *, ends: bool) -> str:
        gathered = gather_values([list(self._notes), self._backwards, ends])
        everyone = [[tuple(note) for note in notes] for notes, _, _ in gathered]
        dropping = [str(rank) for rank, notes in enumerate(everyone) if notes and notes[-1] == _DROPS]
        if dropping:
            return (
                f"zero_grad() drops gradients on {len(dropping)} of {len(everyone)} processes, e.g. on rank "
                f"{dropping[0]}, which the others apply in step(). Where a batch decides whether to step, let all "
                'processes decide alike, by what all of them know, as accelerator.reduce(loss, "mean").'
            )
        differing = next((at for at in zip_longest(*everyone, fillvalue=()) if len(set(at)) > 1), ())
        ended = {rank: backwards for rank, (_, backwards, is_ending) in enumerate(gathered) if is_ending}
        if ended and len(ended) < len(gathered) and all(not differing[rank] for rank in ended):
            going = next(rank for rank in range(len(gathered)) if rank not in ended)
            (rank, count), (_, going_count, _), note = next(iter(ended.items())), gathered[going], differing[going]
            if going_count > count or (note and note[0] < 0):  # else a branch with more parameters
                return self._describe_count(rank, count, going, going_count, note)
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
            "Make every process use the same parameters in the same order: the same random choice, or "
            "dummy_forward(branch, inputs) of zero_plugin on processes that have no data for a branch (it must return "
            "the outputs that the others use). Or use stage 1, "
            "where the gradient of an unused parameter counts as 0."
        )

    def _describe_count(self, ended: int, count: int, going: int, going_count: int, note: tuple[int, ...]) -> str:
        """The error if one process ends its window while another one goes on."""
        has_more = going_count > count
        what = f"runs backward {going_count}" if has_more else f"{self._describe_note(note)} in one more forward"
        return (
            f"the number of backwards differs between the processes in one accumulation window: rank {ended} ends it "
            f"after {count}, where rank {going} {what}. ZeRO stage {self._stage} sums gradients in every backward, "
            "which all processes have to run.\n"
            "Run as many backwards on every process: where one has no micro-batch left, backward() of the loss of any "
            "batch times 0. Or use stage 0 or 1, or DDP with accelerator.no_sync(model) around all but the last "
            f"backward, which sum over all backwards.{'' if has_more else _OTHER_FORWARDS}"
        )

    def _describe_note(self, note: tuple[int, ...]) -> str:
        if not note:
            return "does not"
        gathers = note[0] < 0
        names = [self._names.get(-1 - n if gathers else n, "a parameter added since prepare()") for n in note]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = "the weights" if gathers else "gradients"
        return f"{'gathers' if gathers else 'sums'} {what} of {', '.join(names[:_SHOWN])}{more}"
