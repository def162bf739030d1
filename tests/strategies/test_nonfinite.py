"""Steps with non-finite gradients are skipped on every path, in every precision, and never forever."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, on_paths
from paths import (
    Reads,
    assert_near,
    global_batch,
    is_zero,
    listening,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    weights,
)
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zero_plugin.distributed.collectives import gather_object
from zero_plugin.errors import LoopError
from zero_plugin.loop.clip import clip


def _issued_operations() -> int:
    """Count the operations that this process has given to all of its groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def _poisoned(model: Any, step: int, value: float = float("nan")) -> Tensor:
    """Return a loss that is finite on all processes except the last, where it is `value`."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return loss_of(model, own_batch(step)) * (value if last else 1.0)


def _prepared(accelerator: Any, **arguments: Any) -> tuple[Any, Any, Any]:
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
    return accelerator.prepare(model, sgd, schedule)


@on_paths(*ALL, daily=("ddp", "zero0", "zero2", "zero2-cpu", "zero3-cpu"))
def test_a_step_that_is_not_finite_is_skipped(path: str) -> None:
    """In fp32 and bf16, with nan and inf, clipped or not: weights, momenta and schedule stay. One line is logged."""
    for precision in ("no", "bf16"):
        with running(path, mixed_precision=precision) as accelerator:
            model, optimizer, schedule = _prepared(accelerator)

            def step(loss: Tensor, limit: float | None) -> None:
                accelerator.backward(loss)
                if limit is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), limit)  # noqa: B023
                    assert torch.isfinite(loss) or dist.get_world_size() > 1 or not torch.isfinite(norm)
                optimizer.step()  # noqa: B023
                schedule.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            step(loss_of(model, own_batch(0)), None)
            before, told = weights(accelerator, model), io.StringIO()
            with contextlib.redirect_stderr(told):
                for count, (value, limit) in enumerate(
                    [(float("nan"), None), (float("inf"), None), (float("nan"), 0.1), (float("inf"), float("inf"))]
                ):
                    step(_poisoned(model, 1, value), limit)
                    assert optimizer.step_was_skipped
                    assert accelerator.optimizer_step_was_skipped
                    assert optimizer.skipped_in_a_row == count + 1
                    assert optimizer.applied_steps == 1
                    assert optimizer.param_groups[0]["lr"] == 0.05
                    assert same(weights(accelerator, model), before)
            lines = [line for line in told.getvalue().splitlines() if "was skipped" in line]
            assert len(lines) == (dist.get_rank() == 0), lines
            step(loss_of(model, own_batch(2)), 0.1)
            assert optimizer.skipped_in_a_row == 0
            assert not optimizer.step_was_skipped
            after = weights(accelerator, model)
            assert not same(after, before)
            assert all(torch.isfinite(tensor).all() for tensor in after.values())


@on_paths("single", "ddp")
def test_a_process_leaves_out_the_step_that_others_skip(path: str) -> None:
    """Under DDP a script may check its own loss. The first steps' comparisons wait for no step of this process."""
    with running(path) as accelerator:
        model, optimizer, schedule = _prepared(accelerator)
        for step in range(4):
            loss = _poisoned(model, step) if step % 2 else loss_of(model, own_batch(step))
            accelerator.backward(loss)
            if loss.isfinite():
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
        first, *others = gather_object([{name: t.tolist() for name, t in model.state_dict().items()}])
        assert all(other == first for other in others)
        assert optimizer.applied_steps == 2


@on_paths(*ALL, daily=("ddp", "zero0", "zero2"))
def test_the_run_stops_after_many_skips(path: str) -> None:
    """A LoopError on every process names the first parameter whose gradient is not finite."""

    class Poisoned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.clean, self.bad = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.clean(x) + torch.sqrt(self.bad(x) * 0.0)  # finite, with an infinite derivative

    precisions = ["no", "bf16"] if is_zero(path) else ["no", "fp16"]
    for precision in precisions:
        with running(path, mixed_precision=precision) as accelerator:
            model: Any = Poisoned()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            optimizer.session.most_skips = 3

            def step() -> None:
                accelerator.backward(loss_of(model, own_batch(0)))  # noqa: B023
                optimizer.step()  # noqa: B023

            step()
            step()
            assert optimizer.skipped_in_a_row == 2
            if is_zero(path) and dist.get_world_size() > 1:
                accelerator.backward(loss_of(model, own_batch(0)))
                clip(optimizer.window, optimizer.session, math.inf)
                before = _issued_operations()
                assert optimizer.session.first_nonfinite() == "bad.weight"
                assert _issued_operations() == before + 1, "one collective, whatever the number of parameters"
                optimizer.zero_grad()
            raised(LoopError, "3 steps in a row", "bad.weight", by=step)


