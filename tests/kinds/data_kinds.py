"""Prepared loaders of every kind: the processes' batches are one process's global ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from loops import SIZE, Plain
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from training import Kind, Samples, Weights, squared, with_sgd


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples one after the other, without a length."""

    def __init__(self, count: int) -> None:
        self.samples = Samples(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


def over_loader(make: Callable[[], dict[str, Any]], loop: Plain) -> Weights:
    """Train two epochs. The samples fill complete global batches."""
    model, optimizer = loop.prepare(*with_sgd())
    loader = loop.loader(**make())
    for _ in range(2):
        for batch in loader:
            loop.backward(squared(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return loop.weights(model)


def _weighted() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(4 * SIZE, generator=generator).tolist()
    return {
        "dataset": Samples(4 * SIZE),
        "sampler": WeightedRandomSampler(weights, 4 * SIZE, generator=generator),
    }


def _shuffled() -> dict[str, Any]:
    return {"dataset": Samples(4 * SIZE), "shuffle": True, "generator": torch.Generator().manual_seed(3)}


def _collated() -> dict[str, Any]:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = zip(*samples, strict=True)
        return 2 * torch.stack(x), torch.stack(y)

    return {"dataset": Samples(4 * SIZE), "collate_fn": collate}


def dropped_rest(loop: Plain) -> Weights:
    return over_loader(lambda: {"dataset": Samples(3 * SIZE + 5), "drop_last": True}, loop)


def by_workers(loop: Plain) -> Weights:
    return over_loader(lambda: {"dataset": Samples(2 * SIZE), "num_workers": 1}, loop)


def evaluated(loop: Plain) -> Weights:
    """Predict on a held-out dataset that the processes do not divide evenly, each sample once and in order."""
    model, optimizer = loop.prepare(*with_sgd())
    train, held_out = loop.loader(Samples(2 * SIZE)), loop.loader(Samples(2 * SIZE + 7))
    found = []
    for _ in range(2):
        model.train()
        for batch in train:
            loop.backward(squared(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(torch.cat([loop.for_metrics(model(x)) for x, _ in held_out]))
    return {str(epoch): predictions for epoch, predictions in enumerate(found)}


def streamed_evaluation(loop: Plain) -> Weights:
    """Do the same with a stream."""
    model, _ = loop.prepare(*with_sgd())
    with torch.no_grad():
        found = [loop.for_metrics(model(x)) for x, _ in loop.loader(Stream(2 * SIZE + 7))]
    return {"predictions": torch.cat(found)}


def window_over_epochs(steps: int, loop: Plain) -> Weights:
    """Accumulate by context with an unknown epoch length: the last window is shorter."""
    loop.accumulate_over(steps)
    model, optimizer = loop.prepare(*with_sgd())
    loader = loop.loader(Stream(5 * SIZE))
    for _ in range(2):
        for index, batch in enumerate(loader):
            with loop.accumulate(model, index, 5):
                loop.backward(squared(model, batch))
                loop.step(optimizer)
    return loop.weights(model)


def by_hand_over_loader(loop: Plain) -> Weights:
    """Train with an unprepared loader: each process takes its part itself."""
    model, optimizer = loop.prepare(*with_sgd())
    for x, y in DataLoader(Samples(3 * SIZE), batch_size=SIZE):
        loop.backward(squared(model, (loop.part(x), loop.part(y))))
        optimizer.step()
        optimizer.zero_grad()
    return loop.weights(model)


_LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "loader": lambda: {"dataset": Samples(4 * SIZE)},
    "shuffled loader": _shuffled,
    "weighted sampler": _weighted,
    "iterable dataset": lambda: {"dataset": Stream(4 * SIZE)},
    "a collate function": _collated,
}
KINDS: dict[str, Kind] = {
    **{name: partial(over_loader, make) for name, make in _LOADERS.items()},
    "drop_last": dropped_rest,
    "a worker process": by_workers,
    "sharded evaluation": evaluated,
    "sharded evaluation of a stream": streamed_evaluation,
    "a stream accumulated by context": partial(window_over_epochs, 3),
    "a loader that is not prepared": by_hand_over_loader,
}
REFUSED: dict[str, dict[str, str]] = {}
FAILS: dict[str, dict[str, str]] = {}
