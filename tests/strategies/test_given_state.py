"""An optimizer that got a state before `prepare` continues from it as in plain torch.

Which code reads the state later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloading import wide_net, zero3
from on_paths import ALL, in_processes, on_paths, without
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    take_plain_steps,
    take_steps,
    weights,
)
from torch import nn
from torch.optim import Optimizer

from zero_plugin.errors import LoopError
from zero_plugin.strategies.torch_optimizers import Lion

KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "Lion": (Lion, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad with a decay": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {}),
}


def two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Build two groups, the second with the biases."""
    return [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1]},
    ]


def trained(net: nn.Module, optimizer: Optimizer, steps: range, schedule: Any = None) -> None:
    """Train with plain torch on the batches of all processes."""
    for step in steps:
        take_plain_steps(net, optimizer, [step])
        if schedule is not None:
            schedule.step()


def step_of(accelerator: Any, model: Any, optimizer: Any, step: int) -> None:
    """Train one step on this process's part."""
    take_steps(accelerator, model, optimizer, [step])


def state_after(make: Callable[[], nn.Module], build: Callable[[nn.Module], Optimizer]) -> dict[str, Any]:
    """Return an optimizer's state after three steps. By then its groups have another rate."""
    net = make()
    optimizer = build(net)
    trained(net, optimizer, range(3))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    return copy.deepcopy(optimizer.state_dict())


def given(net: nn.Module, build: Callable[[nn.Module], Optimizer], state: dict[str, Any]) -> Optimizer:
    """Build a new optimizer that continues from a state."""
    optimizer = build(net)
    optimizer.load_state_dict(copy.deepcopy(state))
    return optimizer


def expect_as_torch(
    path: str,
    build: Callable[[nn.Module], Optimizer],
    *,
    make: Callable[[], nn.Module] = make_net,
    tolerance: float = 1e-5,
    **how: Any,
) -> None:
    """Check that three steps from the state equal plain torch's."""
    state = state_after(make, build)
    plain = make()
    trained(plain, given(plain, build, state), range(3, 6))
    with running(path, **how) as accelerator:
        net = make()
        model, optimizer = accelerator.prepare(net, given(net, build, state))
        for step in range(3, 6):
            step_of(accelerator, model, optimizer, step)
        assert_near(weights(accelerator, model), plain.state_dict(), tolerance)


@on_paths(*without(ALL, "zero2", "zero2-cpu"), daily=("single", "zero0", "zero3"))
def test_some_kinds(path: str) -> None:
    """Moments, step counts and the groups' settings are kept."""
    _expect_kinds(path, ("AdamW", "momentum", "Adagrad"))


@on_paths("zero2", "zero2-cpu", daily="zero2-cpu")
def test_every_kind(path: str) -> None:
    """The same holds for each elementwise optimizer, also if DeepSpeed's kernels replace it."""
    _expect_kinds(path, KINDS)


def _expect_kinds(path: str, labels: Iterable[str]) -> None:
    for label in labels:
        kind, arguments = KINDS[label]
        try:
            expect_as_torch(path, lambda net: kind(two_groups(net), **arguments))  # noqa: B023
        except Exception as error:
            raise AssertionError(f"{label}: {error!r}") from error


@on_paths("zero0", "zero2", "zero3", daily=("zero0", "zero3"))
def test_sixteen_bits(path: str) -> None:
    """The states stay in 32 bits. They belong to the fp32 master weights."""

    def build(net: nn.Module) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    expect_as_torch(path, build, tolerance=2e-2, mixed_precision="bf16")


