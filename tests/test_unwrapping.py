"""A model is unwrapped from its containers, and no further than requested."""

from __future__ import annotations

import functools
import pickle

import pytest
import torch
from torch import nn

from zero_plugin.tensors.wrappers import compile_regions, extract_model


class Doubling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.fixture
def model() -> nn.Module:
    return Doubling(2, 2)


def test_containers(model: nn.Module) -> None:
    """Every container around a model is removed. A submodule called `module` is not."""
    assert extract_model(model) is model
    assert extract_model(nn.DataParallel(nn.DataParallel(model))) is model
    holder = nn.Module()
    holder.module = model
    assert extract_model(holder) is holder


def test_containers_inside(model: nn.Module) -> None:
    """`recursive` unwraps submodules too, on every level."""
    outer = nn.Sequential(nn.Sequential(nn.DataParallel(model)))
    assert extract_model(nn.DataParallel(outer), recursive=True) is outer
    assert outer[0][0] is model


@pytest.mark.parametrize("keep", [True, False])
def test_compiled_models(model: nn.Module, keep: bool) -> None:
    """The compiled model is kept, with the inner one inside, or removed."""
    compiled = torch.compile(nn.DataParallel(model), backend="eager")
    got = extract_model(compiled, keep_torch_compile=keep)
    assert got is (compiled if keep else model)
    assert compiled._orig_mod is model or not keep


@pytest.mark.parametrize("keep", [True, False])
def test_models_with_compiled_regions(keep: bool) -> None:
    """A model whose blocks are compiled is kept, or its original is returned."""
    plain = nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))
    compiled = compile_regions(plain, backend="eager")
    assert extract_model(compiled, keep_torch_compile=keep) is (compiled if keep else plain)


def test_decorated_forwards(model: nn.Module) -> None:
    """Decorators of a forward are removed one after another, and the model can be pickled again."""

    def decorate(forward):
        @functools.wraps(forward)
        def decorated(*args):
            return -forward(*args)

        return decorated

    x = torch.ones(1, 2)
    plain = model(x)
    model._original_forward = model.forward
    model.forward = decorate(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    assert extract_model(model) is model
    assert model(x).dtype == torch.bfloat16
    assert extract_model(model, keep_fp32_wrapper=False) is model
    assert model(x).equal(plain)
    assert pickle.loads(pickle.dumps(model))(x).equal(plain)


def test_a_forward_of_the_users_own_stays(model: nn.Module) -> None:
    """A forward without a decorator is never removed."""
    model.forward = torch.neg
    assert extract_model(model, keep_fp32_wrapper=False).forward is torch.neg
