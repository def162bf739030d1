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
    """A user's sampler that draws from Python's generator, which nobody seeds alike on the processes."""

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
    """Process 0 sends no batches of theirs; two small collectives at an epoch's start agree on the order."""
    rank, sent = dist.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        send = batch_sampler.broadcast_object_list
        patch.setattr(batch_sampler, "broadcast_object_list", lambda batches: sent.append(1) or send(batches))
        for sampler in (RandomSampler(range(90)), SubsetRandomSampler(range(80)), WeightedRandomSampler([1.0] * 9, 9)):
            assert len(union(prepared(DataLoader(range(90), batch_size=2, sampler=sampler)))) == len(sampler)
        for shuffle in (False, True):  # items that are batches by themselves
            items = prepared(DataLoader(range(9), batch_size=None, shuffle=shuffle), even_batches=False)
            samples = gather_object([*items])
            assert len(set(samples)) == len(samples) > 9 - dist.get_world_size()
        assert not sent
        # What differs from process 0's, or is of another class there, is process 0's all the same, step by step.
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
    """A look at the first batches leaves a generator of the script's own where it leaves it in one process."""
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
    """What the processes see together in an epoch, step by step in the order of ranks, repeats left out."""
    steps = gather_object([[batch.tolist()[: loader.real_samples] for batch in loader]])
    return [value for step in zip(*steps, strict=True) for part in step for value in part]


class OwnStream(IterableDataset):
    """A stream that differs between the processes: rank 0 reads longest."""

    def __iter__(self):
        return iter(range(20 - 6 * dist.get_rank()))


@in_processes(2, 3)
def test_streams_of_different_length_stop_together() -> None:
    """All end with the shortest one, and process 0 warns of how many samples were left out."""
    with listening() as messages:
        loader = prepared(DataLoader(OwnStream(), batch_size=2))
        flags = [loader.end_of_dataloader for _ in loader]
    left_out = [message for message in messages if "left out" in message]
    assert [("at least" in message) for message in left_out] == ([True] if dist.get_rank() == 0 else [])
    assert flags == [False] * (len(flags) - 1) + [True]
    assert len(set(gather_object([len(flags)]))) == 1
    assert gather(torch.tensor(len(flags))).shape == (dist.get_world_size(),)


class Recorded:
    """0 … size-1; each read leaves a line in a file that all processes and workers share."""

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
    """Also with two workers on each process, in a loop that resumes, or that is left and started again."""
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
    """An evaluation inside training, left early or not, disturbs neither the order nor the counts of the training."""
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
    """Each sample with a number that a worker draws."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()])


@in_processes(2, 3)
def test_an_epoch_that_is_begun_again_leaves_the_later_ones_alone() -> None:
    """On each process: where a state is loaded and nothing skipped, the epochs after it have the seeds they had."""
    for how in ({}, {"shuffle": True}, {"sampler": PythonShuffle(8)}, {"sampler": SubsetRandomSampler(range(8))}):
        torch.manual_seed(6 + dist.get_rank())
        loader = prepared(DataLoader(Augmented(), batch_size=1, num_workers=1, **how))
        next(iter(loader))
        states, drawn = [loader.state_dict()], random_state()
        dist.broadcast_object_list(states)  # as a checkpoint has it
        expected = [[batch.tolist() for batch in loader] for _ in range(2)]
        again = prepared(DataLoader(Augmented(), batch_size=1, num_workers=1, **how))
        again.load_state_dict(states[0], skip=False)
        restore_random_state([drawn], 0)
        found = [[batch.tolist() for batch in again] for _ in range(3)]
        assert found[1:] == expected, how


class Endless(Sampler):
    """A sampler without a length and without an end."""

    def __iter__(self):
        return (number % 10 for number in count())


@in_processes(2, 3)
def test_a_sampler_without_length() -> None:
    """A sampler that never ends is divided in turn."""
    shared = prepared(DataLoader(range(10), batch_size=2, sampler=Endless()))
    for step, batch in enumerate(shared):
        assert shared.batches_left is None
        first = 2 * (step * dist.get_world_size() + dist.get_rank())
        assert batch.tolist() == [first % 10, (first + 1) % 10]
        if step == 12:
            break


@in_processes(2, 3)
def test_a_distributed_sampler_is_left_to_it() -> None:
    """Each process gets what its DistributedSampler draws, another order in each epoch, and its repeats are known."""
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
    """Datasets of different length are an error that says to give each process the complete one."""
    with pytest.raises(LoopError, match="give each process the complete dataset"):
        prepared(DataLoader(range(7 + dist.get_rank()), batch_size=2))


class Learning(Sampler):
    """A curriculum: each next sample is the hardest one, as far as the loop has told, and counts as easier then.

    Args:
        size: of the data set.
        samples: of an epoch.
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
    """The same as a batch sampler."""

    def tell(self, step: int, indices: list[int]) -> None:
        self.sampler.tell(step, indices)


@in_processes(2, 3)
def test_a_sampler_that_learns_is_asked_step_by_step() -> None:
    """What it gives next depends on what the loop told it of the last step: as in plain torch in one process."""
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
