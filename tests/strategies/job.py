"""A whole training script: PATH HOW, or STORE RANK WORLD PATH HOW NVME for a job of one process of its own.

HOW. `end` calls end_training, `fall` runs off its end, `exit` calls sys.exit, `keep` leaves everything referenced by a
module, `raise` raises on the last process while the others go on.
"""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))  # where a test starts Python itself

import torch
from paths import ZERO, loss_of
from torch import nn

from zero_plugin import Accelerator


def configuration(path: str, nvme: str) -> dict[str, object]:
    """Build the launch configuration of a path."""
    if path == "ddp":
        return {"distributed_type": "MULTI_CPU", "use_cpu": True}
    zero = ZERO.get(path) or {
        **ZERO["zero3"],
        "offload_optimizer": {"device": "nvme", "nvme_path": nvme},
        "offload_param": {"device": "nvme", "nvme_path": nvme, "max_in_cpu": 0, "buffer_size": 2_000_000},
    }
    return {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": {"zero_optimization": zero}}


def main(path: str, how: str, nvme: str) -> None:
    """Train four steps, then end in the requested way."""
    accelerator = Accelerator(config=configuration(path, nvme))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 4)) if nvme else nn.Linear(8, 4)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, adamw, loader)
    last = accelerator.process_index == accelerator.num_processes - 1
    for step, x in enumerate(loader):
        if how == "raise" and step == 2 and last:
            raise RuntimeError("the script's own error")
        if how == "wait" and step == 2:
            files = sorted(file for file in Path(nvme).rglob("*") if file.is_file())
            assert any(f"-{os.getpid()}-" in str(file) for file in files)
            print("training", flush=True)
            sys.stdin.readline()
        accelerator.backward(loss_of(model, (x, torch.zeros(len(x), 4))))
        optimizer.step()
        optimizer.zero_grad()
    if nvme:
        assert any(file.is_file() for file in Path(nvme).rglob("*"))
    if how in ("end", "wait"):
        accelerator.end_training()
    elif how == "exit":
        sys.exit(0)
    elif how == "keep":
        builtins.kept = (accelerator, model, optimizer, loader, x)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(*sys.argv[1:3], nvme=sys.argv[3] if len(sys.argv) > 3 else "")
