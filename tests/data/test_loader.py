"""A prepared loader in one process, and each rank's part in simulation."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from zero_plugin.accelerator import Accelerator
from zero_plugin.config.handlers import DataLoaderConfiguration
from zero_plugin.data.active import RUNNING, LoaderProgress
from zero_plugin.data.batches import gather_for_metrics, move_batch
from zero_plugin.data.loader import DataLoaderShard, skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.loop.window import Window


class Numbers(Dataset):
    """A dataset of 0 … size-1. Records its reads and its epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(IterableDataset):
    """A stream of 0 … size-1 without a length."""

    def __init__(self, size: int | None) -> None:
        self.size = size

    def __iter__(self):
        number = 0
        while self.size is None or number < self.size:
            yield number
            number += 1


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.size


class KeptStream(IterableDataset):
    """A stream of ready batches."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def alone(loader: DataLoader, **options) -> DataLoaderShard:
    return prepare_loader(loader, **{"rank": 0, "world_size": 1, "device": torch.device("cpu"), **options})


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_sees_the_plain_loader(workers: int) -> None:
    """With the same seed, two shuffled epochs equal plain torch's, to the last draw of the global RNG."""

    def two_epochs(wrap) -> tuple[list[list[list[int]]], float]:
        torch.manual_seed(5)
        loader = wrap(DataLoader(Numbers(23), batch_size=4, shuffle=True, num_workers=workers))
        return [values(loader), values(loader)], torch.rand(()).item()

    (first, second), drawn = two_epochs(alone)
    assert ([first, second], drawn) == two_epochs(lambda loader: loader)
    assert first != second


@pytest.mark.parametrize(
    "build",
    [
        lambda: DataLoader(Numbers(10), batch_size=4),
        lambda: DataLoader(Numbers(10), batch_size=5),
        lambda: DataLoader(Stream(10), batch_size=4),
        lambda: DataLoader(Stream(8), batch_size=4),
    ],
)
def test_the_last_batch_is_known_when_it_is_yielded(build) -> None:
    """`end_of_dataloader` is true exactly at the last batch of every epoch, for streams too."""
    loader = alone(build())
    for _ in range(2):
        flags = [loader.end_of_dataloader for _ in loader]
        assert flags == [False] * (len(flags) - 1) + [True]


def test_batches_left_counts_down() -> None:
    """The count of batches left starts at the length. A stream without a length gives it at its last batch only."""
    loader = alone(DataLoader(Numbers(10), batch_size=4))
    assert loader.batches_left == 3
    assert [(loader.position, loader.batches_left) for _ in loader] == [(0, 2), (1, 1), (2, 0)]
    stream = alone(DataLoader(Stream(10), batch_size=4))
    assert [stream.batches_left for _ in stream] == [None, None, 0]


class Refilling(Dataset):
    """A stream of 0 … size-1 that refills one buffer for each: a tensor, an array, or a dict."""

    def __init__(self, size: int, kind: str = "tensor") -> None:
        self.size = size
        self.kind = kind
        self.buffer = torch.zeros(2)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        if self.kind == "array":
            self.buffer.numpy()[:] = index  # which torch's version counter does not see
            return {"x": self.buffer.numpy()}
        self.buffer.fill_(index)
        return self.buffer if self.kind == "tensor" else {"x": [self.buffer]}


class RefillingStream(IterableDataset):
    def __init__(self, size: int, kind: str = "tensor") -> None:
        self.data = Refilling(size, kind)

    def __iter__(self):
        return (self.data[index] for index in range(self.data.size))


class SlidingStream(IterableDataset):
    """A stream of windows of one tensor, each overlapping the next by half. No window is written."""

    def __iter__(self):
        numbers = torch.arange(12.0)
        return (numbers[start : start + 4] for start in range(0, 10, 2))


def keep_as_it_is(sample):
    return sample


def test_map_style_data_are_not_read_ahead() -> None:
    """Map-style data that refill one buffer give what plain torch gives: each batch is read when it is due."""
    loader = alone(DataLoader(Refilling(6), batch_size=None, shuffle=False))
    assert [(batch[0].item(), loader.end_of_dataloader) for batch in loader] == [(n, n == 5) for n in range(6)]
    data = Numbers(6)
    read = []
    for loader in (alone(DataLoader(data, batch_size=2)), alone(DataLoader(data, batch_size=2, sampler=[4, 1, 0, 5]))):
        read.append([len(data.read) for _ in loader])
        data.read.clear()
    assert read == [[2, 4, 6], [2, 4]]


