"""Parameters partitioned by ZeRO-3 are unpartitioned inside `GatheredParameters`."""

from __future__ import annotations

import torch
from on_paths import on_paths
from paths import running
from torch import nn

from zero_plugin.utils import GatheredParameters, extract_model_from_parallel


@on_paths("zero3")
def test_partitioned_parameters(path: str, rank: int) -> None:
    """Inside they are unpartitioned, and one process's change reaches all. Outside, or if disabled, they are not."""
    with running(path) as accelerator:
        plain = nn.Linear(4, 4)
        model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), 0.1))
        assert extract_model_from_parallel(model) is plain
        weight = plain.weight
        assert weight.numel() == 0
        with GatheredParameters(plain.parameters(), modifier_rank=1), torch.no_grad():
            assert weight.shape == (4, 4)
            if rank == 1:
                weight.fill_(7)
        assert weight.numel() == 0
        with GatheredParameters(weight, enabled=False):
            assert weight.numel() == 0
        with GatheredParameters(weight):
            assert weight.eq(7).all()
