"""Torch's own samplers, drawn on each process, give the order of one torch process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from zero_plugin.data.prepare import prepare_loader
from zero_plugin.data.sharing import (
    Order,
    SeedableRandomSampler,
    Sharing,
    draw_order,
    is_drawn_at_once,
    share_batches,
    share_order,
)

SIZE = 103


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


SAMPLERS: dict[str, Callable[[], Sampler[Any]]] = {
    "random": lambda: RandomSampler(range(SIZE)),
    "random, some": lambda: RandomSampler(range(SIZE), num_samples=40),
    "replaced": lambda: RandomSampler(range(SIZE), replacement=True),
    "own generator": lambda: RandomSampler(range(SIZE), generator=seeded()),
    "own generator, some": lambda: RandomSampler(range(SIZE), num_samples=40, generator=seeded()),
    "subset": lambda: SubsetRandomSampler([*range(5, 90), 3]),
    "subset, own generator": lambda: SubsetRandomSampler([*range(5, 90)], generator=seeded()),
    "names": lambda: SubsetRandomSampler(["a", "b", "c"]),
    "weighted": lambda: WeightedRandomSampler(torch.rand(SIZE, generator=seeded()).tolist(), 150),
    "weighted, each once": lambda: WeightedRandomSampler(
        torch.rand(SIZE, generator=seeded()).tolist(), 60, replacement=False, generator=seeded()
    ),
    "seedable": lambda: SeedableRandomSampler(range(SIZE), data_seed=3),
}
DRAWN_ON: dict[str, Callable[[], Sampler[Any]]] = {
    "random, more": lambda: RandomSampler(range(SIZE), num_samples=250),
    "random, twice": lambda: RandomSampler(range(SIZE), num_samples=2 * SIZE),
    "replaced, more": lambda: RandomSampler(range(SIZE), replacement=True, num_samples=250),
    "own generator, replaced": lambda: RandomSampler(range(SIZE), replacement=True, generator=seeded()),
    "own generator, more": lambda: RandomSampler(range(SIZE), num_samples=250, generator=seeded()),
}


@pytest.mark.parametrize("name", [*SAMPLERS, *DRAWN_ON])
def test_the_order_is_torchs(name: str) -> None:
    """Order and number of global draws equal torch's, element by element, for two epochs."""
    make = {**SAMPLERS, **DRAWN_ON}[name]
    ours, theirs = make(), make()
    assert is_drawn_at_once(ours) == (name in SAMPLERS)
    torch.manual_seed(4)
    expected = [list(theirs) for _ in range(2)]
    after = torch.get_rng_state()
    torch.manual_seed(4)
    loader = prepare_loader(
        DataLoader(_Numbers(), batch_sampler=BatchSampler(ours, 7, False), collate_fn=list),
        rank=0,
        world_size=1,
        device=None,
    )
    found = []
    for _ in range(2):
        found.append([sample for batch in loader.base_dataloader.batch_sampler for sample in batch])
        assert found[-1] == expected[len(found) - 1]
    assert torch.equal(torch.get_rng_state(), after)
    own = None if name == "seedable" else getattr(ours, "generator", None)  # that is seeded again in each epoch
    assert own is None or torch.equal(own.get_state(), theirs.generator.get_state())


@pytest.mark.parametrize("replacement", [True, False])
def test_an_epoch_without_an_end_is_drawn_as_it_runs(replacement: bool) -> None:
    """The first batches of a sampler with ten billion samples, as in minGPT's trainer, equal torch's."""

    def first(loader: Any) -> list[Any]:
        torch.manual_seed(4)
        return list(islice(loader.batch_sampler, 3))

    sampler = RandomSampler(range(SIZE), replacement=replacement, num_samples=int(1e10))
    loader = DataLoader(_Numbers(), 7, sampler=sampler, collate_fn=list)
    prepared = prepare_loader(loader, rank=0, world_size=1, device=None)
    assert first(prepared.base_dataloader) == first(loader)


class _Numbers:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: Any) -> Any:
        return index


class _Foreign(RandomSampler):
    """A class of the user's own."""


@pytest.mark.parametrize("make", [*DRAWN_ON.values(), lambda: _Foreign(range(SIZE)), lambda: iter(range(3))])
def test_what_draws_on_is_foreign(make: Callable[[], Any]) -> None:
    """A sampler with later draws counts as foreign: process 0 draws for all."""
    assert not is_drawn_at_once(make())


@given(
    st.integers(0, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.booleans(),
)
def test_shares_are_those_of_all_batches(
    samples: int, world: int, size: int, even: bool, split: bool, drop_last: bool, skip: int, reports: bool
) -> None:
    """Each process's parts, and the dropped count, follow from all batches: completed, cut, dropped or skipped."""
    order = Order(torch.randperm(samples, generator=seeded()))
    sampler: Any = BatchSampler(order.part(0, samples), world * size if split else size, drop_last)
    for rank in range(world):
        sharing = Sharing(rank, world, size, even=even, split=split, drop_last=drop_last)
        wanted, found = [], []
        report = [wanted.append, found.append] if reports else [None, None]
        shares = list(islice(share_batches(iter(sampler), sharing, report[0]), skip, None))
        assert list(share_order(order, sampler, sharing, report[1], skip=skip)) == shares
        assert found == (wanted if skip <= samples // (world * size) else [])


def test_a_part_is_cut_out_of_a_hundred_million() -> None:
    """Process 700 of 1,000 reads only its own samples: a step takes microseconds at any world size."""
    order = Order(range(100_000_000))
    sampler: Any = BatchSampler(SequentialSampler(range(100_000_000)), 8, False)
    shares = share_order(order, sampler, Sharing(700, 1000, 8), None, skip=12_000)
    first = next(shares)
    assert first.indices == list(range(12_000 * 8000 + 5600, 12_000 * 8000 + 5608))
    assert sum(share.samples for share in shares) == 499 * 8


def test_indices_of_any_kind_have_no_checksum() -> None:
    """Indices of other types have no checksum, so process 0 sends them. Numbers have one, by value."""
    names = draw_order(SubsetRandomSampler(["a", "b"]), seeded())
    assert names.digest() is None
    assert sorted(names.part(0, 2)) == ["a", "b"]
    one, same, other = (draw_order(SubsetRandomSampler(s), seeded()) for s in ([1, 2, 3], [1, 2, 3], [1, 2, 4]))
    assert one.digest() == same.digest() != other.digest()


def shuffled(random_state: random.Random) -> Iterator[int]:
    yield from random_state.sample(range(9), 9)


def test_a_sampler_is_asked_once_an_epoch() -> None:
    """A foreign sampler is asked once an epoch, so its draws do not change."""
    state = random.Random(2)
    wanted = list(shuffled(random.Random(2)))
    batches = DataLoader(range(9), batch_size=2, sampler=_Iterated(functools.partial(shuffled, state)))
    loader = prepare_loader(batches, rank=0, world_size=1, device=None)
    assert [int(x) for batch in loader for x in batch] == wanted


class _Iterated(Sampler[int]):
    def __init__(self, begin: Callable[[], Iterator[int]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[int]:
        return self._begin()

    def __len__(self) -> int:
        return 9
