"""The accumulation window: when a step acts, and the divisor of a loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from zero_plugin import Accelerator, PartialState
from zero_plugin.data.active import ActiveLoaders, LoaderProgress
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.errors import LoopError
from zero_plugin.loop.together import count_foreign_backward
from zero_plugin.loop.window import Window


@dataclass
class FakeEpoch:
    """An epoch of `length` batches. `known` is whether its length is known."""

    length: int
    known: bool = True
    batch: int = -1

    def __post_init__(self) -> None:
        self._running = ActiveLoaders()
        self.progress = LoaderProgress(running=self._running)

    def begin(self) -> None:
        """Begin again. A loop that did not finish is left."""
        self._running.leave(self)
        self._running.enter(self)

    @property
    def position(self) -> int:
        return self.batch

    @property
    def batches_left(self) -> int | None:
        return self.length - self.batch - 1 if self.known else None

    @property
    def end_of_dataloader(self) -> bool:
        return self.batch == self.length - 1


def step(window: Window) -> float:
    """Step the optimizer. Return the correction of the applied gradients, or 0 inside a window."""
    if not window.count_step():
        return 0.0
    correction = window.own.correction
    assert correction is not None
    window.finish()
    return correction


def run_epoch(steps: int, length: int, *, known: bool, context: bool) -> list[tuple[list[int], float]]:
    """Return, per applied step, the divisors of its micro-batches, and the correction."""
    epoch = FakeEpoch(length, known)
    window = Window(steps, progress=epoch.progress)
    epoch.begin()
    applied: list[tuple[list[int], float]] = []
    divisors: list[int] = []
    for epoch.batch in range(length):
        if context:
            window.enter_batch()
        assert window.next_backward_ends == ((epoch.batch + 1) % steps == 0 or epoch.batch == length - 1)
        window.count_backward()
        divisors.append(window.divisor)
        if correction := step(window):
            applied.append((divisors, correction))
            divisors = []
        assert not window.dropping_is_meant
        if context:
            window.leave_batch()
    assert not divisors
    return applied


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("steps", "length"), [(1, 3), (2, 4), (4, 10), (3, 2), (5, 1)])
def test_gradients_are_averaged_over_the_true_window(steps: int, length: int, known: bool, context: bool) -> None:
    """Divisor over correction is the number of micro-batches of each window, the shorter last one included."""
    applied = run_epoch(steps, length, known=known, context=context)
    assert sum(len(divisors) for divisors, _ in applied) == length
    assert len(applied) == -(-length // steps)
    for divisors, correction in applied:
        assert {d / correction for d in divisors} == {float(len(divisors))}
        assert known is False or correction == 1.0


def run_fetched(steps: int, length: int, *, known: bool, context: bool, epochs: int) -> list[list[tuple[int, float]]]:
    """Run like `run_epoch`, fetching `steps` batches at a time.

    Return each window's size and true divisor per epoch.
    """
    epoch = FakeEpoch(length, known)
    window = Window(steps, progress=epoch.progress)
    applied: list[list[tuple[int, float]]] = []
    for _ in range(epochs):
        epoch.begin()
        applied.append([])
        divisors: list[int] = []
        for first in range(0, length, steps):
            count = min(steps, length - first)
            epoch.batch = first + count - 1  # all of them are fetched before the first is computed
            for index in range(count):
                if context:
                    window.enter_batch()
                ends = window.next_backward_ends
                window.count_backward()
                divisors.append(window.divisor)
                assert ends == window.ends_here
                if (context or index == count - 1) and (correction := step(window)):
                    true = {divisor / correction for divisor in divisors}
                    applied[-1].append((len(divisors), true.pop()))
                    assert not true
                    divisors = []
                if context:
                    window.leave_batch()
        assert not divisors
    return applied


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("length", "sizes"), [(8, [4, 4]), (10, [4, 4, 2]), (9, [4, 4, 1]), (4, [4]), (3, [3]), (1, [1])]
)
def test_a_window_fetched_before_it_is_computed(length: int, sizes: list[int], known: bool) -> None:
    """Batches are fetched four at a time, computed, and stepped once, by hand. Each window is that of the loop."""
    expected = [(size, float(size)) for size in sizes]
    assert run_fetched(4, length, known=known, context=False, epochs=3) == [expected] * 3


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("length", "sizes"), [(8, [4, 4]), (10, [4, 4, 2]), (9, [4, 4, 1])])
def test_a_window_fetched_before_accumulate(length: int, sizes: list[int], known: bool) -> None:
    """Under accumulate(), a batch fetched at the end of the data does not end each batch's window."""
    expected = [(size, float(size)) for size in sizes]
    assert run_fetched(4, length, known=known, context=True, epochs=3) == [expected] * 3