@on_paths("single", "zero2-one-process", "ddp", "zero2", daily=("ddp", "zero2"))
def test_the_number_of_skips(path: str) -> None:
    """The default is 18 in a row, the number of halvings of fp16's scale. The section's numbers change it."""
    with running(path) as accelerator:
        _, optimizer, _ = _prepared(accelerator)
        assert optimizer.session.most_skips == 18
    if not is_zero(path):
        section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 4}
        with running(path, deepspeed={"fp16": section}) as accelerator:
            model, optimizer, _ = _prepared(accelerator)
            assert optimizer.loss_scale == 16

            def step() -> None:
                accelerator.backward(_poisoned(model, 0))
                optimizer.step()

            scales = []
            for _ in range(2):
                step()
                scales.append(optimizer.loss_scale)
            assert scales == [8, 4]
            raised(LoopError, "3 steps in a row", "The loss scale is 4", by=step)


@on_paths("single", "zero2-one-process", "ddp", "zero2", daily=("ddp", "zero2"))
def test_unchecked_bf16_applies(path: str) -> None:
    """With `bf16.check_grad_overflow: false` the gradients are applied unchecked."""
    section = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    with running(path, deepspeed=section) as accelerator:
        model, optimizer, _ = _prepared(accelerator)
        accelerator.backward(_poisoned(model, 0))
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert any(tensor.isnan().any() for tensor in weights(accelerator, model).values())


@on_paths("single", "ddp")
def test_unchecked_fp32_applies(path: str) -> None:
    """Without ZeRO in fp32, the same key turns off the check, and no line says that the key has no effect."""
    section = {"bf16": {"check_grad_overflow": False}}
    with listening() as messages, running(path, deepspeed=section, mixed_precision="no") as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
        accelerator.backward(_poisoned(model, 0))
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert any(tensor.isnan().any() for tensor in weights(accelerator, model).values())
        assert not any("has no effect" in message for message in messages), messages


@on_paths("single")
def test_sparse_gradients_are_looked_at(path: str) -> None:
    """An embedding with sparse gradients trains, and is skipped like any other.

    A fused kernel refuses it with torch's error.
    """
    with running(path) as accelerator:
        model: Any = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
        accelerator.backward(model(torch.tensor([[1, 2], [3, 3]])).sum())
        raised(RuntimeError, "`_fused_sgd` does not support sparse gradients", by=optimizer.step)
    with running(path) as accelerator:
        model: Any = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for factor in (1.0, float("nan")):
            before = weights(accelerator, model)
            accelerator.backward(model(torch.tensor([[1, 2], [3, 3]])).sum() * factor)
            optimizer.step()
            assert optimizer.step_was_skipped is (factor != 1.0)
            assert same(weights(accelerator, model), before) is (factor != 1.0)


Build = Callable[[Any], torch.optim.Optimizer]
FUSED: dict[str, Build] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, fused=True
    ),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.1, fused=True),
}
# Factors of the steps' losses, and the norm at which gradients are clipped.
FACTORS: list[tuple[float, float | None]] = [
    *((math.nan, None), (1.0, None), (math.inf, None), (1.0, 0.1), (math.nan, 0.1)),
    *((1.0, math.inf), (math.inf, 0.1), (math.inf, math.inf), (1.0, 0.1), (1.0, 100.0)),
]


