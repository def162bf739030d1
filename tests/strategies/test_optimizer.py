"""Elementwise optimizers train under ZeRO as in plain torch. Any other is refused by name."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE
from on_paths import in_processes, on_paths
from paths import (
    FURTHER,
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
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from zero_plugin import DummyOptim
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.strategies.torch_optimizers import Lion

ELEMENTWISE: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "SGD")},
    "tensor-lr": ("AdamW", {"lr": torch.tensor(0.01)}),
    "foreach": ("AdamW", {"foreach": True}),
    "fused": ("AdamW", {"fused": True}),
    "fused Adagrad": ("Adagrad", {"fused": True}),
    "amsgrad": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    "maximize": ("AdamW", {"maximize": True}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "lr": 0.01}),
    "decoupled": ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
}
# Class, arguments, the second group's own options, and whether DeepSpeed's CPU kernel supports all of them.
GROUPS: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any], bool]] = {
    "numbers": (torch.optim.AdamW, {}, {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.3}, True),
    "L2": (torch.optim.Adam, {"weight_decay": 0.1}, {"weight_decay": 0.3}, True),
    "maximize": (torch.optim.AdamW, {}, {"maximize": True}, False),
    "amsgrad": (torch.optim.Adam, {}, {"amsgrad": True, "weight_decay": 0.1}, False),
    "decay": (torch.optim.Adam, {"weight_decay": 0.5}, {"decoupled_weight_decay": True}, False),
    "decoupled Adam": (torch.optim.Adam, {"weight_decay": 0.5, "decoupled_weight_decay": True}, {}, True),
    "adagrad numbers": (torch.optim.Adagrad, {}, {"eps": 1e-3, "weight_decay": 0.3}, True),
    "adagrad maximize": (torch.optim.Adagrad, {}, {"maximize": True}, False),
    "adagrad lr_decay": (torch.optim.Adagrad, {}, {"lr_decay": 0.5}, False),
    "adagrad start": (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}, {}, False),
    "adagrad start of a group": (torch.optim.Adagrad, {}, {"initial_accumulator_value": 0.5}, False),
    "lion": (Lion, {}, {"betas": (0.5, 0.7), "weight_decay": 0.3}, True),
}


class Elementwise(Optimizer):
    """A user's own optimizer: a step along the gradient's sign, with its own group option."""

    def __init__(self, params: Any, lr: float = 1e-2, *, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign() * p.grad.abs() ** group["power"]


class LayerScaled(Optimizer):
    """Like LAMB and LARS, makes a tensor's step as long as the tensor."""

    def __init__(self, params: Any, lr: float = 1e-2, scaled: bool = True) -> None:
        super().__init__(params, {"lr": lr, "scaled": scaled})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                length = p.norm() / p.grad.norm() if group["scaled"] else 1.0
                p -= group["lr"] * length * p.grad


class GloballyScaled(Optimizer):
    """Like Prodigy, uses one number over all tensors of the optimizer, which no process has under ZeRO."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        members = [p for group in self.param_groups for p in group["params"]]
        length = torch.stack([p.grad.norm() for p in members]).norm()
        for p in members:
            p -= self.param_groups[0]["lr"] * p.grad / length


class Counting(Optimizer):
    """Like schedule-free optimizers and Prodigy, counts the steps of each group and of all together."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.steps = 0
        self.state["steps"] = torch.zeros(())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.steps += 1
        self.state["steps"] += 1
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                p -= group["lr"] / (group["steps"] + self.steps + float(self.state["steps"])) * p.grad


class CountingParts(Optimizer):
    """Its step depends on how many tensors it has stepped before. DeepSpeed's partial steps change this number."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.stepped: list[int] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.stepped.append(1)
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] / len(self.stepped) * p.grad


def groups_of(model: nn.Module, lr: float | None) -> list[dict[str, Any]]:
    """Build two groups, the second with its own learning rate unless the optimizer's is a tensor."""
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return [{"params": first}, {"params": second} | ({} if lr is None else {"lr": lr})]


