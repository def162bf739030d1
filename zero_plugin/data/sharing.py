"""The samples of an epoch that each process gets: how batches are shared, and the order of torch's own samplers.

The draws of torch's own samplers depend only on the state of one generator. So the processes only agree on that state:
each draws the complete order, as a tensor, and cuts out its part. A sampler of another class may do anything: process 0
draws from it for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from zero_plugin.distributed.collectives import broadcast, gather_values, process_index
from zero_plugin.distributed.messages import working
from zero_plugin.distributed.seeding import Draws, generator_of
from zero_plugin.errors import LoopError

_Item = TypeVar("_Item")


def take_skipped(batches: Iterator[_Item], count: int) -> Iterator[_Item]:
    """Yield the first `count` batches, or fewer if the data ends, and show progress; the loop skips them."""
    if count:
        with working("skipping batches", count, unit="batches") as work:
            for batch in islice(batches, count):
                work.advance()
                yield batch


class Share(NamedTuple):
    """One process's part of one step.

    Attributes:
        indices: the samples to read from the dataset.
        real: how many of them, from the front, are not repetitions that make the step even.
    """

    indices: list[Any]
    real: int

    @property
    def samples(self) -> int:
        """The number of samples, including repeated ones."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The sharing of batches among processes.

    Attributes:
        rank, world: the rank of this process, and the number of processes. A group that shares its samples counts as
            one process.
        batch_size: samples in a full batch of one process; None if batches have no common size.
        even: complete the last step from the first samples of the epoch: every process has a full batch.
        split: each of the loader's batches is cut into one piece per process, instead of going to one process.
        drop_last: an incomplete last step is left out, because the loader has `drop_last`.
        batched: False if the loader does not batch. Each item of its sampler or stream is then already a batch of
            unknown size, and counts here as one sample.
        cut: the number of micro-batches into which each of the user's batches was cut before.
        shared_by: how many processes have the same samples.
        is_counted: whether this process counts the samples in metrics; only one process of a group does.
    """

    rank: int
    world: int
    batch_size: int | None
    even: bool = True
    split: bool = False
    drop_last: bool = False
    batched: bool = True
    cut: int = 1
    shared_by: int = 1
    is_counted: bool = True

    @property
    def processes(self) -> int:
        """The number of all processes, each group member counted."""
        return self.world * self.shared_by


def share_batches(
    batches: Iterable[list[Any]], sharing: Sharing, report_dropped: Callable[[int], None] | None
) -> Iterator[Share]:
    """Yield this process's shares, one per step.

    At step k the processes' shares, in the order of ranks, are the batches k·world … (k+1)·world-1 of `batches`, or
    with `split` the pieces of batch k. Only the last step can be incomplete:

    * With `even`, the epoch's first samples complete it.
    * Otherwise every process leaves it out if some process would have nothing. `report_dropped` gets the number of lost
      samples, unless the loader has `drop_last`.
    * Without `report_dropped`, each process continues to the end of its own shares; the first processes may have one
      share more than the last.

    Raises:
        LoopError: with `split`, a batch that is not the last does not hold world × batch_size samples.
    """
    completes = sharing.even and not sharing.drop_last
    steps = _steps(batches, sharing)
    step = first = next(steps, None)
    while step is not None:
        # Look ahead only after an incomplete step, to know whether it is the last: the batches may depend on the time
        # at which they are drawn.
        is_full = len(step) == sharing.world and (
            not completes or all(len(batch) == (sharing.batch_size or len(batch)) for batch in step)
        )
        following = None if is_full else next(steps, None)
        if len(step) > sharing.world or (following is not None and len(step) < sharing.world):
            raise LoopError(
                f"split_batches: the batch sampler gave {sum(map(len, step))} samples; every batch except the last "
                f"must hold {sharing.world} × {sharing.batch_size}. Use split_batches=False with batches of varying "
                "size."
            )
        if following is None and not is_full and completes:
            assert first is not None
            yield _complete(step, first, sharing)
        elif len(step) == sharing.world or (
            sharing.rank < len(step) and report_dropped is None and not sharing.drop_last
        ):
            own = step[sharing.rank]
            yield Share(own, len(own))
        elif not sharing.drop_last and report_dropped is not None:
            report_dropped(sum(map(len, step)))
        step = next(steps, None) if is_full else following


def split_size(batch_size: int | None, num_processes: int) -> int:
    """Return the batch size of each process if batches are split among all.

    Raises:
        ValueError: `num_processes` does not divide the batch size.
    """
    if not batch_size or batch_size % num_processes:
        raise ValueError(
            f"split_batches: the batch size {batch_size} cannot be split among {num_processes} processes; "
            "make it a multiple of the number of processes"
        )
    return batch_size // num_processes


def count_steps(samples: int, sharing: Sharing) -> int:
    """Return the number of steps in which every process has a batch, for a dataset of `samples` samples."""
    assert sharing.batch_size is not None
    full, tail = divmod(samples, sharing.world * sharing.batch_size)
    needed = 1 if sharing.even else (sharing.world - 1) * sharing.batch_size + 1  # with fewer, the last rank has none
    return full + (tail >= needed and not sharing.drop_last)


def _steps(batches: Iterable[list[Any]], sharing: Sharing) -> Iterator[list[list[Any]]]:
    """Yield the batches of all processes, step by step, before the last step is completed."""
    if sharing.split and sharing.world > 1:
        size = sharing.batch_size
        assert size is not None
        for batch in map(list, batches):
            yield [batch[start : start + size] for start in range(0, len(batch), size)]
        return
    iterator = iter(batches)
    while step := [batch if hasattr(batch, "__len__") else list(batch) for batch in islice(iterator, sharing.world)]:
        yield step


def _complete(step: list[list[Any]], first: list[list[Any]], sharing: Sharing) -> Share:
    """Return this process's share of an incomplete last step, completed from the first step's samples, in turn."""
    if sharing.batch_size is None:
        # The size of a full batch is not known: batches of the first step replace missing ones.
        missing = sharing.rank - len(step)
        return (
            Share(step[sharing.rank], len(step[sharing.rank])) if missing < 0 else Share(first[missing % len(first)], 0)
        )
    # Complete the lower ranks too, and drop the result: they take their samples from `filler` first.
    filler = cycle(chain.from_iterable(first))
    for real in [*step, *[[]] * sharing.world][: sharing.rank + 1]:
        own = [*real, *islice(filler, max(0, sharing.batch_size - len(real)))]
    return Share(own, len(real))


class SeedableRandomSampler(RandomSampler):
    """torch's RandomSampler, with its generator seeded by `initial_seed + epoch` at the start of each epoch.

    Each complete iteration ends an epoch, unless `set_epoch` sets another.

    Attributes:
        initial_seed: `data_seed`, or torch's seed when the sampler was made.
        epoch: the next epoch.

    Args:
        *args: arguments of `torch.utils.data.RandomSampler`, like the other keyword arguments.
        data_seed: None takes torch's current seed.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.seed()
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def seed(self) -> torch.Generator:
        """Seed the generator for the coming epoch."""
        generator: torch.Generator = self.generator or torch.Generator()
        self.generator = generator
        return generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch at the next start."""
        self.epoch = epoch


@dataclass(frozen=True)
class Order:
    """The samples of an epoch.

    Attributes:
        numbers: the indices of the samples, int64 of shape [samples] or a range; with `given`, positions in `given`.
        given: the indices that a SubsetRandomSampler chooses from.
    """

    numbers: Tensor | range
    given: Sequence[Any] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, begin: int, end: int) -> list[Any]:
        """Return the samples from position `begin` to before `end`."""
        part = self.numbers[begin:end]
        numbers = list(part) if isinstance(part, range) else part.tolist()
        return numbers if self.given is None else [self.given[number] for number in numbers]

    def batches(self, sampler: BatchSampler, begin: int = 0, end: int | None = None) -> Iterator[list[Any]]:
        """Return the batches of the samples from position `begin` to before `end`, or to the last that is used."""
        end, size = self.count(sampler) if end is None else end, sampler.batch_size
        return (self.part(first, min(first + size, end)) for first in range(begin, end, size))

    def count(self, sampler: BatchSampler) -> int:
        """Return the number of samples in the sampler's batches, without an incomplete last batch that it drops."""
        return len(self) // sampler.batch_size * sampler.batch_size if sampler.drop_last else len(self)

    def digest(self) -> str | None:
        """Return a checksum; None for indices that are no numbers."""
        parts = [torch.as_tensor(self.numbers)]
        if self.given is not None:
            try:
                parts.append(torch.as_tensor(self.given))
            except (TypeError, ValueError, RuntimeError):
                return None
        checksum = xxhash.xxh3_64()
        for part in parts:
            checksum.update(part.contiguous().numpy())  # type: ignore[arg-type]  # NumPy's arrays are buffers
        return checksum.hexdigest()


