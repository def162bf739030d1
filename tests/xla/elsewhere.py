"""Trains the second epoch, on ZeRO-3 or DDP, of a training that began on XLA: STORE RANK WORLD KIND FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["DS_ACCELERATOR"] = "cpu"

import torch.distributed as dist
from loop import ACCUMULATION, by_hand, largest_difference, make_parts, part_of, train

from zero_plugin import Accelerator

CONFIGS: dict[str, dict[str, Any]] = {
    "zero3": {"deepspeed_config": {"zero_optimization": {"stage": 3}}},
    "ddp": {"distributed_type": "MULTI_CPU"},
}


def main() -> None:
    store, rank, world, kind, folder = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    config = {"scheduler_counts": "steps", "use_cpu": True, **CONFIGS[kind]}
    accelerator = Accelerator(config=config, gradient_accumulation_steps=ACCUMULATION)
    ours = train(accelerator, make_parts(), range(1, 2), load=f"{folder}/xla", save=f"{folder}/{kind}")
    theirs = part_of(by_hand(int(world))[int(rank)], range(1, 2))
    found = {what: largest_difference(ours, theirs, what) for what in ("losses", "norms", "rates")}
    print(found, flush=True)
    assert max(found.values()) < 1e-5, found
    accelerator.end_training()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
