"""Iterable datasets over processes and workers: each sample once, whoever divides them."""

from __future__ import annotations

import random
from itertools import count, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from zero_plugin.data.loader import DataLoaderShard, skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed.collectives import gather_object, num_processes, process_index
from zero_plugin.distributed.seeding import SameDraws
from zero_plugin.errors import LoopError

WORKERS = 3


class Lines(IterableDataset):
    """A stream of the numbers in a file, one a line, that ignores processes and workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self):
        with self.path.open() as lines:
            yield from map(int, lines)


class Shuffled(Lines):
    """The same stream in an order drawn at each iteration, from a generator that no code seeds."""

    def __init__(self, path: Path, shuffle) -> None:
        super().__init__(path)
        self.shuffle = shuffle

    def __iter__(self):
        numbers = list(super().__iter__())
        self.shuffle(numbers)
        yield from numbers


class DividedAmongWorkers(Lines):
    """A stream divided among workers as in the first example of torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        every, start = (1, 0) if info is None else (info.num_workers, info.id)
        yield from list(super().__iter__())[start::every]


class Range(IterableDataset):
    """A stream divided among workers from outside, as in the second example of torch's documentation."""

    def __init__(self, end: int) -> None:
        self.start, self.end = 0, end

    def __iter__(self):
        return iter(range(self.start, self.end))


