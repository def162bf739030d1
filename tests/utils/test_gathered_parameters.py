"""Parameters that ZeRO-3 has partitioned are whole inside `GatheredParameters`."""

from __future__ import annotations

import os
import sys

import pytest

pytestmark = pytest.mark.processes


def test_partitioned_parameters(run_processes) -> None:
    """Inside they are whole; one process' change reaches all; outside, and where it is not enabled, they are not."""
    run_processes(__file__, 2)


def check(rank: int) -> None:
    import torch
    from torch import nn

    from zero_plugin import Accelerator
    from zero_plugin.utils import GatheredParameters, extract_model_from_parallel

    section = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    accelerator = Accelerator(config={"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": section})
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
    accelerator.end_training()


if __name__ == "__main__":
    store, rank, world = sys.argv[1:4]
    os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    check(int(rank))
    dist.barrier()
    dist.destroy_process_group()