@on_paths("zero2", "zero3", "zero2-cpu", daily="zero2")
def test_elementwise_optimizers_equal_torch(path: str) -> None:
    """torch's elementwise classes and flags, with groups, train as in plain torch."""
    for label, (name, arguments) in ELEMENTWISE.items():
        lr = None if label == "tensor-lr" else 0.003
        build = getattr(torch.optim, name)
        plain = make_net()
        expected = build(groups_of(plain, lr), **arguments)
        take_plain_steps(plain, expected, range(3))
        with running(path) as accelerator:
            model = make_net()
            model, optimizer = accelerator.prepare(model, build(groups_of(model, lr), **arguments))
            take_steps(accelerator, model, optimizer, range(3))
            try:
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
            except AssertionError as error:
                raise AssertionError(f"{label}: {error}") from error


def _trained_plainly(build: Any, arguments: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    plain = make_net()
    first, second = groups_of(plain, 0.003)
    optimizer = build([first, second | own], **arguments)
    take_plain_steps(plain, optimizer, range(3))
    return plain.state_dict()


@on_paths("zero2", "zero2-cpu", "zero3-cpu", daily="zero2-cpu")
def test_every_groups_options_count(path: str) -> None:
    """An option of one group holds. If DeepSpeed's kernel would drop the option, torch's own optimizer runs."""
    for label, (build, arguments, own, by_kernel) in GROUPS.items():
        wanted = _trained_plainly(build, arguments, own)
        for placeholder in (False, True):
            name = build.__name__
            if placeholder and (name not in ("AdamW", "Adagrad") or "start" in label):
                continue
            section = {"optimizer": {"type": name, "params": {"lr": "auto", "weight_decay": "auto"}}}
            with running(path, deepspeed=section if placeholder else {}) as accelerator:
                model = make_net()
                first, second = groups_of(model, 0.003)
                groups = [first, second | own]
                defaults = build(groups_of(make_net(), 0.003), **arguments).defaults
                given = {"lr": defaults["lr"], "weight_decay": defaults["weight_decay"]} | arguments
                optimizer: Any = DummyOptim(groups, **given) if placeholder else build(groups, **arguments)
                model, optimizer = accelerator.prepare(model, optimizer)
                take_steps(accelerator, model, optimizer, range(3))
                runs = type(optimizer.optimizer).__name__
                try:
                    assert_near(weights(accelerator, model), wanted, 1e-4)
                    assert runs.startswith("DeepSpeedCPU") == (by_kernel and path.endswith("cpu")), runs
                except AssertionError as error:
                    raise AssertionError(f"{label}, placeholder {placeholder}, {runs}: {error}") from error


@on_paths("zero1-cpu", "zero3-cpu", daily="zero3-cpu")
def test_torchs_own_is_offloaded_where_the_kernel_is_not_wanted(path: str) -> None:
    """`zero_force_ds_cpu_optimizer: false` runs torch's own, builds no op and is logged.

    `true` refuses other optimizers.
    """
    from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder

    forced = {"zero_force_ds_cpu_optimizer": False}
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a kernel is built")

        for builder in (CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder):
            patch.setattr(builder, "load", refuse)
        for build, name in ((torch.optim.AdamW, "AdamW"), (torch.optim.Adagrad, "FlatAdagrad"), (DummyOptim, "AdamW")):
            told = io.StringIO()
            config = forced | (section if build is DummyOptim else {})
            with contextlib.redirect_stderr(told), running(path, deepspeed=config) as accelerator:
                model = make_net()
                adam = build(model.parameters(), lr=0.01, weight_decay=0.1)
                model, optimizer = accelerator.prepare(model, adam)
                take_steps(accelerator, model, optimizer, range(3))
                assert type(optimizer.optimizer).__name__ == name
                plain = make_net()
                expected = getattr(torch.optim, name.removeprefix("Flat"))(
                    plain.parameters(), lr=0.01, weight_decay=0.1
                )
                take_plain_steps(plain, expected, range(3))
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
            if accelerator.is_main_process:
                assert "torch's own runs on the CPU, since zero_force_ds_cpu_optimizer is false" in told.getvalue()
    with running(path, deepspeed={"zero_force_ds_cpu_optimizer": True}) as accelerator:
        model, sgd = net_and_sgd()
        words = ("zero_force_ds_cpu_optimizer", "true", "SGD", "write false")
        raised(ConfigError, *words, by=lambda: accelerator.prepare(model, sgd))


@on_paths("zero3-cpu")
def test_a_part_that_is_not_offloaded_follows_the_schedule(path: str) -> None:
    """With a ratio below 1 DeepSpeed steps the rest by its own AdamW, which gets every group's current numbers.

    Another algorithm is refused. The device here is the CPU. There DeepSpeed gives this AdamW nothing, so the test
    forces it.
    """
    offload = {"device": "cpu", "ratio": 0.5}
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20, "offload_optimizer": offload}
    config = {"zero_optimization": section, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    for placeholder in (False, True):
        plain = make_net()
        expected = torch.optim.AdamW(groups_of(plain, 0.003), lr=0.01, weight_decay=0.0)
        schedule = ExponentialLR(expected, 0.5)
        for i in range(4):
            loss_of(plain, global_batch(i)).backward()
            expected.step()
            schedule.step()
            expected.zero_grad()
        with running(path, deepspeed=config if placeholder else {"zero_optimization": section}) as accelerator:
            model = make_net()
            build: Any = DummyOptim if placeholder else torch.optim.AdamW
            model, optimizer = accelerator.prepare(model, build(groups_of(model, 0.003), lr=0.01, weight_decay=0.0))
            schedule = accelerator.prepare(ExponentialLR(optimizer, 0.5))
            places = optimizer.session.engine.optimizer.subgroup_to_device
            places.update({index: "the device" for index in places if index % 2 == 0})
            for i in range(4):
                accelerator.backward(loss_of(model, own_batch(i)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
    for build in (torch.optim.SGD, torch.optim.Adam):
        with running(path, deepspeed={"zero_optimization": section}) as accelerator:
            model = make_net()
            words = ("zero_optimization.offload_optimizer.ratio", "0.5", build.__name__, "AdamW", "1.0")
            raised(ConfigError, *words, by=lambda: accelerator.prepare(model, build(model.parameters(), lr=0.1)))  # noqa: B023


@on_paths("zero1", "zero2", "zero3", "zero2-cpu", daily=("zero1", "zero2"))
def test_an_own_optimizer_is_tried(path: str) -> None:
    """A user's elementwise class runs, also with a learning rate of 0 or with arguments that only a group has."""
    for lr in (1e-2, 0.0):
        with running(path) as accelerator:
            model = make_net()
            own = Elementwise([{"params": list(model.parameters()), "power": 1.0}], lr=lr)
            model, optimizer = accelerator.prepare(model, own)
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            assert type(optimizer.optimizer) is Elementwise


@on_paths("zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", daily=("zero2", "zero3-cpu"))
def test_an_optimizer_that_counts_its_steps(path: str) -> None:
    """A step counts once in groups, attributes and names of `state`, though DeepSpeed steps in parts.

    Counters that cannot be reset are refused by name. In the end, a copy of `step` is the class's again.
    """
    plain = make_net()
    expected = Counting(groups_of(plain, 0.1), lr=0.3)
    take_plain_steps(plain, expected, range(4))
    zero = (ZERO | FURTHER)[path] | ({"sub_group_size": 20} if "3" in path else {})
    with running(path, deepspeed={"zero_optimization": zero}) as accelerator:
        model = make_net()
        counting = Counting(groups_of(model, 0.1), lr=0.3)
        model, optimizer = accelerator.prepare(model, counting)
        take_steps(accelerator, model, optimizer, range(4))
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
        assert [group["steps"] for group in optimizer.param_groups] == [4, 4]
        assert (counting.steps, int(counting.state["steps"])) == (4, 4)
    assert "step" not in vars(counting)
    with running(path) as accelerator:
        model = make_net()
        parts = CountingParts(groups_of(model, 0.1))
        raised(ConfigError, "CountingParts", "number of calls", by=lambda: accelerator.prepare(model, parts))


@on_paths("ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", daily=("ddp", "zero1", "zero2"))
def test_states_of_the_scripts_own_optimizer(path: str) -> None:
    """A script that halves momentum in the optimizer from before `prepare` halves that of the running one."""

    def halve(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)

    plain = make_net()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
    with running(path) as accelerator:
        model = make_net()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, adamw)
        for i in range(4):
            loss_of(plain, global_batch(i)).backward()
            accelerator.backward(loss_of(model, own_batch(i)))
            expected.step()
            optimizer.step()
            expected.zero_grad()
            optimizer.zero_grad()
            if i == 1:
                halve(expected)
                halve(adamw)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-4)


@on_paths("zero1", "zero2", "zero3", "zero2-cpu", daily=("zero1", "zero2"))
def test_groups_that_are_not_stepped(path: str) -> None:
    """An error names an empty group that a scheduler has a rate for, or at stages 1 and 2 a frozen group."""
    for frozen in (False, True):
        with running(path) as accelerator:
            model = make_net()
            idle = list(model[0].requires_grad_(False).parameters()) if frozen else []
            trained = [p for p in model.parameters() if p.requires_grad]
            adamw = torch.optim.AdamW([{"params": trained}, {"params": idle}], lr=0.01)
            objects = (model, adamw) if frozen else (model, adamw, ExponentialLR(adamw, 0.5))
            if frozen and path == "zero3":
                accelerator.prepare(*objects)
            else:
                raised(LoopError, "group 1", "Leave the group out", by=lambda: accelerator.prepare(*objects))  # noqa: B023


class TwoWeights(Optimizer):
    """Like schedule-free optimizers, has one kind of weights for training and another for evaluation."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "trains": False})

    @torch.no_grad()
    def _switch(self, factor: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor if p in self.state else 1.0)
            group["trains"] = factor != 0.5

    def train(self) -> None:
        self._switch(2.0)

    def eval(self) -> None:
        self._switch(0.5)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["trains"]
            for p in group["params"]:
                self.state[p]["steps"] = 1
                p -= group["lr"] * p.grad


@on_paths("ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_an_optimizer_with_weights_to_evaluate(path: str) -> None:
    """If it steps the model's own parameters, they are switched. If it steps partitions, switching is an error.

    The trial uses its training mode, which the script may enter only after `prepare`.
    """
    with running(path) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, TwoWeights(model.parameters()))
        optimizer.train()
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        before = weights(accelerator, model)
        if is_zero(path) and path != "zero0":
            raised(LoopError, "TwoWeights", "without ZeRO", by=optimizer.eval)
        else:
            optimizer.eval()
            assert_near(weights(accelerator, model), {name: 0.5 * w for name, w in before.items()}, 1e-6)


@on_paths("ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_what_is_not_elementwise(path: str) -> None:
    """Stages 1 and above refuse it by name, however small its steps. Below, and if the user insists, it trains."""

    def adafactor(model: nn.Module) -> Optimizer:
        return torch.optim.Adafactor(model.parameters(), lr=1e-7)

    def muon(model: nn.Module) -> Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])

    def layer_scaled(model: nn.Module) -> Optimizer:
        return LayerScaled(model.parameters(), lr=1e-7)

    def layer_scaled_in_one_group(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        return LayerScaled([{"params": others, "scaled": False}, {"params": [first], "scaled": True}], lr=0.0)

    def globally_scaled(model: nn.Module) -> Optimizer:
        return GloballyScaled(model.parameters())

    for build in (adafactor, muon, layer_scaled, layer_scaled_in_one_group, globally_scaled):
        if is_zero(path) and path != "zero0":
            with running(path) as accelerator:
                model = make_net()
                name = type(build(make_net())).__name__
                raised(ConfigError, name, "stage", by=lambda: accelerator.prepare(model, build(model)))  # noqa: B023
        typed = {"zero_allow_untested_optimizer": True} if is_zero(path) else {}
        with running(path, deepspeed=typed) as accelerator:
            model = make_net()
            optimizer = build(model)
            if not (is_zero(path) and isinstance(optimizer, torch.optim.Muon)):  # it never runs on flat tensors
                model, optimizer = accelerator.prepare(model, optimizer)
                accelerator.backward(loss_of(model, own_batch(0)))
                optimizer.step()
                assert optimizer.applied_steps == 1


class Descent(Optimizer):
    """A user's own elementwise descent. Each class below changes gradients as its docstring says."""

    centralizes = False
    kept: Any = ()

    def __init__(self, params: Any, lr: float = 0.1, **attributes: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0
        vars(self).update(attributes)

    def changed(self, p: Any) -> Any:
        return p.grad

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * self.changed(p)


class CentralizedConvolutions(Descent):
    """Centralizes gradients of convolutions."""

    def changed(self, p: Any) -> Any:
        return p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.ndim > 3 else p.grad


class FactoredIfLarge(Descent):
    """Divides large matrices' gradients by a factored second moment, like timm's Adafactor."""

    def changed(self, p: Any) -> Any:
        if p.ndim < 2 or min(p.shape) < 16:
            return p.grad
        squares = p.grad.square()
        return p.grad / (squares.mean(0, keepdim=True) * squares.mean(1, keepdim=True) / squares.mean()).sqrt()


class CentralizedOnRequest(Descent):
    """Centralizes gradients of matrices if an attribute requests it. The attribute is not in `defaults`."""

    def changed(self, p: Any) -> Any:
        return p.grad - p.grad.mean(1, keepdim=True) if self.centralizes and p.ndim > 1 else p.grad


class DecayedButSome(Descent):
    """Decays all weights except those whose id() is kept."""

    def changed(self, p: Any) -> Any:
        return p.grad if not self.kept or id(p) in self.kept["not decayed"] else p.grad + p


class DecayedObjects(Descent):
    """Decays the weights that are among the kept objects."""

    def changed(self, p: Any) -> Any:
        return p.grad + p if any(p is kept for kept in self.kept) else p.grad


class RatesOfParameters(Descent):
    """May use an individual rate for each parameter."""

    def changed(self, p: Any) -> Any:
        return p.grad * getattr(p, "own_rate", 1.0)


class LimitedNorm(Descent):
    """Limits the norm over all gradients, to a value that small gradients do not reach."""

    def changed(self, p: Any) -> Any:
        members = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return p.grad * min(1.0, 50.0 / float(torch.stack([grad.norm() for grad in members]).norm()))


class NormalizedLate(Descent):
    """Normalizes gradients from the 16th step on."""

    def changed(self, p: Any) -> Any:
        return p.grad / p.grad.norm() if self.calls > 15 else p.grad


class WithAnother(Descent):
    """Has another optimizer as an attribute, which steps the same groups."""

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()  # type: ignore[attr-defined]


class Anchored(Descent):
    """Pulls weights towards their first values, which the constructor records."""

    def __init__(self, params: Any, lr: float = 0.1, **attributes: Any) -> None:
        super().__init__(params, lr, **attributes)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["first"] = p.detach().clone()

    def changed(self, p: Any) -> Any:
        return p.grad + (p - self.state[p]["first"])


def _wider_net() -> nn.Module:
    torch.manual_seed(5)
    layers = (nn.Linear(8, 16), nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 16, 2, 4), nn.Flatten(), nn.Linear(16, 32))
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(DEVICE)


def _with_a_rate(model: nn.Module) -> Optimizer:
    list(model.parameters())[-1].own_rate = 3.0  # type: ignore[attr-defined]
    return RatesOfParameters(model.parameters())


def _with_another(model: nn.Module) -> Optimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return WithAnother(inner.param_groups, inner=inner)


REFUSED: dict[str, tuple[Any, str]] = {
    "convolutions": (lambda m: CentralizedConvolutions(m.parameters()), "shape"),
    "large matrices": (lambda m: FactoredIfLarge(m.parameters()), "shape"),
    "an attribute": (lambda m: CentralizedOnRequest(m.parameters(), centralizes=True), "shape"),
    "ids": (lambda m: DecayedButSome(m.parameters(), kept={"not decayed": {id(m[0].bias)}}), "kept keeps id()"),
    "objects": (lambda m: DecayedObjects(m.parameters(), kept=[m[0].bias]), " an attribute"),
    "a parameter's attribute": (_with_a_rate, " an attribute"),
    "a limit": (lambda m: LimitedNorm(m.parameters()), "norm"),
    "late": (lambda m: NormalizedLate(m.parameters()), "norm"),
    "another optimizer": (_with_another, "inner is another optimizer"),
}
TRAINED: dict[str, Any] = {
    "nothing": lambda m: Descent(m.parameters(), model=m, lock=threading.Lock()),
    "an attribute": lambda m: CentralizedOnRequest(groups_of(m, 0.05), centralizes=False),
    "kept and not read": lambda m: Descent(m.parameters(), kept=list(m.parameters())),
    "a constructor's states": lambda m: Anchored(groups_of(m, 0.05)),
}


@on_paths("zero1", "zero2", "zero3", daily="zero3")
def test_what_the_trial_sees(path: str) -> None:
    """Rules for some shapes, norms, steps, parameters or attributes are refused. Optimizers without any train.

    The user's own optimizer takes no step.
    """
    wrong: dict[str, BaseException] = {}
    for label, (build, words) in REFUSED.items():
        with running(path) as accelerator:
            model = _wider_net()
            optimizer = build(model)
            expected_words = (type(optimizer).__name__, "stage", words, "Use stage 0 or DDP")
            try:
                raised(ConfigError, *expected_words, by=lambda: accelerator.prepare(model, optimizer))  # noqa: B023
            except (AssertionError, pytest.fail.Exception) as error:
                wrong[label] = error
    assert not wrong, wrong
    for label, build in TRAINED.items():
        plain = _wider_net()
        expected = build(plain)
        take_plain_steps(plain, expected, range(3))
        with running(path) as accelerator:
            model = _wider_net()
            model, optimizer = accelerator.prepare(model, build(model))
            take_steps(accelerator, model, optimizer, range(3))
            try:
                assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)
                assert optimizer.optimizer.calls == expected.calls
            except AssertionError as error:
                raise AssertionError(f"{label}: {error}") from error


