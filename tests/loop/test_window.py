"""The states of a window: every operation in every phase leads to the listed phase, or is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from zero_plugin.errors import LoopError
from zero_plugin.loop import backward, step, together
from zero_plugin.loop.clip import clip
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.window import NEXT_PHASES, Phase, Window
from zero_plugin.strategies.events import subscribe
from zero_plugin.strategies.precision import LossScale
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import GUARDS

EMPTY, ACCUMULATED, COMPLETE, CLIPPED, APPLIED, FAILED = Phase


@dataclass
class Loop:
    """A loop with one weight of 1.0, whose gradient is always 1.0, in a window of one micro-batch."""

    scaled: bool
    model: nn.Linear = field(default_factory=lambda: nn.Linear(1, 1, bias=False))

    def __post_init__(self) -> None:
        nn.init.ones_(self.model.weight)
        scale = LossScale({"loss_scale": 8}) if self.scaled else None
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.session = TorchSession(self.model, self.model, sgd, precision="no", scale=scale)
        subscribe(self.session, GUARDS, "all")
        self.window = Window(1)
        AcceleratedOptimizer(sgd).run_in(self.window, self.session)

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(1)).sum()

    def backward(self) -> None:
        backward.run_through_one(self.window, self.session, self.loss())

    def backward_that_fails(self) -> None:
        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError

        hook = self.model.weight.register_post_accumulate_grad_hook(fail)
        try:
            with pytest.raises(ArithmeticError):
                self.backward()
        finally:
            hook.remove()

    def backward_of_another(self) -> None:
        backward.begin(self.window, self.session, self.loss(), ends_window=True)
        self.session.scale_loss(self.loss()).backward()
        backward.end(self.window, self.session, reached=True)
        together.count_foreign_backward(self.window, ends=True)

    def backward_that_does_not_reach(self) -> None:
        backward.begin(self.window, self.session, self.loss(), ends_window=True)
        backward.end(self.window, self.session, reached=False)

    def backward_past_the_window(self) -> None:
        with pytest.raises(LoopError, match=r"computed by loss\.backward\(\)"):
            self.loss().backward()

    def measure(self) -> None:
        clip(self.window, self.session, float("inf"))

    def clip(self) -> None:
        clip(self.window, self.session, 0.5)

    def look_for_nonfinite(self) -> None:
        assert step.first_nonfinite(self.window, self.session) is None

    def step(self) -> None:
        assert self.window.count_step()
        assert step.apply(self.window, self.session)

    def step_that_fails(self) -> None:
        def fail(*_: Any) -> None:
            raise ArithmeticError

        hook = self.session.optimizer.register_step_pre_hook(fail)
        try:
            with pytest.raises(ArithmeticError):
                self.step()
        finally:
            hook.remove()

    def zero_grad(self) -> None:
        step.drop_if_meant(self.window, self.session)

    def load_a_checkpoint(self) -> None:
        step.drop(self.window, self.session)
        self.window.begin()

    @property
    def weight(self) -> float:
        return float(self.model.weight.detach())

    @property
    def gradient(self) -> float | None:
        return None if self.model.weight.grad is None else float(self.model.weight.grad)


TO_PHASE: dict[Phase, list[Callable[[Loop], None]]] = {
    EMPTY: [],
    ACCUMULATED: [Loop.backward],
    COMPLETE: [Loop.backward, Loop.measure],
    CLIPPED: [Loop.backward, Loop.clip],
    APPLIED: [Loop.backward, Loop.step],
    FAILED: [Loop.backward_that_fails],
}

LATE = "the clipped norm would not be the step's"
AFTER_STEP = "called after optimizer.step"
LEFT = "must not be applied"

# The result of each operation in the phases EMPTY, ACCUMULATED, COMPLETE, CLIPPED, APPLIED, FAILED: the phase after it,
# or a pair of the error and the phase after the error.
Outcome = Phase | tuple[str, Phase]
OUTCOMES: dict[Callable[[Loop], None], tuple[Outcome, ...]] = {
    Loop.backward: (ACCUMULATED, ACCUMULATED, COMPLETE, CLIPPED, ACCUMULATED, (LEFT, FAILED)),
    Loop.backward_of_another: (ACCUMULATED, ACCUMULATED, COMPLETE, CLIPPED, ACCUMULATED, (LEFT, FAILED)),
    Loop.backward_that_does_not_reach: (EMPTY, ACCUMULATED, COMPLETE, CLIPPED, APPLIED, (LEFT, FAILED)),
    Loop.backward_that_fails: (FAILED, FAILED, FAILED, FAILED, FAILED, (LEFT, FAILED)),
    Loop.backward_past_the_window: (FAILED,) * 6,
    Loop.measure: (EMPTY, COMPLETE, COMPLETE, CLIPPED, (AFTER_STEP, APPLIED), (LEFT, FAILED)),
    Loop.clip: (EMPTY, CLIPPED, CLIPPED, CLIPPED, (AFTER_STEP, APPLIED), (LEFT, FAILED)),
    Loop.look_for_nonfinite: (EMPTY, COMPLETE, COMPLETE, CLIPPED, APPLIED, (LEFT, FAILED)),
    Loop.step: (APPLIED, APPLIED, APPLIED, APPLIED, APPLIED, (LEFT, FAILED)),
    Loop.step_that_fails: (APPLIED, FAILED, FAILED, FAILED, APPLIED, (LEFT, FAILED)),
    Loop.zero_grad: (EMPTY, EMPTY, EMPTY, EMPTY, APPLIED, EMPTY),
    Loop.load_a_checkpoint: (EMPTY,) * 6,
}
# After a loss scale was divided out of the gradients, a backward would add gradients that still have the scale.
LATE_WITH_A_SCALE = {
    (operation, phase): (LATE, FAILED)
    for operation in (Loop.backward, Loop.backward_of_another)
    for phase in (COMPLETE, CLIPPED)
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("operation", OUTCOMES)
def test_every_operation_in_every_phase(operation: Callable[[Loop], None], phase: Phase, scaled: bool) -> None:
    """Each operation reaches a phase or raises. Dropping leaves every phase, and later numbers equal plain torch's."""
    loop = Loop(scaled)
    for before in TO_PHASE[phase]:
        before(loop)
    assert loop.window.phase is phase
    if operation is Loop.step_that_fails and phase in (EMPTY, APPLIED):
        operation = Loop.step  # no gradients exist, so the optimizer is not called
    outcome = OUTCOMES[operation][list(Phase).index(phase)]
    if scaled:
        outcome = LATE_WITH_A_SCALE.get((operation, phase), outcome)
    if isinstance(outcome, tuple):
        message, after = outcome
        with pytest.raises(LoopError, match=message):
            operation(loop)
    else:
        after = outcome
        operation(loop)
    assert loop.window.phase is after
    assert after in NEXT_PHASES[phase] or after in NEXT_PHASES[COMPLETE]

    loop.zero_grad()
    assert (loop.gradient, loop.window.holds_gradients) == (None, False)
    weight = loop.weight
    loop.backward()
    loop.step()
    assert loop.weight == weight - 0.5


