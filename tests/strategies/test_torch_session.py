"""A session of plain torch does the same as torch's own calls."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from paths import Reads

from zero_plugin.loop.backward import run_through_one
from zero_plugin.loop.clip import clip
from zero_plugin.loop.step import apply
from zero_plugin.loop.window import Window
from zero_plugin.strategies.base import SessionRequest, release_failed_backward
from zero_plugin.strategies.precision import run_under_autocast
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import torch_optimizer


@pytest.mark.parametrize("share", [0.5, 1.0, 1.0 + 1e-6, 3.0, math.inf])
@pytest.mark.parametrize("skips", [True, False])
def test_clipping_is_torchs_to_the_bit(share: float, skips: bool) -> None:
    """Below the norm, at it, above it and without a limit, norm and clipped gradients are the same."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    layer(x).square().sum().backward()
    before = float(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]))
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), share * before)
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()

    sgd = torch.optim.SGD(layer.parameters())
    session = TorchSession(layer, layer, sgd, precision="no", skips=skips)
    window = Window(1)
    run_through_one(window, session, layer(x).square().sum())
    assert torch.equal(clip(window, session, share * before), norm)
    for p, gradient in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)
    session.close()


@pytest.mark.parametrize("fused", [False, True])
def test_states_go_where_the_parameters_are(fused: bool) -> None:
    """Like torch's load_state_dict, moments go to the parameters' device, steps only for a kernel that runs there.

    The device here has no memory. A GPU would behave the same.
    """
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    adam = torch.optim.Adam([weight])
    adam.param_groups[0]["fused"] = fused
    adam.state[weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    request: Any = SessionRequest(torch.nn.ParameterList([weight]), adam, cast("Any", None), ())
    assert torch_optimizer(request) is adam
    devices = {name: state.device.type for name, state in adam.state[weight].items()}
    assert devices == {"step": "meta" if fused else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


class OwnAdamW(torch.optim.AdamW):
    """A script's own class, whose `step` may do more than torch's kernel."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnAdamW])
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_a_step_reads_one_number_to_know_whether_it_is_applied(skips: bool, clips: bool, kind: Any) -> None:
    """No number is read if the check is off or a fused optimizer of torch skips itself.

    The norm of clipping suffices too.
    """
    layer = torch.nn.Linear(5, 3)
    adamw = kind(layer.parameters(), fused=True)
    session = TorchSession(layer, layer, adamw, precision="no", skips=skips)
    window = Window(1)
    run_through_one(window, session, layer(torch.ones(4, 5)).square().sum())
    with Reads() as reads:
        if clips:
            clip(window, session, 1.0)
        apply(window, session)
    assert reads.count == (skips and kind is OwnAdamW)
    session.close()


def test_torch_holds_what_a_failed_backward_has_not_run() -> None:
    """Plain torch frees it at the thread's next backward. `release_failed_backward` runs one, in any context."""

    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.held = torch.nn.Identity()
            held.append(weakref.ref(ctx.held))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def fail() -> None:
        later, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        hook = weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            (Holding.apply(later) * weight).sum().backward()  # type: ignore[no-untyped-call]
        hook.remove()

    held: list[weakref.ref[torch.nn.Module]] = []
    for context in (nullcontext, torch.no_grad, torch.inference_mode):
        fail()
        gc.collect()
        assert held[-1]() is not None
        with context():
            release_failed_backward()
        gc.collect()
        assert held[-1]() is None


def test_a_layer_without_weights_computes_under_the_models_autocast() -> None:
    """A dropout outside the forward gets a warning only if no autocast for the model's device is active."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    undo = run_under_autocast(model, nullcontext, "cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model[1](torch.ones(2))
    finally:
        torch.set_autocast_enabled("cuda", False)
    with pytest.warns(UserWarning, match="the Dropout of a prepared Sequential is called outside of its forward"):
        model[1](torch.ones(2))
    undo()