@pytest.mark.parametrize("device", [torch.device("cpu"), None])
@pytest.mark.parametrize("kind", ["tensor", "array", "nested"])
def test_a_batch_that_reading_ahead_would_overwrite_is_an_error(kind: str, device: torch.device | None) -> None:
    """A stream that refills one buffer, or map-style data whose end is queried, raise an error that says to clone."""
    stream = alone(DataLoader(RefillingStream(6, kind), batch_size=None, collate_fn=keep_as_it_is), device=device)
    with pytest.raises(LoopError, match=r"refills one (tensor|array)(.|\n)*clone\(\)"):
        list(stream)
    sampler = [3, 1, 2]
    asked = alone(DataLoader(Refilling(6, kind), None, sampler=sampler, collate_fn=keep_as_it_is), device=device)
    assert len(list(asked)) == 3
    with pytest.raises(LoopError, match="refills one"):
        [asked.end_of_dataloader for _ in asked]


def test_what_reading_for_the_others_would_overwrite_is_an_error() -> None:
    """A stream that refills one buffer is an error if it is skipped through, or read by process 0 for all."""
    for options in ({}, {"dispatch_batches": True}):
        shared = alone(DataLoader(RefillingStream(6), batch_size=None), world_size=2, **options)
        with pytest.raises(LoopError, match="refills one tensor"):
            list(shared._read_steps(0) if options else shared._read(0))


