"""Loaders that process 0 reads for all, in every size and way of division, over real processes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from on_paths import in_processes
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from zero_plugin.data.batches import gather_for_metrics
from zero_plugin.data.dispatch import DataLoaderDispatcher
from zero_plugin.data.loader import skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed.collectives import gather_object, num_processes, process_index
from zero_plugin.errors import LoopError


class Numbers(Dataset):
    """A dataset of 0 … size-1 that only process 0 may read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert process_index() == 0, "the others' data sets are not touched"
        return index


class OwnSequence(Sampler):
    """A user's own sampler."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self):
        return iter(range(self.size))


class Stream(IterableDataset):
    """The same numbers as a stream without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        assert process_index() == 0, "the others' data sets are not touched"
        return iter(range(self.size))


class Texts(Dataset):
    """Samples with a text of varying length."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict:
        return {"ids": torch.full((index + 1,), index), "text": f"line {index}"}


def collate_texts(samples: list[dict]) -> dict:
    longest = max(len(sample["ids"]) for sample in samples)
    ids = [torch.nn.functional.pad(sample["ids"], (0, longest - len(sample["ids"]))) for sample in samples]
    return {"ids": torch.stack(ids), "text": [sample["text"] for sample in samples], "kind": "train"}


def prepared(loader: DataLoader, **options) -> DataLoaderDispatcher:
    given = {"rank": process_index(), "world_size": num_processes(), "device": torch.device("cpu")}
    dispatcher = prepare_loader(loader, **given, dispatch_batches=True, **options)
    assert type(dispatcher) is DataLoaderDispatcher
    return dispatcher


def seen_by_rule(samples: int, batch: int, *, even: bool, drop_last: bool, split: bool) -> int:
    """Return how many of the first samples are seen."""
    world = num_processes()
    step = batch if split else batch * world
    left = samples % step
    if drop_last or (left < world and not even):
        left = 0
    return samples - samples % step + left


@in_processes(2, 3)
def test_every_way() -> None:
    """The dataset is seen in order, once. A step's parts are equal, or differ by one sample without even_batches."""
    world = num_processes()
    for samples, even, drop_last, split in product((1, 7, 12), (True, False), (False, True), (False, True)):
        batch = 2 * world if split else 2
        expected = list(range(seen_by_rule(samples, batch, even=even, drop_last=drop_last, split=split)))
        for data in (Numbers(samples), Stream(samples)):
            loader = prepared(
                DataLoader(data, batch_size=batch, drop_last=drop_last), even_batches=even, split_batches=split
            )
            case = (samples, even, drop_last, split, data)
            seen, sizes, flags = [], [], []
            for part in loader:
                seen += gather_for_metrics(part, loader).tolist()
                sizes.append(len(part))
                flags.append(loader.end_of_dataloader)
            assert seen == expected, case
            assert flags == [False] * (len(flags) - 1) + [True] * bool(flags), case
            if flags and (even or not samples % batch):
                assert loader.remainder == len(expected) - (len(flags) - 1) * loader.total_batch_size, case
            for step in zip(*gather_object([sizes]), strict=True):
                assert max(step) - min(step) <= (0 if even else 1), case
            if isinstance(data, Numbers):
                assert len(loader) == len(flags), case


@in_processes(2, 3)
def test_what_a_step_looks_like() -> None:
    """A step's parts are consecutive, in rank order. The last step is completed from the first samples."""
    if num_processes() == 2:
        own = [part.tolist() for part in prepared(DataLoader(Numbers(11), batch_size=3))]
        assert own == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 0]]][process_index()]
        tiny = [part.tolist() for part in prepared(DataLoader(Numbers(1), batch_size=3))]
        assert tiny == [[0]]


@in_processes(2, 3)
def test_texts_and_unequal_lengths() -> None:
    """Lists of objects are divided like tensors. Batches that cannot be joined are an error on process 0."""
    loader = prepared(DataLoader(Texts(), batch_size=6, collate_fn=collate_texts), split_batches=True)
    for part in loader:
        assert part["text"] == [f"line {int(row[0])}" for row in part["ids"]]
        assert part["kind"] == "train"
        got = gather_for_metrics({"text": part["text"], "ids": part["ids"]}, loader)
        assert got["text"] == [f"line {n}" for n in range(5)]
        assert got["ids"].shape == (5, 5)


