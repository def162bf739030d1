"""A model that stage 3 partitions when it is built: what a script finds before `prepare`, and what it is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paths import (
    FURTHER,
    PAIR,
    SINGLE,
    assert_near,
    checks_on,
    global_batch,
    loss_of,
    own_batch,
    raised,
    running,
    weights,
)
from torch import Tensor, nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.guards.group_shapes import refuse_groups_by_empty_shape
from zero_plugin.strategies.deepspeed.partitioned_models import OwnHook

Groups = list[dict[str, Any]]


class Net(nn.Module):
    """Matrices and vectors: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def _build() -> Net:
    torch.manual_seed(8)
    return Net()


def _split(net: nn.Module, is_matrix: Callable[[str, Tensor], bool], **matrix: Any) -> Groups:
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if is_matrix(name, p)], "weight_decay": 0.5, **matrix},
        {"params": [p for name, p in named if not is_matrix(name, p)], "weight_decay": 0.0},
    ]


def _by_shape(net: nn.Module) -> Groups:
    return _split(net, lambda _, p: p.ndim >= 2)


def _plain() -> dict[str, Tensor]:
    net = _build()
    optimizer = torch.optim.SGD(_by_shape(net), lr=0.1)
    for index in range(3):
        loss_of(net, global_batch(index)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


def _train(accelerator: Any, net: nn.Module, groups: Groups) -> Any:
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(groups, lr=0.1))
    for index in range(3):
        accelerator.backward(loss_of(model, own_batch(index)))
        optimizer.step()
        optimizer.zero_grad()
    return model


def _refusing(net: nn.Module) -> list[int]:
    return [sum(isinstance(hook, OwnHook) for hook in part._forward_pre_hooks.values()) for part in net.modules()]


def check_groups_by_shape(path: str) -> None:
    """Built inside `whole_weights` they are those of plain torch; built outside, at stage 3, they are an error.

    So it is after `free_memory()`, of a model that stays partitioned.
    """
    with running(path) as accelerator:
        with accelerator.init_model():
            net = _build()
        partitioned = path in ("zero3", "zero3-cpu")  # in all others prepare() finds the true shapes afterwards too
        if path.startswith("zero3"):
            raised(LoopError, "a Net", "whole_weights", by=lambda: _train(accelerator, net, _by_shape(net)))
        with accelerator.whole_weights(net):
            groups = _by_shape(net)
            assert sum(p.numel() for p in net.parameters()) == 8 * 16 + 16 + 2 * 16 + 16 * 4 + 4
        model = _train(accelerator, net, groups)
        assert_near(weights(accelerator, model), _plain())
        del model
        accelerator.free_memory()
        if partitioned:
            raised(LoopError, "a Net", "leave the empty one out", by=lambda: _train(accelerator, net, _by_shape(net)))
        with accelerator.whole_weights(net), torch.no_grad():
            for p, start in zip(net.parameters(), _build().parameters(), strict=True):
                p.copy_(start)
            groups = _by_shape(net)
        assert_near(weights(accelerator, _train(accelerator, net, groups)), _plain())


def check_a_model_that_is_not_prepared(path: str, folder: Path) -> None:
    """At stage 3 a forward of it, or of a part, says to prepare it; inside `whole_weights`, and prepared, it computes.

    A copy of it is an error as of a prepared one.
    """
    x, _ = global_batch(0)
    with running(path) as accelerator, torch.no_grad():
        accelerator.prepare(student := nn.Linear(8, 4), torch.optim.SGD(student.parameters(), lr=0.1))
        wanted = _build()(x)
        with accelerator.init_model():
            teacher = _build()
        accelerator.save_model(_build(), folder)
        accelerator.wait_for_everyone()
        with accelerator.init_model(weights=folder):
            read = Net()
        for net in (teacher, read):
            if path.startswith("zero3"):
                for part, kind in ((net, "Net"), (net.first, "Linear")):
                    forward = lambda part=part: part(x)  # noqa: E731
                    raised(LoopError, f"a {kind} that is not prepared", "accelerator.prepare(model)", by=forward)
                raised(LoopError, "deepcopy() of a model", "before prepare()", by=lambda net=net: copy.deepcopy(net))
            else:
                assert torch.equal(net(x), wanted)
            with accelerator.whole_weights(net):
                assert torch.allclose(net(x), wanted, atol=1e-6)
                copied = copy.deepcopy(net)
            assert torch.allclose(copied(x), wanted, atol=1e-6)
            assert torch.allclose(accelerator.prepare(net)(x), wanted, atol=1e-6)


