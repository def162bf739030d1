"""The training of the GPU tests, alone in a process group over NCCL."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from device import DEVICE, ON_GPU, distributed_type, process_group

os.environ["DS_ACCELERATOR"] = DEVICE

import torch
from torch import nn

from zero_plugin import Accelerator

WIDTH, LAYERS, BATCH = 512, 6, 16
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": WIDTH * WIDTH}
HOST = {"device": "cpu", "pin_memory": True}
PATHS: dict[str, dict[str, Any]] = {
    "single": {},
    "zero1": {"stage": 1, "reduce_bucket_size": WIDTH * WIDTH},
    "zero2": {"stage": 2, "reduce_bucket_size": WIDTH * WIDTH, "overlap_comm": True},
    "zero2-cpu": {
        "stage": 2,
        "reduce_bucket_size": WIDTH * WIDTH,
        "overlap_comm": True,
        "offload_optimizer": HOST,
    },
    "zero3": ZERO3,
    "zero3-cpu": {**ZERO3, "sub_group_size": 300_000, "offload_optimizer": HOST, "offload_param": HOST},
    "zero3-nvme": {
        **ZERO3,
        "sub_group_size": 300_000,
        "offload_optimizer": {"device": "nvme", "nvme_path": "NVME"},
        "offload_param": {"device": "nvme", "nvme_path": "NVME", "max_in_cpu": 0, "buffer_size": 2_000_000},
    },
}


@contextmanager
def group_of_one() -> Iterator[list[str]]:
    """Wrap a worker `STORE RANK WORLD ARGS…` in a process group. Yield the arguments."""
    store, rank, world, *arguments = sys.argv[1:]
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"  # allows a trial of the scripts without a GPU
    with process_group(store, rank, world, backend=backend):
        yield arguments


def start(path: str, precision: str, nvme: str = "", accumulation: int = 1, **arguments: Any) -> Accelerator:
    """Create an Accelerator on a path."""
    zero = json.loads(json.dumps(PATHS[path]).replace("NVME", nvme))
    section: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if zero:
        section |= {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config = {"distributed_type": distributed_type(path), "use_cpu": not ON_GPU, "scheduler_counts": "steps"}
    return Accelerator(config={**config, "deepspeed_config": section}, mixed_precision=precision, **arguments)


def make_net() -> nn.Sequential:
    """Create a model with the same weights each time."""
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
