"""Learning rates as applied: real schedules and placeholders, both step counts, every way of preparing."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_paths import on_paths
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    take_steps,
    weights,
)
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import DummyOptim, DummyScheduler
from zero_plugin.errors import LoopError

STEPS = 5


def _adamw(model: Any) -> torch.optim.Optimizer:
    """Build AdamW, which offload converts to DeepSpeed's kernel; eps keeps the first steps well conditioned."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)


def _train(path: str, build: Callable[[Any], Any], *, counts: str, when: str, **config: Any) -> tuple[list[Any], Any]:
    """Applied rates of each step, and the final weights; `build` makes the schedule of an optimizer.

    Args:
        path: the path to train on.
        build: builds the schedule on an optimizer; None for no schedule.
        counts: `scheduler_counts`.
        when: whether the schedule is prepared `together` with its optimizer, `later` on the prepared one, or `never`.
        **config: the DeepSpeed part.
    """
    with running(path, counts=counts, deepspeed=config) as accelerator:
        model = make_net()
        optimizer: Any = _adamw(model)
        if when == "together":
            model, optimizer, schedule = accelerator.prepare(model, optimizer, build(optimizer))
            # Also hold the optimizer itself, not only its groups, which load_state_dict() replaces.
            assert schedule.scheduler.optimizer is optimizer.optimizer
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
            schedule = build(optimizer)
            if when == "later":
                schedule = accelerator.prepare(schedule)
        rates = []
        for i in range(STEPS):
            rates.append([group["lr"] for group in optimizer.param_groups])
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return rates, weights(accelerator, model)


def _plain(build: Callable[[Any], Any], times: int = 1) -> tuple[list[Any], Any]:
    model = make_net()
    optimizer = _adamw(model)
    schedule = build(optimizer)
    rates = []
    for i in range(STEPS):
        rates.append([group["lr"] for group in optimizer.param_groups])
        loss_of(model, global_batch(i)).backward()
        optimizer.step()
        for _ in range(times):
            if not isinstance(schedule, OneCycleLR) or schedule.last_epoch < schedule.total_steps - 1:
                schedule.step()
        optimizer.zero_grad()
    return rates, model.state_dict()


def _lambda(optimizer: Any) -> Any:
    return LambdaLR(optimizer, lambda step: 0.7**step)


def _one_cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS + 1)


def _sequential(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=2)
    second = lr_scheduler.ExponentialLR(optimizer, 0.5)
    return SequentialLR(optimizer, [first, second], milestones=[2])


def _chained(optimizer: Any) -> Any:
    return lr_scheduler.ChainedScheduler([_lambda(optimizer), lr_scheduler.StepLR(optimizer, 2, 0.5)])