DRAWING_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, SeedableRandomSampler)


def is_drawn_at_once(sampler: Any) -> bool:
    """Return whether the sampler's order depends only on the state of one CPU generator at the epoch's start.

    Cases that return False:

    * A subclass may do anything.
    * A RandomSampler with more samples than its dataset draws while the epoch runs. The epoch may be practically
      endless (`num_samples=int(1e10)`), and its order would not fit into memory.
    * A RandomSampler with replacement also draws while the epoch runs. With the script's own generator, the script may
      draw from it in between.
    """
    if type(sampler) not in DRAWING_SAMPLERS:
        return False
    if type(sampler) is RandomSampler and sampler.num_samples > len(sampler.data_source):
        return False
    own = generator_of(sampler)
    if own is None or type(sampler) is SeedableRandomSampler:
        return True
    return own.device.type == "cpu" and not (type(sampler) is RandomSampler and sampler.replacement)


def draw_order(sampler: Any, generator: torch.Generator | None = None) -> Order:
    """Draw the order that iterating over the sampler would give, from `generator` instead of its own or torch's.

    Args:
        sampler: a SequentialSampler, or a sampler that `is_drawn_at_once`.
        generator: a CPU generator; a SequentialSampler needs none.
    """
    if isinstance(sampler, SequentialSampler):
        return Order(range(len(sampler.data_source)))
    if isinstance(sampler, SubsetRandomSampler):
        return Order(torch.randperm(len(sampler.indices), generator=generator), sampler.indices)
    if isinstance(sampler, WeightedRandomSampler):
        return Order(torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator))
    size, count = len(sampler.data_source), sampler.num_samples
    if sampler.generator is None:  # without its own generator, torch's sampler draws a seed and makes one
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        generator = torch.Generator().manual_seed(seed)
    if sampler.replacement:
        return Order(torch.randint(size, (count,), generator=generator))
    return Order(torch.randperm(size, generator=generator)[:count])


