"""Mistakes of a loop: every path names them and says what to do instead."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import types
import warnings
from pathlib import Path
from typing import Any

import torch
from on_paths import LOOP, on_paths, without
from paths import (
    ZERO,
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    net_and_sgd,
    own_batch,
    raised,
    running,
    take_plain_steps,
    take_steps,
    weights,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from zero_plugin import DummyScheduler
from zero_plugin.errors import ConfigError, LoopError


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_a_layer_is_unfrozen(path: str) -> None:
    """In step 13, the first backward that reaches it raises an error.

    After a new prepare, it trains as in plain torch.
    """
    plain, sgd = net_and_sgd()
    for i in range(14):
        plain[0].requires_grad_(i > 11)
        take_plain_steps(plain, sgd, [i])
    with running(path) as accelerator:
        net = make_net()
        net[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(12):  # more than the first ones, which are all checked
            take_steps(accelerator, model, optimizer, [i])
        net[0].requires_grad_(True)
        raised(LoopError, "frozen", "free_memory()", by=lambda: accelerator.backward(loss_of(model, own_batch(12))))
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        take_steps(accelerator, model, optimizer, range(12, 14))
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_a_layer_is_frozen(path: str) -> None:
    """Frozen in step 2 without a gradient, it is fine on one device and elsewhere an error.

    After its backward, it is stepped.

    Under ZeRO its momentum and weight decay would continue, and DDP waits for its gradient.
    """

    def train(model: Any, layer: Any, optimizer: Any, backward: Any, batch: Any, steps: range) -> None:
        for i in steps:
            layer.requires_grad_(i < 3)
            backward(loss_of(model, batch(i)))
            layer.requires_grad_(i not in (1, 3))
            optimizer.step()
            optimizer.zero_grad()

    def sgd_of(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    plain = make_net()
    steps = range(4 if path == "single" else 3)
    train(plain, plain[0], sgd_of(plain), lambda loss: loss.backward(), global_batch, steps)
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, sgd_of(net))
        rest = functools.partial(train, model, net[0], optimizer, accelerator.backward, own_batch)
        rest(steps)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
        if path != "single":
            raised(LoopError, "0.weight, 0.bias", "prepare()", by=lambda: rest(range(3, 4)))


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_a_layer_is_replaced(path: str) -> None:
    """After step 11, the first backward that reaches the new layer raises an error. A new parameter does too."""

    def replace(net: Any) -> None:
        net[2] = torch.nn.Linear(16, 4)

    def renew(net: Any) -> None:
        net[2].bias = torch.nn.Parameter(torch.zeros(4))

    for change in (replace, renew) if path != "zero3" else (replace,):  # there the forward fails before
        with running(path) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for i in range(11):  # more than the first ones, which are all checked
                take_steps(accelerator, model, optimizer, [i])
            change(net)
            for _ in range(2):
                raised(LoopError, "added later", by=lambda: accelerator.backward(loss_of(model, own_batch(11))))  # noqa: B023


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_clipping_comes_too_late(path: str) -> None:
    """After the step, it is an error. The configuration's clipping and the window's size are unchanged."""
    with running(path, deepspeed={"gradient_clipping": 0.01}) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(2):
            before = weights(accelerator, model)
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            raised(LoopError, "before optimizer.step()", by=lambda: accelerator.clip_grad_norm_(net.parameters(), 0.01))
            optimizer.zero_grad()
            after = weights(accelerator, model)
            moved = torch.stack([(after[name] - before[name]).norm() for name in before]).norm()
            assert abs(float(moved) - 0.1 * 0.01) < 1e-5


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_a_schedule_comes_after_its_section_runs(path: str) -> None:
    """A placeholder takes over from the section's schedule, which stepped automatically. A real schedule is refused."""
    sections: list[dict[str, Any]] = [
        {"type": "ExponentialLR", "params": {"gamma": 0.5}},
        {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 3}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.1, "warmup_type": "linear"}},
    ]
    for section in sections:
        rates = []
        for later in (False, True):
            with running(path, deepspeed={"scheduler": section}) as accelerator:
                net, sgd = net_and_sgd()
                if later:
                    model, optimizer = accelerator.prepare(net, sgd)
                    schedule = accelerator.prepare(DummyScheduler(optimizer))
                else:
                    model, optimizer, schedule = accelerator.prepare(net, sgd, DummyScheduler(sgd))
                for i in range(3):
                    rates.append(optimizer.param_groups[0]["lr"])
                    accelerator.backward(loss_of(model, own_batch(i)))
                    optimizer.step()
                    schedule.step()
        assert rates[:3] == rates[3:], rates
    with running(path, deepspeed={"scheduler": sections[0]}) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        raised(ConfigError, "scheduler", by=lambda: accelerator.prepare(LambdaLR(optimizer, lambda step: 1.0)))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        raised(LoopError, "before the first step", by=lambda: accelerator.prepare(DummyScheduler(optimizer)))


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_the_loader_comes_after_its_model(path: str) -> None:
    """If it changes the meaning of the configuration's accumulation or micro-batch, it is refused or logged."""
    data = torch.randn(32, 8)
    micro = {"train_micro_batch_size_per_gpu": 8}
    for deepspeed, kind, words in (
        ({"train_batch_size": 16}, LoopError, ("resolved to gradient_accumulation_steps 1", "the number is")),
        (micro, ConfigError, ("8, but the loop trains on 2",)),
    ):
        for shuffles in (True, False):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), running(path, deepspeed=deepspeed) as accelerator:
                net = make_net()
                accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
                loader: Any = DataLoader(data, batch_size=2, shuffle=shuffles)
                if shuffles:
                    raised(kind, *words, by=functools.partial(accelerator.prepare, loader))
                else:  # it may be a loader for evaluation
                    accelerator.prepare(loader)
                    first = accelerator.is_main_process
            assert shuffles or all((word in said.getvalue()) is first for word in words), said.getvalue()
    with running(path, deepspeed=micro) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True))
        accelerator.prepare(DataLoader(data, batch_size=3, shuffle=True))  # a second one is another loop's


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_a_schedule_is_prepared_once(path: str) -> None:
    """A schedule prepared twice would advance twice per step. The error covers real schedules and placeholders."""
    for build, words in (
        (lambda sgd: LambdaLR(sgd, lambda step: 1.0), "use the object that it returned"),
        (DummyScheduler, "use the scheduler of the first call"),
    ):
        with running(path) as accelerator:
            net, sgd = net_and_sgd()
            schedule: Any = build(sgd)
            _, _, prepared = accelerator.prepare(net, sgd, schedule)
            assert accelerator.prepare(prepared) is prepared
            raised(LoopError, words, by=functools.partial(accelerator.prepare, schedule))


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_a_loss_that_is_none(path: str) -> None:
    """For a dict, a tuple, a number, several elements or no graph, the error says what to pass. Nothing is counted."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for given, words in (
            (lambda loss: {"loss": loss}, ("a dict", 'output["loss"]')),
            (lambda loss: types.SimpleNamespace(loss=loss), ("a SimpleNamespace", "the tensor itself")),
            (lambda loss: (loss, loss), ("a tuple", "the sum of several losses")),
            (lambda loss: loss.item(), ("a float", "without item()")),
            (lambda loss: loss * torch.ones(3), ("shape (3,)", "loss.mean() or loss.sum()", "gradient=")),
            (lambda loss: loss.detach(), ("without a graph", "detach()")),
            (lambda loss: loss.detach().long(), ("torch.int64", "floating")),
        ):
            loss = given(loss_of(model, own_batch(0)))
            raised(LoopError, "backward()", *words, by=functools.partial(accelerator.backward, loss))
        for i in range(2):
            accelerator.backward(loss_of(model, own_batch(i)).reshape(1))
            optimizer.step()
        assert optimizer.applied_steps == 1


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_an_optimizer_that_needs_a_closure(path: str) -> None:
    """LBFGS computes losses within its step. `prepare` refuses it before it builds anything."""
    for through_schedule in (False, True):
        with running(path) as accelerator:
            net = make_net()
            lbfgs = torch.optim.LBFGS(net.parameters())
            given: list[Any] = [LambdaLR(lbfgs, lambda step: 1.0)] if through_schedule else [net, lbfgs]
            raised(LoopError, "LBFGS", "closure", "AdamW", by=functools.partial(accelerator.prepare, *given))


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_sparse_gradients(path: str) -> None:
    """DeepSpeed has none, so `prepare` refuses them and names the layer. Elsewhere they train.

    A frozen layer is fine.
    """
    for trained in (True, False):
        with running(path) as accelerator:
            net = nn.Sequential(nn.Embedding(10, 8, sparse=True), make_net())
            net[0].requires_grad_(trained)
            sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
            if is_zero(path) and trained:
                words = ("0 is Embedding(sparse=True)", "sparse=False")
                raised(LoopError, *words, by=functools.partial(accelerator.prepare, net, sgd))
                continue
            model, optimizer = accelerator.prepare(net, sgd)
            accelerator.backward(model(torch.tensor([1, 2])).square().mean())
            optimizer.step()
            assert optimizer.applied_steps == 1


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_scripted_modules(path: str) -> None:
    """torch.jit's modules take no hooks. Under ZeRO `prepare` refuses them, also as a part. Elsewhere they train."""
    for whole in (True, False):
        with running(path) as accelerator, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's own
            net: Any = torch.jit.script(make_net()) if whole else make_net()
            if not whole:
                net[2] = torch.jit.script(net[2])
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            if is_zero(path):
                words = ("torch.jit", "that is made" if whole else "whose 2 is made")
                raised(LoopError, *words, by=functools.partial(accelerator.prepare, net, sgd))
                continue
            model, optimizer = accelerator.prepare(net, sgd)
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            assert optimizer.applied_steps == 1


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_a_forward_that_scales_weights(path: str) -> None:
    """`Embedding(max_norm=…)` writes into its weights: ZeRO would lose the change, and DDP's processes would differ."""
    for trained in (True, False):
        with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
            net = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), make_net())
            net[0].requires_grad_(trained)
            sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
            if is_zero(path) and trained:
                words = ("0 (Embedding)", "max_norm")
                raised(LoopError, *words, by=functools.partial(accelerator.prepare, net, sgd))
                continue
            accelerator.prepare(net, sgd)
            is_first = accelerator.is_main_process
        assert ("max_norm" in said.getvalue()) == (trained and path == "ddp" and is_first), said.getvalue()


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_hooks_that_change_gradients(path: str) -> None:
    """A step_pre_hook that changes them is warned about under ZeRO, whose gradients it does not see.

    Elsewhere it applies.
    """
    plain, sgd = net_and_sgd()
    with contextlib.redirect_stderr(io.StringIO()) as said, running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def halve(of: Any, *_: Any) -> None:
            for p in (p for group in of.param_groups for p in group["params"] if p.grad is not None):
                p.grad.mul_(0.5)

        sgd.register_step_pre_hook(halve)
        optimizer.register_step_pre_hook(halve)
        for i in range(2):
            take_plain_steps(plain, sgd, [i])
            take_steps(accelerator, model, optimizer, [i])
        trained, is_first = weights(accelerator, model), accelerator.is_main_process
    if not is_zero(path):
        assert_near(trained, plain.state_dict(), 1e-5)
    assert ("step_pre_hook" in said.getvalue()) == (is_zero(path) and is_first), said.getvalue()


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_a_copy_of_a_model_that_trains(path: str) -> None:
    """`copy.deepcopy` of the module starts an averaged model. The copy holds nothing of the engine, and computes."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        with accelerator.whole_weights(model):
            copied = copy.deepcopy(accelerator.unwrap_model(model))
            assert_near(copied.state_dict(), accelerator.unwrap_model(model).state_dict())


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_sparse_gradients_of_a_function(path: str) -> None:
    """`embedding(…, sparse=True)` shows only during training. If sparse gradients fail there, an error says so."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Parameter(torch.ones(10, 8)), make_net()

        def forward(self, numbers: Tensor) -> Tensor:
            return self.net(nn.functional.embedding(numbers, self.table, sparse=True))

    with running(path) as accelerator:
        net = Table()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

        def train() -> None:
            accelerator.backward(model(torch.tensor([1, 2])).square().mean())
            optimizer.step()

        if (is_zero(path) and path != "zero0") or path == "ddp":
            raised(LoopError, "Table", "sparse tensor", "sparse=False", by=train)
        else:
            train()
            assert optimizer.applied_steps == 1


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_the_schedule_comes_first_the_optimizer_last(path: str) -> None:
    """In three calls, schedule, model, optimizer, the schedule reveals the optimizer, and the last call returns it."""
    plain, sgd = net_and_sgd()
    schedule: Any = LambdaLR(sgd, lambda step: 0.5**step)
    for i in range(3):
        loss_of(plain, global_batch(i)).backward()
        sgd.step()
        schedule.step()
        sgd.zero_grad()
    with running(path) as accelerator:
        net, own = net_and_sgd()
        schedule = accelerator.prepare(LambdaLR(own, lambda step: 0.5**step))
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare(own)
        for i in range(3):
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert abs(optimizer.param_groups[0]["lr"] - 0.1 * 0.125) < 1e-12
        assert_near(weights(accelerator, model), plain.state_dict())
        raised(LoopError, "returned", by=lambda: accelerator.prepare(own))


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_hooks_around_a_step(path: str) -> None:
    """Registered on the optimizer before or after `prepare`, they run once per step.

    Skipped steps run no post hooks.
    """
    for build in (torch.optim.SGD, torch.optim.AdamW):  # under offload, the second is replaced by DeepSpeed's kernel
        with running(path) as accelerator:
            net = make_net()
            first, second = list(net.parameters())[:2], list(net.parameters())[2:]
            own = build([{"params": first}, {"params": second, "lr": 0.01}], lr=0.1)
            calls: list[str] = []

            def note(what: str, *_: Any, calls: list[str] = calls) -> None:
                calls.append(what)

            own.register_step_pre_hook(functools.partial(note, "before"))
            own.register_step_post_hook(functools.partial(note, "after"))
            model, optimizer = accelerator.prepare(net, own)
            optimizer.register_step_pre_hook(functools.partial(note, "own before"))
            handle = optimizer.register_step_post_hook(functools.partial(note, "own after"))
            take_steps(accelerator, model, optimizer, range(2))
            assert calls == ["before", "own before", "after", "own after"] * 2, calls
            handle.remove()
            accelerator.backward(loss_of(model, own_batch(2), float("inf")))
            optimizer.step()
            assert optimizer.step_was_skipped
            assert "after" not in calls[8:], calls