def test_what_shares_memory_and_is_not_written_is_no_mistake() -> None:
    """Overlapping views, a constant in every batch, and one reused dict give what plain torch gives."""
    assert values(alone(DataLoader(SlidingStream(), batch_size=None))) == values(
        DataLoader(SlidingStream(), batch_size=None)
    )
    again, constant = {}, torch.full((1,), float("nan"))

    def collate(samples):
        again["x"], again["mask"] = torch.tensor(samples), constant
        return again

    for device in (None, torch.device("cpu")):
        loader = alone(DataLoader(Stream(5), batch_size=2, collate_fn=collate), device=device)
        assert [batch["x"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_a_batch_is_moved_before_the_next_is_read() -> None:
    """A batch is moved before the next is read, so its buffer can be reused."""
    done: list[str] = []

    class Recording(torch.Tensor):
        def to(self, *args, **kwargs):
            done.append("moved")
            return super().to(*args, **kwargs)

    def collate(samples):
        done.append("read")
        return torch.zeros(len(samples)).as_subclass(Recording)

    for data, order in ((Stream(4), ["read", "moved", "read", "used"]), (Numbers(4), ["read", "moved", "used"])):
        done.clear()
        loader = alone(DataLoader(data, batch_size=2, collate_fn=collate))
        for _ in loader:
            done += ["used"]
        assert done[: len(order)] == order
        assert done.count("read") == done.count("moved") == done.count("used") == 2


def test_data_that_draw_are_read_between_the_loop_s_own_draws() -> None:
    """Data that draw are read between the loop's own draws, so dropout and augmentation match plain torch."""

    class Augmented(Numbers):
        def __getitem__(self, index: int) -> float:
            return torch.rand(()).item()

    def run(wrap) -> list[float]:
        torch.manual_seed(1)
        loader = wrap(DataLoader(Augmented(6), batch_size=2, shuffle=True))
        return [value for batch in loader for value in (*batch.tolist(), torch.rand(()).item())]

    assert run(alone) == run(lambda loader: loader)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_length_is_the_number_of_batches(world: int) -> None:
    """The length is exact for map-style data with torch's samplers, for every size and way, and reads nothing."""
    for samples, even, drop_last, split in product(range(14), (True, False), (True, False), (True, False)):
        loader = DataLoader(Numbers(samples), batch_size=2 * world if split else 2, drop_last=drop_last)
        for rank in range(world):
            options = {"rank": rank, "world_size": world, "device": None, "split_batches": split, "even_batches": even}
            for first in (0, 1):
                part = skip_first_batches(prepare_loader(loader, **options), first)
                flags = [part.end_of_dataloader for _ in part]  # a wrong length would be an error
                assert flags == [False] * (len(flags) - 1) + [True] * bool(flags)
                assert len(flags) == len(part)
                assert part.state_dict()["_iterator_finished"]


def test_a_length_that_changes_in_the_epoch_is_an_error() -> None:
    """A length that changes in the epoch is an error, since it would cut an accumulation window or leave one open."""

    class Changing(Numbers):
        def __len__(self) -> int:  # at the sampler's query, then at the loader's
            self.size += self.step
            return self.size

    for step, found in ((2, "more"), (-2, "fewer")):
        data = Changing(20)
        data.step = 0
        loader = alone(DataLoader(data, batch_size=2))
        data.step = step
        with pytest.raises(LoopError, match=f"gives {found} batches than its length"):
            list(loader)


@pytest.mark.parametrize("said", [2, 4, 5, 9])
@pytest.mark.parametrize("context", [True, False])
def test_a_wrong_length_closes_windows_rightly(said: int, context: bool) -> None:
    """Five batches under a wrong length give windows of three and two, each averaged over its own size."""

    class Boasting(BatchSampler):
        def __len__(self) -> int:
            return said

    for data in (Numbers(10), SizedStream(10)):
        batches = {"batch_sampler": Boasting(range(10), 2, False)} if isinstance(data, Numbers) else {"batch_size": 2}
        loader, sizes, divisors = alone(DataLoader(data, **batches)), [], []
        window = Window(3, progress=LoaderProgress())
        for _ in (batch for _ in range(2) for batch in loader):
            if context:
                window.enter_batch()
            window.count_backward()
            divisors.append(window.divisor)
            if window.count_step():
                assert [divisor / (window.own.correction or 0) for divisor in divisors] == pytest.approx(
                    [len(divisors)] * len(divisors)
                )
                window.finish()
                sizes.append(len(divisors))
                divisors = []
            if context:
                window.leave_batch()
        assert sizes == [3, 2, 3, 2]


def test_a_sampler_that_may_learn_is_told_of_while_gradients_accumulate(capsys: pytest.CaptureFixture[str]) -> None:
    """A query of a learning sampler's end during accumulation is reported. Otherwise nothing is drawn early."""

    class Own(RandomSampler):
        pass

    loader = alone(DataLoader(range(8), batch_size=2, sampler=Own(range(8))))
    assert len(list(loader)) == 4
    assert capsys.readouterr().err == ""
    assert [loader.end_of_dataloader for _ in loader] == [False] * 3 + [True]
    assert [loader.end_of_dataloader for _ in loader] == [False] * 3 + [True]
    drawn = "zero_plugin: warning: Own: while gradients accumulate, each batch is drawn before"
    assert capsys.readouterr().err.count(drawn) == 1


def test_an_endless_stream_is_read_one_batch_ahead() -> None:
    """An endless stream yields immediately, one batch ahead, and its loop can be left."""
    loader = alone(DataLoader(Stream(None), batch_size=2))
    endless = iter(loader)
    assert [next(endless).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert values(alone(DataLoader(Stream(3), batch_size=2))) == [[0, 1], [2]]


def test_an_empty_data_set_is_an_empty_loop() -> None:
    """An empty dataset gives no batch and no error."""
    assert values(alone(DataLoader(Numbers(0), batch_size=2))) == []
    assert values(alone(DataLoader(Stream(0), batch_size=2))) == []


def test_what_a_loop_asks_of_a_dataloader_is_there() -> None:
    """Sizes are given for this process and in total. All other attributes are the wrapped loader's."""
    data = Numbers(10)
    loader = alone(DataLoader(data, batch_size=4, num_workers=0, pin_memory=False), rank=1, world_size=2)
    assert (len(loader), loader.batch_size, loader.total_batch_size, loader.total_dataset_length) == (2, 4, 8, 10)
    assert loader.dataset is data
    assert loader.num_workers == 0
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = loader.no_such_thing
    split = alone(DataLoader(data, batch_size=4), world_size=2, split_batches=True)
    assert (len(split), split.batch_size, split.total_batch_size) == (3, 2, 4)
    sized = alone(DataLoader(SizedStream(10), batch_size=4), world_size=2)
    assert (len(sized), sized.dataset.size) == (2, 10)
    with pytest.raises(TypeError):
        len(alone(DataLoader(Stream(10), batch_size=4)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_sized_stream_s_length_is_the_number_of_batches(world: int, even: bool, drop_last: bool) -> None:
    """For every size, len() of a stream is the number of steps that all processes have."""
    for samples in range(30):
        loaders = [
            prepare_loader(
                DataLoader(SizedStream(samples), batch_size=4, drop_last=drop_last),
                rank=rank,
                world_size=world,
                device=None,
                even_batches=even,
            )
            for rank in range(world)
        ]
        shortest = min(len(list(loader.base_dataloader)) for loader in loaders)
        assert {len(loader) for loader in loaders} == {shortest}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", [False, True])
def test_stream_and_map_style_shard_alike(workers: int, split: bool) -> None:
    """A stream gives each rank the same batches and real counts as the same data by index."""
    for samples in (1, 5, 8, 12, 13) if workers == 0 else (13,):
        for rank in range(2):
            options = {"rank": rank, "world_size": 2, "device": None, "split_batches": split}
            by_index = prepare_loader(DataLoader(Numbers(samples), batch_size=4, num_workers=workers), **options)
            stream = prepare_loader(DataLoader(Stream(samples), batch_size=4), **options)
            assert [(p.batch.tolist(), p.samples, p.real) for p in stream._read(0)] == [
                (p.batch.tolist(), p.samples, p.real) for p in by_index._read(0)
            ]


def test_ready_batches_are_dealt_out_whole() -> None:
    """With batch_size=None an item is a batch. A batch repeated to even out a step counts no real samples."""
    batches = [torch.arange(n) for n in (3, 1, 2)]
    sources = [
        lambda: DataLoader(KeptStream(batches), batch_size=None),
        lambda: DataLoader(batches, batch_size=None),
    ]
    for source in sources:
        loader = alone(source(), rank=1, world_size=2)
        assert [(p.batch.tolist(), p.samples, p.real) for p in loader._read(0)] == [
            ([0], None, None),
            ([0, 1, 2], None, 0),
        ]
        assert loader.batch_size is None


def test_a_batch_sampler_given_as_sampler_is_shared_by_batches() -> None:
    """`DataLoader(sampler=BatchSampler(…), batch_size=None)` passes index lists to the dataset."""
    data = torch.arange(10)
    loader = DataLoader(data, sampler=BatchSampler(range(10), 4, False), batch_size=None)
    assert values(alone(loader, rank=1, world_size=2)) == [[4, 5, 6, 7], [2, 3, 4, 5]]


def test_a_custom_batch_sampler_without_attributes_works() -> None:
    """A plain list of index lists works as a batch sampler."""
    loader = DataLoader(Numbers(6), batch_sampler=[[5, 4], [3], [2, 1, 0]])
    assert values(alone(loader)) == [[5, 4], [3], [2, 1, 0]]
    assert alone(loader).batch_size is None


def test_the_subclass_and_its_way_of_iterating_are_kept() -> None:
    """A DataLoader subclass that changes batches still does, and the user's loader is not modified."""

    class Doubling(DataLoader):
        def __iter__(self):
            return (batch * 2 for batch in super().__iter__())

    loader = Doubling(Numbers(4), batch_size=2)
    assert values(alone(loader)) == [[0, 2], [4, 6]]
    assert values(alone(loader, rank=1, world_size=2)) == [[4, 6]]
    assert values(loader) == [[0, 2], [4, 6]]


def test_a_subclass_with_batches_of_its_own_is_named() -> None:
    """A subclass that holds an earlier iterator is an error: otherwise every process would get the complete dataset."""

    class Holding(DataLoader):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.held = super().__iter__()

        def __iter__(self):
            return self.held

    with pytest.raises(LoopError, match="Holding gives batches that its batch sampler did not draw"):
        list(alone(Holding(Numbers(4), 2)))


def test_a_wrong_length_does_not_end_the_epoch_early() -> None:
    """A wrong length of a sampler does not end the epoch early. The epoch ends with its last batch."""

    class Boasting(BatchSampler):
        said = 2

        def __len__(self) -> int:
            return self.said

    loader = alone(DataLoader(Numbers(8), batch_sampler=Boasting(range(8), 2, False)))
    assert [loader.batches_left for _ in loader] == [1, 1, 1, 0]
    Boasting.said = 9
    assert [loader.batches_left for _ in loader] == [8, 7, 6, 0]


def test_persistent_workers_serve_every_epoch() -> None:
    """Persistent workers draw new numbers each epoch, also after an epoch that was left early."""
    loader = alone(DataLoader(Numbers(9), batch_size=2, num_workers=1, persistent_workers=True))
    for _ in loader:
        break
    for _ in range(2):
        assert values(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
        assert loader.real_samples == 1
    plain = alone(DataLoader(range(9), batch_size=2, num_workers=1, persistent_workers=True))
    assert len(values(plain)) == 5
    assert values(skip_first_batches(plain, 3)) == [[6, 7], [8]]
    assert len(values(plain)) == 5


def test_the_accelerator_s_argument_reaches_the_loader() -> None:
    """`shard_iterable="never"` reaches the loader: a stream is left to its workers, which all yield everything here."""
    loader = DataLoader(Stream(6), batch_size=2, num_workers=2)
    accelerator = Accelerator(cpu=True, shard_iterable="never")
    try:
        assert values(accelerator.prepare(loader)) == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    finally:
        accelerator.end_training()
    assert values(alone(loader)) == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(LoopError, match="'auto' or 'never'"):
        alone(loader, shard_iterable="always")


def test_epochs_count_themselves_unless_somebody_tells() -> None:
    """Each start sets the next epoch on a dataset that shuffles by epoch, unless the user sets the epoch."""
    data = Numbers(2)
    loader = alone(DataLoader(data, batch_size=2))
    told = []
    for command in (lambda: None, lambda: None, lambda: data.set_epoch(9), lambda: loader.set_epoch(4), lambda: None):
        command()
        values(loader)
        told.append(data.epoch)
    assert told == [0, 1, 9, 4, 5]


def test_set_epoch_reaches_all_who_want_to_know() -> None:
    """set_epoch reaches the dataset, the batch sampler and its sampler."""

    class Told(RandomSampler):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    data, sampler = Numbers(4), Told(range(4))
    alone(DataLoader(data, batch_size=2, sampler=sampler)).set_epoch(3)
    assert (data.epoch, sampler.epoch) == (3, 3)


def test_active_loaders_follow_nested_and_broken_loops() -> None:
    """The innermost running loader is current. A loop left by break or error is removed."""
    active = RUNNING
    outer = alone(DataLoader(Numbers(4), batch_size=2))
    inner = alone(DataLoader(Numbers(4), batch_size=2))
    assert active.current is None
    for _ in outer:
        assert active.current is outer
        for _ in inner:
            assert active.current is inner
            break
        assert active.current is outer
    assert active.current is None
    first, second = iter(outer), iter(inner)
    next(first), next(second)
    first.close()
    assert active.current is inner
    second.close()
    assert active.current is None


def test_skipping_reads_nothing_it_skips() -> None:
    """Skipped map-style samples are not read, a stream continues at its place, and the original stays complete."""
    data = Numbers(10)
    loader = alone(DataLoader(data, batch_size=3))
    later = skip_first_batches(loader, 2)
    assert values(later) == [[6, 7, 8], [9]]
    assert data.read == [6, 7, 8, 9]
    assert (len(later), len(loader)) == (2, 4)
    assert [later.batches_left for _ in later] == [1, 0]
    assert values(skip_first_batches(later, 1)) == [[9]]
    assert len(values(loader)) == 4
    assert values(skip_first_batches(alone(DataLoader(SizedStream(5), batch_size=2)), 1)) == [[2, 3], [4]]
    assert values(skip_first_batches(loader, 99)) == []
    with pytest.raises(LoopError, match="found a list"):
        skip_first_batches([data], 1)  # type: ignore[arg-type]


def test_what_is_left_out_is_told_once_by_the_main_process(capsys: pytest.CaptureFixture[str]) -> None:
    """With even_batches off, process 0 warns once, not per epoch, about the number of samples lost."""
    for rank in range(3):
        loader = alone(DataLoader(Numbers(10), batch_size=4), rank=rank, world_size=3, even_batches=False)
        assert sum(map(len, values(loader))) + sum(map(len, values(loader))) == [8, 8, 4][rank]
    assert capsys.readouterr().err == ""
    loader = alone(DataLoader(Numbers(7), batch_size=2), world_size=3, even_batches=False)
    assert values(loader) == values(loader) == [[0, 1]]
    assert capsys.readouterr().err.count("zero_plugin: warning: samples left out: 1 ") == 1


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: [1, 2], "found a list"),
        (lambda: skip_first_batches(DataLoader(Stream(4)), 1), "already skips batches"),
        (lambda: DataLoader(Numbers(4), sampler=DistributedSampler(range(4), 2, 1)), "part 1 of 2"),
        (lambda: DataLoader(Numbers(4), sampler=DistributedSampler(range(4), 3, 0)), "part 0 of 3"),
        (lambda: DataLoader(Numbers(4), in_order=False), "in_order=True"),
    ],
)
def test_a_loader_that_cannot_be_shared_is_named(loader, message: str) -> None:
    """A loader that cannot be divided raises an error that says what was found and what to pass."""
    with pytest.raises(LoopError, match=message):
        alone(loader(), world_size=2)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Numbers(4), batch_size=3), "batch_size=3"),
        (lambda: DataLoader(Numbers(4), batch_size=None), "no batch size"),
        (lambda: DataLoader(Numbers(4), batch_sampler=[[0], [1]]), "no batch size"),
    ],
)
def test_split_batches_wants_a_divisible_batch_size(loader, message: str) -> None:
    """A global batch that cannot be split evenly is a configuration error."""
    with pytest.raises(ConfigError, match=message):
        alone(loader(), world_size=2, split_batches=True)