@on_paths("ddp", "zero2", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_the_schedule_too(path: str) -> None:
    """A schedule that got its state continues inside its curve."""

    def build(net: nn.Module) -> tuple[Optimizer, Any]:
        adam = torch.optim.AdamW(net.parameters(), lr=1e-2)
        return adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 8)

    net = make_net()
    adam, cosine = build(net)
    trained(net, adam, range(3), cosine)
    states = copy.deepcopy((adam.state_dict(), cosine.state_dict()))

    def restored(net: nn.Module) -> tuple[Optimizer, Any]:
        adam, cosine = build(net)
        adam.load_state_dict(copy.deepcopy(states[0]))
        cosine.load_state_dict(copy.deepcopy(states[1]))
        return adam, cosine

    plain = make_net()
    adam, cosine = restored(plain)
    trained(plain, adam, range(3, 6), cosine)
    with running(path) as accelerator:
        net = make_net()
        model, optimizer, schedule = accelerator.prepare(net, *restored(net))
        for step in range(3, 6):
            accelerator.backward(loss_of(model, own_batch(step)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        assert schedule.get_last_lr() == pytest.approx(cosine.get_last_lr(), rel=1e-12)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@in_processes(2)
def test_partitioned_at_birth(folder: Path) -> None:
    """A model that init_model partitioned takes unpartitioned states.

    Adagrad's states from before its first step are its own.
    """
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        for steps in (0, 3):
            source = make_net()
            optimizer = kind(source.parameters(), lr=1e-2)
            trained(source, optimizer, range(steps))
            state = copy.deepcopy(optimizer.state_dict())
            plain = make_net()
            trained(plain, given(plain, lambda net: kind(net.parameters(), lr=1e-2), state), range(3, 6))  # noqa: B023
            with running("zero3") as accelerator:
                with accelerator.init_model():
                    net = make_net()
                own = kind(net.parameters(), lr=1e-2)
                if steps:
                    own.load_state_dict(state)
                model, prepared = accelerator.prepare(net, own)
                for step in range(3, 6):
                    step_of(accelerator, model, prepared, step)
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@in_processes(2)
def test_on_nvme(folder: Path) -> None:
    """States for NVMe are written there."""
    for param in ("cpu", "nvme"):
        section = zero3(folder / "swap", optimizer="nvme", param=param)
        (folder / "swap").mkdir(exist_ok=True)
        expect_as_torch(
            "zero3",
            lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4),
            make=wide_net,
            deepspeed=section,
        )


@on_paths("zero2", "zero3")
def test_what_does_not_fit(path: str) -> None:
    """States that one flat buffer cannot hold raise an error that names parameters, before anything is partitioned."""

    def refused(change: Callable[[dict[int, Any]], Any], *words: str, groups: bool = False) -> None:
        def build(net: nn.Module) -> Optimizer:
            return torch.optim.AdamW(two_groups(net) if groups else net.parameters(), lr=1e-2)

        state = state_after(make_net, build)
        change(state["state"])
        with running(path) as accelerator:
            net = make_net()
            optimizer = given(net, build, state)
            if words:
                raised(LoopError, *words, by=lambda: accelerator.prepare(net, optimizer))
            else:
                accelerator.prepare(net, optimizer)

    refused(lambda states: states.pop(2), "2.weight", "no state", "group")
    refused(lambda states: states[1].update(step=torch.tensor(7.0)), "0.bias", "step", "7", "3")
    refused(lambda states: states[1].pop("exp_avg"), "0.bias", "exp_avg")
    refused(lambda states: states[0].update(exp_avg=torch.zeros(3)), "0.weight", "exp_avg", "[3]")
    refused(lambda states: states[0].update(history=[1, 2]), "0.weight", "history", "list")
    # The biases are in their own group.
    refused(lambda states: [states[i].update(step=torch.tensor(9.0)) for i in (2, 3)], groups=True)


@on_paths("ddp", "zero2")
def test_states_on_some_ranks(path: str) -> None:
    """A state that only one process loaded is an error on all of them."""

    def build(net: nn.Module) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    state = state_after(make_net, build)
    with running(path) as accelerator:
        net = make_net()
        optimizer = given(net, build, state) if dist.get_rank() == 0 else build(net)
        optimizer.param_groups[0]["lr"] = 1e-2
        raised(LoopError, "state", "rank 0", by=lambda: accelerator.prepare(net, optimizer))


@on_paths("ddp", "zero2")
def test_sixteen_bit_weights(path: str) -> None:
    """A 16-bit model with an optimizer's state trains in fp32, states included."""

    def make() -> nn.Module:
        return make_net().bfloat16()

    def build(net: nn.Module) -> Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=1e-2)

    net = make()
    optimizer = build(net)
    for step in range(2):
        x, y = global_batch(step)
        loss_of(net, (x.bfloat16(), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    plain = make_net().bfloat16().float()
    trained(plain, given(plain, build, state), range(3, 6))
    with running(path) as accelerator:
        net = make()
        model, prepared = accelerator.prepare(net, given(net, build, state))
        for step in range(3, 6):
            step_of(accelerator, model, prepared, step)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(
    "ddp",
    "zero0",
    "zero1",
    "zero3",
    "zero2-cpu",
    "zero1-one-process",
    "zero2-cpu-one-process",
    "zero3-one-process",
    daily=("ddp", "zero3", "zero2-cpu", "zero2-cpu-one-process", "zero3-one-process"),
)
def test_what_a_prepared_one_says(path: str) -> None:
    """The prepared optimizer's state is complete, or an error names the alternative.

    Never does it return one partition as all.
    """
    with running(path) as accelerator:
        net = make_net()
        first = net[0].weight
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        step_of(accelerator, model, optimizer, 0)
        before = weights(accelerator, model)
        if is_zero(path) and path != "zero0":
            raised(LoopError, "optimizer.state[parameter]", "safe_get_full", by=lambda: optimizer.state[first])
            raised(LoopError, "optimizer.state[parameter]", by=lambda: first in optimizer.state)
            assert [set(state) for state in optimizer.state.values()] == [{"step", "exp_avg", "exp_avg_sq"}]
        else:
            assert optimizer.state[first]["exp_avg"].shape == first.shape
        if is_zero(path) and path != "zero0" and (dist.get_world_size() > 1 or path == "zero3"):
            where = "sub-groups of stage 3" if dist.get_world_size() == 1 else "2 processes"
            raised(LoopError, "optimizer.state_dict()", where, "save_state", by=optimizer.state_dict)
            load = partial(optimizer.load_state_dict, {})
            raised(LoopError, "optimizer.load_state_dict()", where, "load_state", by=load)
            return
        state = copy.deepcopy(optimizer.state_dict())
        for step in (1, 2):
            step_of(accelerator, model, optimizer, step)
        wanted = weights(accelerator, model)
        for step in (3, 4):
            step_of(accelerator, model, optimizer, step)
        optimizer.load_state_dict(state)
        with accelerator.whole_weights(model), torch.no_grad():
            for name, parameter in accelerator.unwrap_model(model).named_parameters():
                parameter.copy_(before[name])
        for step in (1, 2):
            step_of(accelerator, model, optimizer, step)
        assert same(weights(accelerator, model), wanted)


@on_paths("zero2", "zero3")
def test_the_engines_own_checkpoint(path: str, folder: Path) -> None:
    """`save_checkpoint` of a prepared model allows resuming, or raises an error that names save_state."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        step_of(accelerator, model, optimizer, 0)
        if path == "zero3":
            raised(LoopError, "stage 3", "save_state", by=lambda: model.save_checkpoint(str(folder)))
            return
        model.save_checkpoint(str(folder))
        step_of(accelerator, model, optimizer, 1)
        wanted = weights(accelerator, model)
        step_of(accelerator, model, optimizer, 2)
        model.load_checkpoint(str(folder))
        step_of(accelerator, model, optimizer, 1)
        assert same(weights(accelerator, model), wanted)


@in_processes(1)
def test_what_lies_on_nvme(folder: Path) -> None:
    """One process has all of the state, but not in memory."""
    (folder / "swap").mkdir()
    with running("zero3", deepspeed=zero3(folder / "swap", optimizer="nvme", param="cpu")) as accelerator:
        net = wide_net()
        _, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        raised(LoopError, "state_dict()", "on NVMe", "save_state", by=optimizer.state_dict)