def _equal(got: tuple[list[Any], Any], wanted: tuple[list[Any], Any]) -> None:
    assert torch.allclose(torch.tensor(got[0]), torch.tensor(wanted[0]), rtol=1e-9), f"{got[0]} wanted {wanted[0]}"
    assert_near(got[1], wanted[1])


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_real_schedules_stay_attached(path: str) -> None:
    """The user's schedule drives the running optimizer (rates and momenta), also if that one replaced the user's."""
    for build in (_lambda, _one_cycle, _sequential, _chained):
        _equal(_train(path, build, counts="steps", when="together"), _plain(build))


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_schedules_know_the_step_that_runs(path: str) -> None:
    """torch does not warn of an overridden `step`, also if ZeRO steps an optimizer in parts, as it does an SGD."""
    with running(path) as accelerator, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*optimizer.step")
        model = make_net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, _one_cycle(optimizer))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        schedule.step()


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_schedules_on_the_prepared_optimizer(path: str) -> None:
    """A schedule built after `prepare` may be prepared or stepped directly."""
    for when in ("later", "never"):
        _equal(_train(path, _lambda, counts="steps", when=when), _plain(_lambda))


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_real_schedules_count_processes(path: str) -> None:
    """With Accelerate's counting a schedule advances W per applied step.

    OneCycleLR stops at its end without an error.
    """
    world = dist.get_world_size()
    for build in (_lambda, _one_cycle):
        _equal(_train(path, build, counts="processes", when="together"), _plain(build, times=world))


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_split_batches_count_steps(path: str) -> None:
    """With `split_batches` a real schedule advances once per applied step in both countings."""
    with running(path, counts="processes", split_batches=True) as accelerator:
        model = make_net()
        sgd = _adamw(model)
        model, optimizer, schedule = accelerator.prepare(model, sgd, _lambda(sgd))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        schedule.step()
        assert abs(optimizer.param_groups[0]["lr"] - 0.01 * 0.7) < 1e-12


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_plateau(path: str) -> None:
    """ReduceLROnPlateau counts measurements: one per call, with its metric, in both countings, inside a window too."""
    for counts, size in (("steps", 1), ("processes", 1), ("steps", 2)):
        with running(path, counts=counts, gradient_accumulation_steps=size) as accelerator:
            model = make_net()
            adamw = _adamw(model)
            plateau = ReduceLROnPlateau(adamw, factor=0.1, patience=1)
            model, optimizer, schedule = accelerator.prepare(model, adamw, plateau)
            rates = []
            for _ in range(4):
                accelerator.backward(loss_of(model, own_batch(0)))
                optimizer.step()
                schedule.step(1.0)
                optimizer.zero_grad()
                rates.append(optimizer.param_groups[0]["lr"])
            assert torch.allclose(torch.tensor(rates), torch.tensor([0.01, 0.01, 0.001, 0.001])), rates


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_a_plateau_of_each_process_own_loss(path: str) -> None:
    """Every process refuses it before a step uses the different rates. With the mean loss, or one process, it works."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for reduces in (True, False):
        with running(path, gradient_accumulation_steps=2) as accelerator:
            model = make_net()
            adamw = _adamw(model)
            plateau = ReduceLROnPlateau(adamw, factor=0.5, patience=0)
            model, optimizer, schedule = accelerator.prepare(model, adamw, plateau)

            def window(step: int, model=model, optimizer=optimizer) -> None:
                for micro in range(2):
                    take_steps(accelerator, model, optimizer, [2 * step + micro])

            for step in range(2):
                window(step)
                loss = torch.tensor(1.0 + step if rank else 1.0 - step)  # falls on process 0, and rises on the others
                schedule.step(float(accelerator.reduce(loss, "mean") if reduces else loss))
            before = weights(accelerator, model)
            words = ("group 0: lr: 0.01 on rank 0", "0.005 on rank 1", "accelerator.reduce(loss")
            if reduces or world == 1:
                window(3)
                assert not same(weights(accelerator, model), before)
            else:
                raised(LoopError, *words, by=lambda window=window: window(3))


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_numbers_of_a_group_that_differ(path: str) -> None:
    """If the processes set different values for a group's number, one of the next two steps fails."""
    cases: list[tuple[str, Any]] = [("lr", 0.1), ("weight_decay", 0.2), ("betas", (0.5, 0.9))]
    if not is_zero(path):
        cases.append(("lr", torch.tensor(0.5)))
    for key, own in cases:
        with running(path) as accelerator:
            model = make_net()
            groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.01, eps=1e-3))

            def train(steps: range, model=model, optimizer=optimizer, key=key, own=own) -> None:
                for step in steps:
                    accelerator.backward(loss_of(model, own_batch(step)))
                    if dist.get_rank() == 1 and step > 1:
                        optimizer.param_groups[1][key] = own
                    optimizer.step()
                    optimizer.zero_grad()

            train(range(2))
            if dist.get_world_size() == 1:
                train(range(2, 4))
            else:
                value = own.item() if isinstance(own, torch.Tensor) else own
                words = (f"group 1: {key}: ", "on rank 0", f"{value} on rank 1")
                raised(LoopError, *words, by=lambda train=train: train(range(2, 4)))


