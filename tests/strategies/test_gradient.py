"""Gradients between backward and step: whose they are, where they are averaged, and what a script may do to them."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_paths import LOOP, on_paths
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    net_and_sgd,
    own_batch,
    raised,
    running,
    same,
    take_steps,
    weights,
)
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.config.handlers import GradientAccumulationPlugin
from zero_plugin.distributed.collectives import gather_object
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.strategies.deepspeed.guards.lost_gradients import PartialGradients
from zero_plugin.strategies.events import Sampling


def _prepared(accelerator: Accelerator) -> tuple[Any, Any]:
    return accelerator.prepare(*net_and_sgd())


def _trained_plainly(*batches: list[int], values: float | None = None) -> dict[str, Tensor]:
    """Return the weights after a step for each list of batches, averaged over it; gradients clamped to ±`values`."""
    model, sgd = net_and_sgd()
    for window in batches:
        for i in window:
            (loss_of(model, global_batch(i)) / len(window)).backward()
        if values is not None:
            torch.nn.utils.clip_grad_value_(model.parameters(), values)
        sgd.step()
        sgd.zero_grad()
    return model.state_dict()


def _agree(model: nn.Module) -> bool:
    """Return whether the processes have the same gradients."""
    own = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    assert own
    pairs = [pair for other in gather_object([own]) for pair in zip(own, other, strict=True)]
    return all(torch.allclose(torch.tensor(mine), torch.tensor(theirs)) for mine, theirs in pairs)


@on_paths("single", "ddp")
def test_gradients_stay_to_be_looked_at_after_the_step(path: str) -> None:
    """Gradients remain until `zero_grad`, as in plain torch.

    A loop that never calls it trains the same: nothing adds up.
    """
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        own = list(accelerator.unwrap_model(model).parameters())
        for i in range(3):
            accelerator.backward(loss_of(model, own_batch(i)))
            before = [p.grad.clone() for p in own if p.grad is not None]
            optimizer.step()
            assert all(torch.equal(p.grad, kept) for p, kept in zip(own, before, strict=True))
        optimizer.zero_grad()
        assert all(p.grad is None for p in own)
        assert_near(weights(accelerator, model), _trained_plainly([0], [1], [2]))
        raised(
            LoopError, "loss.backward()", by=lambda: loss_of(accelerator.unwrap_model(model), own_batch(3)).backward()
        )


@on_paths("single", "ddp")
def test_gradients_that_are_kept_over_zero_grad(path: str) -> None:
    """PCGrad and GradNorm keep one task's gradients while they compute the next task's.

    No later step writes to them.
    """
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        own = list(accelerator.unwrap_model(model).parameters())
        for i in range(3):
            accelerator.backward(loss_of(model, own_batch(2 * i)))
            kept = [p.grad for p in own]
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, own_batch(2 * i + 1)))
            for p, gradient in zip(own, kept, strict=True):
                assert p.grad is not None
                assert gradient is not None
                p.grad.add_(gradient)
            optimizer.step()
            optimizer.zero_grad()
    plain, sgd = net_and_sgd()
    for i in range(3):
        for j in (2 * i, 2 * i + 1):
            loss_of(plain, global_batch(j)).backward()
        sgd.step()
        sgd.zero_grad()
    assert_near(accelerator.unwrap_model(model).state_dict(), plain.state_dict(), 1e-6)


@on_paths("single", "ddp")
def test_gradients_from_before_prepare(path: str) -> None:
    """They would enter the step: an error at the next backward and in the step. `zero_grad` drops them."""
    with running(path) as accelerator:
        net = make_net()
        net[2].weight.square().sum().backward()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        raised(LoopError, "loss.backward()", by=lambda: accelerator.backward(loss_of(model, own_batch(0))))
        raised(LoopError, "loss.backward()", by=optimizer.step)
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0]))


@on_paths("single", "ddp")
def test_a_direct_backward_of_some_parameters(path: str) -> None:
    """It fails immediately before, between and after a window's backwards. `zero_grad` drops its gradients."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = _prepared(accelerator)
        own = accelerator.unwrap_model(model)

        def penalty() -> None:
            own[2].bias.square().sum().backward()  # through one parameter alone

        def behind_a_frozen_layer() -> None:
            own[2].requires_grad_(False)
            loss = loss_of(own, own_batch(0))
            own[2].requires_grad_(True)
            loss.backward()

        for direct in (penalty, behind_a_frozen_layer):
            for place in range(3):
                for i in range(2):
                    if i == place:
                        raised(LoopError, "loss.backward()", by=direct)
                        break
                    with accelerator.accumulate(model):
                        accelerator.backward(loss_of(model, own_batch(i)))
                else:
                    raised(LoopError, "loss.backward()", by=direct)
                if place == 2:
                    raised(LoopError, "zero_grad()", by=optimizer.step)
                else:
                    raised(LoopError, "zero_grad()", by=lambda: accelerator.backward(loss_of(own, own_batch(0))))
                optimizer.zero_grad()
        for i in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(i)))
                optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0, 1]))


