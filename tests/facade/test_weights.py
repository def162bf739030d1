"""A model is unwrapped from `prepare`, and saved files load."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zero_plugin import Accelerator


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    yield accelerator
    accelerator.end_training()


def test_a_model_can_be_pickled_when_its_own_forward_is_back(accelerator: Accelerator) -> None:
    """Unwrapping returns the user's module. Its own forward, without autocast, is restored only on request."""
    model = nn.Linear(2, 2)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert accelerator.unwrap_model(prepared) is model
    assert "forward" in model.__dict__
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare.weight is model.weight
    assert pickle.loads(pickle.dumps(bare)).weight.equal(model.weight)


def test_a_model_that_was_not_prepared_is_unwrapped_too(accelerator: Accelerator) -> None:
    """An unprepared model is unwrapped too, like by `extract_model_from_parallel`."""
    model = nn.Linear(2, 2)
    assert accelerator.unwrap_model(nn.DataParallel(model)) is model


def test_saving_tied_weights_as_safetensors(accelerator: Accelerator, tmp_path: Path) -> None:
    """Tied weights, which safetensors refuses, are written once."""
    weight = torch.ones(2)
    accelerator.save({"a": weight, "b": weight}, tmp_path / "tied.safetensors", safe_serialization=True)
    assert list(load_file(tmp_path / "tied.safetensors")) == ["a"]
