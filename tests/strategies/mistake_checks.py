"""Mistakes of a loop that are named, the same on every path, and what to do instead."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import torch
from paths import (
    PAIR,
    SINGLE,
    assert_near,
    checks_on,
    global_batch,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    weights,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from zero_plugin import DummyScheduler
from zero_plugin.errors import ConfigError, LoopError


def check_a_layer_is_unfrozen(path: str) -> None:
    """In step 13: refused in the first backward that reaches it; prepared anew, it is trained as in plain torch."""
    plain = make_net()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for i in range(14):
        plain[0].requires_grad_(i > 11)
        loss_of(plain, global_batch(i)).backward()
        sgd.step()
        sgd.zero_grad()
    with running(path) as accelerator:
        net = make_net()
        net[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(12):  # more than the first ones, which are all looked at
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            optimizer.zero_grad()
        net[0].requires_grad_(True)
        raised(LoopError, "frozen", "free_memory()", by=lambda: accelerator.backward(loss_of(model, own_batch(12))))
        model, optimizer = accelerator.free_memory(model, optimizer)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for i in range(12, 14):
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            optimizer.zero_grad()
        assert_near(weights(accelerator, model), plain.state_dict())


def check_a_layer_is_frozen(path: str) -> None:
    """In step 2, without a gradient: it stays on one device; elsewhere an error names it. After its backward: stepped.

    Under ZeRO its momentum and weight decay would go on, and DDP waits for its gradient.
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


def check_clipping_comes_too_late(path: str) -> None:
    """After the step: named; what the configuration says of clipping, and the window's size, hold on."""
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


def check_a_schedule_comes_after_its_section_runs(path: str) -> None:
    """A placeholder takes over from the section's schedule, which stepped by itself; a real one is refused."""
    sections: list[dict[str, Any]] = [
        {"type": "ExponentialLR", "params": {"gamma": 0.5}},
        {"type": "LinearLR", "params": {"start_factor": 0.5, "total_iters": 3}},
        {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 0.1, "warmup_type": "linear"}},
    ]
    for section in sections:
        rates = []
        for later in (False, True):
            with running(path, deepspeed={"scheduler": section}) as accelerator:
                net = make_net()
                sgd = torch.optim.SGD(net.parameters(), lr=0.1)
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


def check_the_loader_comes_after_its_model(path: str) -> None:
    """Where it makes the configuration mean another accumulation, or another micro-batch, it is refused or said."""
    data = torch.randn(32, 8)
    micro = {"train_micro_batch_size_per_gpu": 8}
    for deepspeed, kind, words in (
        ({"train_batch_size": 16}, LoopError, ("settled to gradient_accumulation_steps 1", "means")),
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
                else:  # it may be one for evaluation
                    accelerator.prepare(loader)
                    first = accelerator.is_main_process
            assert shuffles or all((word in said.getvalue()) is first for word in words), said.getvalue()
    with running(path, deepspeed=micro) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True))
        accelerator.prepare(DataLoader(data, batch_size=3, shuffle=True))  # a second one is another loop's


def check_a_schedule_is_prepared_once(path: str) -> None:
    """The second time it would advance twice per step: named, for a real one and for a placeholder."""
    for build in (lambda sgd: LambdaLR(sgd, lambda step: 1.0), DummyScheduler):
        with running(path) as accelerator:
            net = make_net()
            sgd = torch.optim.SGD(net.parameters(), lr=0.1)
            schedule: Any = build(sgd)
            _, _, prepared = accelerator.prepare(net, sgd, schedule)
            assert accelerator.prepare(prepared) is prepared
            raised(LoopError, "returned", by=functools.partial(accelerator.prepare, schedule))


_ALL = [value for name, value in list(globals().items()) if name.startswith("check_")]
CHECKS = checks_on(dict.fromkeys((*SINGLE, *PAIR)), _ALL)
