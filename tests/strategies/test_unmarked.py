"""Steps and forwards without the marks for torch's profiler do all else that torch's own do."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile

from zero_plugin.strategies import ddp, unmarked
from zero_plugin.strategies.unmarked import step_unmarked

STEP, FORWARD = "Optimizer.step#AdamW.step", "DistributedDataParallel.forward"


class Parts:
    """The parts of DDP's forward, which note that they were called, and with what."""

    _delay_all_reduce_all_params = False

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("pre", args, kwargs))
        return ("moved", *args), {"moved": kwargs}

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("run", args, kwargs))
        return "output"

    def _post_forward(self, output: Any) -> Any:
        self.calls.append(("post", output))
        return output, "whole"


class Torchs(Parts, nn.parallel.DistributedDataParallel): ...


class Ours(Parts, ddp.DistributedDataParallel): ...


@pytest.fixture
def optimizer() -> torch.optim.AdamW:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0)
    return torch.optim.AdamW([weight], lr=0.5)


@pytest.fixture
def no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"a mark was made: {name}")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)


def marks(of: Any) -> set[str]:
    return {event.key for event in of.key_averages()} & {STEP, FORWARD}


def weight_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    weight: nn.Parameter = optimizer.param_groups[0]["params"][0]
    return weight.detach()


def test_torchs_functions_are_those_that_were_read() -> None:
    """A torch whose DDP or optimizer does more around a forward or a step fails here, before it is skipped unseen."""
    forward = nn.parallel.DistributedDataParallel.forward.__code__
    assert set(forward.co_names) == {
        *("torch", "autograd", "profiler", "record_function", "_pre_forward", "_delay_all_reduce_all_params"),
        *("module", "forward", "_run_ddp_forward", "_post_forward"),
    }
    own = set(unmarked._MARKING.co_names) - {"cast", "Optimizer", "RuntimeError", "isinstance", "tuple", "len"}
    assert own == {
        *("__class__", "__name__", "torch", "autograd", "profiler", "record_function", "chain", "values"),
        *("_global_optimizer_pre_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_code"),
        *("_optimizer_step_post_hooks", "_global_optimizer_post_hooks"),
    }


@pytest.mark.usefixtures("no_mark")
def test_ddps_forward_calls_what_torchs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same parts in the same order with the same arguments, and no mark."""
    ours = Ours()
    assert ours.forward(1, two=2) == ("output", "whole")
    monkeypatch.setattr(torch.autograd.profiler, "record_function", lambda _: contextlib.nullcontext())
    torchs: Any = Torchs()
    assert torchs.forward(1, two=2) == ("output", "whole")
    assert ours.calls == torchs.calls
    assert len(ours.calls) == 3


def test_ddps_forward_is_marked_for_a_profiler() -> None:
    """Who profiles finds the forward under torch's name."""
    with profile() as profiled:
        Ours().forward(1)
    assert marks(profiled) == {FORWARD}


@pytest.mark.usefixtures("no_mark")
def test_a_step_is_torchs(optimizer: torch.optim.AdamW) -> None:
    """The weight moves as by `optimizer.step()`, and no mark is made."""
    step_unmarked(optimizer, known_hooks=0)
    assert torch.allclose(weight_of(optimizer), torch.full((3,), 1 - 0.5 * 0.01 - 0.5))


def test_a_step_is_marked_for_a_profiler(optimizer: torch.optim.AdamW) -> None:
    """Who profiles finds the step under torch's name."""
    with profile() as profiled:
        step_unmarked(optimizer, known_hooks=0)
    assert marks(profiled) == {STEP}


@pytest.mark.parametrize("place", ["before", "after", "after all"])
def test_hooks_of_a_script_are_called(optimizer: torch.optim.AdamW, place: str) -> None:
    """Hooks before and after the step, of this optimizer and of all, though ours need not be called."""
    called: list[str] = []

    def hook(*_: Any) -> None:
        called.append(place)

    registers = {
        "before": optimizer.register_step_pre_hook,
        "after": optimizer.register_step_post_hook,
        "after all": register_optimizer_step_post_hook,
    }
    optimizer.register_step_pre_hook(lambda *_: None)
    handle = registers[place](hook)
    step_unmarked(optimizer, known_hooks=1)
    handle.remove()
    step_unmarked(optimizer, known_hooks=1)
    assert called == [place]


@pytest.mark.usefixtures("no_mark")
def test_a_schedule_sees_the_step(optimizer: torch.optim.AdamW) -> None:
    """torch's schedules warn where no step came before theirs: what they put around `step` is done."""
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    assert not getattr(optimizer, "_opt_called", False)
    step_unmarked(optimizer, known_hooks=0)
    schedule.step()  # a warning is an error here
    assert optimizer._opt_called  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["instance", "class", "instance with a schedule"])
def test_a_replaced_step_is_what_runs(
    optimizer: torch.optim.AdamW, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that puts its own function in the place of `step` is not passed by."""
    called: list[str] = []
    if where == "instance with a schedule":
        LambdaLR(optimizer, lambda _: 1.0)
    holder: Any = type(optimizer) if where == "class" else optimizer
    with replacing_step(holder, called, monkeypatch):
        step_unmarked(optimizer, known_hooks=0)
    assert called == ["replaced"]
    assert not weight_of(optimizer).eq(1).any()


@contextlib.contextmanager
def replacing_step(holder: Any, called: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = holder.step

    @functools.wraps(before)  # which takes over torch's own notes about the function
    def replaced(*args: Any) -> Any:
        called.append("replaced")
        return before(*args)

    with monkeypatch.context() as patch:
        patch.setattr(holder, "step", replaced)
        yield
