"""LocalSGD: processes step separately, and are averaged every few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from on_paths import in_processes
from paths import listening
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.errors import LoopError
from zero_plugin.local_sgd import LocalSGD

RATE, EVERY, STEPS = 0.1, 2, 5


def replay(world: int, *, enabled: bool) -> tuple[list[list[float]], float]:
    """Return each process's weight after each step, by plain numbers, and the weight at the end."""
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


@in_processes(1, 2)
def test_weights_are_averaged_every_few_steps(rank: int, world: int, folder: Path) -> None:
    """Between averages each process has its own weights. After an average and at the end all have the mean."""
    for enabled in (True, False):
        accelerator = Accelerator(cpu=True)
        plain = nn.Linear(1, 1, bias=False)
        nn.init.ones_(plain.weight)
        model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=RATE))
        seen = []
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=EVERY, enabled=enabled) as local:
            for step in range(STEPS):
                loss = (model(torch.ones(1, 1)) - (rank + step)).square().sum() / 2
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local.step()
                seen.append(accelerator.gather(plain.weight.detach().flatten()).tolist())
        expected, last = replay(world, enabled=enabled)
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected))
        torch.testing.assert_close(plain.weight.item(), last, rtol=1e-5, atol=1e-6)
        with listening() as said:
            accelerator.save_state(folder / f"saved-{enabled}")
        own_states = "each process has its own optimizer state"
        assert any(own_states in line for line in said) == (enabled and world > 1 and rank == 0)
        accelerator.free_memory()
    with pytest.raises(LoopError, match="local_sgd_steps is 0"):
        LocalSGD(accelerator, model, 0)
    accelerator.end_training()


def test_under_deepspeed_is_an_error() -> None:
    """ZeRO's processes share one optimizer. The error says so before anything trains."""
    accelerator = Accelerator(cpu=True, config={"zero_optimization": {"stage": 2}})
    model = nn.Linear(1, 1)
    with pytest.raises(LoopError, match="not prepared"):
        LocalSGD(accelerator, model, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(LoopError, match="under DeepSpeed"):
        LocalSGD(accelerator, model, 2)
    accelerator.end_training()
