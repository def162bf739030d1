"""Repeated blocks are compiled one by one, on the original model's parameters."""

from __future__ import annotations

import torch
from torch import nn

from zero_plugin.tensors.wrappers import compile_regions, has_compiled_regions, is_compiled_module


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.different = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in [*self.blocks, *self.different]:
            x = block(x)
        return x


def test_blocks_are_compiled_one_by_one() -> None:
    """Blocks of one class are. A list of several classes is compiled as one. The model itself stays plain."""
    model = Blocks()
    compiled = compile_regions(model, backend="eager")
    assert all(map(is_compiled_module, compiled.blocks))
    assert is_compiled_module(compiled.first)
    assert has_compiled_regions(compiled)
    assert not is_compiled_module(compiled)
    assert not has_compiled_regions(model)
    assert compiled._orig_mod is model


def test_parameters_are_shared() -> None:
    """The compiled model computes the same, on the model's own parameters, each once."""
    model = Blocks()
    compiled = compile_regions(model, backend="eager")
    x = torch.ones(1, 2)
    assert compiled.blocks[0](x).equal(model.blocks[0](x))
    assert {id(p) for p in compiled.parameters()} == {id(p) for p in model.parameters()}
    assert len(list(compiled.parameters())) == len(list(model.parameters()))


def test_a_replaced_forward_belongs_to_the_compiled_model() -> None:
    """A method set as an attribute of the model acts on the compiled model there."""
    model = Blocks()
    model.forward = Blocks.forward.__get__(model)
    assert compile_regions(model, backend="eager").forward.__self__ is not model


def test_a_model_without_repeated_blocks_is_compiled_whole() -> None:
    """It has no blocks to divide."""
    model = nn.Linear(1, 1)
    compiled = compile_regions(model, backend="eager")
    assert is_compiled_module(compiled)
    assert compiled._orig_mod is model


class Absent(nn.Module):
    """A model with blocks, one child that is None, and another with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.first = nn.Linear(2, 2)
        self.second = self.first
        self.register_module("head", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all layers."""
        for block in (self.first, *self.blocks, self.second):
            x = block(x)
        return x if self.head is None else self.head(x)


def test_children_that_are_none_or_have_two_names() -> None:
    """They are unchanged in the copy."""
    model = Absent()
    compiled = compile_regions(model, backend="eager")
    assert compiled.head is None
    assert compiled.first is compiled.second
    x = torch.ones(1, 2)
    assert torch.equal(compiled(x), model(x))
