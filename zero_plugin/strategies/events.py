"""`Events`: the moments of a session to which guards subscribe. A guard looks for one mistake of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from zero_plugin.config.choices import Checks
from zero_plugin.strategies.precision import FoundInf

_FIRST: Final = 10  # see `Sampling`
_EVERY: Final = 100


@dataclass(slots=True, eq=False)
class Events:
    """The lists of calls for each event. A session runs through a list; without a subscribed guard it is empty.

    Attributes:
        before_backward: `(loss, is_first)`, before a backward. `is_first`: whether it is the first of the gradients.
        gradient_outside: `()`, if a gradient was computed outside of a backward of the session.
        before_gather: `(ids)`, before DeepSpeed gathers the weights of these parameters together.
        before_reduce: `(ids)`, before DeepSpeed reduces the gradients of these parameters together.
        after_backward: `()`, after a backward that has computed gradients of the model.
        before_scaling: `()`, before the session multiplies accumulated gradients.
        scaled: `()`, after that.
        before_complete: `()`, before the gradients become those of the step.
        completed: `()`, after that.
        averages: `()`, when all processes average the gradients of one step, so a guard may be collective. Not emitted
            inside `no_sync`, where processes step separately, or `Join`, where some have no more batches.
        before_step: `()`, before the gradients are applied.
        stepped: `(applied)`, after a step. `applied`: False if the step was skipped because gradients are not finite; a
            `FoundInf` if the device has decided.
        nothing_to_step: `(is_again)`, before a step or a clipping without gradients. `is_again`: whether the gradients
            of the last step may still exist.
        before_drop: `()`, before gradients are dropped.
        dropped: `()`, after that.
        before_weights: `()`, before the session reads the weights, or copies them to the fp32 master weights.
        weights_noted: `()`, after a write into the weights that the session tracks.
    """

    before_backward: list[Callable[..., None]] = field(default_factory=list)
    gradient_outside: list[Callable[[], None]] = field(default_factory=list)
    before_gather: list[Callable[[Iterable[int]], None]] = field(default_factory=list)
    before_reduce: list[Callable[[Iterable[int]], None]] = field(default_factory=list)
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    before_scaling: list[Callable[[], None]] = field(default_factory=list)
    scaled: list[Callable[[], None]] = field(default_factory=list)
    before_complete: list[Callable[[], None]] = field(default_factory=list)
    completed: list[Callable[[], None]] = field(default_factory=list)
    averages: list[Callable[[], None]] = field(default_factory=list)
    before_step: list[Callable[[], None]] = field(default_factory=list)
    stepped: list[Callable[[bool | FoundInf], None]] = field(default_factory=list)
    nothing_to_step: list[Callable[..., None]] = field(default_factory=list)
    before_drop: list[Callable[[], None]] = field(default_factory=list)
    dropped: list[Callable[[], None]] = field(default_factory=list)
    before_weights: list[Callable[[], None]] = field(default_factory=list)
    weights_noted: list[Callable[[], None]] = field(default_factory=list)

    def subscribe(self, guard: Guard) -> None:
        """Add each method of the guard that has the name of an event."""
        for name in EVENTS:
            if (call := getattr(guard, name, None)) is not None:
                getattr(self, name).append(call)


EVENTS: Final = tuple(event.name for event in fields(Events))


class Sampling:
    """The schedule of a check that takes time: the first ten times, then one time in a hundred.

    A collective guard asks only where all processes pass, so all of them check at the same times.

    Args:
        checks: with `start`, only the first ten times.
    """

    def __init__(self, checks: Checks = "all") -> None:
        self._every = _EVERY if checks == "all" else None
        self._count = 0

    def is_due(self) -> bool:
        """Count this time, and return whether the guard checks it."""
        count, self._count = self._count, self._count + 1
        return count < _FIRST or (self._every is not None and count % self._every == 0)


class Guard:
    """A check for one mistake of a script. A subclass defines methods with the names of events, and only looks.

    A session computes the same numbers without its guards. The docstring of a subclass names the mistake that it
    finds, and its cost. Example, which raises if the loss is not finite:

        class FiniteLoss(Guard):
            def before_backward(self, loss, *, is_first):
                if self.sampling.is_due() and not loss.isfinite().all():
                    raise LoopError("the loss is not finite")

        class CheckedStrategy(TorchStrategy):
            guards = (*TorchStrategy.guards, FiniteLoss)

        accelerator = Accelerator(strategy=CheckedStrategy)

    Args:
        session: the session that emits the events.
        sampling: the guard's own schedule.

    Attributes:
        for_untrained: whether models without an optimizer need the guard too.
    """

    for_untrained = False

    def __init__(self, session: Any, sampling: Sampling) -> None:
        self.session = session
        self.sampling = sampling

    @classmethod
    def is_needed(cls, session: Any) -> bool:  # noqa: ARG003
        """Return whether the guard has something to check in this session."""
        return True

    def remove(self) -> None:
        """Undo the guard's changes of the model and the optimizer."""


def subscribe(session: Any, guards: Iterable[type[Guard]], checks: Checks) -> None:
    """Subscribe the guards that a session needs, in their order, unless `checks` is `off`."""
    for kind in guards if checks != "off" else ():
        if (kind.for_untrained or session.optimizer is not None) and kind.is_needed(session):
            guard = kind(session, Sampling(checks))
            session.events.subscribe(guard)
            session.undo.append(guard.remove)
    session.emit_from_hooks()
