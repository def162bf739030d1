"""A prepared loader as scripts see it: a DataLoader with a position in its epoch, which can be saved."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from zero_plugin.checkpoint.objects import random_state, restore_random_state
from zero_plugin.data.loader import DataLoaderAdapter, skip_first_batches
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.distributed import seeding


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class PythonShuffle(Sampler):
    """A user's sampler that draws from Python's and NumPy's generators."""

    def __len__(self) -> int:
        return 20

    def __iter__(self):
        return iter(random.sample(range(10), 10) + [10 + int(n) for n in np.random.permutation(10)])


class OwnBatches:
    """A user's batch sampler, which draws as soon as an iterator is requested."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.generator).view(4, 2).tolist())


def alone(loader: DataLoader, **options) -> DataLoaderAdapter:
    return prepare_loader(loader, **{"rank": 0, "world_size": 1, "device": None, **options})


def values(loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("dispatch", [None, True])
def test_a_prepared_loader_is_a_dataloader(dispatch: bool | None) -> None:
    """A prepared loader is a DataLoader with all its attributes. Other names are forwarded to the given loader."""
    data = Numbers(10)
    given = DataLoader(data, batch_size=4, shuffle=True, num_workers=0)
    loader = alone(given, dispatch_batches=dispatch)
    assert isinstance(loader, DataLoader)
    assert (loader.dataset, loader.batch_size, loader.total_batch_size, len(loader)) == (data, 4, 4, 3)
    assert (loader.total_dataset_length, loader.remainder, loader.drop_last) == (10, -1, False)
    assert loader.batch_sampler.batch_sampler is given.batch_sampler
    assert loader.batch_sampler.sampler is loader.sampler is given.sampler
    assert (loader.num_workers, loader.multiprocessing_context, loader.collate_fn) == (0, None, given.collate_fn)
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(10))
    assert (loader.end_of_dataloader, loader.remainder) == (True, 2)
    assert alone(loader) is loader, "prepared twice it is the same"


@pytest.mark.parametrize("dispatch", [None, True])
@pytest.mark.parametrize("data", [Numbers(10), Stream(10)])
def test_copies_and_pickles_go_their_own_way(data, dispatch: bool | None) -> None:
    """A prepared loader can be copied and pickled before and after a loop, like a plain one."""
    loader = alone(DataLoader(data, batch_size=4), dispatch_batches=dispatch)
    for _ in range(2):
        for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
            assert type(other) is type(loader)
            assert values(other) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
            assert (other.end_of_dataloader, other.batch_size) == (True, 4)
        next(iter(loader))
    assert loader.position == 0


@pytest.mark.parametrize("data", [Numbers(40), Stream(40)])
def test_a_loop_that_is_left_keeps_no_workers(data) -> None:
    """Workers end with a loop that is left, as in plain torch, not at garbage collection, which would wait for each."""
    loader = alone(DataLoader(data, batch_size=2, num_workers=2))
    gc.disable()
    try:
        for step, _ in enumerate(loader):
            if step == 3:
                break
        assert not multiprocessing.active_children()
    finally:
        gc.enable()
    assert values(loader) == [[n, n + 1] for n in range(0, 40, 2)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "build",
    [
        lambda **how: DataLoader(Numbers(20), batch_size=3, shuffle=True, **how),
        lambda **how: DataLoader(Numbers(20), 3, shuffle=True, generator=torch.Generator().manual_seed(1), **how),
        lambda **how: DataLoader(Numbers(20), batch_size=3, sampler=PythonShuffle(), **how),
        lambda **how: DataLoader(Numbers(20), batch_size=3, sampler=WeightedRandomSampler([1.0] * 20, 20), **how),
        lambda **how: DataLoader(Numbers(20), batch_sampler=BatchSampler(RandomSampler(range(20)), 3, False), **how),
        lambda **how: DataLoader(Stream(20), batch_size=3, **how),
    ],
)
def test_an_interrupted_epoch_goes_on_where_it_was(build, workers: int) -> None:
    """From any batch the epoch resumes in order. After the last batch none follows. The next epoch is complete."""
    torch.manual_seed(3)
    loader = alone(build(num_workers=workers))
    values(loader)
    seen, states = [], [loader.state_dict()]
    for batch in loader:
        seen.append(batch.tolist())
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    for had in (0, 1, 4, 7, 8) if workers == 0 else (4,):
        again = alone(build(num_workers=workers))
        again.load_state_dict(pickle.loads(pickle.dumps(states[had])))
        torch.manual_seed(50)
        rest = values(again)
        assert rest == seen[had:] if 0 < had < 8 else len(rest) == 7, "between epochs: the next one, whole"
        assert again.state_dict()["epoch"] == (2 if had == 8 else 1)
        assert len(values(again)) == 7


class Augmented(Numbers):
    """A dataset that adds to each sample a number drawn while reading."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item()])