def _train_plainly(build: Build, precision: str) -> nn.Module:
    """Return the weights after the applied steps of `FACTORS` in plain torch, on the batches of all processes."""
    plain = make_net()
    optimizer = build(plain.parameters())
    for step, (factor, limit) in enumerate(FACTORS):
        if math.isfinite(factor):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs = plain(global_batch(step)[0])
            (outputs.float() - global_batch(step)[1]).square().mean().backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()
    return plain


@on_paths("single", "ddp")
def test_a_fused_optimizer_skips_on_the_device(path: str) -> None:
    """The CPU reads no result of a step, clipped or not, until code asks.

    A step is plain torch's or changes nothing.
    """
    for precision in ("no", "bf16"):
        for name, build in FUSED.items():
            with running(path, mixed_precision=precision) as accelerator, listening() as messages:
                net = make_net()
                given = build(net.parameters())
                model, optimizer = accelerator.prepare(net, given)
                applied = in_a_row = 0
                for step, (factor, limit) in enumerate(FACTORS):
                    before = weights(accelerator, model), [t.clone() for s in given.state.values() for t in s.values()]
                    loss = _poisoned(model, step, factor)
                    with Reads() as reads:
                        accelerator.backward(loss)
                        if limit is not None:
                            norm = accelerator.clip_grad_norm_(model.parameters(), limit)
                        optimizer.step()
                        optimizer.zero_grad()
                    # A fused SGD sets its momentum to its first step's gradient. The kernel's own skip is unsafe there.
                    assert reads.count == (name == "SGD with momentum" and step < 2), (name, step)
                    skipped = not math.isfinite(factor)
                    assert optimizer.step_was_skipped is skipped, (name, step)
                    applied, in_a_row = applied + (not skipped), in_a_row + 1 if skipped else 0
                    assert (optimizer.applied_steps, optimizer.skipped_in_a_row) == (applied, in_a_row)
                    if limit is not None:
                        assert math.isinf(norm) is skipped
                    if skipped:
                        assert same(weights(accelerator, model), before[0]), (name, step)
                    if skipped and step:
                        after = [t for s in given.state.values() for t in s.values()]
                        assert all(torch.equal(*pair) for pair in zip(after, before[1], strict=True)), (name, step)
                    assert "found_inf" not in vars(given)
                lines = [message for message in messages if "was skipped" in message]
                assert len(lines) == (dist.get_rank() == 0)
                assert all("the step after 0 applied ones" in line for line in lines)
                found, wanted = weights(accelerator, model), _train_plainly(build, precision).state_dict()
                if path == "single":
                    assert same(found, dict(wanted)), (precision, name)
                assert_near(found, wanted, 1e-4 if precision == "no" else 0.02)


def _steps(accelerator: Any, model: Any, optimizer: Any, factors: Iterator[float] | list[float]) -> None:
    for step, factor in enumerate(factors):
        accelerator.backward(_poisoned(model, step, factor))
        optimizer.step()
        optimizer.zero_grad()


@on_paths("single", "ddp")
def test_what_nobody_asks_is_read_one_step_later(path: str) -> None:
    """A step counts the one before it and logs its skip then. A prepared scheduler asks at each step."""
    for scheduled in (False, True):
        with running(path) as accelerator, listening() as messages:
            net = make_net()
            adamw = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            schedule = [torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 0.5**step)] if scheduled else []
            model, optimizer, *schedule = accelerator.prepare(net, adamw, *schedule)
            for step in range(10):
                with Reads() as reads:
                    _steps(accelerator, model, optimizer, [math.nan if step == 3 else 1.0])
                    if scheduled:
                        schedule[0].step()
                assert reads.count == (1 if scheduled or step else 0), step
                said = [message for message in messages if "the step after 3 applied ones was skipped" in message]
                assert len(said) == (dist.get_rank() == 0 and step > 3 - scheduled), step
            assert optimizer.applied_steps == 9
            assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (9 * scheduled)