def _section(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_a_section_without_a_scheduler_steps_by_itself(path: str) -> None:
    """DeepSpeed steps the configuration's schedule, although the loop never asks for it."""
    with running(path, deepspeed={"scheduler": _section("WarmupLR", **_WARMUP)}) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _adamw(model))
        rates = []
        for i in range(STEPS):
            rates.append(optimizer.param_groups[0]["lr"])
            take_steps(accelerator, model, optimizer, [i])
        assert torch.allclose(torch.tensor(rates), 0.01 * torch.tensor([0, 0, 0.25, 0.5, 0.75])), rates


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_placeholder_schedules_count(path: str) -> None:
    """DummyScheduler's numbers are optimizer steps, or are divided by the processes. Typed numbers are always steps."""
    world = dist.get_world_size()
    for counts, divisor in (("steps", 1), ("processes", world)):
        for typed in (True, False):
            section = _section("WarmupLR", **_WARMUP) if typed else _section("WarmupLR", warmup_num_steps="auto")
            wanted = 4 if typed else 8 // divisor
            config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "scheduler": section}
            with running(path, counts=counts, deepspeed=config) as accelerator:
                model = make_net()
                adamw = DummyOptim(model.parameters(), lr=0.01)
                dummy = DummyScheduler(adamw) if typed else DummyScheduler(adamw, warmup_num_steps=8)
                model, optimizer, schedule = accelerator.prepare(model, adamw, dummy)
                assert accelerator.resolved is not None
                assert accelerator.resolved.scheduler is not None
                assert accelerator.resolved.scheduler.params["warmup_num_steps"] == wanted
                for i in range(2):
                    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
                    accelerator.backward(loss_of(model, own_batch(i)))
                    optimizer.step()
                    schedule.step()
                if typed:
                    assert abs(optimizer.param_groups[0]["lr"] - 0.0025) < 1e-9


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_a_placeholder_with_a_callable(path: str) -> None:
    """`lr_scheduler_callable` gets the running optimizer. The prepared scheduler drives its schedule."""
    with running(path) as accelerator:
        model = make_net()
        placeholder = DummyOptim(model.parameters(), lr=0.01)
        dummy = DummyScheduler(placeholder, lr_scheduler_callable=_lambda)
        model, optimizer, schedule = accelerator.prepare(model, placeholder, dummy)
        for i in range(2):
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
            schedule.step()
        assert abs(optimizer.param_groups[0]["lr"] - 0.01 * 0.49) < 1e-12
        assert schedule.scheduler.optimizer is optimizer.optimizer


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_schedule_waits_for_the_window(path: str) -> None:
    """`scheduler.step()` in every micro-batch advances once per applied step."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model = make_net()
        adamw = _adamw(model)
        model, optimizer, schedule = accelerator.prepare(model, adamw, _lambda(adamw))
        for i in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(i)))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        assert abs(optimizer.param_groups[0]["lr"] - 0.01 * 0.49) < 1e-12
        state = schedule.state_dict()
        assert state["last_epoch"] == 2
        schedule.load_state_dict({**state, "last_epoch": 7})
        assert schedule.scheduler.last_epoch == 7


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_rates_and_lengths_are_told(path: str) -> None:
    """The start logs the rates and both countings' ends. If schedule and loop differ in length, one line has both."""
    world, first, wrong = dist.get_world_size(), dist.get_rank() == 0, list[str]()
    for kind in ("real", "section", "alone"):
        for steps, wanted in (
            (2, "but the loop took 2"),
            (4 if kind != "real" else 2 * STEPS, None),
            (6, "the loop continues"),
        ):
            if kind == "real" and wanted == "the loop continues":
                continue  # OneCycleLR refuses to
            told = io.StringIO()
            with contextlib.redirect_stderr(told), pytest.MonkeyPatch.context() as patch:
                patch.setenv("ZERO_PLUGIN_VERBOSE", "1")  # shows the rates
                config: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
                if kind != "real":
                    params = {"total_num_steps": 4, "warmup_num_steps": 1, "warmup_max_lr": 0.01}
                    config["scheduler"] = _section("WarmupDecayLR", **params)
                with running(path, counts="processes", deepspeed=config if kind != "real" else {}) as accelerator:
                    model = make_net()
                    optimizer: Any = _adamw(model) if kind == "real" else DummyOptim(model.parameters(), lr=0.01)
                    given = (
                        [OneCycleLR(optimizer, max_lr=0.02, total_steps=2 * STEPS * world)] if kind == "real" else []
                    )
                    given = [DummyScheduler(optimizer)] if kind == "section" else given
                    model, optimizer, *schedules = accelerator.prepare(model, optimizer, *given)
                    for i in range(steps):
                        accelerator.backward(loss_of(model, own_batch(i)))
                        optimizer.step()
                        for schedule in schedules:
                            schedule.step()
            lines = told.getvalue().splitlines()
            for what, words, expected in (
                ("rates", ("learning rate", "start (step 0)"), True),
                ("both ends", ("with scheduler_counts: steps it would be",), kind == "real" and world > 1),
                ("lengths", ("is built for",), wanted is not None),
                ("lengths as they are", ("is built for", wanted or ""), wanted is not None),
            ):
                count = sum(all(word in line for word in words) for line in lines)
                if count != (first and expected):
                    wrong.append(f"{what}: {count} lines: {lines}")
    assert not wrong, wrong[0]  # at the end, since the other processes find no mistake


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", "zero2-cpu", daily=("ddp", "zero2-cpu"))
def test_lengths_in_the_other_counting_are_told(path: str) -> None:
    """A warning names both lengths and the key if the length equals the loader's whole epochs in the other counting.

    The schedule is built before the loader is divided, after it, or before a loader that comes last.
    """
    data = TensorDataset(torch.zeros(40, 8), torch.zeros(40, 4))
    given, prepared = 10, 10 // dist.get_world_size()
    wrong = []
    for counts, when, epochs_of, warned in (
        ("processes", "before", given, ""),
        ("processes", "after", prepared, "Write scheduler_counts: steps"),
        ("steps", "before", given, "Write scheduler_counts: processes"),
        ("steps", "after", prepared, ""),
        ("steps", "loader last", given, "Write scheduler_counts: processes"),
        ("processes", "placeholder", prepared, "Write scheduler_counts: steps"),
    ):
        told = io.StringIO()
        with contextlib.redirect_stderr(told), running(path, counts=counts) as accelerator:
            model, loader = make_net(), DataLoader(data, batch_size=4)
            optimizer: Any = DummyOptim(model.parameters(), lr=0.01) if when == "placeholder" else _adamw(model)
            if when == "after":
                loader = accelerator.prepare(loader)
            build = DummyScheduler if when == "placeholder" else lr_scheduler.CosineAnnealingLR
            schedule = build(optimizer, 3 * epochs_of)
            if when in ("after", "loader last"):
                accelerator.prepare(model, optimizer, schedule)
            if when != "after":
                accelerator.prepare(*([loader] if when == "loader last" else [model, optimizer, loader, schedule]))
        found = [line for line in told.getvalue().splitlines() if "scheduler_counts" in line]
        expected = bool(warned) and given != prepared
        warning = " ".join(line for line in found if line.startswith(("zero_plugin: warning", "Write")))
        if dist.get_rank() == 0 and (
            (warned in warning and "10 batches" in warning and "5 batches" in warning) if expected else warning
        ) != (True if expected else ""):
            wrong.append((counts, when, found))
    assert not wrong, wrong
