"""How `Accelerator` applies its loader configuration, on one process and on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from on_paths import in_processes
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zero_plugin.accelerator import Accelerator
from zero_plugin.config.handlers import DataLoaderConfiguration
from zero_plugin.data.dispatch import DataLoaderDispatcher
from zero_plugin.data.loader import DataLoaderShard
from zero_plugin.data.sharing import SeedableRandomSampler
from zero_plugin.data_loader import get_sampler, prepare_data_loader
from zero_plugin.errors import LoopError


class Stream(IterableDataset):
    """A stream of 0 … 9, shuffled by its own generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        return iter(torch.randperm(10, generator=self.generator).tolist())


@pytest.fixture
def accelerators() -> Iterator[type[Accelerator]]:
    """Build accelerators that end with the test."""
    made: list[Accelerator] = []

    def build(**arguments) -> Accelerator:
        made.append(Accelerator(cpu=True, **arguments))
        return made[-1]

    yield build
    for accelerator in made:
        accelerator.end_training()


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_the_configuration_shows_and_acts(accelerators) -> None:
    """Every field of the configuration shows in its property and in a prepared loader's behaviour."""
    config = DataLoaderConfiguration(dispatch_batches=True, use_seedable_sampler=True, data_seed=4, non_blocking=True)
    accelerator = accelerators(dataloader_config=config, even_batches=False)
    assert (accelerator.dispatch_batches, accelerator.split_batches, accelerator.even_batches) == (True, False, False)
    assert (accelerator.use_seedable_sampler, accelerator.non_blocking) == (True, True)
    assert accelerator.use_stateful_dataloader is False
    loader = accelerator.prepare(DataLoader(range(9), batch_size=2, shuffle=True))
    assert type(loader) is DataLoaderDispatcher
    assert type(get_sampler(loader)) is SeedableRandomSampler
    assert get_sampler(loader).initial_seed == 4
    assert accelerator.prepare(loader) is loader
    other = prepare_data_loader(DataLoader(range(4)))
    assert accelerator.prepare(other) is other
    assert accelerator._dataloaders == [loader, other], "its place is kept in checkpoints"
    plain = accelerators().prepare_data_loader(DataLoader(range(9), batch_size=2))
    assert type(plain) is DataLoaderShard


def test_batches_stay_where_they_are(accelerators) -> None:
    """The call's `device_placement` decides, otherwise the Accelerator's."""
    loader = DataLoader(TensorDataset(torch.ones(2)), batch_size=2)
    accelerator = accelerators(device_placement=False)
    assert accelerator.prepare(loader).device is None
    assert accelerator.prepare_data_loader(loader, device_placement=True).device == accelerator.device
    other = accelerators()
    assert other.prepare(loader).device == accelerator.device
    left, moved = other.prepare(loader, DataLoader(range(2)), device_placement=[False, True])
    assert (left.device, moved.device) == (None, accelerator.device)


def test_loaders_show_their_epoch_and_their_sampler(accelerators) -> None:
    """Epoch and sampler can be set on a loader. The next loop follows, and sets the epoch on the new sampler."""
    loader = accelerators().prepare(DataLoader(range(4), batch_size=2))
    assert loader.iteration == 0
    values(loader)
    values(loader)
    assert loader.iteration == 1
    loader.iteration = 7
    assert loader.iteration == 7
    values(loader)
    assert loader.iteration == 7
    loader.set_epoch(3)
    assert loader.iteration == 3
    assert loader.get_sampler() is get_sampler(loader)
    sampler = SeedableRandomSampler([3, 2, 1, 0], generator=torch.Generator(), data_seed=5)
    loader.set_sampler(sampler)
    assert loader.get_sampler() is sampler
    loader.set_epoch(2)
    assert sampler.epoch == 2
    torch_order = list(SeedableRandomSampler([3, 2, 1, 0], generator=torch.Generator(), data_seed=7))
    assert [value for batch in values(loader) for value in batch] == torch_order
    stream = accelerators().prepare(DataLoader(Stream(1)))
    assert stream.get_sampler() is None
    with pytest.raises(LoopError, match="no sampler"):
        stream.set_sampler(sampler)


def test_skipping_is_a_call_too(accelerators) -> None:
    """skip_first_batches is also a method, as in a script that resumes."""
    accelerator = accelerators()
    loader = accelerator.prepare(DataLoader(range(9), batch_size=2))
    assert values(accelerator.skip_first_batches(loader, num_batches=3)) == [[6, 7], [8]]