@on_paths("single", "ddp")
def test_a_backward_that_reaches_no_trained_parameter(path: str) -> None:
    """The script may compute gradients of inputs, for adversarial examples and penalties."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        own = accelerator.unwrap_model(model)
        x, y = own_batch(0)
        x.requires_grad_(True)
        accelerator.backward(loss_of(model, own_batch(0)))
        loss = loss_of(own, (x, y))
        loss.backward(inputs=[x], retain_graph=True)
        torch.autograd.grad(loss, own[0].weight)
        own.requires_grad_(False)
        loss_of(own, (x, y)).backward()
        own.requires_grad_(True)
        optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0]))


@on_paths("zero2-one-process", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", daily="zero2-cpu")
def test_a_direct_backward_past_the_engine(path: str) -> None:
    """Under ZeRO it also fails if it reaches only some parameters, through no output.

    `zero_grad` drops the gradients.
    """
    for precision in ("no", "bf16"):
        with running(path, gradient_accumulation_steps=2, mixed_precision=precision) as accelerator:
            model, optimizer = _prepared(accelerator)
            own = accelerator.unwrap_model(model)
            part = own[2](torch.ones(2, 16, dtype=own[2].weight.dtype)).sum()
            for i in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, own_batch(i)))
                    if i == 0:
                        raised(LoopError, "loss.backward()", by=part.backward)
                        raised(LoopError, "zero_grad()", by=lambda: accelerator.backward(loss_of(model, own_batch(0))))  # noqa: B023
                        optimizer.zero_grad()
                        accelerator.backward(loss_of(model, own_batch(i)))
                    optimizer.step()
                    optimizer.zero_grad()
            assert_near(weights(accelerator, model), _trained_plainly([0, 1]), 1e-5 if precision == "no" else 1e-2)


@on_paths("single", "ddp")
def test_gradients_are_averaged_at_the_end_of_a_window(path: str) -> None:
    """The user's parameters show this process's gradients inside `no_sync` and the window, the average at its end."""
    for each in (False, True):
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        with running(path, gradient_accumulation_plugin=plugin) as accelerator:
            model, optimizer = _prepared(accelerator)
            own = accelerator.unwrap_model(model)
            for i in range(4):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, own_batch(i)))
                    assert _agree(own) is (path == "single" or each or bool(i % 2)), (i, each)
                    optimizer.step()
                    optimizer.zero_grad()
            assert_near(weights(accelerator, model), _trained_plainly([0, 1], [2, 3]))
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        for inside in (True, False):
            with accelerator.no_sync(model) if inside else accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss_of(model, own_batch(0)))
            assert _agree(accelerator.unwrap_model(model)) is (path == "single" or not inside)
        with accelerator.no_sync(model):
            loss = loss_of(model, own_batch(1))
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
        assert _agree(accelerator.unwrap_model(model))
    if path == "ddp":  # DDP's own context is the accelerator's
        with running(path) as accelerator:
            model, optimizer = _prepared(accelerator)
            with model.no_sync():
                accelerator.backward(loss_of(model, own_batch(0)))
            assert not _agree(accelerator.unwrap_model(model))
            accelerator.backward(loss_of(model, own_batch(1)))
            assert _agree(accelerator.unwrap_model(model))


@on_paths("zero2-one-process", "zero1", "zero2", "zero3", daily=("zero1", "zero2"))
def test_a_refused_step_is_dropped(path: str) -> None:
    """A step that raises an error never applies its gradients. `zero_grad` drops them and must come first."""

    def set_gradients(model: nn.Module) -> None:
        for p in model.parameters():
            with contextlib.suppress(RuntimeError):  # at stage 3 one process has no unpartitioned parameter
                p.grad = torch.ones_like(p)

    def write_weights(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.0)

    causes = {"zero1": [set_gradients], "zero2": [set_gradients], "zero3": [set_gradients, write_weights]}
    precision = "bf16" if path == "zero1" else "no"  # in fp32 stage 1 steps by the gradients that are set
    for cause in causes[path]:
        with running(path, mixed_precision=precision) as accelerator:
            model, optimizer = _prepared(accelerator)
            accelerator.backward(loss_of(model, own_batch(0)))
            cause(accelerator.unwrap_model(model))
            raised(LoopError, by=optimizer.step)
            raised(LoopError, "zero_grad()", by=lambda: accelerator.backward(loss_of(model, own_batch(1))))  # noqa: B023
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, own_batch(1)))
            optimizer.step()
            assert optimizer.applied_steps == 1
            assert_near(weights(accelerator, model), _trained_plainly([1]), 1e-5 if precision == "no" else 1e-2)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_values_are_clipped(path: str) -> None:
    """Each value of the gradients is clamped, for this step only.

    ZeRO has no gradients to clamp and raises an error.
    """
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = _prepared(accelerator)
        if is_zero(path):
            clip = accelerator.clip_grad_value_
            raised(LoopError, "clip_grad_norm_", by=lambda: clip(model.parameters(), 0.01))
            return
        for i in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(i)))
                accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        assert_near(weights(accelerator, model), _trained_plainly([0, 1], [2, 3], values=0.01))


@on_paths("single", "ddp")
def test_what_is_not_finite_is_not_hidden_by_clipping(path: str) -> None:
    """inf, clamped to a finite number, still skips the step."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        before = weights(accelerator, model)
        x, y = own_batch(0)
        accelerator.backward(loss_of(model, (x, y)) * float("inf"))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert accelerator.optimizer_step_was_skipped
        assert same(weights(accelerator, model), before)


