"""The lines on a schedule: its start rates in both countings, and a length that differs from the loop's."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, SchedulerFacts, SchedulerSection
from zero_plugin.loop.scheduler import (
    SchedulerLength,
    describe_counting,
    describe_section,
    describe_torch_scheduler,
    own_steps,
)
from zero_plugin.strategies.torch_optimizers import build_scheduler


def sgd(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def linear_after_warmup(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    """Build transformers' linear schedule: rise, then fall to 0."""
    if step < num_warmup_steps:
        return step / num_warmup_steps
    return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))


linear_after_warmup.__module__ = "transformers.optimization"  # these schedules' functions are known to count nothing


def linear(optimizer: Any, warm: int = 10, total: int = 100) -> lr_scheduler.LambdaLR:
    shape = functools.partial(linear_after_warmup, num_warmup_steps=warm, num_training_steps=total)
    return lr_scheduler.LambdaLR(optimizer, shape)


def decay(**params: Any) -> SchedulerSection:
    numbers = {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 0.01}
    return SchedulerSection("WarmupDecayLR", numbers | params)


def test_a_section_shows_its_corners() -> None:
    """They show start, after warm-up, middle, end, and an epoch's length. A schedule without an end takes the epoch."""
    assert describe_section(decay(), [0.005], None, 25) == (
        "WarmupDecayLR: learning rate 0 start (step 0), 0.01 after warm-up (step 11), 0.00567 middle (step 50), "
        "0.000111 end (step 100); one epoch is 25 optimizer steps"
    )
    line = describe_section(SchedulerSection("WarmupLR", {"warmup_num_steps": 0}), [0.005], None, 7)
    assert line is not None
    assert "0.005 start (step 0)" in line
    assert "0.005 end (step 7)" in line
    assert describe_section(SchedulerSection("StepLR", {"step_size": 1}), [0.005], None, None) is None


def test_a_divided_placeholder_shows_both_ends() -> None:
    """DummyScheduler(total 200, warm-up 20) on 2 processes: the other counting is in the middle of its decay."""
    facts = SchedulerFacts(placeholder=True, total_num_steps=200, warmup_num_steps=20)
    line = describe_section(decay(), [0.005], facts, None)
    assert line is not None
    assert "0.000111 end (step 100)" in line
    assert "scheduler_counts is processes, which ends at 0.000111 in step 100" in line
    assert "with scheduler_counts: steps it would be 0.00561 there" in line
    undivided = SchedulerFacts(placeholder=True, total_num_steps=100, warmup_num_steps=10)
    assert "scheduler_counts" not in str(describe_section(decay(), [0.005], undivided, None))


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 10}),
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.001}),
    ],
)
def test_numbers_that_a_type_does_not_know_shape_nothing(kind: str, params: dict[str, Any]) -> None:
    """This is as in Accelerate's examples: DummyScheduler(total 100, warm-up 10) with any type of a section."""
    facts = SchedulerFacts(placeholder=True, total_num_steps=100, warmup_num_steps=10)
    section = SchedulerSection(kind, params)
    assert describe_section(section, [0.005], facts, 7) == describe_section(section, [0.005], None, 7)


def test_a_scripts_schedule_shows_the_rates_that_are_applied() -> None:
    """In applied steps, a schedule of 100 steps that advances twice per step ends in step 50.

    The schedule is unchanged.
    """
    schedule = linear(sgd())
    line = describe_torch_scheduler(schedule, 2, 30)
    assert line == (
        "LambdaLR: learning rate 0 start (step 0), 1 after warm-up (step 5), 0.556 middle (step 25), 0 end (step 50); "
        "one epoch is 30 optimizer steps; scheduler_counts is processes, which ends at 0 in step 50: "
        "with scheduler_counts: steps it would be 0.556 there"
    )
    assert schedule.last_epoch == 0
    assert schedule.optimizer.param_groups[0]["lr"] == 0
    assert "scheduler_counts" not in str(describe_torch_scheduler(linear(sgd()), 1, 30))


@pytest.mark.parametrize(
    ("build", "end"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40), 40),
        (lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=40), 40),
        (lambda o: lr_scheduler.PolynomialLR(o, total_iters=40), 40),
        (linear, 100),
        (lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), linear(o)], milestones=[20]), 120),
        (lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.0, total_iters=40), 40),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=40), None),
        (lambda o: lr_scheduler.StepLR(o, 5), None),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), None),
        (lr_scheduler.ReduceLROnPlateau, None),
        (lambda o: build_scheduler(decay(), o), 100),
        (lambda o: build_scheduler(SchedulerSection("WarmupLR", {}), o), None),
        (lambda o: build_scheduler(SchedulerSection("OneCycle", ONE_CYCLE), o), None),
    ],
)
def test_the_end_of_a_schedule(build: Any, end: int | None) -> None:
    """It is known for schedules that state it. DeepSpeed's OneCycle is meant to decay after its cycle too."""
    assert own_steps(build(sgd())) == end


ONE_CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": False}


