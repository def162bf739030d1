"""Mixture-of-experts layers whose processes use different experts train as in plain torch on every path."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from on_paths import on_paths
from paths import PAIR, assert_near, global_batch, running, weights
from torch import Tensor, nn


class Routed(nn.Module):
    """A layer that routes process 0's rows to the first expert, and process 1's to the others in turn."""

    names = ("gate", "experts")

    def __init__(self) -> None:
        super().__init__()
        router, experts = self.names
        setattr(self, router, nn.Linear(8, 4, bias=False))
        parts = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        setattr(self, experts, nn.ModuleList(parts))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        router, experts = (getattr(self, name) for name in self.names)
        weight = router(x).softmax(-1).gather(-1, chosen[:, None])
        out = torch.zeros_like(x)
        for i in chosen.unique().tolist():
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_put((rows,), experts[i](x[rows]))
        return x + out * weight


class Spread(Routed):
    """The same layer with names that detection does not recognise."""

    names = ("mix", "parts")


class Net(nn.Module):
    """A model with two such layers. The first one's input needs no gradient."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second, self.out = layer(), layer(), nn.Linear(8, 4)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.out(self.second(self.first(x, chosen), chosen))


def _choice(step: int) -> Tensor:
    return torch.tensor([0] * 4 + [1 + step % 3] * 4)


def _loss(model: Any, step: int, rows: slice) -> Tensor:
    x, y = global_batch(step)
    return (model(x[rows], _choice(step)[rows]) - y[rows]).square().mean()


def _build(layer: type[nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return Net(layer)


def _check(path: str, layer: type[nn.Module], **deepspeed: Any) -> None:
    reference = _build(layer)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    rank = dist.get_rank()
    with running(path, deepspeed=deepspeed) as accelerator:
        model = _build(layer)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for step in range(4):
            wanted = _loss(reference, step, slice(0, 8))
            wanted.backward()
            for p in reference.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # no process used it: see reach_every_expert
            plain.step()
            plain.zero_grad()
            loss = _loss(model, step, slice(4 * rank, 4 * rank + 4))
            assert abs(accelerator.reduce(loss.detach(), "mean") - wanted) < 1e-5
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert_near(weights(accelerator, model), reference.state_dict(), 1e-5)


@on_paths(*PAIR, daily=("ddp", "zero3"))
def test_found_by_structure(path: str) -> None:
    """Experts that only some processes use are gathered and reduced by all."""
    _check(path, Routed)


@on_paths("zero1", "zero2", "zero3", daily="zero2")
def test_named_in_the_configuration(path: str) -> None:
    """A layer with unrecognised names is handled if `deepspeed_moe_layer_cls_names` names its class."""
    _check(path, Spread, deepspeed_moe_layer_cls_names="Other,Spread")