class Wrapped(torch.optim.Optimizer):
    """A lookahead-style wrapper: has the inner optimizer's attributes and never calls `Optimizer.__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@on_paths(*LOOP, daily=("single", "zero3", "zero2-cpu"))
def test_a_wrapper_without_torchs_constructor(path: str) -> None:
    """It steps an unpartitioned model, hooks included. If ZeRO partitions the model, it is refused by name."""
    plain, sgd = net_and_sgd()
    loss_of(plain, global_batch(0)).backward()
    sgd.step()
    with running(path) as accelerator:
        net = make_net()
        wrapped = Wrapped(torch.optim.SGD(net.parameters(), lr=0.1))
        if is_zero(path) and path != "zero0":
            raised(ConfigError, "Wrapped", "stage", by=lambda: accelerator.prepare(net, wrapped))
            return
        model, optimizer = accelerator.prepare(net, wrapped)
        seen: list[Any] = []
        optimizer.register_step_post_hook(lambda *given: seen.append(given))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        assert len(seen) == 1
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_gradients_that_the_script_sets(path: str) -> None:
    """DDP, one device and stages 0 and 1 step by a `p.grad` set between backward and step. Elsewhere it is an error.

    The error's advice, a hook that returns the gradient, works on every path.
    """
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before = weights(accelerator, model)
        for p in net.parameters():
            p.register_hook(torch.ones_like)
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        after = weights(accelerator, model)
        for name, weight in before.items():
            assert torch.allclose(weight - after[name], torch.full_like(weight, 0.1), atol=1e-6), name
    partitioned = path in ("zero2", "zero3", "zero2-cpu")
    if path in ("zero0", "zero1"):  # in bf16 stage 1 steps by sums in fp32, stage 0 by p.grad
        with running(path, mixed_precision="bf16") as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for i in range(2):
                accelerator.backward(loss_of(model, own_batch(i)))
                optimizer.step()
            accelerator.backward(loss_of(model, own_batch(2)))
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            if path == "zero1":
                raised(LoopError, "set a parameter's grad", by=optimizer.step)
            else:
                optimizer.step()
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        before = weights(accelerator, model)
        accelerator.backward(loss_of(model, own_batch(0)))
        for p in net.parameters():
            if path == "zero3":  # one process has no unpartitioned parameter
                with contextlib.suppress(RuntimeError):
                    p.grad = torch.ones_like(p)
            else:
                p.grad = torch.ones_like(p)
        if partitioned:
            raised(LoopError, "set a parameter's grad", "register_hook", by=optimizer.step)
            return
        optimizer.step()
        after = weights(accelerator, model)
        for name, weight in before.items():
            assert torch.allclose(weight - after[name], torch.full_like(weight, 0.1), atol=1e-6), name
        optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        raised(LoopError, by=optimizer.step)  # no backward has marked them yet


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_an_optimizer_that_is_made_later(path: str) -> None:
    """An unprepared optimizer of the prepared model's parameters would step by partial or no gradients under ZeRO."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        later = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.backward(loss_of(model, own_batch(0)))
        if is_zero(path):
            raised(LoopError, "SGD", "free_memory()", by=later.step)
            optimizer.step()
        else:
            later.step()
        plain = make_net()
        loss_of(plain, global_batch(0)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths("zero2-one-process", "zero1", "zero2", "zero3", "zero2-cpu", daily=("zero3", "zero2-cpu"))
def test_an_optimizer_that_deepspeed_has_not_tested(path: str) -> None:
    """`zero_allow_untested_optimizer: false` is obeyed: an error at the key names the optimizer."""
    with running(path, deepspeed={"zero_allow_untested_optimizer": False}) as accelerator:
        net = make_net()
        nadam = torch.optim.NAdam(net.parameters())
        words = ("zero_allow_untested_optimizer", "false", "NAdam", "Delete the key")
        raised(ConfigError, *words, by=lambda: accelerator.prepare(net, nadam))
    with running(path, deepspeed={"zero_allow_untested_optimizer": False}) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.Adagrad(net.parameters()))


