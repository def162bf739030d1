"""Accumulation windows and a loop's loaders: which loader ends a window, and how many backwards a batch has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from on_paths import on_paths
from paths import assert_near, global_batch, loss_of, make_net, net_and_sgd, raised, running, weights
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator
from zero_plugin.errors import LoopError

LONG, SHORT, STEPS = 5, 2, 2


def batches_of(count: int, first: int) -> list[Any]:
    """Build `count` batches of all processes together."""
    return [global_batch(first + step) for step in range(count)]


def loader_of(accelerator: Accelerator, count: int, first: int) -> DataLoader:
    x, y = (torch.cat(column) for column in zip(*batches_of(count, first), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=8 // accelerator.num_processes)


def cycled(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@on_paths("single", "zero2-one-process", "ddp", "zero1", "zero2", daily=("ddp", "zero1", "zero2"))
def test_a_short_loader_that_is_cycled_beside_a_long_one(path: str) -> None:
    """Windows end with the long loader's epochs. With windows of two, two and one, the weights are plain torch's."""
    plain, sgd = net_and_sgd()
    others = cycled(batches_of(SHORT, 20))
    for _ in range(2):
        batches = batches_of(LONG, 0)
        for first in range(0, LONG, STEPS):
            window = batches[first : first + STEPS]
            for batch in window:
                ((loss_of(plain, batch) + loss_of(plain, next(others))) / len(window)).backward()
            sgd.step()
            sgd.zero_grad()
    with running(path, gradient_accumulation_steps=STEPS) as accelerator:
        model = make_net()
        model, optimizer, long, short = accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loader_of(accelerator, LONG, 0),
            loader_of(accelerator, SHORT, 20),
        )
        iterator = iter(short)
        for _ in range(2):
            for batch in long:
                try:
                    other = next(iterator)
                except StopIteration:
                    iterator = iter(short)
                    other = next(iterator)
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch) + loss_of(model, other))
                    optimizer.step()
                    optimizer.zero_grad()
        assert optimizer.applied_steps == 6
        assert_near(weights(accelerator, model), dict(plain.state_dict()))


@on_paths("single", "zero2-one-process", "ddp", "zero1", "zero2", daily=("ddp", "zero1", "zero2"))
def test_two_losses_of_a_batch_by_hand(path: str) -> None:
    """With accumulation the second backward is an error on every process. Under accumulate() both form one batch."""
    with running(path, gradient_accumulation_steps=STEPS) as accelerator:
        model = make_net()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(accelerator, LONG, 0)
        )
        for batch in loader:
            with accelerator.accumulate(model):
                for scale in (1.0, 0.5):
                    accelerator.backward(loss_of(model, batch, scale))
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.applied_steps == 3
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            second = loss_of(model, batch, 0.5)
            raised(
                LoopError,
                "backward() ran twice in one batch",
                "two micro-batches, or two losses of one",
                "accelerator.accumulate(model)",
                by=lambda second=second: accelerator.backward(second),
            )
            break


@on_paths("single", "zero2-one-process", "ddp", "zero1", "zero2", "zero3", daily=("ddp", "zero1", "zero2"))
def test_a_window_that_is_dropped_at_its_end(path: str) -> None:
    """`zero_grad()` instead of the step, after the window's last backward, drops the window in `accumulate()` too."""
    for steps in (1, 2):
        plain, sgd = net_and_sgd(momentum=0.9)
        batches = batches_of(6, 0)
        for number in range(0, 6, steps):
            for batch in batches[number : number + steps]:
                (loss_of(plain, batch) / steps).backward()
            if number != 2:
                sgd.step()
            sgd.zero_grad()
        with running(path, gradient_accumulation_steps=steps) as accelerator:
            model, sgd = net_and_sgd(momentum=0.9)
            model, optimizer, loader = accelerator.prepare(model, sgd, loader_of(accelerator, 6, 0))
            for number, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    if accelerator.sync_gradients and number // steps == 2 // steps:
                        optimizer.zero_grad()
                        continue
                    optimizer.step()
                    optimizer.zero_grad()
            assert_near(weights(accelerator, model), dict(plain.state_dict()))