def test_metrics_of_every_kind(accelerators) -> None:
    """Tensors, lists of objects, tuples, dicts and single objects are gathered, on one process also outside a loop."""
    accelerator = accelerators()
    for batch in accelerator.prepare(DataLoader(range(3), batch_size=3)):
        gather = accelerator.gather_for_metrics
        pair = gather((batch, ["a", "b", "c"]))
        assert (pair[0].tolist(), pair[1]) == ([0, 1, 2], ["a", "b", "c"])
        assert gather({"ids": [7, 8, 9], "rows": [[1], [2], [3]]}) == {"ids": [7, 8, 9], "rows": [[1], [2], [3]]}
        assert gather(("x", "y", "z")) == ["x", "y", "z"]
        assert gather({"loss": 0.5, "name": "epoch"}) == {"loss": [0.5], "name": ["epoch"]}
        ragged = [torch.ones(n) for n in (1, 2, 3)]
        assert [len(row) for row in gather(ragged, use_gather_object=True)] == [1, 2, 3]
        assert [int(row) for row in gather(batch, use_gather_object=True)] == [0, 1, 2]
        assert gather({"boxes": ragged, "n": batch}, use_gather_object=True)["boxes"][2].tolist() == [1, 1, 1]
    assert accelerator.gather_for_metrics(torch.ones(2)).tolist() == [1, 1]


@contextmanager
def ended() -> Iterator[Accelerator]:
    """Create an Accelerator that synchronises random states and ends with the test."""
    accelerator = Accelerator(cpu=True, rng_types=["torch", "generator"])
    try:
        yield accelerator
    finally:
        accelerator.end_training()


@in_processes(2, 3)
def test_seedable_shuffles() -> None:
    """A seed and an epoch give one order, whatever the number of processes."""
    with ended() as accelerator:
        accelerator.dataloader_config.use_seedable_sampler = True
        torch.manual_seed(42)
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
        epochs = [[number for batch in loader for number in accelerator.gather(batch).tolist()] for _ in range(2)]
        alone = SeedableRandomSampler(range(12), data_seed=42)
        assert epochs == [list(alone), list(alone)]
        loader.set_epoch(0)
        assert [number for batch in loader for number in accelerator.gather(batch).tolist()] == epochs[0]
        accelerator.dataloader_config.use_seedable_sampler = False


@in_processes(2, 3)
def test_random_states_are_shared() -> None:
    """If configured, every process gets process 0's random states at each epoch's start."""
    with ended() as accelerator:
        loader = accelerator.prepare(DataLoader(range(4), batch_size=2))
        torch.manual_seed(accelerator.process_index)
        for _ in loader:
            break
        drawn = accelerator.gather(torch.rand(1)).tolist()
        assert len(set(drawn)) == 1


@in_processes(2, 3)
def test_a_stream_s_own_generator() -> None:
    """A stream's own generator is synchronised if it differs between the processes."""
    with ended() as accelerator:
        loader = accelerator.prepare(DataLoader(Stream(accelerator.process_index), batch_size=2))
        for _ in range(2):
            seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
            assert sorted(seen) == list(range(10))


@in_processes(2, 3)
def test_objects_of_all_processes() -> None:
    """Each sample's object comes once, in order. A value per batch comes once per batch of one process's loader."""
    with ended() as accelerator:
        names, columns, batches = [], [], []
        for batch in accelerator.prepare(DataLoader(range(7), batch_size=2)):
            texts = [f"line {n}" for n in batch.tolist()]
            names += accelerator.gather_for_metrics(texts)
            got = accelerator.gather_for_metrics(
                {"text": texts, "n": (batch, [torch.ones(int(n)) for n in batch])}, True
            )
            columns += zip(got["text"], [int(n) for n in got["n"][0]], [len(row) for row in got["n"][1]], strict=True)
            batches += accelerator.gather_for_metrics("one")
        assert names == [f"line {n}" for n in range(7)]
        assert columns == [(f"line {n}", n, n) for n in range(7)]
        assert batches == ["one"] * 4


@in_processes(2, 3)
def test_dispatched_streams() -> None:
    """Process 0's stream is seen once over all processes, split or not."""
    with ended() as accelerator:
        for split in (False, True):
            accelerator.dataloader_config.dispatch_batches = True
            accelerator.dataloader_config.split_batches = split
            loader = accelerator.prepare(DataLoader(Stream(accelerator.process_index), batch_size=6 if split else 2))
            seen = [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]
            expected = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
            assert seen == expected
        accelerator.dataloader_config.dispatch_batches = None
        accelerator.dataloader_config.split_batches = False