class AugmentedStream(Stream):
    """A stream that draws nothing without workers, because it is read a batch ahead of what is saved."""

    def __iter__(self):
        return map(Augmented(self.size).__getitem__ if get_worker_info() else torch.tensor, range(self.size))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("workers", "places"),
    [
        (0, lambda each: (0, 1, each - 2, each - 1, each + 1)),
        (1, lambda each: (each - 1, each + 1)),  # each epoch starts processes
        pytest.param(1, lambda each: (0, 1, each - 2), marks=pytest.mark.campaign),
    ],
    ids=["0", "1", "1, elsewhere"],
)
@pytest.mark.parametrize(
    "build",
    [
        lambda how: DataLoader(Augmented(8), batch_size=2, **how),
        lambda how: DataLoader(Augmented(8), batch_size=None, **how),
        lambda how: DataLoader(Augmented(8), batch_size=2, shuffle=True, **how),
        lambda how: DataLoader(Augmented(8), batch_size=2, shuffle=True, generator=seeded(), **how),
        lambda how: DataLoader(Augmented(8), 2, sampler=RandomSampler(range(8), True, 8, seeded()), **how),
        lambda how: DataLoader(Augmented(20), batch_size=5, sampler=PythonShuffle(), **how),
        lambda how: DataLoader(AugmentedStream(8), batch_size=2, **how),
        lambda how: DataLoader(Augmented(8), 2, sampler=RandomSampler(range(8)), generator=seeded(), **how),
        lambda how: DataLoader(AugmentedStream(8), batch_size=2, generator=seeded(), **how),
        lambda how: DataLoader(Augmented(8), batch_sampler=OwnBatches(), **how),
        lambda how: DataLoader(Augmented(8), batch_sampler=OwnBatches(seeded()), **how),
        lambda how: DataLoader(Augmented(8), batch_sampler=OwnBatches(own := seeded()), generator=own, **how),
    ],
    ids=[
        *("in order", "samples", "shuffled", "own generator", "replacement", "python", "stream"),
        *("workers", "stream's", "global batches", "batches", "batches and workers"),
    ],
)
def test_the_epochs_after_a_resumed_one_are_as_if_nothing_had_been(build, workers: int, places) -> None:
    """Epochs after a resumed one keep their order, worker draws and loop draws, even after an immediate save."""

    def drawn_by(loader):
        return random_state(getattr(loader, "generators", ()))

    def events(loader, epochs: int):
        for _ in range(epochs):
            for batch in loader:
                yield (batch.tolist(), random.random()), loader.state_dict(), drawn_by(loader)
            yield torch.rand(()).item(), loader.state_dict(), drawn_by(loader)

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    whole = list(events(alone(build({"num_workers": workers})), 3))
    each = len(whole) // 3
    for place in places(each):
        _, state, drawn = whole[place]
        for way in ("resumed", "saved again", "skipped by the script"):
            kept = state
            for _ in range(1 + (way == "saved again")):
                loader = alone(build({"num_workers": workers}))
                loader.load_state_dict(pickle.loads(pickle.dumps(kept)), skip=way != "skipped by the script")
                kept = loader.state_dict()
            restore_random_state([drawn], 0, loader.generators)
            if place != each - 1:  # also at the last batch, with the code after the loop still to run
                rest = skip_first_batches(loader, state["batches"]) if way == "skipped by the script" else loader
                list(events(rest, 1))
            later = place // each + 1
            found, expected = events(loader, 3 - later), whole[later * each :]
            assert [one[0] for one in found] == [one[0] for one in expected], (place, way)


class Pools:
    """A user's batch sampler that shuffles a pool of samples by Python's generator when it reaches the pool."""

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        for start in range(0, 24, 8):
            pool = list(range(start, start + 8))
            random.shuffle(pool)
            yield from (pool[:4], pool[4:])


