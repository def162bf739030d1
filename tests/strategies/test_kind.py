"""A few of the kinds of training code of tests/kinds, on ZeRO-2: those that no other daily check has."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kinds"))  # the kinds import each other by name

import pytest
import torch
import torch.distributed as dist
from kinds import KINDS
from loops import Plain, difference, prepared
from on_paths import on_paths

DAILY = (
    "OneCycle with betas",
    "LSTM, weight and spectral norm",
    "dropout by seeds, checkpointed",
    "tied weights, padding, smoothed labels",
    "hooks after gradients",
    "accumulated by context, a shorter last window",
    "weighted sampler",
    "sharded evaluation",
    "AveragedModel of the prepared one",
    "GAN",
    "two models, one loss",
    "contrast with gathered gradients",
)


@pytest.mark.parametrize("kind", DAILY)
@on_paths("zero2")
def test_kind_trains_as_plain_torch(kind: str) -> None:
    """Final weights are those of plain torch in one process over the same global batches."""
    wanted = KINDS[kind](Plain(dist.get_world_size()))
    torch.manual_seed(0)
    with prepared("zero2") as loop:
        assert difference(KINDS[kind](loop), wanted) < 3e-6
