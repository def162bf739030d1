"""Trains with and without delays on the GPU's streams: STORE RANK WORLD PATH PRECISION FOLDER.

A copy between GPU and CPU memory that does not wait for the writer or reader of its tensors copies wrong values if a
stream is late. So milliseconds of idle time precede each forward and backward of a layer, and each use of a side
stream, on that stream.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import BATCH, WIDTH, group_of_one, make_net, start

from zero_plugin import DataLoaderConfiguration

STEPS = 6
CYCLES = 4_000_000  # two milliseconds


@contextmanager
def delays(seed: int | None) -> Iterator[random.Random]:
    """Delay work on side streams, or do nothing without a seed."""
    draw = random.Random(seed)
    enter = torch.cuda.StreamContext.__enter__

    def late(self: Any) -> None:
        enter(self)
        if self.stream is not None and draw.random() < 0.5:
            torch.cuda._sleep(CYCLES)

    if seed is not None:
        torch.cuda.StreamContext.__enter__ = late  # type: ignore[method-assign]
    yield draw
    torch.cuda.StreamContext.__enter__ = enter  # type: ignore[method-assign]


def train(path: str, precision: str, folder: Path, seed: int | None) -> dict[str, Any]:
    """Return losses, final weights, and the weights of an asynchronous save after half of the steps."""
    loading = DataLoaderConfiguration(non_blocking=True)
    accelerator = start(path, precision, str(folder / "nvme"), accumulation=2, dataloader_config=loading)
    net = make_net()
    samples = torch.randn(BATCH * STEPS * 2, WIDTH, generator=torch.Generator().manual_seed(3))
    loader: Any = DataLoader(TensorDataset(samples), batch_size=BATCH, pin_memory=True)
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    with delays(seed) as draw:
        if seed is not None:
            for layer in net:
                hook = late_hook(draw)
                layer.register_forward_pre_hook(hook)
                layer.register_full_backward_pre_hook(hook)
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = (model(x.to(next(model.parameters()).dtype)).float() - x.sin()).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == STEPS:
                accelerator.save_state(folder / f"state-{seed}", asynchronous=True)
    accelerator.wait_for_save()
    state = accelerator.get_state_dict(model)
    assert state is not None
    written: dict[str, Tensor] = {}
    for file in sorted((folder / f"state-{seed}").rglob("*.safetensors")):
        written |= {f"{file.name}: {name}": tensor for name, tensor in load_file(file).items()}
    result = {"losses": torch.stack(losses).cpu(), "weights": state, "written": written}
    accelerator.end_training()
    return result


def late_hook(draw: random.Random) -> Any:
    def hook(module: nn.Module, *_: Any) -> None:
        if draw.random() < 0.5:
            torch.cuda._sleep(CYCLES)

    return hook


if __name__ == "__main__":
    with group_of_one() as (path, precision, folder):
        torch.save([train(path, precision, Path(folder), seed) for seed in (None, 1, 2)], Path(folder, "results.pt"))
