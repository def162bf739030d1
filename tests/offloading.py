"""A model whose tensors are large enough for NVMe, its stage 3 configurations, its training and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from paths import take_steps
from torch import nn

WIDTH = 1024  # tensors below 1 MiB per process never go to NVMe


def wide_net() -> nn.Module:
    """Build one layer of 4 MiB (fp32) between two thin ones."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def zero3(folder: Path, **offload: str) -> dict[str, Any]:
    """Return stage 3 with every parameter partitioned; `offload` maps optimizer and param to a device."""
    section: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 700_000}
    for what, device in offload.items():
        section[f"offload_{what}"] = {"device": device}
        if device == "nvme":
            section[f"offload_{what}"]["nvme_path"] = str(folder)
    if offload.get("param") == "nvme":
        section["offload_param"] |= {"max_in_cpu": 0, "buffer_size": 2_000_000}
    return {"zero_optimization": section}


def prepared(accelerator: Any) -> tuple[Any, Any]:
    model = wide_net()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def train(accelerator: Any, model: Any, optimizer: Any, step: int) -> None:
    take_steps(accelerator, model, optimizer, [step])


def files_of(folder: Path) -> dict[str, int]:
    """Return the bytes of this process's files below `folder`, by kind of content."""
    dist.barrier()
    found: dict[str, int] = {}
    for file in folder.rglob(f"rank{dist.get_rank()}/*"):
        inside = file.parts[-3]
        name = file.name
        kind = inside if inside.endswith("params") else name.split("-")[0] if name[0] == "e" else "master"
        kind = "gradient" if "gradient" in name else kind
        found[kind] = found.get(kind, 0) + file.stat().st_size
    dist.barrier()
    return found
