"""Guards: which stages subscribe to which guards, when these look, and that each documents its mistake and its cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_paths import on_paths
from paths import loss_of, make_net, own_batch, raised, running
from torch import nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.guards import GUARDS
from zero_plugin.strategies.events import EVENTS, Events, Guard, Sampling, subscribe
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import GUARDS as TORCH_GUARDS

_ALL = {kind for kinds in (TORCH_GUARDS, *GUARDS.values()) for kind in kinds}


@pytest.mark.parametrize("checks", ["all", "start"])
def test_sampling_looks_at_the_first_ten_and_then_at_one_in_a_hundred(checks: Any) -> None:
    """With `start` it looks at the first ten times only."""
    sampling = Sampling(checks)
    looked = [number for number in range(301) if sampling.is_due()]
    assert looked == [*range(10), *([100, 200, 300] if checks == "all" else [])]


@pytest.mark.parametrize("kind", sorted(_ALL, key=lambda kind: kind.__name__))
def test_a_guard_says_its_mistake_and_its_cost(kind: type[Guard]) -> None:
    """Its docstring has both, and it subscribes to an event or removes its own hooks."""
    assert "Mistake: " in (kind.__doc__ or "")
    assert "Cost: " in (kind.__doc__ or "")
    assert any(hasattr(kind, event) for event in EVENTS) or kind.remove is not Guard.remove


def test_an_event_calls_its_guards_in_the_order_of_the_list() -> None:
    """A guard subscribes to the events that its methods are named after."""
    called: list[str] = []

    class First(Guard):
        def before_step(self) -> None:
            called.append("first")

    class Second(First):
        def before_step(self) -> None:
            called.append("second")

    events = Events()
    for kind in (First, Second):
        events.subscribe(kind(None, Sampling()))
    assert [len(getattr(events, name)) for name in EVENTS if name != "before_step"] == [0] * (len(EVENTS) - 1)
    for call in events.before_step:
        call()
    assert called == ["first", "second"]


def test_the_example_in_the_docstring_works() -> None:
    """The guard in `Guard`'s docstring raises for a loss that is not finite, and does nothing without subscription."""
    lines = (Guard.__doc__ or "").split("Example, which raises if the loss is not finite:\n\n")[1].split("\n\n")[0]
    names: dict[str, Any] = {"Guard": Guard, "LoopError": LoopError}
    exec("\n".join(line[8:] for line in lines.splitlines()), names)
    layer = nn.Linear(1, 1)
    sgd = torch.optim.SGD(layer.parameters())
    session = TorchSession(layer, layer, sgd, precision="no")
    loss = layer(torch.ones(1)) * float("nan")
    session.open_backward(loss, ends_window=True, is_first=True)
    subscribe(session, [names["FiniteLoss"]], "all")
    with pytest.raises(LoopError, match="the loss is not finite"):
        session.open_backward(loss, ends_window=True, is_first=True)


@on_paths("single", "ddp", "zero0", "zero1", "zero2", "zero3", daily=("ddp", "zero2", "zero3"))
def test_checks_off_subscribes_to_nothing(path: str) -> None:
    """The step emits no event to any guard, and a mistake that is otherwise an error passes."""
    for checks in ("all", "off"):
        with running(path, checks=checks) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            events = optimizer.session.events
            subscribed = [name for name in EVENTS if getattr(events, name)]
            assert bool(subscribed) is (checks == "all"), subscribed
            if path == "single" and checks == "all":
                raised(LoopError, "accelerator.backward", by=loss_of(model, own_batch(0)).backward)