@on_paths("single", "ddp")
def test_a_fused_optimizer_stops_the_run(path: str) -> None:
    """It stops in the very step that is one skip too many, and names the parameter, though no code asked before."""
    with running(path) as accelerator:
        net: Any = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
        optimizer.session.most_skips = 3

        def step() -> None:
            accelerator.backward(loss_of(model, own_batch(0)) + 0 * net[1].bias.log().sum() * float("inf"))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            assert net[0].weight.grad.any(), "finite gradients stay too, to show the cause"
            optimizer.step()

        _steps(accelerator, model, optimizer, [1.0, math.nan, 1.0])
        step()
        step()
        raised(LoopError, "3 steps in a row", "after 2 applied ones", "1.bias", by=step)


@on_paths("single", "ddp")
def test_who_needs_the_answer_within_the_step(path: str) -> None:
    """Calls made after applied steps only, and the loss scale of fp16, get the answer immediately."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
        calls: list[int] = []
        optimizer.call_after_step(lambda: calls.append(optimizer.applied_steps))
        _steps(accelerator, model, optimizer, [1.0, math.nan, 1.0])
        assert calls == [1, 2]
    section = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    with running(path, deepspeed={"fp16": section}) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
        accelerator.backward(_poisoned(model, 0))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert optimizer.loss_scale == 8


@on_paths("single", "ddp")
def test_a_pending_skip_is_counted_in_the_end(path: str) -> None:
    """Its skip is logged immediately after the training ends or the memory is released."""
    for end in ("end_training", "free_memory"):
        with running(path) as accelerator, listening() as messages:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
            _steps(accelerator, model, optimizer, [1.0, math.nan])
            assert not messages[-1:] or "was skipped" not in messages[-1]
            getattr(accelerator, end)()
            said = [message for message in messages if "the step after 1 applied ones was skipped" in message]
            assert len(said) == (dist.get_rank() == 0)
            assert (optimizer.applied_steps, optimizer.skipped_in_a_row) == (1, 1)


@on_paths("single", "ddp")
def test_a_checkpoint_has_the_counts_of_a_pending_step(folder: Path, path: str) -> None:
    """This holds right after a step that no code asked about.

    Loading does not count a pending step on the loaded numbers.
    """
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), fused=True))
        _steps(accelerator, model, optimizer, [1.0, 1.0, math.nan])
        accelerator.save_state(folder / "skipped")
        _steps(accelerator, model, optimizer, [1.0])
        accelerator.save_state(folder / "applied")
        for name, counts in (("skipped", (2, 1)), ("applied", (3, 0))):
            _steps(accelerator, model, optimizer, [1.0])
            accelerator.load_state(folder / name)
            assert (optimizer.applied_steps, optimizer.skipped_in_a_row) == counts
            assert {float(state["step"]) for state in optimizer.state.values()} == {float(counts[0])}


@on_paths("single", "ddp")
def test_what_runs_around_a_step_is_not_run_for_a_skipped_one(path: str) -> None:
    """With hooks of one or all optimizers, a replaced `step` or a subclass, each step asks first."""
    seen: list[str] = []

    class Own(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append("a subclass")
            return super().step(closure)

    def note(*_: Any) -> None:
        seen.append("a hook")

    def replace(optimizer: Any) -> None:
        own = optimizer.step
        optimizer.step = lambda: seen.append("a replaced step") or own()

    ways: list[Callable[[Any], Any]] = [
        lambda optimizer: optimizer.register_step_pre_hook(note),
        lambda optimizer: optimizer.register_step_post_hook(note),
        lambda _: register_optimizer_step_pre_hook(note),
        lambda _: register_optimizer_step_post_hook(note),
        replace,
        lambda _: None,
    ]
    for way in ways:
        for clips in (False, True):
            with running(path) as accelerator:
                net = make_net()
                kind = Own if way is ways[-1] else torch.optim.AdamW
                given = kind(net.parameters(), fused=True)
                model, optimizer = accelerator.prepare(net, given)
                before = weights(accelerator, model)
                accelerator.backward(_poisoned(model, 0))
                if clips:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                handle = way(given)
                optimizer.step()
                assert seen == []
                assert optimizer.step_was_skipped
                assert same(weights(accelerator, model), before)
                optimizer.zero_grad()
                _steps(accelerator, model, optimizer, [1.0])
                assert len(seen) == 1
                seen.clear()
                if handle is not None:
                    handle.remove()