@pytest.mark.parametrize(
    ("length", "counts", "built_before", "warned"),
    [
        # Two processes: 33 batches as given, 17 on each.
        (99, "processes", True, None),
        (51, "processes", True, "3 epochs of the prepared loader, which has 17 batches on each process"),
        (51, "processes", False, "Write scheduler_counts: steps into the config"),
        (51, "steps", False, None),
        (51, "steps", True, None),
        (99, "steps", True, "3 epochs of the loader before prepare(), 33 batches"),
        (99, "steps", False, "Write scheduler_counts: processes into the config"),
        (33 * 17, "processes", False, None),
        (33 * 17, "steps", False, None),
        (100, "processes", True, None),
        (100, "steps", True, None),
        (33 * 1000, "steps", True, None),
    ],
)
def test_a_length_in_the_other_counting(length: int, counts: str, built_before: bool, warned: str | None) -> None:
    """A warning appears if the length is complete epochs in the other counting, and not in the run's own."""
    facts = Facts(LoopFacts(4, "", batches_per_epoch=17, batches_given=33), MachineFacts(processes=2))
    line = describe_counting(
        "OneCycleLR", length, facts, 1, by_process=counts == "processes", built_before=built_before
    )
    assert (line is not None) == (warned is not None), line
    if warned is not None and line is not None:
        assert line.startswith(f"warning: OneCycleLR is {length} steps long: 3 epochs of the ")
        assert warned in line
        assert "17 batches" in line
        assert "33 batches" in line


@pytest.mark.parametrize("steps_per_epoch", [33 // 4, -(-33 // 4)])
def test_a_length_divided_by_accumulation(steps_per_epoch: int) -> None:
    """The length is understood for any rounding of an epoch of accumulation windows."""
    facts = Facts(LoopFacts(4, "", batches_per_epoch=17, batches_given=33), MachineFacts(processes=2))
    for length, by_process in ((3 * steps_per_epoch, False), (3 * -(-17 // 4), True)):
        line = describe_counting("LambdaLR", length, facts, 4, by_process=by_process, built_before=True)
        assert line is not None
        assert "3 epochs" in line
        assert "gradient_accumulation_steps 4" in line
    assert describe_counting("LambdaLR", 3 * steps_per_epoch, facts, 4, by_process=True, built_before=True) is None


def test_lengths_that_cannot_differ_are_not_warned_of() -> None:
    """One process, a loader without a length, and a run that continues with fewer machines give no warning."""
    for loop, machine in (
        (LoopFacts(4, "", batches_per_epoch=33, batches_given=33), MachineFacts()),
        (LoopFacts(4), MachineFacts(processes=2)),
        (LoopFacts(4, "", batches_per_epoch=17, batches_given=33), MachineFacts(processes=2, intended=4)),
    ):
        for by_process in (True, False):
            for length in (33, 51, 99):
                facts = Facts(loop, machine)
                line = describe_counting("LambdaLR", length, facts, 1, by_process=by_process, built_before=True)
                assert line is None


def test_a_scripts_own_function_is_not_called() -> None:
    """It may count its calls, so only the start is shown. A plateau, or an unknown epoch length, shows nothing."""
    calls = itertools.count()
    start = "LambdaLR: learning rate 1 start (step 0); one epoch is 30 optimizer steps"
    for wrapped in (False, True):
        optimizer = sgd()
        schedule: Any = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + 0 * next(calls))
        if wrapped:
            schedule = lr_scheduler.ChainedScheduler([schedule, lr_scheduler.StepLR(optimizer, 2)])
        before = next(calls)
        assert describe_torch_scheduler(schedule, 1, 30) == start.replace("LambdaLR", type(schedule).__name__)
        assert next(calls) == before + 1
    assert describe_torch_scheduler(lr_scheduler.ReduceLROnPlateau(sgd()), 1, 30) is None
    assert describe_torch_scheduler(lr_scheduler.LambdaLR(sgd(), lambda step: 1.0), 1, None) is None


def test_a_schedule_without_an_end_is_shown_over_an_epoch() -> None:
    """The report shows start and the end of the first epoch."""
    line = describe_torch_scheduler(lr_scheduler.ExponentialLR(sgd(), 0.5), 1, 3)
    assert line == (
        "ExponentialLR: learning rate 1 start (step 0), 0.125 after one epoch (step 3); one epoch is 3 optimizer steps"
    )


@pytest.mark.parametrize(("times", "typed", "steps"), [(1, 1, 100), (2, 2, 50), (3, 3, 34), (1, 2, 100)])
def test_the_loop_goes_on_after_the_schedule(times: int, typed: int, steps: int) -> None:
    """It is logged once, in the first step too many, with both numbers. The end then logs nothing."""
    length = SchedulerLength(linear(sgd()), times, typed)
    lines = [length.count() for _ in range(steps + 3)]
    assert [line is None for line in lines] == [True] * steps + [False, True, True]
    assert f"built for {steps} steps, but the loop continues: this was step {steps + 1}." in str(lines[steps])
    assert ("counted 2 times per optimizer step" in str(lines[steps])) is (typed == 2)
    assert length.at_end(0.0) is None


@pytest.mark.parametrize(("times", "typed", "steps"), [(1, 1, 100), (2, 2, 50), (1, 2, 100)])
def test_the_loop_ends_before_the_schedule(times: int, typed: int, steps: int) -> None:
    """The end logs both numbers, the rate that was reached, and the number to write."""
    length = SchedulerLength(linear(sgd()), times, typed)
    assert length.at_end(0.25) is None  # it never ran
    for _ in range(steps - 20):
        assert length.count() is None
    line = length.at_end(0.25)
    assert f"built for {steps} steps, but the loop took {steps - 20}: it ended at a learning rate of 0.25" in str(line)
    assert f"Make it {(steps - 20) * typed} steps long" in str(line)
    length.resume(100)
    assert length.at_end(0.0) is None


def test_a_schedule_as_long_as_the_loop_says_nothing() -> None:
    """Neither the loop nor its end logs a line."""
    length = SchedulerLength(linear(sgd()), 1, 1)
    assert [length.count() for _ in range(100)] == [None] * 100
    assert length.at_end(0.0) is None