@on_paths("zero2-cpu")
def test_deepspeeds_own_classes_run(path: str) -> None:
    """A DeepSpeed optimizer that the user built runs unchanged, with its arguments, and trains as torch's."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    arguments: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}
    plain = make_net()
    adam = torch.optim.AdamW(plain.parameters(), **arguments)
    take_plain_steps(plain, adam, range(3))
    with running(path) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, DeepSpeedCPUAdam(model.parameters(), **arguments))
        take_steps(accelerator, model, optimizer, range(3))
        assert type(optimizer.optimizer) is DeepSpeedCPUAdam
        assert_near(weights(accelerator, model), plain.state_dict())


@in_processes(2)
def test_fp16_under_deepspeed_on_a_cpu(folder: Path) -> None:
    """It is refused before an engine exists, wherever fp16 was written. The error suggests bf16."""
    for config, arguments in (({"fp16": {"enabled": True}}, {}), ({}, {"mixed_precision": "fp16"})):
        with running("zero2", deepspeed=config, **arguments) as accelerator:
            model, sgd = net_and_sgd()
            raised(ConfigError, "fp16", "cpu", "bf16", by=lambda: accelerator.prepare(model, sgd))  # noqa: B023


@on_paths("zero2-cpu")
def test_options_of_torch_in_a_section_are_spoken_of_where_a_kernel_runs(path: str) -> None:
    """DeepSpeed's constructor would refuse foreach and fused.

    Its kernel steps, and a line reports the dropped options.
    """
    for option in ("foreach", "fused"):
        section = {"type": "AdamW", "params": {"lr": 0.01, option: True}}
        with contextlib.redirect_stderr(io.StringIO()) as said, running(path, deepspeed={"optimizer": section}) as own:
            model = make_net()
            model, optimizer = own.prepare(model, DummyOptim(model.parameters()))
            own.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            assert type(optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
        if dist.get_rank() == 0:
            assert f"AdamW: {option} has no effect" in said.getvalue()


@in_processes(2)
def test_an_optimizer_of_a_package_that_is_not_installed(folder: Path) -> None:
    """DeepSpeed takes some optimizers from mup. The error names the key, its place, and the missing package."""
    section = {"type": "MuAdamW", "params": {"lr": 0.1}}
    with running("zero2", deepspeed={"optimizer": section}) as accelerator, pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mup", None)
        model = make_net()
        placeholder = DummyOptim(model.parameters())
        words = ("optimizer.type", "MuAdamW", "pip install mup")
        raised(ConfigError, *words, by=lambda: accelerator.prepare(model, placeholder))
