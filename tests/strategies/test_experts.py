"""The modules taken for mixture-of-experts layers, and the experts that a backward reaches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zero_plugin.strategies.experts import find_expert_layers, reach_every_expert


class Layer(nn.Module):
    """A router and four experts under given names; only the first expert is called."""

    def __init__(self, router: str = "gate", experts: str = "experts", outputs: int = 4) -> None:
        super().__init__()
        self.add_module(router, nn.Linear(8, outputs))
        self.add_module(experts, nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
        self.calls = (router, experts)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        router, experts = (self.get_submodule(name) for name in self.calls)
        return scale * experts[0](x) * router(x)[:, :1]


class Deep(nn.Module):
    """Twelve layers and a head of twelve classes, so its shapes look like those of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))
        self.head = nn.Linear(8, 12)


def switch() -> nn.Module:
    """Put the experts in a dictionary and the router one level down."""
    layer = nn.Module()
    layer.router = nn.Sequential(nn.Linear(8, 3))
    layer.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(8, 8) for i in range(3)})
    return layer


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (Layer(), True),
        (Layer("wg", "experts"), True),
        (Layer("router", "mlps"), True),
        (switch(), True),
        (Layer("mix", "parts"), False),  # no module has this name
        (Layer("gate", "experts", outputs=5), False),  # the router's outputs are not one per expert
        (Deep(), False),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False), False),
    ],
)
def test_layers_are_told_by_structure_and_names(layer: nn.Module, found: bool) -> None:
    """Structure and names must both match: a stack of layers with equally many classes does not."""
    model = nn.Sequential(nn.Linear(8, 8), layer)
    assert list(find_expert_layers(model, ())) == ([layer] if found else [])


def test_a_named_class_counts() -> None:
    """The configuration's names are added to the detected layers."""
    model = nn.Sequential(Layer("mix", "parts"), Layer())
    assert list(find_expert_layers(model, ["Layer"])) == list(model)


@pytest.mark.parametrize("by_name", [False, True])
def test_every_expert_gets_a_gradient(by_name: bool) -> None:
    """Experts that were not called get zeros, frozen ones nothing.

    The others get the same gradients as without the call.
    """
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(3, 8)
    layer(x).sum().backward()
    wanted = [None if p.grad is None else p.grad.clone() for p in layer.parameters()]
    assert None in wanted
    layer.zero_grad()
    layer.experts[3].requires_grad_(False)
    reach_every_expert(layer, with_gradients=True)
    (layer(x=x) if by_name else layer(x, scale=1.0)).sum().backward()
    for p, gradient in zip(layer.parameters(), wanted, strict=True):
        if not p.requires_grad:
            assert p.grad is None
        else:
            assert torch.equal(p.grad, torch.zeros_like(p) if gradient is None else gradient)
    with torch.no_grad():
        assert not layer(x).requires_grad
