"""`dummy_forward` adds a 0 whose gradients are 0, for any computation of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_plugin import dummy_forward


class Outputs(nn.Module):
    """A layer with outputs of some structure."""

    def __init__(self, give: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self._give = nn.Linear(4, 4), give

    def forward(self, x: Tensor) -> object:
        return self._give(self.layer(x))


@pytest.mark.parametrize(
    "give",
    [
        lambda x: x,
        lambda x: (x, None, 3),
        lambda x: {"last": x, "all": [x, x.argmax()]},
        lambda x: x / 0,
        lambda x: (x * 0).sqrt() / 0,
        lambda x: x.log() * float("inf"),
        lambda x: checkpoint(torch.exp, x * 1e4, use_reentrant=False),
    ],
)
def test_gradients_are_zero(give: Callable[[Tensor], object]) -> None:
    """Every parameter's gradient is exactly 0, for any structure of outputs and infinite numbers. The result is 0."""
    module = Outputs(give)
    zero = dummy_forward(module, torch.zeros(2, 4))
    assert zero.shape == ()
    assert zero.item() == 0
    (zero + 1).backward()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in module.parameters())


def test_a_real_call_in_the_same_backward_keeps_its_gradient() -> None:
    """This holds for micro-batches with summed losses. The tensors behind the inputs get no gradient of the dummy."""
    module, before = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    (module(x).sum() + dummy_forward(module, before(x) / 0)).backward()
    both = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).sum().backward()
    assert all(torch.equal(p.grad, kept) for p, kept in zip(module.parameters(), both, strict=True))
    assert all(p.grad is None for p in before.parameters())


def test_a_frozen_module_gives_a_zero_without_a_graph() -> None:
    """Only its forward runs, which gathers its weights at ZeRO stage 3. Named arguments reach it."""
    zero = dummy_forward(nn.Linear(4, 4).requires_grad_(False), input=torch.zeros(1, 4))
    assert zero.item() == 0
    assert not zero.requires_grad


def test_outputs_without_numbers_are_refused() -> None:
    """They have no gradient, so the module would take no part in the step."""
    with pytest.raises(TypeError, match="no tensor of floating-point numbers from the Outputs"):
        dummy_forward(Outputs(lambda x: x.argmax()), torch.zeros(1, 4))


@dataclass
class Checked:
    """Outputs that check their parts on construction."""

    hidden: Tensor

    def __post_init__(self) -> None:
        assert self.hidden.dim() == 2


def test_outputs_may_check_their_parts() -> None:
    """A dataclass that reads its tensors in its constructor works."""
    assert dummy_forward(Outputs(Checked), torch.ones(1, 4)).item() == 0


def test_a_function_chooses_the_outputs_in_use() -> None:
    """Layers behind other outputs get no gradient, as on a process with data."""
    body, head = nn.Linear(4, 4), nn.Linear(4, 4)

    def tower(x: Tensor) -> dict[str, Tensor]:
        hidden = body(x)
        return {"hidden": hidden, "pooled": head(hidden)}

    dummy_forward(lambda x: tower(x)["hidden"], torch.ones(1, 4)).backward()
    assert body.weight.grad is not None
    assert head.weight.grad is None
