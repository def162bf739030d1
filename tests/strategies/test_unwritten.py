"""Operations on weights that write nothing are not reported as writes. A write in a forward is reported."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from on_paths import on_paths
from paths import assert_near, global_batch, loss_of, own_batch, raised, running, take_plain_steps, weights
from torch import Tensor, nn
from torch.nn.utils import parametrize

from zero_plugin.errors import LoopError
from zero_plugin.utils import GatheredParameters

PROGRAMS = 200
Use = Callable[[nn.Module], Any]  # operations of a program on a layer


class Same(nn.Module):
    """A parametrization that computes the unchanged weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


class SameAgain(Same):
    """The same with an inverse."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


def _parametrize(layer: nn.Module, kind: type[nn.Module] = Same) -> None:
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, kind())
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(layer, name, leave_parametrized=False)


def _freeze_and_thaw(layer: nn.Module) -> None:
    layer.requires_grad_(False)
    layer.requires_grad_(True)


def _each(change: Callable[[Tensor], Any]) -> Use:
    def use(layer: nn.Module) -> None:
        with torch.no_grad():
            for p in layer.parameters():
                change(p)

    return use


# These need no values, so a program may run them at any time.
_ANYWHERE: dict[str, Use] = {
    "parametrize": _parametrize,
    "parametrize with an inverse": lambda layer: _parametrize(layer, SameAgain),
    "freeze and thaw": _freeze_and_thaw,
    "set to itself": _each(lambda p: p.set_(p)),  # type: ignore[call-overload]
    "read data": _each(lambda p: p.data.float().norm()),
    "read detached": _each(lambda p: p.detach().clone().mul_(2)),
    "replace data by itself": _each(lambda p: setattr(p, "data", p.data)),
    "name": lambda layer: dict(layer.named_parameters()),
    "evaluate": lambda layer: layer.eval() and layer.train(),
    "to the same dtype": lambda layer: layer.to(layer.weight.dtype),
}
# These change no value, which can be checked for weights in memory.
_IN_MEMORY: dict[str, Use] = {
    "times 1": _each(lambda p: p.mul_(1)),
    "plus 0": _each(lambda p: p.add_(0)),
    "copied from itself": _each(lambda p: p.copy_(p.clone())),
    "clamped far away": _each(lambda p: p.clamp_(-1e4, 1e4)),
    "filled nowhere": _each(lambda p: p.masked_fill_(torch.zeros_like(p, dtype=torch.bool), 7.0)),
    "set to its values": _each(lambda p: p[...].copy_(p.clone())),
    "averaged with itself": _each(lambda p: p.lerp_(p.clone(), 0.5)),
    "changed and restored": _each(lambda p: (kept := p.clone(), p.zero_(), p.copy_(kept))),
    "foreach": lambda layer: _each(lambda p: torch._foreach_mul_([p], 1))(layer),
    "set to its storage": _each(lambda p: p.set_(p.detach())),  # type: ignore[call-overload]
}


class Net(nn.Module):
    """Two layers. A program uses one of them inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.uses: dict[str, Use] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@contextlib.contextmanager
def _in_forward(layer: nn.Module, use: Use) -> Iterator[None]:
    """Make the layer's forwards use it first, while the layer's weights are in memory."""
    handle = layer.register_forward_pre_hook(lambda *_: (use(layer), None)[1])
    try:
        yield
    finally:
        handle.remove()


def _programs() -> Iterator[tuple[str, str, str]]:
    """Return programs: names of an operation, of its place, and of a layer."""
    places = ("before the forward", "before the backward", "before the step", "after the step", "at last")
    inside = ("in the forward", "gathered by the script")
    every = [
        *itertools.product(_ANYWHERE, (*places, *inside), ("first", "second")),
        *itertools.product(_IN_MEMORY, inside, ("first", "second")),
    ]
    random.Random(0).shuffle(every)
    yield from itertools.islice(itertools.cycle(every), PROGRAMS)


def _run(accelerator: Any, model: Any, optimizer: Any, number: int, program: tuple[str, str, str]) -> None:
    operation, place, name = program
    layer = getattr(accelerator.unwrap_model(model), name)
    use = (_ANYWHERE | _IN_MEMORY)[operation]

    def at(here: str) -> None:
        if here == place:
            use(layer)

    if place == "gathered by the script":
        with GatheredParameters(list(layer.parameters())):
            use(layer)
    at("before the forward")
    with _in_forward(layer, use) if place == "in the forward" else contextlib.nullcontext():
        loss = loss_of(model, own_batch(number % 8))
    at("before the backward")
    accelerator.backward(loss)
    at("before the step")
    optimizer.step()
    at("after the step")
    optimizer.zero_grad()
    at("at last")


@on_paths("zero3", "zero3-cpu", "zero3-gathered", daily="zero3")
def test_what_writes_nothing(path: str) -> None:
    """Two hundred programs cause no error or warning about a write, and train as without these operations."""
    plain = Net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    for number in range(PROGRAMS):
        take_plain_steps(plain, sgd, [number % 8])
    with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        for number, program in enumerate(_programs()):
            print(number, *program, flush=True)  # the last one has failed
            _run(accelerator, model, optimizer, number, program)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
    assert "has written" not in said.getvalue(), said.getvalue()


@on_paths("zero3", "zero3-cpu", "zero3-gathered")
def test_a_write_in_a_forward(path: str) -> None:
    """At stage 3 it is an error that names the parameter, since DeepSpeed keeps the partition; also after no-ops."""
    double = _each(lambda p: p.mul_(2))
    with running(path) as accelerator:
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01))
        _run(accelerator, model, optimizer, 0, ("times 1", "in the forward", "first"))
        with _in_forward(net.first, double):
            loss = loss_of(model, own_batch(1))
        accelerator.backward(loss)
        raised(LoopError, "2 parameters", "first.weight", "whole_weights", by=optimizer.step)


class Experts(nn.Module):
    """Stacked experts in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.linspace(-1, 1, 3 * 8 * 8).view(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eio->bo", x, self.stacked) / 3


def _lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("experts", Experts())
    model.add_module("last", nn.Linear(8, 4))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.stacked"]))
    for p in lora.parameters():
        p.data = torch.linspace(-0.5, 0.6, p.numel()).view(p.shape)
    return lora


@on_paths(
    "zero2-one-process", "ddp", "zero2", "zero3", "zero3-cpu", "zero3-gathered", daily=("ddp", "zero3", "zero3-cpu")
)
def test_lora_of_stacked_experts(path: str) -> None:
    """PEFT registers and removes a parametrization in every forward. The model trains as on one device."""
    plain = _lora()
    sgd = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    with running(path) as accelerator:
        net = _lora()
        trained = [p for p in net.parameters() if p.requires_grad]
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(trained, lr=0.1))
        for step in range(4):
            wanted, loss = loss_of(plain, global_batch(step)), loss_of(model, own_batch(step))
            assert torch.allclose(accelerator.reduce(loss.detach(), "mean"), wanted, rtol=1e-5)
            wanted.backward()
            sgd.step()
            sgd.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