@pytest.mark.parametrize(("workers", "together"), [(0, 1), (0, 1024), (1, 1024)])
def test_an_order_that_is_drawn_while_the_epoch_runs_is_resumed(
    workers: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order drawn during the epoch resumes from any batch, also twice, if only the sampler uses its generator."""

    def saved(loader: DataLoaderAdapter) -> bytes:
        return pickle.dumps((loader.state_dict(), random_state()))

    def resumed(kept: bytes) -> DataLoaderAdapter:
        loader = alone(DataLoader(Numbers(24), batch_sampler=Pools(), num_workers=workers))
        state, drawn = pickle.loads(kept)
        loader.load_state_dict(state)
        restore_random_state([drawn], 0)
        return loader

    monkeypatch.setattr(seeding, "_DRAWN_TOGETHER", together)
    random.seed(3)
    loader = alone(DataLoader(Numbers(24), batch_sampler=Pools(), num_workers=workers))
    read = [(batch.tolist(), saved(loader)) for _ in range(2) for batch in loader]
    whole, states = [list(column) for column in zip(*read, strict=True)]
    for had, kept in enumerate(states[:6], start=1):
        loader = resumed(kept)
        assert [values(loader), values(loader)] == [whole[had:6], whole[6:]], had
    found, kept = [], states[0]
    for _ in whole[1:6]:
        loader = resumed(kept)
        found.append(next(iter(loader)).tolist())
        kept = saved(loader)
    assert found == whole[1:6]


class InPlace(Sampler):
    """A user's sampler that shuffles the previous epoch's order once more."""

    def __init__(self) -> None:
        self.order = list(range(8))

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


class Hidden(Numbers):
    """A dataset that counts the set_epoch calls and does not expose its epoch."""

    told = 0

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.told])


@pytest.mark.parametrize("told", [False, True])
def test_an_epoch_that_no_loop_has_set_is_set_by_no_resume(told: bool) -> None:
    """A dataset that does not expose its epoch gets only the epochs that the loop sets on the loader."""

    def run(loader: DataLoaderAdapter, epochs: range) -> list[Any]:
        found = []
        for epoch in epochs:
            if told:
                loader.set_epoch(epoch)
            found += [(batch.tolist(), loader.state_dict()) for batch in loader]
        return found

    whole = run(alone(DataLoader(Hidden(8), batch_size=2)), range(3))
    loader = alone(DataLoader(Hidden(8), batch_size=2))
    loader.load_state_dict(whole[5][1])
    assert [batch for batch, _ in run(loader, range(1, 3))] == [batch for batch, _ in whole[6:]]


@pytest.mark.parametrize("changes", [False, True])
def test_an_order_of_other_weights_is_told(changes: bool, caplog: pytest.LogCaptureFixture) -> None:
    """If a sampler's weights changed since the save, the order differs and a warning says so."""
    weights = torch.ones(8)

    def build() -> DataLoaderAdapter:
        return alone(DataLoader(Numbers(8), batch_size=2, sampler=WeightedRandomSampler(weights, 8)))

    loader = build()
    next(iter(loader))
    state = loader.state_dict()
    weights[:4] = 0.0 if changes else 1.0
    loader = build()
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert len(values(loader)) == 3
    told = "WeightedRandomSampler gives another order than before the run was interrupted"
    assert [told in line for line in caplog.messages] == [True] * changes


@pytest.mark.parametrize("adds", [False, True])
def test_a_generator_that_came_or_went_is_reported(adds: bool, caplog: pytest.LogCaptureFixture) -> None:
    """If a resumed script draws from another generator than before, the order differs and the warning says so."""
    own = {"generator": seeded()}
    loader = alone(DataLoader(Numbers(8), batch_size=2, shuffle=True, **({} if adds else own)))
    next(iter(loader))
    state = loader.state_dict()
    loader = alone(DataLoader(Numbers(8), batch_size=2, shuffle=True, **(own if adds else {})))
    loader.load_state_dict(state)
    assert len(values(loader)) == 3
    assert "RandomSampler gives another order" in "".join(caplog.messages)


def test_a_state_of_before_is_loaded() -> None:
    """An older state without the generators, the checksum and the last-batch flag is loaded."""
    torch.manual_seed(3)
    loader = alone(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    whole, states = zip(*[(batch.tolist(), loader.state_dict()) for batch in loader], strict=True)
    state = {name: value for name, value in states[1].items() if name not in ("generators", "is_last")}
    state["draws"] = {name: state["draws"][name] for name in ("shared", "own")}
    loader = alone(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    loader.load_state_dict(state)
    assert values(loader) == list(whole[2:])


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_order_that_cannot_be_resumed_is_told(epochs: int, caplog: pytest.LogCaptureFixture) -> None:
    """An order that depends on earlier epochs is reported as lost. The first epoch's order resumes."""
    loader = alone(DataLoader(Numbers(8), batch_size=2, sampler=InPlace()))
    whole = [(batch.tolist(), loader.state_dict()) for _ in range(epochs) for batch in loader]
    state = whole[-3][1]
    loader = alone(DataLoader(Numbers(8), batch_size=2, sampler=InPlace()))
    loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert (values(loader) == [batch for batch, _ in whole[-2:]]) == (epochs == 1)
    told = "InPlace gives another order than before the run was interrupted"
    assert [told in line for line in caplog.messages] == [True] * (epochs - 1)


@pytest.mark.parametrize("generator", [None, seeded], ids=["global", "own generator"])
def test_lasting_workers_change_no_order_of_a_resumed_run(generator) -> None:
    """Persistent workers get their only seed in the first epoch, and a resumed run uses the same seed."""

    def build() -> DataLoaderAdapter:
        own = None if generator is None else generator()
        return alone(DataLoader(Numbers(8), 2, shuffle=True, generator=own, num_workers=1, persistent_workers=True))

    torch.manual_seed(3)
    loader = build()
    epochs, states = [], []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist())
            states.append((loader.state_dict(), random_state()))
    for place in (1, 3):
        state, drawn = states[place]
        loader = build()
        loader.load_state_dict(state)
        restore_random_state([drawn], 0)
        assert [values(loader) for _ in range(3)] == [epochs[0][place + 1 :], *epochs[1:]]


def test_a_state_that_is_loaded_in_a_loop_is_for_the_next_one() -> None:
    """A state loaded inside a loop applies to the next loop. What the loop saves afterwards is its own position."""
    torch.manual_seed(3)
    loader = alone(DataLoader(Numbers(8), batch_size=2, shuffle=True))
    whole, states = [], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(loader.state_dict())
        if len(whole) == 2:
            loader.load_state_dict(states[0])
            assert loader.state_dict() == states[0]
    assert [state["batches"] for state in states] == [1, 2, 3, 4]
    assert values(loader) == whole[1:]
    loader.load_state_dict(states[0])
    loader.load_state_dict(states[3])
    assert [len(values(loader)) for _ in range(2)] == [0, 4]


def test_going_on_disturbs_nobody_s_random_numbers() -> None:
    """The order is drawn from the old states, and the global generators keep the state that load_state set."""
    loader = alone(DataLoader(Numbers(20), batch_size=3, sampler=PythonShuffle()))
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    random.seed(4), np.random.seed(4)
    values(loader)
    drawn = random.random(), np.random.random()
    random.seed(4), np.random.seed(4)
    assert drawn == (random.random(), np.random.random())


def test_a_position_counts_samples_of_all_processes() -> None:
    """With twice the processes the position is half the batches. A partly consumed batch is read again."""
    loader = alone(DataLoader(Numbers(40), batch_size=4))
    for _ in loader:
        if loader.position == 4:
            break
    state = loader.state_dict()
    assert (state["batches"], state["total_batch_size"]) == (5, 4)
    for rank in range(2):
        two = alone(DataLoader(Numbers(40), batch_size=4), rank=rank, world_size=2)
        two.load_state_dict(state)
        assert next(iter(two)).tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]][rank]


def test_a_loop_over_a_skipping_copy_moves_the_place() -> None:
    """A loop over a skipping copy advances the original's position. The original then continues with the next epoch."""
    torch.manual_seed(1)
    loader = alone(DataLoader(Numbers(12), batch_size=2, shuffle=True))
    first = values(loader)
    assert loader.state_dict()["_iterator_finished"]
    for _ in skip_first_batches(loader, 2):
        state = loader.state_dict()
        break
    assert (state["epoch"], state["batches"], state["_iterator_finished"]) == (1, 3, False)
    again = alone(DataLoader(Numbers(12), batch_size=2, shuffle=True))
    again.load_state_dict({**state, "batches": 0})  # a script that skips on its own
    rest = values(skip_first_batches(again, 3))
    assert len(rest) == 3
    assert len(values(again)) == 6
    assert again.state_dict()["epoch"] == 2
    assert first != rest


def test_an_untouched_loader_has_nothing_to_go_on_from() -> None:
    """The state of an untouched loader changes nothing."""
    loader = alone(DataLoader(Numbers(4), batch_size=2))
    loader.load_state_dict(alone(DataLoader(Numbers(4), batch_size=2)).state_dict())
    assert values(loader) == [[0, 1], [2, 3]]