def test_every_transition_that_is_legal_happens() -> None:
    """Every transition in the table is made by some operation."""
    happen = {(phase, phase) for phase in Phase}
    for outcomes in OUTCOMES.values():
        for phase, outcome in zip(Phase, outcomes, strict=True):
            happen.add((phase, outcome[1] if isinstance(outcome, tuple) else outcome))
    through = {(ACCUMULATED, CLIPPED), (ACCUMULATED, APPLIED)}  # these pass through COMPLETE
    happen.add((EMPTY, COMPLETE))  # so does clipping without gradients, which returns to EMPTY
    assert happen - through - {(phase, phase) for phase in Phase} == {
        (phase, after) for phase, nexts in NEXT_PHASES.items() for after in nexts if after is not phase
    }


def test_other_transitions_are_refused() -> None:
    """Code that enters a phase by an illegal transition fails immediately."""
    for phase in Phase:
        for after in set(Phase) - NEXT_PHASES[phase]:
            window = Window(1)
            window.phase = phase
            with pytest.raises(AssertionError, match="is not followed by"):
                window.enter(after)


@pytest.mark.parametrize("scaled", [False, True])
def test_what_a_backward_adds_to_complete_gradients(scaled: bool) -> None:
    """Without a loss scale a backward adds to complete gradients, like torch, and the step rechecks finiteness."""
    loop = Loop(scaled)
    loop.backward()
    loop.clip()
    if scaled:
        with pytest.raises(LoopError, match=LATE):
            loop.backward()
        return
    loop.backward()
    assert loop.gradient == pytest.approx(1.5)
    backward.run_through_one(loop.window, loop.session, loop.loss() * float("inf"))
    assert loop.window.count_step()
    assert not step.apply(loop.window, loop.session)
    assert loop.weight == 1.0


def test_gradients_can_be_read_after_the_step() -> None:
    """Gradients can be read until the next backward or zero_grad(), as in plain torch."""
    loop = Loop(scaled=False)
    loop.backward()
    loop.step()
    assert loop.gradient == 1.0
    loop.backward()
    assert loop.gradient == 1.0
    loop.step()
    loop.zero_grad()
    assert loop.gradient is None