@on_paths("single", "ddp")
def test_gradients_can_be_unscaled(path: str) -> None:
    """Under fp16 the script sees true gradients after `unscale_gradients`, and the step applies these."""
    plain = make_net()
    loss_of(plain, global_batch(0)).backward()
    for precision in ("fp16", "no"):
        with running(path, mixed_precision=precision) as accelerator:
            model, optimizer = _prepared(accelerator)
            accelerator.backward(loss_of(model, own_batch(0)))
            scaled = copy.deepcopy([p.grad for p in accelerator.unwrap_model(model).parameters()])
            accelerator.unscale_gradients(optimizer)
            accelerator.unscale_gradients()
            for before, p, wanted in zip(scaled, model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, wanted.grad, rtol=0.02, atol=0.002)
                assert torch.equal(before, p.grad) is (precision == "no")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert optimizer.applied_steps == 1


@on_paths("single", "ddp")
def test_what_comes_too_late_is_named(path: str) -> None:
    """A backward after a call that divides by the loss scale, or clamping after the step, is an error.

    It names the call.
    """
    with running(path, mixed_precision="fp16") as accelerator:
        model, optimizer = _prepared(accelerator)
        calls: dict[str, Callable[[], Any]] = {
            "clip_grad_norm_()": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
            "clip_grad_value_()": lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
            "unscale_gradients()": accelerator.unscale_gradients,
            "accelerator.scaler.unscale_()": lambda: accelerator.scaler.unscale_(optimizer),
        }
        for name, call in calls.items():
            accelerator.backward(loss_of(model, own_batch(0)))
            call()
            late = functools.partial(accelerator.backward, loss_of(model, own_batch(1)))
            raised(LoopError, f"backward() after {name} and before", f"Call {name} after the window's last", by=late)
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        for name in ("clip_grad_norm_()", "clip_grad_value_()"):
            raised(LoopError, f"{name} was called after optimizer.step()", by=calls[name])


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_gradients_that_the_script_has_set(path: str) -> None:
    """If set before a backward, ZeRO 0-2 adds to them like plain torch.

    On other paths the error says that they were set.
    """
    plain = make_net()
    for p in plain.parameters():
        p.grad = torch.ones_like(p)
    loss_of(plain, global_batch(0)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with running(path) as accelerator:
        model, optimizer = accelerator.prepare(*net_and_sgd())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        train = functools.partial(accelerator.backward, loss_of(model, own_batch(0)))
        if path == "zero3":
            raised(LoopError, "changed or set a parameter's grad", by=train)
        elif not is_zero(path):
            raised(LoopError, "the script has set a parameter's grad", "optimizer.zero_grad()", by=train)
        else:
            train()
            optimizer.step()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths("single", "ddp")
def test_values_of_other_models_are_clipped(path: str) -> None:
    """For a model that the script itself trains next to the prepared one, it works as torch's own function."""
    with running(path) as accelerator:
        _prepared(accelerator)
        other = make_net()
        loss_of(other, own_batch(0)).backward()
        accelerator.clip_grad_value_(other.parameters(), 1e-3)
        assert max(float(p.grad.abs().max()) for p in other.parameters() if p.grad is not None) <= 1.01e-3


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_accumulation_may_change(path: str) -> None:
    """`gradient_accumulation_steps` takes effect from the next window, before and after `prepare`."""
    with running(path) as accelerator:
        assert accelerator.sync_gradients
        accelerator.gradient_accumulation_steps = 2
        model, optimizer = _prepared(accelerator)
        assert accelerator.gradient_accumulation_steps == accelerator.resolved.accumulation == 2
        take_steps(accelerator, model, optimizer, range(2))
        accelerator.gradient_accumulation_steps = 1
        accelerator.backward(loss_of(model, own_batch(2)))
        optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0, 1], [2]))


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_accumulation_of_a_file_stays(path: str) -> None:
    """Another number in code is an error that names both, as in `Accelerator(…)`."""
    stage = "zero_optimization: {stage: 2}, " if is_zero(path) else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "launch.yaml"
        file.write_text(f"use_cpu: true\ndeepspeed_config: {{{stage}gradient_accumulation_steps: 4}}\n")
        accelerator = Accelerator(config=file)

    def change(steps: int) -> None:
        accelerator.gradient_accumulation_steps = steps

    change(4)
    raised(ConfigError, "2 in code, but 4 at", "launch.yaml:2", by=lambda: change(2))
    accelerator.end_training()


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_loop_says_itself_where_windows_end(path: str) -> None:
    """With `sync_gradients`, as in transformers' Trainer, nothing is counted. A step inside a window does nothing."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda _: 1.0))
        for window in ([0, 1, 2], [3]):
            for i in window:
                accelerator.sync_gradients = i == window[-1]
                accelerator.backward(loss_of(model, own_batch(i)) / len(window))
                before = weights(accelerator, model)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                assert same(weights(accelerator, model), before) is (i != window[-1])
        assert (optimizer.applied_steps, schedule.last_epoch) == (2, 2)
        assert_near(weights(accelerator, model), _trained_plainly([0, 1, 2], [3]))


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_windows_may_run_on_from_epoch_to_epoch(path: str) -> None:
    """`sync_with_dataloader=False`: three batches in an epoch, two in a window, three windows in two epochs."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    with running(path, gradient_accumulation_plugin=plugin) as accelerator:
        model = make_net()
        size = 4 * accelerator.num_processes
        loader = torch.utils.data.DataLoader(torch.randn(3 * size, 8), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        applied = []
        for _ in range(2):
            for x in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    applied.append(optimizer.applied_steps)
        assert applied == [0, 1, 1, 2, 2, 3]


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_processes_with_fewer_batches_follow(path: str) -> None:
    """Under DDP a process without further batches joins the others' reductions. On other paths a warning is logged."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.zeros(12, 8), batch_size=4))
        if accelerator.num_processes == 1:
            with accelerator.join_uneven_inputs([model], even_batches=False):
                return
        if is_zero(path):
            with pytest.warns(UserWarning, match="no effect"), accelerator.join_uneven_inputs([model]):
                return
        taken = 0
        for least in (0, 2):
            with accelerator.join_uneven_inputs([model], even_batches=False):
                assert len(loader) == 1
                for i in range(least + accelerator.process_index):
                    take_steps(accelerator, model, optimizer, [i])
                    taken += 1
        assert len(loader) == 2
        assert optimizer.applied_steps == taken
        first, *others = gather_object([{name: t.tolist() for name, t in model.module.state_dict().items()}])
        assert all(other == first for other in others)  # the last process's, which took every step
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with accelerator.join_uneven_inputs([model]):
                assert len(loader) == 2


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_arguments_of_backward(path: str) -> None:
    """They equal those of `Tensor.backward`: the gradient for a loss of several numbers, and a kept graph."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        x, y = own_batch(0)
        losses = (model(x).float() - y).square().flatten()
        accelerator.backward(losses, gradient=torch.full_like(losses, 1 / len(losses)))
        optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0]))


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_a_graph_that_is_run_through_twice(path: str) -> None:
    """Two losses of one forward, with a backward each, work as in plain torch.

    Stage 3 releases weights and refuses it.
    """
    plain, sgd = net_and_sgd()
    for step in range(2):
        out = plain(global_batch(step)[0])
        (out.square().mean() + out.abs().mean()).backward()
        sgd.step()
        sgd.zero_grad()
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        for step in range(2):
            out = model(own_batch(step)[0])
            accelerator.backward(out.square().mean(), retain_graph=True)
            second = functools.partial(accelerator.backward, out.abs().mean())
            if path == "zero3":
                raised(LoopError, "Add the losses", "stage 2", by=second)
                optimizer.zero_grad()
                out = model(own_batch(step)[0])
                accelerator.backward(out.square().mean() + out.abs().mean())
            else:
                second()
            optimizer.step()
            optimizer.zero_grad()
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths("zero3", "zero3-gathered")
def test_a_graph_that_is_run_through_twice_at_once(path: str) -> None:
    """In the first forward stage 3 releases small weights too. A gradient of one element would be silently wrong."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), 1.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    with running(path) as accelerator:
        net = nn.Sequential(nn.Linear(8, 1), Scale(), nn.Tanh(), nn.Linear(1, 4))
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        out = model(own_batch(0)[0])
        accelerator.backward(out.square().mean(), retain_graph=True)
        raised(LoopError, "Add the losses", "stage 2", by=lambda: accelerator.backward(out.abs().mean()))


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_penalty_on_the_weights(path: str) -> None:
    """A penalty in the loss works as in plain torch.

    At stage 3 the script would find empty weights, so it is refused.
    """
    plain, sgd = net_and_sgd()
    (loss_of(plain, global_batch(0)) + 0.1 * sum(p.square().sum() for p in plain.parameters())).backward()
    sgd.step()
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        loss = loss_of(model, own_batch(0)) + 0.1 * sum(p.square().sum() for p in model.parameters())
        if path == "zero3":
            raised(LoopError, "outside of its forward", "weight_decay", by=lambda: accelerator.backward(loss))
            return
        accelerator.backward(loss)
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_a_penalty_on_the_weights_of_several_models(path: str) -> None:
    """One backward of both works as in plain torch. Stage 3 refuses it as it does for one model."""
    plain, other = make_net(), make_net()
    both = [*plain.parameters(), *other.parameters()]
    sgd = torch.optim.SGD(both, lr=0.1)
    joint = loss_of(plain, global_batch(0)) + loss_of(other, global_batch(1))
    (joint + 0.1 * sum(p.square().sum() for p in both)).backward()
    sgd.step()
    with running(path) as accelerator:
        (one, first), (two, second) = _prepared(accelerator), _prepared(accelerator)
        loss = loss_of(one, own_batch(0)) + loss_of(two, own_batch(1))
        loss = loss + 0.1 * sum(p.square().sum() for p in (*one.parameters(), *two.parameters()))
        if path == "zero3":
            raised(LoopError, "outside of its forward", "weight_decay", by=lambda: accelerator.backward(loss))
            return
        accelerator.backward(loss)
        first.step()
        second.step()
        assert_near(weights(accelerator, one), plain.state_dict(), 1e-5)
        assert_near(weights(accelerator, two), other.state_dict(), 1e-5)


def _clip_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _clip_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def _sign(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.sign()


@on_paths("single", "ddp", "zero0", "zero1", daily=("ddp", "zero0"))
def test_gradients_that_the_script_changes(path: str) -> None:
    """Changes work as under DDP.

    If ZeRO averages only in the step, one warning is logged, and only for a changed gradient.
    """
    for change in (_clip_norm, _clip_value, _sign, None):
        plain, sgd = net_and_sgd()
        with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
            model, optimizer = _prepared(accelerator)
            for i in range(3):
                loss_of(plain, global_batch(i)).backward()
                accelerator.backward(loss_of(model, own_batch(i)))
                if change is not None:
                    change(plain)
                    change(accelerator.unwrap_model(model))
                else:
                    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                    assert abs(accelerator.clip_grad_norm_(model.parameters(), 0.1) - norm) < 1e-5
                for one in (sgd, optimizer):
                    one.step()
                    one.zero_grad()
            warned = change is not None and is_zero(path)
            assert said.getvalue().count("the script has changed p.grad of 4 parameters") == warned
            if not warned:
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
            else:
                assert "0.weight" in said.getvalue()
                assert "accelerator.clip_grad_norm_" in said.getvalue()


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_gradients_that_this_package_changes(path: str) -> None:
    """No warning blames the script for a short window's correction or a shared loss scale."""
    with contextlib.redirect_stderr(io.StringIO()) as said, running(path, gradient_accumulation_steps=3) as accelerator:
        data = list(zip(*own_batch(0, 16), strict=True))
        model, optimizer, loader = accelerator.prepare(*net_and_sgd(), torch.utils.data.DataLoader(data, batch_size=1))
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, (x, y)))
                optimizer.step()
                optimizer.zero_grad()
        assert "the script has" not in said.getvalue()