def divide_range(worker: int) -> None:
    info = get_worker_info()
    each = -(-info.dataset.end // info.num_workers)
    info.dataset.start, info.dataset.end = worker * each, min(info.dataset.end, (worker + 1) * each)


class DividedAmongAll(Lines):
    """A stream that divides itself among processes and workers."""

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (1, 0) if info is None else (info.num_workers, info.id)
        yield from list(super().__iter__())[process_index() * workers + worker :: num_processes() * workers]


class Files(IterableDataset):
    """A stream of several files with a `shard` method. Each sample begins with the epoch's number."""

    read: ClassVar[set[Path]] = set()  # by this process

    def __init__(self, paths: list[Path], epoch: int = 0) -> None:
        self.paths, self.epoch = paths, epoch

    @property
    def num_shards(self) -> int:
        return len(self.paths)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(self.paths[index::num_shards], self.epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for path in self.paths:
            Files.read.add(path)
            yield from (self.epoch * 1000 + int(line) for line in path.read_text().split())


class Forever(IterableDataset):
    def __iter__(self):
        return count()


class Draws(IterableDataset):
    """A collate function that records the random draws of each worker."""

    def __iter__(self):
        return iter(range(WORKERS * 2 * num_processes()))


def draw(_: object) -> torch.Tensor:
    return torch.tensor([torch.rand(()), random.random(), np.random.random()], dtype=torch.float64)


def shuffle_with_numpy(numbers: list[int]) -> None:
    np.random.shuffle(numbers)


def shuffle_with_torch(numbers: list[int]) -> None:
    numbers[:] = [numbers[i] for i in torch.randperm(len(numbers)).tolist()]


def prepared(loader: DataLoader, **options) -> DataLoaderShard:
    return prepare_loader(loader, rank=process_index(), world_size=num_processes(), device=None, **options)


def union(loader: DataLoaderShard, *, limit: int | None = None) -> list[int]:
    """Return the samples of all processes in an epoch, step by step in rank order, without repeats."""
    parts = []
    for batch in loader:
        parts.append(batch.tolist()[: loader.real_samples])
        if len(parts) == limit:
            break
    return [value for step in zip(*gather_object([parts]), strict=True) for part in step for value in part]


@in_processes(2)
def test_a_file_is_read_once(folder: Path) -> None:
    """Each line of a file is read once, with persistent workers and split batches."""
    path, numbers = write_numbers(folder / "lines", 50)
    for persistent, split in ((False, False), (True, True)):
        loader = DataLoader(
            Lines(path),
            batch_size=4 * (num_processes() if split else 1),
            num_workers=WORKERS,
            persistent_workers=persistent,
        )
        shared = prepared(loader, split_batches=split)
        assert union(shared) == numbers, "the order of one process, and nothing twice"
        assert union(shared) == numbers
        assert union(skip_first_batches(shared, 2)) == numbers[8 * num_processes() :], "read past with workers"


@in_processes(2)
def test_who_divides_among_workers_is_left_to_it(folder: Path) -> None:
    """A stream that divides itself among workers is divided among processes only."""
    path, numbers = write_numbers(folder / "lines", 50)
    assert sorted(union(prepared(DataLoader(DividedAmongWorkers(path), batch_size=4, num_workers=WORKERS)))) == numbers
    by_start = DataLoader(Range(50), batch_size=4, num_workers=WORKERS, worker_init_fn=divide_range)
    assert sorted(union(prepared(by_start))) == numbers
    pipe = IterableWrapper(range(50)).shuffle().sharding_filter()
    for workers in (0, 2):
        assert sorted(union(prepared(DataLoader(pipe, batch_size=4, num_workers=workers)))) == numbers


@in_processes(2)
def test_who_divides_among_all_is_left_to_it(folder: Path) -> None:
    """A stream that divides itself among workers and processes is read as it is."""
    path, numbers = write_numbers(folder / "lines", 50)
    for workers in (0, WORKERS):
        loader = DataLoader(DividedAmongAll(path), batch_size=4, num_workers=workers)
        assert sorted(union(prepared(loader, shard_iterable="never"))) == numbers
        if num_processes() > 1:
            with pytest.raises(LoopError, match="shard_iterable='never'"):
                list(prepared(loader))


@in_processes(2)
def test_a_shard_is_asked_for(folder: Path) -> None:
    """Files of 5, 10, 15, 20 lines: the process with fewer lines repeats. Epochs reach persistent workers."""
    paths, numbers = [], []
    for files in range(4):
        path, found = write_numbers(folder / f"part{files}", 5 * (files + 1), start=len(numbers))
        paths.append(path)
        numbers += found
    for workers in (0, 2):
        loader = DataLoader(Files(paths), batch_size=4, num_workers=workers, persistent_workers=workers > 0)
        shared = prepared(loader)
        Files.read.clear()
        assert sorted(union(shared)) == numbers
        own = set(paths[process_index() :: num_processes()])
        assert Files.read == (set() if workers else own), "each reads its own files"
        assert sorted(union(shared)) == [1000 + number for number in numbers], "the next epoch, by itself"
        shared.set_epoch(5)
        assert sorted(union(shared)) == [5000 + number for number in numbers]
        loader.dataset.set_epoch(7)
        assert sorted(union(shared)) == [7000 + number for number in numbers], "told by the user himself"
        stopped = union(prepared(loader, even_batches=False))
        assert len(stopped) <= len(numbers)
        assert len(set(stopped)) == len(stopped)
    three = prepared(DataLoader(Files(paths[:3]), batch_size=4))  # cannot be divided evenly: skipped through
    assert sorted(number % 1000 for number in union(three)) == numbers[:30]


@in_processes(2)
def test_a_shuffled_stream_loses_nothing(folder: Path) -> None:
    """Each epoch of a shuffled stream has every sample, in a new and reproducible order."""
    path, numbers = write_numbers(folder / "lines", 50)
    for workers, persistent, shuffle in (
        (0, False, random.shuffle),
        (2, False, shuffle_with_numpy),
        (2, True, shuffle_with_torch),
    ):
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(process_index() + 1)  # as after set_seed(…, device_specific=True)
        loader = DataLoader(
            Shuffled(path, shuffle), batch_size=4, num_workers=workers, persistent_workers=persistent, collate_fn=tear
        )
        shared = prepared(loader)
        epochs = [union(shared) for _ in "abc"]
        if num_processes() * max(1, workers) > 1:
            assert [sorted(epoch) for epoch in epochs] == [numbers] * 3, (workers, persistent)
            assert len(set(map(tuple, epochs))) == 3, "another order in each epoch"
            shared.set_epoch(1)
            assert union(shared) == epochs[1], "an epoch can be had again"


def tear(numbers: list[int]) -> torch.Tensor:
    """Draw random numbers like a masking collate function, which must not change the order."""
    draw(None)
    return torch.tensor(numbers)


@in_processes(2)
def test_workers_draw_differently(folder: Path) -> None:
    """No two workers of any process draw the same numbers. Process 0's equal plain torch's."""
    torch.manual_seed(3)
    for dataset in (Draws(), range(WORKERS * 2 * num_processes())):
        plain = [batch.tolist() for batch in DataLoader(dataset, batch_size=1, num_workers=WORKERS, collate_fn=draw)]
        torch.manual_seed(3)
        loader = DataLoader(dataset, batch_size=1, num_workers=WORKERS, collate_fn=draw)
        drawn = [batch.tolist() for batch in prepared(loader, shard_iterable="auto")]
        everywhere = [row for part in gather_object([drawn]) for row in part]
        for generator in zip(*everywhere, strict=True):
            assert len(set(generator)) == len(everywhere) == 6 * num_processes(), "no two alike"
        if process_index() == 0:
            assert drawn[:WORKERS] == plain[:WORKERS], "process 0's are plain torch's"
        torch.manual_seed(3)


@in_processes(2)
def test_an_endless_stream(folder: Path) -> None:
    """A stream without an end gives each sample once, in order."""
    for workers in (0, 3):
        loader = prepared(DataLoader(Forever(), batch_size=2, num_workers=workers))
        for _ in range(2):
            assert union(loader, limit=5) == list(range(10 * num_processes()))


def write_numbers(path: Path, size: int, start: int = 0) -> tuple[Path, list[int]]:
    numbers = list(range(start, start + size))
    if process_index() == 0:
        path.write_text("\n".join(map(str, numbers)))
    if num_processes() > 1:
        dist.barrier()
    return path, numbers


@pytest.mark.parametrize(
    "test",
    [
        test_a_file_is_read_once,
        test_who_divides_among_workers_is_left_to_it,
        test_who_divides_among_all_is_left_to_it,
        test_a_shard_is_asked_for,
        test_a_shuffled_stream_loses_nothing,
        test_workers_draw_differently,
        test_an_endless_stream,
    ],
)
def test_a_stream_on_one_process(test, tmp_path: Path) -> None:
    """Workers alone divide a stream too."""
    test.body(tmp_path)


@pytest.mark.parametrize(
    ("module", "attributes", "told"),
    [("webdataset.compat", {}, False), ("datasets", {"_distributed": (0, 2)}, False), ("mine", {}, True)],
)
def test_who_is_known_to_divide_is_not_skipped_through(
    module: str, attributes: dict, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library known to read rank and worker is trusted. For others, a message says how to declare it."""
    stream = type("Source", (Range,), {"__module__": module, **attributes})(8)
    loader = prepare_loader(DataLoader(stream, batch_size=4), rank=1, world_size=2, device=None)
    own = [portion.batch.tolist() for portion in loader._read(0)]
    assert own == ([[4, 5, 6, 7]] if told else [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert capsys.readouterr().err == ""
    prepare_loader(DataLoader(stream, batch_size=4), rank=0, world_size=2, device=None)
    assert capsys.readouterr().err.count("shard_iterable='never'") == told


class BeginsAgain(IterableDataset):
    """A stream of 0 … size-1 that starts again if it is asked after its end."""

    def __init__(self, size: int) -> None:
        self.size, self.next = size, 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.next == self.size:
            self.next = 0
            raise StopIteration
        self.next += 1
        return self.next - 1


@pytest.mark.parametrize("size", [7, 8, 10])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_that_has_ended_is_not_asked_again(size: int, rank: int) -> None:
    """A stream that would start again gives each sample once, as in plain torch, also on several processes."""
    found = []
    for stream in (BeginsAgain(size), Range(size)):
        loader = prepare_loader(DataLoader(stream, batch_size=2), rank=rank, world_size=2, device=None)
        found.append([portion.batch.tolist() for portion in islice(loader._read(0), 20)])
    assert found[0] == found[1]


def test_same_draws_disturb_nobody() -> None:
    """Inside, numbers depend on the seed only. Outside, they are as though nothing was drawn."""
    everyone = (random.random, np.random.random, lambda: torch.rand(()).item())

    def run(inside) -> tuple[list[float], list[float]]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        within, outside = [], []
        for _ in range(3):
            outside += [draw_one() for draw_one in everyone]
            with inside:
                within += [draw_one() for draw_one in everyone]
        return within, outside

    random.seed(9)
    first, around = run(SameDraws(5))
    second, _ = run(SameDraws(5))
    other, _ = run(SameDraws(6))
    assert first == second != other
    assert len(set(first)) == 9
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert around == [draw_one() for _ in range(3) for draw_one in everyone]