@on_paths("zero2-one-process", "zero2", "zero3", daily="zero3")
def test_a_key_that_the_engine_would_fail_at(path: str) -> None:
    """The error comes before an engine is built, at the key, with the fix."""
    with running(path, deepspeed={"checkpoint": {"writer": {"type": "FAST"}}}) as accelerator:
        net, sgd = net_and_sgd()
        words = ("checkpoint.writer", "CROSS_SIZE", "save_state()")
        raised(ConfigError, *words, by=lambda: accelerator.prepare(net, sgd))


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("single", "zero3", "zero2-cpu"))
def test_a_step_that_one_process_leaves_out(path: str) -> None:
    """It is an error, under DDP at a later backward, since no process waits for that step.

    If all skip it, nothing is wrong.
    """
    words = (
        ("backwards without a step: 0 on rank 0", "1 on rank 1")
        if path == "ddp"
        else ("drops gradients", "rank 1", "step()")
    )
    for others_too in (True, False):
        with running(path) as accelerator:
            model = make_net()
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

            def train(model=model, optimizer=optimizer, others_too=others_too, accelerator=accelerator) -> None:
                for step in range(5):
                    accelerator.backward(loss_of(model, own_batch(step)))
                    if step != 2 or not (others_too or accelerator.process_index == 1):
                        optimizer.step()
                    optimizer.zero_grad()

            if others_too or accelerator.num_processes == 1:
                train()
            else:
                raised(LoopError, *words, "accelerator.reduce(loss", by=train)


