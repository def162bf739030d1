"""Measures how long the host waits in steps while the GPU is busy: STORE RANK WORLD PATH PRECISION FOLDER."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from training import BATCH, WIDTH, group_of_one, make_net, start

BUSY = 1_000_000_000  # cycles, half a second


def seconds_of_host(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a step's call while the GPU has half a second of work, and until all work is done."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(BUSY)
    step()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return host, time.perf_counter() - start


def measure(path: str, precision: str, folder: str, *, clip: bool) -> tuple[float, float]:
    accelerator = start(path, precision, folder)
    net = make_net()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=path == "single")
    model, optimizer = accelerator.prepare(net, optimizer)
    x = torch.randn(BATCH, WIDTH, device=accelerator.device)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(x.to(next(model.parameters()).dtype)).float().square().mean())
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    found = seconds_of_host(step)
    accelerator.end_training()
    return found


if __name__ == "__main__":
    with group_of_one() as (path, precision, folder):
        found = [measure(path, precision, folder, clip=clip) for clip in (False, True)]
        print(path, precision, "host and whole, s; without and with clipping:", found)
        Path(folder, "waits.json").write_text(json.dumps(found))