def end_order(sampler: Any, *, has_drawn: bool = False) -> None:
    """Leave the sampler in its state after a complete iteration.

    Args:
        sampler: see `draw_order`.
        has_drawn: the sampler had reached its end before the run was interrupted.
    """
    if isinstance(sampler, SeedableRandomSampler):
        sampler.set_epoch(sampler.epoch + 1)
    elif type(sampler) is RandomSampler and sampler.generator is not None and not has_drawn:
        size = len(sampler.data_source)
        if sampler.num_samples == size:  # torch's sampler draws a permutation for the rest even if the rest is empty
            torch.randperm(size, generator=sampler.generator)


def draw_here(sampler: Any, draws: Draws | None) -> tuple[Order, Draws, Tensor]:
    """Draw the order on this process, from its own generators or from `draws`.

    Args:
        sampler: a sampler that `is_drawn_at_once`.
        draws: the draws of an interrupted epoch; all generators then stay as they are.

    Returns:
        The order, the random states that it was drawn from, and the state from which other processes draw the same.
    """
    found = Draws.of(sampler) if draws is None else draws
    own = sampler.seed() if isinstance(sampler, SeedableRandomSampler) else generator_of(sampler)
    generator = torch.default_generator if own is None else own
    if draws is not None and not isinstance(sampler, SeedableRandomSampler):
        generator = torch.Generator().set_state(draws.shared[-1] if draws.own is None else draws.own)
    state = generator.get_state()
    return draw_order(sampler, generator), found, state


def draw_alike(sampler: Any, order: Order | None, state: Tensor | None) -> Order | None:
    """Draw the order of process 0 on every process; None if a process draws another order. Collective.

    Args:
        sampler: this process's own sampler.
        order, state: the result of `draw_here` on process 0; None if its sampler is not `is_drawn_at_once`.
    """
    # A state of zeros means that process 0 has none: every process must take part in the broadcast.
    agreed = broadcast(torch.zeros_like(torch.default_generator.get_state()) if state is None else state)
    if not agreed.any():
        return None
    if process_index() != 0:
        order = draw_order(sampler, torch.Generator().set_state(agreed)) if is_drawn_at_once(sampler) else None
    # The orders differ if a process has another subset, weights, length or build of torch: then process 0 sends its.
    digests = gather_values(None if order is None else order.digest())
    return order if digests[0] is not None and len(set(digests)) == 1 else None


def share_order(
    order: Order,
    sampler: BatchSampler,
    sharing: Sharing,
    report_dropped: Callable[[int], None] | None,
    *,
    skip: int = 0,
    at_end: Callable[[], None] = lambda: None,
) -> Iterator[Share]:
    """Yield this process's shares, one per step: like `share_batches`, but without making other processes' batches.

    Args:
        order: the order of all processes' samples.
        sampler: torch's batch sampler, for its batch size and `drop_last`.
        sharing: must have a batch size.
        report_dropped: see `share_batches`.
        skip: steps that are left out at the beginning.
        at_end: called when an iteration over the sampler would reach its end: before an incomplete last step.
    """
    size = sharing.batch_size
    assert size is not None
    count, step = order.count(sampler), sharing.world * size
    full = count // step
    for number in range(skip, full):
        begin = number * step + sharing.rank * size
        yield Share(order.part(begin, begin + size), size)
    at_end()
    if skip > full or count == full * step:
        return
    first = order.batches(sampler, 0, step if full else 0)  # its samples complete the last step
    shares = share_batches([*first, *order.batches(sampler, full * step)], sharing, report_dropped)
    yield from islice(shares, min(full, 1), None)