def test_batches_move_however_nested() -> None:
    """Tensors move to the device in containers of every kind. Objects with `to` move themselves, others stay."""
    Pair = namedtuple("Pair", "a b")
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batch = {"x": [torch.ones(1), Pair(torch.ones(1), "text")], "y": UserDict(z=torch.ones(1)), "p": packed, "n": None}
    meta = torch.device("meta")

    @dataclass
    class Record:
        x: torch.Tensor
        name: str

    class Encoding(UserDict):
        """A mapping with its own `to`, like transformers' encoding, which would wait for the copy."""

        def to(self, device):
            raise AssertionError("moved by its items")

    record = move_batch([Record(torch.ones(1), "a"), Encoding(ids=torch.ones(2), n=[1, 2])], meta)
    assert (record[0].x.device, record[0].name, record[1]["ids"].device, record[1]["n"]) == (meta, "a", meta, [1, 2])
    assert type(record[1]) is Encoding
    moved = move_batch({key: value for key, value in batch.items() if key != "p"}, meta)
    assert (moved["x"][0].device, moved["x"][1].a.device, moved["y"]["z"].device) == (meta, meta, meta)
    assert (moved["x"][1].b, moved["n"]) == ("text", None)
    assert isinstance(move_batch(batch, torch.device("cpu"))["p"], PackedSequence)
    assert [b[0].device for b in alone(DataLoader(TensorDataset(torch.ones(2))), device=meta)] == [meta, meta]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_wait_or_not_as_asked(non_blocking: bool) -> None:
    """`non_blocking` reaches every tensor's copy, also through the facade. Other objects move without it."""
    asked: list[bool] = []

    class Recording(torch.Tensor):
        def to(self, *args, **kwargs):
            asked.append(kwargs["non_blocking"])
            return super().to(*args, **kwargs)

    class Graph:
        def to(self, device: torch.device):
            return self

    def collate(samples):
        return {"x": [torch.zeros(len(samples)).as_subclass(Recording)] * 2, "graph": Graph()}

    loader = DataLoader(Numbers(4), batch_size=2, collate_fn=collate)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(non_blocking=non_blocking))
    try:
        by_itself = alone(loader, device=torch.device("cpu"), non_blocking=non_blocking)
        for prepared in (by_itself, accelerator.prepare(loader)):
            asked.clear()
            assert len(list(prepared)) == 2
            assert asked == [non_blocking] * 4
    finally:
        accelerator.end_training()


def test_metrics_outside_a_loop_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gather_for_metrics outside a loop is refused, because padding is unknown. On one process no padding exists."""
    assert gather_for_metrics({"a": torch.ones(2), "b": ["x"]}, None)["b"] == ["x"]
    monkeypatch.setattr("zero_plugin.data.batches.num_processes", lambda: 2)
    with pytest.raises(LoopError, match="inside `for batch in loader:`"):
        gather_for_metrics(torch.ones(2), None)


def test_metrics_that_are_not_per_sample_are_refused_at_the_first_batch() -> None:
    """Values that are not per sample, such as flattened tokens, are refused at the first batch: use gather()."""
    loader = alone(DataLoader(Numbers(6), batch_size=4))
    for batch in loader:
        for wrong in (batch.repeat(3), [1] * 7):
            with pytest.raises(LoopError, match=r"use gather\(\)"):
                gather_for_metrics(wrong, loader)
        # One row per nominal sample, like `loss.repeat(batch_size)`, is cut to the real samples.
        assert len(gather_for_metrics(torch.ones(4), loader)) == len(batch)