@in_processes(2, 3)
def test_a_slice_function() -> None:
    """A user's slice function is called with the step, the slice and the process's index."""
    calls = []

    def interleave(step, rows, process_index, num_processes):
        calls.append((len(step), rows))
        return step[process_index::num_processes]

    own = [part.tolist() for part in prepared(DataLoader(Numbers(12), batch_size=2), slice_fn=interleave)]
    world, rank = num_processes(), process_index()
    steps = [list(range(start, min(12, start + 2 * world))) for start in range(0, 12, 2 * world)]
    assert own == [step[rank::world] for step in steps]
    assert calls[0] == (2 * world, slice(2 * rank, 2 * rank + 2))


@in_processes(2, 3)
def test_skipping_and_positions() -> None:
    """Skipped steps are not sent. A position resumes in the same shuffled order."""
    whole = prepared(DataLoader(Numbers(12 * num_processes()), batch_size=2))
    later = [part.tolist() for part in skip_first_batches(whole, 4)]
    assert later == [part.tolist() for part in whole][4:]
    torch.manual_seed(7 + process_index())
    shuffled = DataLoader(Numbers(12 * num_processes()), batch_size=2, shuffle=True)
    loader, rest = prepared(shuffled), []
    for step, part in enumerate(loader):
        if step == 2:
            state = loader.state_dict()
        elif step > 2:
            rest.append(part.tolist())
    again = prepared(shuffled)
    again.load_state_dict(state)
    assert [part.tolist() for part in again] == rest
    assert len(list(again)) == 6, "the next epoch is whole"


@in_processes(2, 3)
def test_a_break() -> None:
    """A loop that all processes leave can be started again."""
    loader = prepared(DataLoader(Stream(20), batch_size=2))
    for _ in loader:
        break
    assert sum(len(gather_for_metrics(part, loader)) for part in loader) == 20


@in_processes(2, 3)
def test_only_process_0_has_the_data() -> None:
    """Only process 0 has the data. The others recognise the last step all the same."""
    samples = 11 if process_index() == 0 else 0
    for sampler in (None, OwnSequence(samples)):
        loader = prepared(DataLoader(Numbers(samples), batch_size=2, sampler=sampler))
        seen, flags = [], []
        for part in loader:
            seen += gather_for_metrics(part, loader).tolist()
            flags.append(loader.end_of_dataloader)
        assert seen == list(range(11))
        assert flags == [False] * (len(flags) - 1) + [True]


@pytest.mark.parametrize(
    "test",
    [
        *(test_every_way, test_what_a_step_looks_like, test_texts_and_unequal_lengths, test_a_slice_function),
        *(test_skipping_and_positions, test_a_break, test_only_process_0_has_the_data),
    ],
)
def test_dispatching_on_one_process(test) -> None:
    """On one process the batches are the loader's own."""
    test.body()


def test_what_cannot_be_joined_or_divided_is_named() -> None:
    """Batches padded to different lengths, and batches without samples, raise an error that names them."""
    lengths = DataLoader(Texts(), batch_size=2, collate_fn=collate_texts)
    two = prepare_loader(lengths, rank=0, world_size=2, device=None, dispatch_batches=True)
    with pytest.raises(LoopError, match="differ beyond their first dimension"):
        next(two._read_steps(0))
    with pytest.raises(LoopError, match="cannot be divided"):
        list(prepared(DataLoader(Texts(), batch_size=2, collate_fn=lambda samples: "text")))


def test_what_is_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Without even_batches, a last step with fewer samples than processes is dropped on all, with a message."""
    loader = prepare_loader(
        DataLoader(range(9), batch_size=2), rank=0, world_size=4, device=None, dispatch_batches=True, even_batches=False
    )
    assert len(loader) == 1
    loader._report_dropped(1)
    assert "zero_plugin: warning: samples left out: 1 " in capsys.readouterr().err