def test_gradients_dropped_in_a_fetched_window() -> None:
    """zero_grad() inside accumulate() starts a new window, which takes no further batch of the fetched ones."""
    epoch = FakeEpoch(8)
    window = Window(4, progress=epoch.progress)
    epoch.begin()
    acts = []
    for index in range(8):
        epoch.batch = 3 if index < 4 else 7
        with window:
            window.count_backward()
            if index == 5:
                window.restart()
                window.count_backward()
            acts.append(bool(step(window)))
    assert [index for index, act in enumerate(acts) if act] == [3, 7]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize("left_out", [{1}, {8}, {0, 4, 5}, {6, 7, 8}])
def test_batches_that_the_loop_leaves_out(left_out: set[int], context: bool, known: bool) -> None:
    """`continue` on a bad batch is no prefetching.

    The epoch's last batch ends the window with its present gradients.
    """
    epoch = FakeEpoch(10, known)
    window = Window(4, progress=epoch.progress)
    for _ in range(2):
        epoch.begin()
        sizes, divisors = [], []
        for epoch.batch in range(10):
            if epoch.batch in left_out:
                continue
            if context:
                window.enter_batch()
            window.count_backward()
            divisors.append(window.divisor)
            if correction := step(window):
                assert {divisor / correction for divisor in divisors} == {float(len(divisors))}
                sizes.append(len(divisors))
                divisors = []
            if context:
                window.leave_batch()
        taken = 10 - len(left_out)
        assert sizes == [4] * (taken // 4) + [taken % 4] * bool(taken % 4)


def loader_of(batches: int, *, stream: bool = False) -> DataLoader:
    data = Stream(batches) if stream else range(batches)
    return prepare_loader(DataLoader(data, batch_size=1), rank=0, world_size=1, device=None)


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def cycled(loader: DataLoader) -> Iterator[int]:
    while True:
        yield from loader


def windows_of(batches: Iterable[Any], *, steps: int, context: bool) -> list[int]:
    """Return the micro-batches of each window, one for each of `batches`. Each is averaged over its own size."""
    window = Window(steps, progress=LoaderProgress())
    sizes, divisors = [], []
    for _ in batches:
        if context:
            window.enter_batch()
        ends = window.next_backward_ends
        window.count_backward()
        assert ends == window.ends_here
        divisors.append(window.divisor)
        if correction := step(window):
            found = [divisor / correction for divisor in divisors]
            assert found == pytest.approx([len(divisors)] * len(divisors))
            sizes.append(len(divisors))
            divisors = []
        if context:
            window.leave_batch()
    return sizes


@pytest.mark.parametrize("context", [True, False])
@pytest.mark.parametrize(("in_turn", "sizes"), [(True, [4, 4]), (False, [4, 1, 4, 3])])
def test_windows_over_several_loaders(in_turn: bool, sizes: list[int], context: bool) -> None:
    """With one loader after the other, either end ends a window. With both in turn, the longer one's end does."""

    def batches() -> Iterator[Any]:
        first, second = iter(loader_of(5)), iter(loader_of(7))
        for one in first:
            yield one
            yield next(second)

    order = batches() if in_turn else (batch for length in (5, 7) for batch in loader_of(length))
    assert windows_of(order, steps=4, context=context) == sizes


@pytest.mark.parametrize("context", [True, False])
def test_a_short_loader_that_is_cycled_ends_no_window(context: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends none next to a long one, however it cycles and in any order. A line says which loader's end counts."""

    def by_hand(long: DataLoader, short: DataLoader) -> Iterator[Any]:
        iterator = iter(short)
        for batch in long:
            try:
                other = next(iterator)
            except StopIteration:
                iterator = iter(short)
                other = next(iterator)
            yield batch, other

    ways = [
        by_hand,
        lambda long, short: zip(long, cycle(short), strict=False),
        lambda long, short: zip(long, cycled(short), strict=False),
        lambda long, short: zip(cycled(short), long, strict=False),
    ]
    for way in ways:
        assert windows_of(way(loader_of(10), loader_of(3)), steps=4, context=context) == [4, 4, 2]
        told = capsys.readouterr().err
        assert told.count("windows end with the epoch of the loader over range (10 batches), not with that of") == 1
    streams = zip(loader_of(10, stream=True), cycled(loader_of(3, stream=True)), strict=False)
    assert windows_of(streams, steps=4, context=context) == [4, 4, 2], "of unknown lengths the one begun first"
    assert "not with that of the loader over Stream (of unknown length)" in capsys.readouterr().err
    equal = zip(loader_of(10), loader_of(10), strict=True)
    assert windows_of(equal, steps=4, context=context) == [4, 4, 2]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("context", [True, False])
def test_loops_inside_loops_and_windows(context: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation in mid-window ends none. The inner of two nested loops does."""

    def evaluating() -> Iterator[int]:
        evaluation, kept = loader_of(20), []
        for batch in loader_of(10):
            yield batch
            if batch == 1:
                list(evaluation)
                kept.append(iter(evaluation))
                next(kept[0])  # and one that the loop left, but still references

    assert windows_of(evaluating(), steps=4, context=context) == [4, 4, 2]
    nested = ((task, batch) for inner in [loader_of(5)] for task in loader_of(7) for batch in inner)
    assert windows_of(nested, steps=3, context=context) == [3, 2] * 7


def by_hand(loader: DataLoader, backwards: Callable[[Window], None], steps: int = 2) -> Window:
    """Run a loop that calls `backwards` for each batch, and steps after it."""
    window = Window(steps, progress=LoaderProgress())
    for _ in loader:
        backwards(window)
        step(window)
    return window


def test_two_backwards_in_one_batch_are_ambiguous() -> None:
    """With accumulation by hand over a prepared loader, the error names both readings, at the second backward."""
    seen: list[int] = []

    def two_losses(window: Window) -> None:
        for number in range(2):
            window.count_backward()
            seen.append(number)

    for stream in (False, True):
        with pytest.raises(LoopError, match=r"two micro-batches, or two losses of one(.|\n)*accelerator\.accumulate"):
            by_hand(loader_of(4, stream=stream), two_losses)
        assert seen == [0], "the second one is not counted"
        seen.clear()
    by_hand(loader_of(4), two_losses, steps=1)  # without accumulation gradients add up, as in plain torch

    def with_context(window: Window) -> None:
        with window:
            two_losses(window)

    by_hand(loader_of(4), with_context)
    window = Window(2)
    two_losses(window)
    assert step(window), "with no prepared loader running, backwards are counted"
    assert list(loader_of(2))
    two_losses(window)


def test_a_batch_may_be_computed_again_after_its_gradients_were_dropped() -> None:
    """A loop may do this after a loss that is not finite, or after it has run out of memory."""

    def again(window: Window) -> None:
        window.count_backward()
        assert window.dropping_is_meant
        window.restart()
        window.count_backward()

    by_hand(loader_of(4), again)


def test_two_backwards_after_batches_that_were_left_out() -> None:
    """One batch later it is known whether a jump of the loader means prefetching."""
    window = Window(4, progress=LoaderProgress())
    loader = iter(loader_of(9))
    for _ in range(5):
        next(loader)
    window.count_backward()
    next(loader)
    window.count_backward()
    with pytest.raises(LoopError, match="ran twice in one batch"):
        window.count_backward()


@pytest.mark.parametrize("stream", [True, False])
def test_windows_that_are_fetched_before_they_are_computed_are_not_ambiguous(stream: bool) -> None:
    """One backward for each fetched batch is fine at any time, also in a loop that fetches one batch ahead."""
    for fetched in (1, 2, 4):
        progress = LoaderProgress()
        window = Window(4, progress=progress)
        sizes = []
        for _ in range(2):
            iterator = iter(loader_of(10, stream=stream))
            for first in range(0, 10, fetched):
                for _ in list(islice(iterator, min(fetched, 10 - first))):
                    window.count_backward()
                backwards = window.backwards
                if (fetched == 1 or window.ends_here) and step(window):
                    sizes.append(backwards)
        assert sizes == [4, 4, 2] * 2
    ahead = iter(loader_of(10, stream=stream))
    window = Window(4, progress=progress)
    coming, acts = next(ahead, None), []
    while coming is not None:
        coming = next(ahead, None)
        window.count_backward()
        acts.append(bool(step(window)))
    assert len(acts) == 10


def test_without_a_loader_windows_are_of_the_given_size() -> None:
    """A loop over anything except a prepared loader accumulates `steps` micro-batches."""
    window = Window(3)
    acts = []
    for _ in range(7):
        window.count_backward()
        acts.append(bool(step(window)))
    assert acts == [False, False, True, False, False, True, False]


def test_several_backwards_and_one_step_without_accumulation() -> None:
    """With gradient_accumulation_steps 1, a hand-written loop may add up any number of backwards."""
    window = Window(1)
    for _ in range(3):
        window.count_backward()
    assert window.divisor == 1
    assert step(window)


def test_step_at_every_window_by_hand() -> None:
    """`if (i + 1) % n == 0: step()` works, and so does a step after each micro-batch."""
    window = Window(4)
    for _ in range(3):
        for _ in range(4):
            window.count_backward()
        assert step(window)


def test_a_step_at_another_cadence_is_an_error() -> None:
    """Stepping every two backwards contradicts gradient_accumulation_steps 4."""
    window = Window(4)
    window.count_backward()
    window.count_backward()
    with pytest.raises(LoopError, match="after 2 backwards, but gradient_accumulation_steps is 4"):
        step(window)


def test_more_backwards_than_the_window_is_an_error() -> None:
    """Eight backwards without a step, with gradient_accumulation_steps 4, would silently lose the division."""
    window = Window(4)
    for _ in range(4):
        window.count_backward()
    with pytest.raises(LoopError, match="ran 5 times without"):
        window.count_backward()


def test_no_step_at_the_end_of_an_epoch() -> None:
    """`if (i + 1) % 4 == 0: step()` over 10 batches: the next epoch's first backward says what to write."""
    epoch = FakeEpoch(10)
    window = Window(4, progress=epoch.progress)
    epoch.begin()
    for epoch.batch in range(10):
        window.count_backward()
        if (epoch.batch + 1) % 4 == 0:
            assert step(window)
    epoch.begin()
    epoch.batch = 0
    with pytest.raises(LoopError, match=r"last accumulation window has 2(.|\n)* or i \+ 1 == len\(loader\)"):
        window.count_backward()


def test_an_early_step_at_the_end_of_a_loader_that_was_not_prepared() -> None:
    """After complete windows, without a running loader, the advice is to prepare the loader."""
    window = Window(4)
    for _ in range(4):
        window.count_backward()
    assert step(window)
    window.count_backward()
    window.count_backward()
    with pytest.raises(LoopError, match=r"previous windows had 4(.|\n)*prepare\(\) the loader"):
        window.count_step(has_stepped=True)


def test_a_window_goes_on_over_a_break(capfd: pytest.CaptureFixture[str]) -> None:
    """After a `break` inside a window, the gradients count in the next epoch, which is logged once."""
    epoch = FakeEpoch(10)
    window = Window(4, progress=epoch.progress)
    acts = []
    for _ in range(3):
        epoch.begin()
        for epoch.batch in range(6):
            with window:
                window.count_backward()
                acts.append(bool(step(window)))
    assert [index for index, act in enumerate(acts) if act] == [3, 7, 11, 15]
    assert capfd.readouterr().err.count("an epoch was left after 2 of the 4 micro-batches") == 1


def test_entering_accumulate_twice_is_an_error() -> None:
    """A nested accumulate() would count one micro-batch as two."""
    window = Window(2)
    window.enter_batch()
    with pytest.raises(LoopError, match="inside accumulate"):
        window.enter_batch()


def test_step_after_the_context_acts_on_its_boundary() -> None:
    """optimizer.step() may come after the `with accumulate` block."""
    window = Window(2)
    acts = []
    for _ in range(4):
        window.enter_batch()
        window.count_backward()
        window.leave_batch()
        acts.append(bool(step(window)))
    assert acts == [False, True, False, True]


def test_two_optimizers_step_at_one_boundary() -> None:
    """A second optimizer's step in the same batch acts like the first one's."""
    window = Window(2)
    window.enter_batch()
    window.count_backward()
    assert not step(window)
    assert not step(window)
    window.leave_batch()
    window.enter_batch()
    window.count_backward()
    window.count_backward()
    assert step(window)
    assert window.ends_here
    assert step(window)


def test_zero_grad_drops_only_between_backward_and_step() -> None:
    """Before a backward or after a step it has no effect. Between backward and step it drops."""
    window = Window(1)
    assert not window.dropping_is_meant
    window.count_backward()
    assert window.dropping_is_meant
    window.restart()
    assert not window.dropping_is_meant
    window.count_backward()
    step(window)
    assert not window.dropping_is_meant


def test_gradients_are_held_from_a_backward_to_the_step_that_applies_them() -> None:
    """Gradients of another model's loss, or dropped ones, are not held: there a checkpoint is complete."""
    window = Window(2)
    assert not window.holds_gradients
    with window:
        window.count_backward()
        assert window.holds_gradients
        assert not step(window)
    assert window.holds_gradients
    with window:
        window.count_backward()
        assert step(window)
    assert not window.holds_gradients
    count_foreign_backward(window, ends=True)
    assert not window.holds_gradients
    window.count_backward()
    assert window.holds_gradients
    window.restart()
    assert not window.holds_gradients


@pytest.mark.parametrize("decides", [False, True])
def test_what_is_gone_on_from_elsewhere_begins_a_window(decides: bool) -> None:
    """Wherever the loop was, also if it sets the window's end itself, it is the same as before the first batch."""
    window = Window(3)
    window.count_backward()
    if decides:
        window.decide(False)
    window.begin()
    assert window.ends_here
    assert [(window.count_backward(), window.ends_here)[1] for _ in range(3)] == [False, False, True]
    assert step(window)


def test_zero_grad_never_drops_inside_accumulate() -> None:
    """Inside accumulate() gradients of earlier micro-batches are kept."""
    window = Window(2)
    window.enter_batch()
    window.count_backward()
    assert not window.dropping_is_meant
    window.leave_batch()
    assert not window.dropping_is_meant


def train(accelerator: Accelerator, fetched: int) -> dict[str, torch.Tensor]:
    """Return the weights after two epochs of ten batches, `fetched` at a time, with a step after each."""
    torch.manual_seed(0)
    inputs = torch.randn(20 * accelerator.num_processes, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=2))
    for _ in range(2):
        iterator = iter(loader)
        for first in range(0, 10, fetched):
            for (batch,) in list(islice(iterator, min(fetched, 10 - first))):
                accelerator.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    with accelerator.whole_weights(model):
        weights = {name: p.detach().clone() for name, p in accelerator.unwrap_model(model).named_parameters()}
    accelerator.free_memory()
    return weights


def test_a_backward_after_clipping_without_the_model() -> None:
    """Gradients of an unprepared model's optimizer add up, as in plain torch, except in a shorter window."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(torch.ones(1)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    accelerator.backward(model(torch.ones(1)).sum())
    optimizer.step()
    assert float(model.weight.detach()) == pytest.approx(1 - 0.5 * 1.5)
    optimizer.zero_grad()
    accelerator.gradient_accumulation_steps = 2
    with accelerator.accumulate(model):
        optimizer.window.decide(True)  # the end of data whose length is unknown
        accelerator.backward(model(torch.ones(1)).sum())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        with pytest.raises(LoopError, match=r"after clip_grad_norm_\(\)"):
            accelerator.backward(model(torch.ones(1)).sum())
        with pytest.raises(LoopError, match="must not be applied"):
            accelerator.backward(model(torch.ones(1)).sum())
    accelerator.end_training()


def test_optimizers_without_models_whose_windows_differ() -> None:
    """If one has dropped its gradients inside a window, each step still has the mean of its own micro-batches."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    sgds = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model in models:
        nn.init.zeros_(model.weight)
    *optimizers, loader = accelerator.prepare(*sgds, DataLoader(torch.arange(1.0, 6.0).reshape(5, 1)))
    for batch, x in enumerate(loader):
        accelerator.backward(sum(model(x).sum() for model in models))
        if batch == 0:
            optimizers[0].zero_grad()
        for optimizer, model in zip(optimizers, models, strict=True):
            before = float(model.weight.detach())
            optimizer.step()
            if float(model.weight.detach()) != before:
                optimizer.zero_grad()
    assert [float(model.weight.detach()) for model in models] == pytest.approx(
        [-(2 + 3 + 4 + 5) / 4, -(1 + 2 + 3 + 4) / 4 - 5]
    )
    accelerator.end_training()


def main(store: str, rank: str, world: str, stage: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ["DS_ACCELERATOR"] = "cpu"
    PartialState(cpu=True, init_method=f"file://{store}")
    config = {"zero_optimization": {"stage": int(stage)}} if stage != "none" else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, config=config)
    torch.testing.assert_close(train(accelerator, 4), train(accelerator, 1))
    accelerator.end_training()


@pytest.mark.processes
@pytest.mark.parametrize("stage", ["none", "2"])
def test_fetched_windows_train_the_same(run_processes, stage: str) -> None:
    """Four batches at a time give an ordinary loop's weights, under DDP and ZeRO, with a shorter window."""
    run_processes(__file__, 2, stage)


if __name__ == "__main__":
    main(*sys.argv[1:5])
