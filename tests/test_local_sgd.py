"""LocalSGD: processes step apart, and are averaged every few steps."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import torch
from torch import nn

from zero_plugin import Accelerator, PartialState
from zero_plugin.errors import LoopError
from zero_plugin.local_sgd import LocalSGD

RATE, EVERY, STEPS = 0.1, 2, 5


def replay(world: int, *, enabled: bool) -> tuple[list[list[float]], float]:
    """Per step each process's weight after it, by plain numbers, and the weight at the end."""
    weights, seen = [1.0] * world, []
    for step in range(STEPS):
        gradients = [weights[rank] - (rank + step) for rank in range(world)]  # of (w - (rank + step))² / 2
        if not enabled:
            gradients = [sum(gradients) / world] * world
        weights = [weight - RATE * gradient for weight, gradient in zip(weights, gradients, strict=True)]
        if (step + 1) % EVERY == 0:
            weights = [sum(weights) / world] * world
        seen.append(list(weights))
    return seen, sum(weights) / world


def main(store: str, rank: str, world: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    PartialState(cpu=True, init_method=f"file://{store}")
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("zero_plugin").addHandler(listener)
    for enabled in (True, False):
        accelerator = Accelerator(cpu=True)
        plain = nn.Linear(1, 1, bias=False)
        nn.init.ones_(plain.weight)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
        seen = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=EVERY, enabled=enabled) as local:
            for step in range(STEPS):
                loss = (model(torch.ones(1, 1)) - (int(rank) + step)).square().sum() / 2
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                seen.append(accelerator.gather(plain.weight.detach().flatten()).tolist())
        expected, last = replay(int(world), enabled=enabled)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))
        torch.testing.assert_close(plain.weight.item(), last, rtol=1e-5, atol=1e-6)
        said.clear()
        accelerator.save_state(f"{store}-saved")
        own_states = "each process has an optimizer state of its own"
        assert any(own_states in line for line in said) == (enabled and world != "1" and rank == "0")
        accelerator.free_memory()
    with pytest.raises(LoopError, match="local_sgd_steps is 0"):
        LocalSGD(accelerator, model, 0)
    accelerator.end_training()


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_weights_are_averaged_every_few_steps(run_processes, world: int) -> None:
    """Between averages each process has its own weights, after them and at the end all have the mean."""
    run_processes(__file__, world)


def test_under_deepspeed_is_an_error() -> None:
    """ZeRO's processes share one optimizer: the error says so before anything trains."""
    accelerator = Accelerator(cpu=True, config={"zero_optimization": {"stage": 2}})
    model = nn.Linear(1, 1)
    with pytest.raises(LoopError, match="not prepared"):
        LocalSGD(accelerator, model, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LoopError, match="under DeepSpeed"):
        LocalSGD(accelerator, model, 2)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:4])
