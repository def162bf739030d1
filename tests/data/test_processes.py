"""Loaders over real process groups."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes
from paths import listening
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zero_plugin.checkpoint.objects import random_state, restore_random_state
from zero_plugin.data import batch_sampler
from zero_plugin.data.loader import DataLoaderShard, skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed.collectives import gather, gather_object
from zero_plugin.errors import LoopError

pytestmark = pytest.mark.programs


class PythonShuffle(Sampler):
    """A user's sampler that draws from Python's generator, which is seeded differently on each process."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(random.sample(range(self.size), self.size))


def prepared(loader: DataLoader, **options) -> DataLoaderShard:
    rank, world = dist.get_rank(), dist.get_world_size()
    return prepare_loader(loader, rank=rank, world_size=world, device=torch.device("cpu"), **options)


@in_processes(2, 3)
def test_the_order_is_process_0_s() -> None:
    """Every process reads its part of process 0's order, whatever the generators of the others."""
    rank = dist.get_rank()
    samples = 2101  # beyond two broadcasts of 1024 batches
    generator = torch.Generator().manual_seed(50 + rank)
    loaders = [
        DataLoader(range(samples), batch_size=1, shuffle=True),
        DataLoader(range(samples), batch_size=4, shuffle=True, generator=generator),
        DataLoader(range(samples), batch_size=4, sampler=PythonShuffle(samples)),
        DataLoader(range(300), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
        DataLoader(range(samples), batch_sampler=BatchSampler(PythonShuffle(samples), 7, False)),
        DataLoader(range(samples), batch_size=4, sampler=WeightedRandomSampler([1.0] * samples, samples)),
    ]
    for index, loader in enumerate(loaders):
        sharded = prepared(loader)
        torch.manual_seed(100 + rank)  # as after set_seed(…, device_specific=True)
        random.seed(100 + rank)
        generator.manual_seed(50 + rank)
        epochs = [union(sharded) for _ in "ab"]
        assert epochs[0] != epochs[1], "reshuffled each epoch"
        torch.manual_seed(100)
        random.seed(100)
        generator.manual_seed(50)
        alone = [[value for batch in loader for value in batch.tolist()] for _ in "ab"]
        assert epochs == alone, f"loader {index}: what one process with process 0's random state sees"


@in_processes(2, 3)
def test_torchs_own_samplers_are_drawn_by_each() -> None:
    """Torch's own samplers are drawn on each process. Two small collectives at an epoch's start check the order."""
    rank, sent = dist.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        send = batch_sampler.broadcast_object_list
        patch.setattr(batch_sampler, "broadcast_object_list", lambda batches: sent.append(1) or send(batches))
        for sampler in (RandomSampler(range(90)), SubsetRandomSampler(range(80)), WeightedRandomSampler([1.0] * 9, 9)):
            assert len(union(prepared(DataLoader(range(90), batch_size=2, sampler=sampler)))) == len(sampler)
        for shuffle in (False, True):  # items that are complete batches
            items = prepared(DataLoader(range(9), batch_size=None, shuffle=shuffle), even_batches=False)
            samples = gather_object([*items])
            assert len(set(samples)) == len(samples) > 9 - dist.get_world_size()
        assert not sent
        # A loader that differs from process 0's, or has another class, still follows process 0 step by step.
        torch.manual_seed(7 + rank)
        others = [
            SubsetRandomSampler([*range(10 * rank, 10 * rank + 12)]),
            SubsetRandomSampler(range(12)) if rank else SubsetRandomSampler([*range(2, 14)]),
            PythonShuffle(12) if rank else RandomSampler(range(12)),
            WeightedRandomSampler([1.0 + rank, 1.0, 3.0], 12),
        ]
        for number, sampler in enumerate(others):
            before = len(sent)
            state = torch.get_rng_state()
            found = union(prepared(DataLoader(range(90), batch_size=2, sampler=sampler)))
            assert len(sent) > before, number
            if rank == 0:
                torch.set_rng_state(state)
                alone = DataLoader(range(90), batch_size=2, sampler=sampler)
                assert found == [value for batch in alone for value in batch.tolist()], number


@in_processes(2, 3)
def test_an_epoch_that_is_left_draws_no_more_than_torch() -> None:
    """An epoch that is left early advances a script's own generator no further than one torch process does."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for samples, workers in ((8 * world, 0), (8 * world + 3, 0), (9 * world, 2)):
        generator = torch.Generator()
        per_process = DataLoader(range(samples), 2, shuffle=True, generator=generator, num_workers=workers)
        together = DataLoader(range(samples), 2 * world, shuffle=True, generator=generator, num_workers=workers)
        shared = prepared(per_process)
        for left_after in (1, 2) if workers == 0 else (2,):
            generator.manual_seed(60 + rank)
            for _, _ in zip(range(left_after), shared, strict=False):
                pass
            order = [union(shared), union(shared)]
            generator.manual_seed(60)
            for _, _ in zip(range(left_after), together, strict=False):
                pass
            alone = [[value for batch in together for value in batch.tolist()] for _ in "ab"]
            assert order == alone, f"{samples} samples, {workers} workers, left after {left_after}"


def union(loader: DataLoaderShard) -> list[int]:
    """Return the samples of all processes in an epoch, step by step in rank order, without repeats."""
    steps = gather_object([[batch.tolist()[: loader.real_samples] for batch in loader]])
    return [value for step in zip(*steps, strict=True) for part in step for value in part]


class OwnStream(IterableDataset):
    """A stream that differs between processes. Rank 0's is the longest."""

    def __iter__(self):
        return iter(range(20 - 6 * dist.get_rank()))


@in_processes(2, 3)
def test_streams_of_different_length_stop_together() -> None:
    """Streams of different lengths all stop with the shortest, and process 0 warns about the number left out."""
    with listening() as messages:
        loader = prepared(DataLoader(OwnStream(), batch_size=2))
        flags = [loader.end_of_dataloader for _ in loader]
    left_out = [message for message in messages if "left out" in message]
    assert [("at least" in message) for message in left_out] == ([True] if dist.get_rank() == 0 else [])
    assert flags == [False] * (len(flags) - 1) + [True]
    assert len(set(gather_object([len(flags)]))) == 1
    assert gather(torch.tensor(len(flags))).shape == (dist.get_world_size(),)


class Recorded:
    """A dataset of 0 … size-1 that logs each read to a file shared by all processes and workers."""

    def __init__(self, size: int, path: Path) -> None:
        self.size, self.path = size, path
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return index + 1000 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def reads(self) -> list[int]:
        dist.barrier()
        read = sorted(map(int, self.path.read_text().split())) if self.path.exists() else []
        dist.barrier()
        self.path.unlink(missing_ok=True)
        dist.barrier()
        return read


@in_processes(2, 3)
def test_each_sample_is_read_once(folder: Path) -> None:
    """Each sample is read once, with two workers per process, in a loop that resumes or is restarted."""
    data = Recorded(48, folder / "reads")
    world = dist.get_world_size()
    for workers, persistent in ((0, False), (2, False), (2, True)):
        data.epoch = 0
        loader = DataLoader(
            data, 2, num_workers=workers, persistent_workers=persistent, prefetch_factor=workers or None
        )
        shared = prepared(loader)
        assert union(shared) == list(range(48))
        assert data.reads() == list(range(48))
        assert union(skip_first_batches(shared, 3)) == [1000 + n for n in range(6 * world, 48)], "the next epoch"
        assert data.reads() == list(range(6 * world, 48)), "what is skipped is not read"
        for _ in shared:
            break
        shared.set_epoch(7)
        assert union(shared) == [7000 + n for n in range(48)], "workers that last are told the epoch too"
        data.reads()


@in_processes(2, 3)
def test_loops_inside_loops() -> None:
    """An evaluation inside training, left early or not, changes neither order nor counts of the training."""
    torch.manual_seed(4)
    training = prepared(DataLoader(range(21), batch_size=2, shuffle=True))
    evaluation = prepared(DataLoader(range(9), batch_size=2))
    whole, flags = [], []
    for step, batch in enumerate(training):
        whole.append(batch.tolist()[: training.real_samples])
        for _ in evaluation:
            if step == 1:
                break
        flags.append((training.end_of_dataloader, training.batches_left == 0))
        assert union(evaluation) == list(range(9))
    assert flags == [(False, False)] * (len(flags) - 1) + [(True, True)]
    assert sorted(n for part in gather_object(whole) for n in part) == list(range(21))


class Augmented(Dataset):
    """A dataset that adds to each sample a number drawn by a worker."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()])


@in_processes(2, 3)
def test_an_epoch_that_is_begun_again_leaves_the_later_ones_alone() -> None:
    """If a state is loaded and no batch skipped, later epochs keep their seeds on each process."""
    for how in ({}, {"shuffle": True}, {"sampler": PythonShuffle(8)}, {"sampler": SubsetRandomSampler(range(8))}):
        torch.manual_seed(6 + dist.get_rank())
        loader = prepared(DataLoader(Augmented(), batch_size=1, num_workers=1, **how))
        next(iter(loader))
        states, drawn = [loader.state_dict()], random_state()
        dist.broadcast_object_list(states)  # like a checkpoint's state
        expected = [[batch.tolist() for batch in loader] for _ in range(2)]
        again = prepared(DataLoader(Augmented(), batch_size=1, num_workers=1, **how))
        again.load_state_dict(states[0], skip=False)
        restore_random_state([drawn], 0)
        found = [[batch.tolist() for batch in again] for _ in range(3)]
        assert found[1:] == expected, how


class Endless(Sampler):
    """A sampler without length and end."""

    def __iter__(self):
        return (number % 10 for number in count())


@in_processes(2, 3)
def test_a_sampler_without_length() -> None:
    """An endless sampler is divided in turn."""
    shared = prepared(DataLoader(range(10), batch_size=2, sampler=Endless()))
    for step, batch in enumerate(shared):
        assert shared.batches_left is None
        first = 2 * (step * dist.get_world_size() + dist.get_rank())
        assert batch.tolist() == [first % 10, (first + 1) % 10]
        if step == 12:
            break


@in_processes(2, 3)
def test_a_distributed_sampler_is_left_to_it() -> None:
    """A DistributedSampler is left alone: its own draws, another order each epoch, and known repeats."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sampler = DistributedSampler(range(20), world, rank, seed=3)
    shared = prepared(DataLoader(range(20), batch_size=3, sampler=sampler))
    epochs = []
    for epoch in range(2):
        expected = DistributedSampler(range(20), world, rank, seed=3)
        expected.set_epoch(epoch)
        batches = [batch.tolist() for batch in shared]
        assert [n for batch in batches for n in batch] == list(expected)
        epochs.append(batches)
    assert epochs[0] != epochs[1]
    assert len(shared) == len(epochs[0])
    assert sorted(union(shared)) == list(range(20))
    with pytest.raises(LoopError, match="part 0 of 7"):
        prepared(DataLoader(range(20), sampler=DistributedSampler(range(20), 7, 0)))


@in_processes(2, 3)
def test_data_cut_up_by_hand_is_refused() -> None:
    """Datasets of different lengths are an error that says to give each process the complete one."""
    with pytest.raises(LoopError, match="give each process the complete dataset"):
        prepared(DataLoader(range(7 + dist.get_rank()), batch_size=2))


class Learning(Sampler):
    """A curriculum: the next sample is the hardest one by the loop's reports, and then counts as easier.

    Args:
        size: size of the dataset.
        samples: number of samples in an epoch.
    """

    def __init__(self, size: int, samples: int) -> None:
        self.samples = samples
        self.hardness = [float(number) for number in range(size)]

    def tell(self, step: int, indices: list[int]) -> None:
        for index in indices:
            self.hardness[index] += (7 * index + 3 * step) % 11

    def __iter__(self):
        for _ in range(self.samples):
            hardest = max(range(len(self.hardness)), key=self.hardness.__getitem__)
            self.hardness[hardest] -= 5
            yield hardest


class SizedLearning(Learning):
    def __len__(self) -> int:
        return self.samples


class LearningBatches(BatchSampler):
    """The same curriculum as a batch sampler."""

    def tell(self, step: int, indices: list[int]) -> None:
        self.sampler.tell(step, indices)


@in_processes(2, 3)
def test_a_sampler_that_learns_is_asked_step_by_step() -> None:
    """A learning sampler is asked step by step, after the loop's report of the last step, as in one torch process."""
    world, size, samples = dist.get_world_size(), 12, 70
    ways = [
        (Learning, BatchSampler, {}),
        (SizedLearning, BatchSampler, {}),
        (SizedLearning, BatchSampler, {"even_batches": False}),
        (SizedLearning, LearningBatches, {}),
        (SizedLearning, LearningBatches, {"split_batches": True}),
        (SizedLearning, LearningBatches, {"dispatch_batches": True}),
    ]
    for kind, batches, options in ways:

        def build(batch: int, kind=kind, batches=batches) -> tuple[Learning, DataLoader]:
            sampler = kind(size, samples // (2 * world) * 2 * world)
            return sampler, DataLoader(range(size), batch_sampler=batches(sampler, batch, False))

        sampler, plain = build(2 * world)
        expected = []
        for step, batch in enumerate(plain):
            expected.append(batch.tolist())
            sampler.tell(step, expected[-1])
        sampler, loader = build(2 * world if options.get("split_batches") else 2)
        found = []
        for step, batch in enumerate(prepared(loader, **options)):
            found.append(gather(batch).tolist())
            sampler.tell(step, found[-1])
        assert found == expected, (kind, batches, options)
