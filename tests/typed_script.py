"""A script for type checkers: `prepare` returns the types of its arguments. `test_package.py` has mypy check it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator

if TYPE_CHECKING:
    from typing_extensions import assert_type


class GPT(nn.Module):
    """A model with its own type."""


def train(objects: list[Any], modules: list[nn.Module]) -> None:
    accelerator = Accelerator()
    model = GPT()
    optimizer = AdamW(model.parameters())
    scheduler = OneCycleLR(optimizer, 1.0, 3)
    loader = DataLoader(TensorDataset(torch.zeros(2)))
    assert_type(accelerator.prepare(model), GPT)
    assert_type(accelerator.prepare(model, optimizer), tuple[GPT, AdamW])
    assert_type(
        accelerator.prepare(model, optimizer, loader, scheduler, device_placement=[None, None, False, None]),
        tuple[GPT, AdamW, DataLoader[tuple[torch.Tensor, ...]], OneCycleLR],
    )
    assert_type(accelerator.prepare(*modules), tuple[nn.Module, ...])
    model = accelerator.prepare(optimizer)  # type: ignore[assignment]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer = accelerator.prepare(*objects)
