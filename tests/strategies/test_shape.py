"""A model that stage 3 partitions when it is built: what a script sees before `prepare`, and the errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from on_paths import ALL, on_paths
from paths import (
    assert_near,
    global_batch,
    listening,
    raised,
    running,
    take_plain_steps,
    take_steps,
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
    take_plain_steps(net, optimizer, range(3))
    return net.state_dict()


def _train(accelerator: Any, net: nn.Module, groups: Groups) -> Any:
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(groups, lr=0.1))
    take_steps(accelerator, model, optimizer, range(3))
    return model


class Constructed(nn.Module):
    """A constructor that initializes its submodules like nanoGPT and timm, and copies, reads and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(8, 16), nn.Linear(16, 4), nn.Parameter(torch.tensor(0.5))
        self.first.bias.data[2] = 7.0
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        self.apply(self._initialize)
        nn.init.normal_(self.last.weight, std=0.002)
        self.first.weight.data = self.first.weight.data * 2
        with zero.GatheredParameters([self.last.weight], modifier_rank=0):
            self.last.weight.data.add_(1)
        self.copied = copy.deepcopy(self.last)
        with torch.no_grad():
            self.last.bias.copy_(self.first.bias[:4])
            torch._foreach_add_(list(self.first.parameters()), 1.0)
        self.recurrent = nn.LSTM(4, 4, 2)
        for name, p in self.recurrent.named_parameters():
            nn.init.orthogonal_(p) if "weight" in name else p.data[4:8].fill_(1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.embedding = nn.utils.parametrizations.weight_norm(nn.Embedding(5, 4, padding_idx=0))
        self.count = sum(p.numel() for p in self.parameters())

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


@on_paths("zero3", "zero3-cpu", "zero3-gathered")
def test_constructors(path: str) -> None:
    """Initializing, copying, reading or counting the submodules' parameters gives the same model, partitioned.

    The random numbers drawn afterwards are the same too.
    """
    torch.manual_seed(9)
    outside = Constructed()
    drawn = torch.randn(3)
    with running(path) as accelerator:
        torch.manual_seed(9)
        with accelerator.init_model():
            net = Constructed()
            if path.startswith("zero3"):
                assert all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in net.last.parameters())
        assert torch.equal(torch.randn(3), drawn)
        assert net.count == outside.count
        assert_near(weights(accelerator, accelerator.prepare(net)), outside.state_dict(), 1e-7)


def _refusing(net: nn.Module) -> list[int]:
    return [sum(isinstance(hook, OwnHook) for hook in part._forward_pre_hooks.values()) for part in net.modules()]


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_groups_by_shape(path: str) -> None:
    """Groups built inside `whole_weights` equal plain torch's. Groups built outside, at stage 3, are an error.

    They are also an error after `free_memory()`, for a model that stays partitioned.
    """
    with running(path) as accelerator:
        with accelerator.init_model():
            net = _build()
        partitioned = path in ("zero3", "zero3-cpu")  # in all others prepare() also finds the true shapes afterwards
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


@on_paths("ddp", "zero2", "zero3", "zero3-gathered", daily=("ddp", "zero3"))
def test_an_empty_group_with_another_learning_rate_is_warned_of(path: str) -> None:
    """At stage 3 shapes have split the groups of a partitioned model. Groups by names train without a warning."""
    for by_shape in (True, False):
        with running(path) as accelerator, listening() as messages:
            with accelerator.init_model():
                net = _build()
            matrices = [p for p in net.parameters() if p.ndim >= 2 or not by_shape]
            others = [p for p in net.parameters() if p.ndim < 2 and by_shape]
            options = {"lr": 0.01} if by_shape else {"weight_decay": 0.0}
            groups = [{"params": matrices}, {"params": others, **options}]
            accelerator.prepare(net, torch.optim.SGD(groups, lr=0.1, weight_decay=0.1 if not by_shape else 0.0))
            warned = any("a parameter group is empty" in message for message in messages)
        assert warned == (by_shape and path.startswith("zero3") and accelerator.is_main_process)


@on_paths("ddp", "zero2", "zero3", "zero3-cpu", "zero3-gathered", daily=("ddp", "zero3", "zero3-cpu"))
def test_a_model_that_is_not_prepared(path: str, folder: Path) -> None:
    """At stage 3 a forward of it, or of a part, is an error: prepare it. In `whole_weights`, or prepared, it computes.

    A copy of it is an error, like a copy of a prepared one.
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


@on_paths("zero3", "zero3-cpu", "zero3-gathered")
def test_hooks_do_not_add_up(path: str) -> None:
    """However often a model is prepared and freed, each part has one hook that refuses forwards, none if prepared."""
    with running(path) as accelerator:
        with accelerator.init_model():
            net = _build()
        for _ in range(3):
            _train(accelerator, net, [{"params": list(net.parameters())}])
            assert _refusing(net) == [0, 0, 0, 0]
            accelerator.free_memory()
            assert _refusing(net) == [1, 1, 1, 1]


@on_paths("zero3")
def test_recipes_of_groups(path: str) -> None:
    """Groups made by names, and those of adapters, pass on a partitioned model. Groups made by shapes do not."""
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
