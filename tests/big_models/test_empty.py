"""Models are built without memory, or on their final device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_plugin import init_empty_weights
from zero_plugin.big_modeling import init_on_device
from zero_plugin.tensors.empty import outermost_modules
from zero_plugin.utils import find_tied_parameters


def test_parameters_have_no_memory_and_buffers_have(make) -> None:
    """Shapes, dtypes, `requires_grad` and ties exist without memory. Buffers keep computed values."""
    plain = make()
    with init_empty_weights():
        model = make()
        nn.Sequential(*[nn.Linear(10_000, 10_000) for _ in range(50)])  # 20 GB
    assert all(p.is_meta for p in model.parameters())
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain.named_parameters()
    }
    assert torch.equal(model.blocks[0].shift, plain.blocks[0].shift)
    assert find_tied_parameters(model) == find_tied_parameters(plain) == [["embedding.weight", "head.weight"]]
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("by_variable", [False, True])
def test_buffers_too(make, by_variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers have no memory either on request, by argument or environment."""
    if by_variable:
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "true")
    with init_empty_weights(include_buffers=None if by_variable else True):
        model = make()
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_a_parameter_of_two_modules() -> None:
    """A parameter of two modules, created before both, stays one."""
    with init_on_device("meta"):
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        a, b = nn.Module(), nn.Module()
        a.w = b.w = shared
    assert a.w is b.w
    assert a.w.is_meta
    assert not a.w.requires_grad
    assert not shared.is_meta


def test_after_an_error() -> None:
    """After an error modules are built normally."""
    with pytest.raises(KeyError), init_empty_weights():
        raise KeyError
    assert not nn.Linear(2, 2).weight.is_meta


def test_on_a_device_that_is_there() -> None:
    """On an existing device models have values."""
    with init_on_device(torch.device("cpu")):
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_outermost_modules() -> None:
    """Outermost modules have no parent. Temporary modules and later ones are excluded."""
    before = nn.Linear(1, 1)
    with outermost_modules() as outermost:
        first = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
        nn.Linear(3, 3)
        passing = nn.Linear(4, 4)
        passing.itself = [passing]  # only the garbage collector frees it
        del passing
        second = nn.ModuleList([before])
        assert outermost == []
    nn.Linear(5, 5)
    assert outermost == [first, second]