# Every load of ungathered weights needs all processes there.
@on_paths(*without(LOOP, "zero3"), "zero3-gathered", daily=("single", "zero0", "zero2"))
def test_weights_that_one_process_loads(path: str) -> None:
    """If only the main process loads its best weights, all processes raise an error.

    Restoring in time is no mistake.
    """
    for restores in (True, False):
        with running(path) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
            best = {name: tensor * 0.5 for name, tensor in make_net().state_dict().items()}

            def train(
                model=model, optimizer=optimizer, net=net, best=best, restores=restores, accelerator=accelerator
            ) -> None:
                for step in range(5):
                    if step == 2 and accelerator.is_main_process:
                        before = copy.deepcopy(net.state_dict())
                        net.load_state_dict(best)
                        if restores:
                            net.load_state_dict(before)
                    take_steps(accelerator, model, optimizer, [step])

            if restores or accelerator.num_processes == 1:
                train()
            else:
                raised(LoopError, "written on some processes only", "is_main_process", by=train)


@on_paths(*without(LOOP, "zero3"), "zero3-gathered", daily=("single", "zero1", "zero2"))
def test_weights_that_one_process_loads_are_not_saved(path: str) -> None:
    """Each process writes a part of its own copies, so the files would hold a mixture."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        if accelerator.num_processes == 1:
            return
        if accelerator.is_main_process:
            net.load_state_dict({name: tensor * 0.5 for name, tensor in make_net().state_dict().items()})
        words = "written on some processes only", "is_main_process"
        raised(LoopError, *words, by=lambda: accelerator.save_state("a_mixture"))
        if path != "zero3-gathered":  # the first error has cleared its record
            raised(LoopError, *words, by=lambda: accelerator.save_model(model, "a_mixture"))
        assert not Path("a_mixture").exists()


@on_paths("zero2-one-process", "zero1", "zero2", daily=("zero1", "zero2"))
def test_a_parameter_is_replaced_in_the_forward(path: str) -> None:
    """An example is a codebook that follows its own average. At stages 1 and 2 the step's error says so."""

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.codes = make_net(), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            output = self.net(x) + self.codes.detach()
            self.codes = nn.Parameter(self.codes.detach() * 0.9)
            return output

    with running(path) as accelerator:
        net = Codebook()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))

        def train() -> None:
            take_steps(accelerator, model, optimizer, range(3))

        raised(LoopError, "replaced or removed", "Codebook", "register_buffer", by=train)


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero3", "zero2-cpu"))
def test_a_forward_with_other_parameters(path: str) -> None:
    """At stage 3, parameters that it has not partitioned are an error.

    Below stage 3 they compute, and nothing is logged.

    The same holds for a parametrization added or removed after `prepare`, torch's `functional_call`, and a copy.
    """

    def unparametrize(net: Any) -> None:
        nn.utils.parametrize.remove_parametrizations(net[0], "weight")

    def parametrize(net: Any) -> None:
        nn.utils.parametrizations.spectral_norm(net[2])

    def call_with(net: Any) -> None:
        given = {name: p.detach().clone() for name, p in net.named_parameters()}
        torch.func.functional_call(net, given, (own_batch(0)[0],))

    def copy_of(net: Any) -> None:
        copy.deepcopy(net)(own_batch(0)[0])

    if not path.startswith("zero3"):
        return
    for change in (unparametrize, parametrize, call_with, copy_of):
        with running(path) as accelerator:
            net = make_net()
            nn.utils.parametrizations.weight_norm(net[0])
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            take_steps(accelerator, model, optimizer, [0])

            def train(change=change, net=net, model=model, accelerator=accelerator) -> None:
                with accelerator.whole_weights(model):
                    change(net)
                for step in range(2):
                    accelerator.backward(loss_of(model, own_batch(step)))

            raised(LoopError, "Sequential", "after prepare()", "copy", by=train)


