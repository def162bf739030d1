"""Steps whose gradients are not finite: skipped on every path, in every precision, and never for ever."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import torch
import torch.distributed as dist
from paths import (
    FURTHER,
    PAIR,
    SINGLE,
    checks_on,
    is_zero,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    weights,
)
from torch import Tensor, nn

from zero_plugin.errors import LoopError


def _issued_operations() -> int:
    """Operations that this process has given to all of its groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def _poisoned(model: Any, step: int, value: float = float("nan")) -> Tensor:
    """A loss that is finite on all processes but the last, where it is `value`."""
    last = dist.get_rank() == dist.get_world_size() - 1
    return loss_of(model, own_batch(step)) * (value if last else 1.0)


def _prepared(accelerator: Any, **arguments: Any) -> tuple[Any, Any, Any]:
    model = make_net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, **arguments)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
    return accelerator.prepare(model, sgd, schedule)


def check_a_step_that_is_not_finite_is_skipped(path: str) -> None:
    """fp32 and bf16, nan and inf, clipped, measured or neither: weights, momenta and schedule stay; it is said once."""
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


def check_the_run_stops_after_many_skips(path: str) -> None:
    """With a LoopError that names the first parameter whose gradient is not finite, on every process."""

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
                optimizer.window.clip(math.inf)
                before = _issued_operations()
                assert optimizer.session.first_nonfinite() == "bad.weight"
                assert _issued_operations() == before + 1, "one collective, whatever the number of parameters"
                optimizer.zero_grad()
            raised(LoopError, "3 steps in a row", "bad.weight", by=step)


def check_the_number_of_skips(path: str) -> None:
    """18 in a row by default, as many as the scale of fp16 has halvings, and what the section's numbers make of it."""
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


def check_unchecked_bf16_applies(path: str) -> None:
    """`bf16.check_grad_overflow: false` asks for it: the gradients are applied as they are."""
    section = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    with running(path, deepspeed=section) as accelerator:
        model, optimizer, _ = _prepared(accelerator)
        accelerator.backward(_poisoned(model, 0))
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert any(tensor.isnan().any() for tensor in weights(accelerator, model).values())


def check_sparse_gradients_are_looked_at(path: str) -> None:
    """An embedding with sparse gradients trains, and is skipped like any other."""
    with running(path) as accelerator:
        model: Any = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for factor in (1.0, float("nan")):
            before = weights(accelerator, model)
            accelerator.backward(model(torch.tensor([[1, 2], [3, 3]])).sum() * factor)
            optimizer.step()
            assert optimizer.step_was_skipped is (factor != 1.0)
            assert same(weights(accelerator, model), before) is (factor != 1.0)


CHECKS = {
    **checks_on(
        dict.fromkeys((*SINGLE, *PAIR)),
        [check_a_step_that_is_not_finite_is_skipped, check_the_run_stops_after_many_skips],
    ),
    **checks_on(FURTHER, [check_a_step_that_is_not_finite_is_skipped, check_the_run_stops_after_many_skips]),
    **checks_on(("single", "ddp", "zero2"), [check_the_number_of_skips, check_unchecked_bf16_applies]),
    **checks_on(("single",), [check_sparse_gradients_are_looked_at]),
}