# fp16 needs a GPU here. This test calls the check of the gradients directly.
@on_paths("single")
def test_gradients_that_hold_the_loss_scale(path: str) -> None:
    """Under fp16, results computed from `p.grad` are scaled, with one process too."""
    for is_scaled in (False, True):
        net = make_net()
        session = SimpleNamespace(module=net, trained=list(net.parameters()), stage=1, scales_loss=is_scaled)
        guard = PartialGradients(session, Sampling())
        with contextlib.redirect_stderr(io.StringIO()) as said:
            loss_of(net, own_batch(0), 1024.0).backward()
            guard.after_backward()
            _clip_norm(net)
            guard.before_complete()
        assert said.getvalue().count("the gradient, multiplied by the loss scale") == is_scaled
        assert "average" not in said.getvalue()


@on_paths("single", "ddp", "zero0", "zero1", daily=("ddp", "zero1"))
def test_weights_perturbed_along_gradients(path: str) -> None:
    """Sharpness-aware minimisation equals plain torch under DDP. Stages 0 and 1 warn once that their result differs."""

    def climb(model: nn.Module) -> list[Tensor]:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        steps = [0.05 * g / norm for g in gradients]
        with torch.no_grad():
            for p, step in zip(model.parameters(), steps, strict=True):
                p.add_(step)
        return steps

    def descend(model: nn.Module, steps: list[Tensor]) -> None:
        with torch.no_grad():
            for p, step in zip(model.parameters(), steps, strict=True):
                p.sub_(step)

    plain, sgd = net_and_sgd()
    with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        sides: list[tuple[Any, ...]] = [
            (plain, sgd, lambda loss: loss.backward(), global_batch),
            (model, optimizer, accelerator.backward, own_batch),
        ]
        for i in range(3):
            for net, one, backward, batch in sides:
                backward(loss_of(net, batch(i)))
                steps = climb(net)
                one.zero_grad()
                backward(loss_of(net, batch(i)))
                descend(net, steps)
                one.step()
                one.zero_grad()
        assert said.getvalue().count("between backward() and zero_grad()") == is_zero(path)
        if not is_zero(path):
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_gradient_set_after_clipping(path: str) -> None:
    """Stage 0 steps by it, like one device. The partitioned stages refuse it, because they would not apply it."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        own = accelerator.unwrap_model(model)[2].bias
        accelerator.backward(loss_of(model, own_batch(0)))
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        own.grad = torch.ones_like(own)
        if path in ("single", "ddp", "zero0"):
            before = weights(accelerator, model)["2.bias"]
            optimizer.step()
            assert_near({"b": weights(accelerator, model)["2.bias"]}, {"b": before - 0.1})
        else:
            raised(LoopError, "would not apply it", by=optimizer.step)


@on_paths("zero1")
def test_gradients_that_are_left_behind(path: str) -> None:
    """In bf16 stage 1 leaves in `p.grad` a copy of sums kept elsewhere, so a change of it is refused."""
    with running(path, mixed_precision="bf16") as accelerator:
        model, optimizer = _prepared(accelerator)
        for change in (_clip_norm, _clip_value, _sign):
            accelerator.backward(loss_of(model, own_batch(0)))
            assert all(p.grad is not None for p in model.parameters())
            change(accelerator.unwrap_model(model))
            raised(LoopError, "accelerator.clip_grad_norm_()", "register_hook", by=optimizer.step)
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, own_batch(0)))
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_gradients_that_the_script_clears_itself(path: str) -> None:
    """`p.grad = None` counts as `zero_grad()`.

    ZeRO has no gradients after a step and says that it cannot detect this.
    """
    with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        for i in range(3):
            for p in model.parameters():
                p.grad = None
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0], [1], [2]))
        if is_zero(path):
            assert said.getvalue().count("p.grad = None") == accelerator.is_main_process
        else:
            assert "zero_grad()" not in said.getvalue()


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clipping_over_the_optimizers_groups(path: str) -> None:
    """Clipping all groups equals clipping the model. Stage 3's empty groups and a subset are refused with a reason."""
    plain, sgd = net_and_sgd()
    loss_of(plain, global_batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    sgd.step()
    with running(path) as accelerator:
        net = make_net()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(groups, lr=0.1))
        accelerator.backward(loss_of(model, own_batch(0)))

        def clip(count: int) -> Tensor:
            parameters = [p for group in optimizer.param_groups[:count] for p in group["params"]]
            return accelerator.clip_grad_norm_(parameters, 0.1)

        if path == "zero3":
            raised(LoopError, "param_groups", "model.parameters()", by=lambda: clip(2))
            return
        if is_zero(path):
            raised(LoopError, "subset", by=lambda: clip(1))
        assert abs(clip(2) - norm) < 1e-4
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_values_are_not_clipped_over_partitions(path: str) -> None:
    """`clip_grad_value_` over the optimizer's groups is refused under ZeRO, as over the model's parameters."""
    with running(path) as accelerator:
        model, optimizer = _prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if is_zero(path):
            raised(LoopError, "clip_grad_norm_", by=lambda: accelerator.clip_grad_value_(given, 0.01))
            return
        accelerator.clip_grad_value_(given, 0.01)
        optimizer.step()
        assert_near(weights(accelerator, model), _trained_plainly([0], values=0.01))


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_hooks_on_sums_of_gradients(path: str) -> None:
    """A hook after each gradient sees the window's sum so far. If sums are not in `p.grad`, windows refuse the hook."""

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    plain = make_net()
    plain[0].weight.register_post_accumulate_grad_hook(halve)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        loss_of(plain, global_batch(step)).backward()
    sgd.step()
    with running(path) as accelerator:
        net = make_net()
        net[0].weight.register_post_accumulate_grad_hook(halve)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(loss_of(model, own_batch(0)))
        second = functools.partial(accelerator.backward, loss_of(model, own_batch(1)))
        if path in ("zero2", "zero3", "zero2-cpu"):
            raised(LoopError, "0.weight", "register_hook", by=second)
            return
        second()
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


class Fused(torch.optim.SGD):
    """An optimizer like lomo_optim's classes: a hook of each parameter changes weights within backward."""

    def fused_backward(self, loss: Tensor, lr: float) -> None:
        """Run the backward that a script calls instead of `backward`."""


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_lomo_is_refused(path: str) -> None:
    """Its updates happen within backward. Both its call and `prepare` of its optimizers raise an error."""
    with running(path) as accelerator:
        raised(LoopError, "offload_optimizer", by=lambda: accelerator.lomo_backward(torch.zeros(()), 0.1))
        model = make_net()
        fused = Fused(model.parameters(), lr=0.1)
        raised(LoopError, "Fused", "offload_optimizer", by=lambda: accelerator.prepare(model, fused))
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