def check_hooks_do_not_add_up(path: str) -> None:
    """However often a model is prepared and freed, each part has one hook that refuses forwards, prepared none."""
    with running(path) as accelerator:
        with accelerator.init_model():
            net = _build()
        for _ in range(3):
            _train(accelerator, net, [{"params": list(net.parameters())}])
            assert _refusing(net) == [0, 0, 0, 0]
            accelerator.free_memory()
            assert _refusing(net) == [1, 1, 1, 1]


def check_recipes_of_groups(path: str) -> None:
    """Those that names make, and those of adapters, pass on a partitioned model; those that shapes make do not."""
    named: dict[str, Callable[[nn.Module], Groups]] = {
        "one group": lambda net: [{"params": list(net.parameters()), "weight_decay": 0.0}],
        "names": lambda net: _split(net, lambda name, _: name.endswith("weight") and "norm" not in name),
        "names that no parameter has": lambda net: _split(net, lambda name, _: "layer_norm.weight" not in name),
        "names, without decay": lambda net: [{**g, "weight_decay": 0.0} for g in _split(net, lambda *_: False)],
        "layer-wise rates": lambda net: [
            {"params": list(part.parameters()), "lr": 0.1 * 0.5**index, "weight_decay": 0.1}
            for index, part in enumerate(net.children())
        ],
        "a head that is not there": lambda net: [
            {"params": [], "lr": 1.0, "weight_decay": 0.1},
            {"params": list(net.parameters()), "lr": 0.1, "weight_decay": 0.1},
        ],
        "Muon by names": lambda net: _split(
            net, lambda name, _: "norm" not in name and "bias" not in name, use_muon=True
        ),
        "shapes, without empty groups": lambda net: [group for group in _by_shape(net) if group["params"]],
    }
    trained: dict[str, Callable[[str], bool]] = {
        "all": lambda _: True,
        "matrices alone, as LoRA": lambda name: name.endswith("weight") and "norm" not in name,
        "vectors alone, as BitFit": lambda name: name.endswith("bias"),
        "one layer": lambda name: name.startswith("last"),
    }
    shapes: dict[str, Callable[[nn.Module], Groups]] = {
        "ndim": _by_shape,
        "dim()": lambda net: _split(net, lambda _, p: p.dim() > 1),
        "shape": lambda net: _split(net, lambda _, p: len(p.shape) > 1),
        "timm": lambda net: _split(net, lambda name, p: not (p.ndim <= 1 or name.endswith(".bias")))[::-1],
        "Muon": lambda net: _split(net, lambda _, p: p.ndim == 2, use_muon=True, weight_decay=0.0),
        "layers": lambda net: [group for part in net.children() for group in _by_shape(part)],
    }
    with running(path) as accelerator:
        with accelerator.init_model():
            net = _build()
        outside = _build()
        for which, trains in trained.items():
            for name, p in (*net.named_parameters(), *outside.named_parameters()):
                p.requires_grad_(trains(name))
            for recipe, groups in named.items():
                refuse_groups_by_empty_shape(torch.optim.SGD(groups(net), lr=0.1), net)
                assert groups, (which, recipe)
            for recipe, groups in shapes.items():
                refuse_groups_by_empty_shape(torch.optim.SGD(groups(outside), lr=0.1), outside)
                optimizer = torch.optim.SGD(groups(net), lr=0.1)
                if which in ("all", "one layer"):
                    raised(LoopError, "a Net", by=lambda o=optimizer: refuse_groups_by_empty_shape(o, net))
                else:
                    refuse_groups_by_empty_shape(optimizer, net)
                    assert groups, (which, recipe)


ZERO3 = ("zero3", "zero3-cpu", "zero3-gathered")
CHECKS = checks_on(dict.fromkeys((*SINGLE, *PAIR, *FURTHER)), [check_groups_by_shape])
CHECKS |= checks_on(ZERO3, [check_hooks_do_not_add_up])
CHECKS |= checks_on(("zero3",), [check_recipes_of_groups])
CHECKS |= {
    f"{path}-a_model_that_is_not_prepared": (
        [2],
        lambda folder, path=path: check_a_model_that_is_not_prepared(path, folder),
    )
    for path in ("ddp", "zero2", *ZERO3)
}
