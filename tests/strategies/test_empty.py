"""Layers and buffers without elements, such as an optional head that is off, are trained, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, on_paths
from paths import assert_near, running, take_plain_steps, take_steps, weights
from safetensors.torch import load_file
from torch import Tensor, nn

from zero_plugin import Accelerator

EMPTY = {"off.weight": (0, 8), "history": (0, 3)}


class Optional(nn.Module):
    """A head without outputs and a buffer without rows: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Linear(8, 4)
        self.off = nn.Linear(8, 0, bias=False)
        self.head = nn.Linear(4, 4)
        self.register_buffer("history", torch.zeros(0, 3))
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([torch.tanh(self.body(x)), self.off(x)], 1)) * self.scale


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def _plain(steps: int) -> dict[str, Tensor]:
    net = Optional()
    optimizer = _adamw(net)
    take_plain_steps(net, optimizer, range(steps))
    return net.state_dict()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> None:
    take_steps(accelerator, model, optimizer, steps)


def _read(folder: Path) -> dict[str, Tensor]:
    dist.barrier()
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@on_paths(*ALL, daily=("single", "zero1", "zero3"))
def test_train_and_are_saved(path: str, folder: Path) -> None:
    """They train as in plain torch.

    `save_model` writes and reads them with their shapes, in every dtype and in shards.
    """
    with running(path) as accelerator:
        net = Optional()
        model, optimizer = accelerator.prepare(net, _adamw(net))
        _train(accelerator, model, optimizer, range(2))
        wanted = weights(accelerator, model)
        assert_near(wanted, _plain(2))
        assert {name: wanted[name].shape for name in EMPTY} == EMPTY
        cases: dict[str, dict[str, Any]] = {"": {}, "bf16": {"dtype": "bf16"}, "shards": {"max_shard_size": 64}}
        for name, arguments in cases.items():
            accelerator.save_model(model, folder / name, **arguments)
            found = _read(folder / name)
            assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}
            assert accelerator.load_weights(model, folder / name).is_complete
            assert_near(weights(accelerator, model), wanted, 1e-2)
        accelerator.save_model(model, folder / "trained", trainable_only=True)
        assert _read(folder / "trained").keys() == wanted.keys() - {"history", "scale"}


@on_paths(*ALL, daily=("single", "zero3", "zero1-cpu"))
def test_resume_elsewhere(path: str, folder: Path) -> None:
    """Runs under DDP and at stage 3 resume from a checkpoint, saved at the end of a step or in the background."""
    with running(path) as accelerator:
        net = Optional()
        model, optimizer = accelerator.prepare(net, _adamw(net))
        _train(accelerator, model, optimizer, range(2))
        accelerator.save_state(folder / "state", asynchronous=True)
        accelerator.wait_for_save()
    for other in dict.fromkeys((path, "ddp", "zero3") if dist.get_world_size() > 1 else (path, "single")):
        with running(other) as accelerator:
            net = Optional()
            model, optimizer = accelerator.prepare(net, _adamw(net))
            accelerator.load_state(folder / "state")
            _train(accelerator, model, optimizer, range(2, 4))
            assert_near(weights(accelerator, model), _plain(4))