@on_paths(*LOOP, daily=("single", "zero1", "zero3"))
def test_a_layer_in_two_reentrant_checkpoints(path: str) -> None:
    """Each checkpoint gives its parameters a gradient.

    It trains as in plain torch, or is an error, for any bucket size.
    """

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.begin, self.layer, self.end = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.begin(x)
            for _ in range(3):
                hidden = checkpoint(self.layer, hidden, use_reentrant=True)
            output: Tensor = self.end(hidden)
            return output

    plain = Repeated()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    take_plain_steps(plain, sgd, range(3))
    for bucket in (10, 100, 1000) if path.startswith("zero3") else (1000,):
        section = {"zero_optimization": {**ZERO[path], "reduce_bucket_size": bucket}} if is_zero(path) else {}
        with running(path, deepspeed=section) as accelerator:
            net = Repeated()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))

            def train(model=model, optimizer=optimizer, accelerator=accelerator) -> None:
                take_steps(accelerator, model, optimizer, range(3))

            if path in ("single", "zero0", "zero1"):
                train()
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
            else:
                raised(LoopError, "two gradients in one backward", "use_reentrant=False", by=train)


@on_paths("single", "ddp")
def test_weights_that_each_process_perturbs(path: str) -> None:
    """Sharpness-aware minimisation by each process's own gradient is no mistake if the weights are restored."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(5):
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(model, own_batch(step)))
            before = [p.detach().clone() for p in net.parameters()]
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(p.grad, alpha=10.0)
            optimizer.zero_grad()
            accelerator.backward(loss_of(model, own_batch(step)))
            with torch.no_grad():
                for p, old in zip(net.parameters(), before, strict=True):
                    p.copy_(old)
            optimizer.step()
            optimizer.zero_grad()
