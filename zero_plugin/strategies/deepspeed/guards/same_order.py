"""Check that all processes reduce gradients, and gather weights, of the same parameters together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, Final

from torch import Tensor

from zero_plugin.distributed.collectives import gather_values
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import SecondGradientError, describe_second_gradient
from zero_plugin.strategies.deepspeed.gradients import describe_drops
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.precision import FoundInf

# In the first windows, compare the order before each of DeepSpeed's collectives. Branches of different sizes would hang
# in a collective, or abort under gloo. Most models with branches take them from the start. Afterwards, compare the
# order once per window. At stage 3, an evaluation before the training compares at most _COMPARED times.
_CAREFUL: Final = 10
_COMPARED: Final = 5000
_KEPT: Final = 5000  # notes, to name the first difference
_SHOWN: Final = 4  # names in a message
_OTHER_FORWARDS: Final = (
    " The cause may also be a forward that only some processes run, e.g. an evaluation or generate() under "
    "`if accelerator.is_main_process:`. Then call the model on every process."
)


class SameOrder(Guard):
    """A guard that checks that all processes reduce gradients, and at stage 3 gather weights, in the same order.

    At stages 2 and 3 DeepSpeed reduces gradients in the order in which they are computed. If processes take different
    branches of the model, DeepSpeed would silently add up gradients of different parameters. The guard compares a
    digest of the order in the session's collective before a step. In the first windows, it also compares before each of
    DeepSpeed's collectives.

    Mistake: only some processes have an image, an expert or another backward.
    Cost: a hash for each collective of DeepSpeed; at stage 3, one small collective per backward.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        engine, gradients = session.engine, session.gradients
        names = {id(p): name for name, p in engine.module.named_parameters()}
        self._names = {number: names[id(p)] for number, p in gradients.numbered_parameters().items()}
        self._agreement = gradients.agreement
        self._agreement.describe = self._describe
        self._stage = engine.zero_optimization_stage()
        self._careful = _CAREFUL
        self._compared = 0
        self._notes: deque[tuple[int, ...]] = deque(maxlen=_KEPT)
        self._backwards = 0  # in this window
        self._in_backward: set[int] = set()  # parameters whose gradients this backward has reduced

    @classmethod
    def is_needed(cls, session: Any) -> bool:
        """Return whether backwards reduce gradients."""
        return session.gradients.agreement is not None

    def before_backward(self, loss: Tensor, *, is_first: bool) -> None:  # noqa: ARG002
        """Count the backward."""
        self._in_backward.clear()
        self._backwards += 1

    def before_reduce(self, ids: Iterable[int]) -> None:
        """Note that the gradients of these parameters are about to be reduced together.

        Raises:
            SecondGradientError: this backward has already reduced one of them; stage 3 would overwrite its gradient.
        """
        note = tuple(ids)
        before = len(self._in_backward)
        self._in_backward.update(note)
        if len(self._in_backward) < before + len(note):
            raise SecondGradientError(
                describe_second_gradient(f"At ZeRO stage {self._stage} only one of them would count")
            )
        self._add(note)

    def before_gather(self, ids: Iterable[int]) -> None:
        """Note that the weights of these parameters are about to be gathered together."""
        self._add(tuple(sorted(-1 - number for number in ids)))

    def after_backward(self) -> None:
        """Compare the order at stage 3. DeepSpeed has just waited for the device, so this costs little. Collective."""
        if self._stage < 3:
            return
        try:
            self._agreement.confirm()
        except LoopError:
            # Processes in different branches have gathered different weights, and small ones stay gathered.
            self.session.engine.optimizer.parameter_offload.partition_all_parameters()
            raise
        self._relax()

    def completed(self) -> None:
        """Count one of the first windows, which compare the order before each collective."""
        if self._stage < 3:
            self._relax()

    def stepped(self, applied: bool | FoundInf = False) -> None:  # noqa: ARG002
        """Begin a window."""
        self._notes.clear()
        self._agreement.digest = self._backwards = 0

    dropped = stepped

    def _relax(self) -> None:
        self._careful = max(0, self._careful - 1)

    def _add(self, note: tuple[int, ...]) -> None:
        agreement = self._agreement
        # Hashes of integers are equal in all processes.
        agreement.digest = hash((agreement.digest, note))
        self._notes.append(note)
        if self._careful and self._compared < _COMPARED:
            self._compared += 1
            agreement.confirm()

    def _describe(self, ends: bool, drops: bool) -> str:
        gathered = gather_values([list(self._notes), self._backwards, ends, drops])
        everyone = [[tuple(note) for note in notes] for notes, *_ in gathered]
        if any(dropping := [drops for *_, drops in gathered]):
            return describe_drops(dropping)
        differing = next((at for at in zip_longest(*everyone, fillvalue=()) if len(set(at)) > 1), ())
        ended = {rank: backwards for rank, (_, backwards, is_ending, _) in enumerate(gathered) if is_ending}
        if ended and len(ended) < len(gathered) and all(not differing[rank] for rank in ended):
            going = next(rank for rank in range(len(gathered)) if rank not in ended)
            (rank, count), (_, going_count, *_), note = next(iter(ended.items())), gathered[going], differing[going]
            if going_count > count or (note and note[0] < 0):  # otherwise a branch has more parameters
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
        """Return the message if one process ends its window while another continues."""
        has_more = going_count > count
        what = f"runs backward {going_count}" if has_more else f"{self._describe_note(note)} in one more forward"
        return (
            f"the number of backwards differs between the processes in one accumulation window: rank {ended} ends it "
            f"after {count}, but rank {going} {what}. ZeRO stage {self._stage} sums gradients in every backward, so "
            "all processes have to run it.\n"
            "Run the same number of backwards on every process. If a process has no micro-batch left, call backward() "
            "with the loss of any batch times 0. Or use stage 0 or 1, or DDP with accelerator.no_sync(model) around "
            f"all but the last backward. These sum over all backwards.{'' if has_more else _OTHER_FORWARDS}"
        )

    def _describe_note(self, note: tuple[int, ...]) -> str:
        if not note:
            return "does not"
        gathers = note[0] < 0
        names = [self._names.get(-1 - n if gathers else n, "a parameter added since prepare()") for n in note]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        what = "the weights" if gathers else "gradients"
        return f"{'gathers' if gathers else 'sums'} {what} of {', '.join(names[:_SHOWN])}{more}"
