"""The tests' device: the CPU, or with ZERO_PLUGIN_TEST_DEVICE=cuda the first GPU, as `make gpu` does.

On a GPU, all processes of a group share it over gloo: NCCL takes one process per GPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

DEVICE: Final = os.environ.get("ZERO_PLUGIN_TEST_DEVICE", "cpu")
ON_GPU: Final = DEVICE != "cpu"


def place_process(rank: str, world: str) -> dict[str, str]:
    """Set a launcher's variables for one of the processes of a group, all on this machine."""
    local_rank = "0" if ON_GPU else rank
    return {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DS_ACCELERATOR": DEVICE,
    }


@contextmanager
def process_group(store: str, rank: str, world: str, *, backend: str = "gloo", seconds: float = 120) -> Iterator[None]:
    """Open the process group of a script that `launching.ProcessGroup` started, with its arguments."""
    import torch.distributed as dist

    os.environ.update(place_process(rank, world))
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=int(world),
        timeout=timedelta(seconds=seconds),
    )
    yield
    gc.unfreeze()
    gc.collect()  # engines that still hold the group: its threads may abort a process that ends
    dist.barrier()
    dist.destroy_process_group()


def distributed_type(path: str) -> str:
    """Return a configuration's type for a path: `single`, `ddp` or one of ZeRO's."""
    if path.startswith("zero"):
        return "DEEPSPEED"
    return "NO" if path == "single" else "MULTI_GPU" if ON_GPU else "MULTI_CPU"
