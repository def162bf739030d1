"""The loop contract: the effect of each call, the same on every path."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

import pytest
import torch
from on_paths import LOOP, on_paths
from paths import (
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    net_and_sgd,
    own_batch,
    raised,
    running,
    same,
    start,
    take_plain_steps,
    take_steps,
    weights,
)

from zero_plugin import Accelerator, DummyOptim, DummyScheduler
from zero_plugin.errors import ConfigError, LoopError


def prepared(accelerator: Accelerator, lr: float = 0.1) -> tuple[Any, Any]:
    model = make_net()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_backward_never_steps(path: str) -> None:
    """Weights change only in the step that ends a window."""
    with running(path, gradient_accumulation_steps=3) as accelerator:
        model, optimizer = prepared(accelerator)
        before = weights(accelerator, model)
        for i in range(3):
            accelerator.backward(loss_of(model, own_batch(i)))
            assert same(weights(accelerator, model), before), f"backward {i} changed the weights"
            assert accelerator.sync_gradients is (i == 2)
            optimizer.step()
            assert same(weights(accelerator, model), before) is (i < 2), f"step {i}"
            assert optimizer.applied_steps == (i == 2)
        after = weights(accelerator, model)
        optimizer.zero_grad()
        assert same(weights(accelerator, model), after)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_step_without_a_backward_changes_nothing(path: str) -> None:
    """A second `step()`, or one before any backward, applies nothing."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        before = weights(accelerator, model)
        optimizer.step()
        assert same(weights(accelerator, model), before)
        take_steps(accelerator, model, optimizer, [0])
        after = weights(accelerator, model)
        optimizer.step()
        assert same(weights(accelerator, model), after)


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_gradients_that_the_loop_never_clears(path: str) -> None:
    """They are dropped after each step, and a second `step()` applies nothing. Each case is logged once."""
    plain, sgd = net_and_sgd(momentum=0.9)
    take_plain_steps(plain, sgd, range(3))
    for never in (True, False):
        with running(path) as accelerator, contextlib.redirect_stderr(io.StringIO()) as said:
            model, optimizer = accelerator.prepare(*net_and_sgd(momentum=0.9))
            for i in range(3):
                accelerator.backward(loss_of(model, own_batch(i)))
                optimizer.step()
                if not never:
                    optimizer.step()
                    optimizer.zero_grad()
                    optimizer.step()  # as in plain torch, no gradients are left after zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict())
            if accelerator.is_main_process:
                assert said.getvalue().count("zero_grad() was not called since the last applied step") == never
                assert said.getvalue().count("step() was called twice without a backward() between") == (not never)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_direct_backward_is_refused(path: str) -> None:
    """`loss.backward()` would miss the window and the loss scale. The error names `accelerator.backward`."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)

        def direct() -> None:
            loss_of(model, own_batch(0)).backward()
            optimizer.step()

        raised(LoopError, "accelerator.backward(loss)", by=direct)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_zero_grad_is_harmless_first_and_last(path: str) -> None:
    """`zero_grad` first in the loop or after the step gives plain torch's training."""
    plain, sgd = net_and_sgd()
    for i in range(3):
        sgd.zero_grad()
        loss_of(plain, global_batch(i)).backward()
        sgd.step()
    for first in (True, False):
        with running(path) as accelerator:
            model, optimizer = prepared(accelerator)
            for i in range(3):
                if first:
                    optimizer.zero_grad()
                loss = loss_of(model, own_batch(i))
                accelerator.backward(loss)
                optimizer.step()
                if not first:
                    optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict())


def _plain_norm(step: int, scale: float = 1.0) -> float:
    plain = make_net()
    loss_of(plain, global_batch(step), scale).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clip_returns_the_norm_before_clipping(path: str) -> None:
    """The norm is the global batch's for any limit. The step moves by lr × limit. `inf` only measures."""
    for limit in (0.01, 1e6, math.inf):
        with running(path) as accelerator:
            model, optimizer = prepared(accelerator)
            before = weights(accelerator, model)
            accelerator.backward(loss_of(model, own_batch(0)))
            norm = accelerator.clip_grad_norm_(model.parameters(), limit)
            assert norm.dtype == torch.float32
            assert norm.ndim == 0
            wanted = _plain_norm(0)
            assert abs(float(norm) - wanted) < 1e-5 * wanted, f"{float(norm)} instead of {wanted} at limit {limit}"
            optimizer.step()
            after = weights(accelerator, model)
            moved = float(torch.stack([(after[n] - before[n]).norm() for n in before]).norm())
            assert abs(moved - 0.1 * min(wanted, limit)) < 1e-3 * moved, f"moved {moved} at limit {limit}"
            # The limit is that step's alone.
            accelerator.backward(loss_of(model, own_batch(1)))
            optimizer.step()
            then = weights(accelerator, model)
            moved = float(torch.stack([(then[n] - after[n]).norm() for n in before]).norm())
            assert moved > 0.02, "the next step was clipped too"


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_clip_inside_a_window_does_nothing(path: str) -> None:
    """Before the window's last micro-batch the norm is unknown: the call returns nan and does not change the step."""
    results = []
    for clips_early in (True, False):
        with running(path, gradient_accumulation_steps=2) as accelerator:
            model, optimizer = prepared(accelerator)
            for i in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, own_batch(i)))
                    if clips_early and i == 0:
                        assert math.isnan(float(accelerator.clip_grad_norm_(model.parameters(), 1e-3)))
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(weights(accelerator, model))
    assert same(*results)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clip_refuses_what_partitions_cannot_tell(path: str) -> None:
    """A subset of the parameters, or another norm, works if gradients are unpartitioned and is an error under ZeRO."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        subset = list(model.parameters())[:2]
        if is_zero(path):
            raised(LoopError, "subset", "prepared", by=lambda: accelerator.clip_grad_norm_(subset, 1.0))
            raised(LoopError, "norm_type=1", by=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, 1))
        else:
            plain = make_net()
            loss_of(plain, global_batch(0)).backward()
            gradients = [p.grad for p in plain.parameters() if p.grad is not None]
            one = float(torch.nn.utils.get_total_norm(gradients, 1))
            assert abs(float(accelerator.clip_grad_norm_(model.parameters(), math.inf, 1)) - one) < 1e-4
            part = float(torch.nn.utils.get_total_norm(gradients[:2]))
            assert abs(float(accelerator.clip_grad_norm_(subset, 0.01)) - part) < 1e-4
        raised(LoopError, "no prepared model", by=lambda: accelerator.clip_grad_norm_(make_net().parameters(), 1.0))
        optimizer.step()


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clipping_in_config_and_code_must_agree(path: str) -> None:
    """A limit that differs from the configuration's is an error with both. The same number and `inf` are not."""
    with running(path, deepspeed={"gradient_clipping": 0.5}) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        raised(ConfigError, "1.0", "0.5", by=lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        accelerator.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_measuring_leaves_the_configs_clipping(path: str) -> None:
    """`clip_grad_norm_(…, inf)` only measures. The configuration's limit still holds for the step."""
    with running(path, deepspeed={"gradient_clipping": 0.01}) as accelerator:
        model, optimizer = prepared(accelerator)
        before = weights(accelerator, model)
        accelerator.backward(loss_of(model, own_batch(0)))
        accelerator.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        after = weights(accelerator, model)
        moved = float(torch.stack([(after[n] - before[n]).norm() for n in before]).norm())
        assert abs(moved - 0.1 * 0.01) < 1e-6, f"moved {moved}"


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_backward_after_clip(path: str) -> None:
    """Under ZeRO the clipped gradients are final, so another backward before the step is an error."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        loss = loss_of(model, own_batch(1))
        if is_zero(path):
            raised(LoopError, "clip_grad_norm_", "step", by=lambda: accelerator.backward(loss))
            raised(LoopError, "must not be applied", "zero_grad()", by=optimizer.step)
        else:
            optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, own_batch(2)))
        optimizer.step()
        assert optimizer.applied_steps == (1 if is_zero(path) else 2)


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_no_sync_changes_no_number(path: str) -> None:
    """Backwards under `no_sync`, the model's too, add up as without it, with and without `accumulate`."""
    plain, sgd = net_and_sgd()
    for begin in (0, 2, 4):
        for i in (begin, begin + 1):
            (loss_of(plain, global_batch(i)) / 2).backward()
        sgd.step()
        sgd.zero_grad()
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        accelerator.backward(loss_of(model, own_batch(1)))
        optimizer.step()
        with accelerator.no_sync(), accelerator.accumulate(model):
            accelerator.backward(loss_of(model, own_batch(2)))
            optimizer.step()
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, own_batch(3)))
            optimizer.step()
        with accelerator.no_sync(model) if path == "single" else model.no_sync():
            accelerator.backward(loss_of(model, own_batch(4)))
            optimizer.step()  # it applies nothing, as at any place inside a window
        accelerator.backward(loss_of(model, own_batch(5)))
        optimizer.step()
        assert optimizer.applied_steps == 3
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_orders_without_meaning_are_errors(path: str) -> None:
    """Nested `accumulate`, a closure, unknown cadences, backward without a model, unknown models: LoopError."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        if path != "single":
            raised(LoopError, "no trained model", by=lambda: accelerator.backward(torch.zeros((), requires_grad=True)))
        model, optimizer = prepared(accelerator)

        def nest() -> None:
            with accelerator.accumulate(model), accelerator.accumulate(model):
                pass

        raised(LoopError, "inside accumulate()", by=nest)
        raised(LoopError, "closure", by=lambda: optimizer.step(lambda: 0.0))
        raised(LoopError, "get_state_dict", by=lambda: accelerator.save_model(model, ".", safe_serialization=False))
        if is_zero(path):
            raised(LoopError, "pickled", by=optimizer.__getstate__)
        raised(LoopError, '"sum", "mean"', by=lambda: accelerator.reduce(torch.ones(1), "min"))


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_prepare_refuses(path: str) -> None:
    """It refuses objects prepared before or elsewhere, two of either kind, and a foreign optimizer or schedule."""
    with running(path) as accelerator:
        first, second = make_net(), make_net()
        sgd = torch.optim.SGD(first.parameters(), lr=0.1)
        other = torch.optim.SGD(first.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
        dummy = DummyOptim(first.parameters())
        lazy = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyBatchNorm1d())
        late = torch.optim.SGD(lazy.parameters(), lr=0.1)
        raised(LoopError, "0.weight", "1.running_mean", "once on a batch", by=lambda: accelerator.prepare(lazy, late))
        raised(LoopError, "without its model", by=lambda: accelerator.prepare(dummy))
        raised(LoopError, "two optimizers", by=lambda: accelerator.prepare(first, sgd, other))
        raised(LoopError, "was not prepared", by=lambda: accelerator.prepare(DummyScheduler(dummy)))
        strange = torch.optim.SGD(second.parameters(), lr=0.1)
        raised(LoopError, "4 parameters (of 4)", by=lambda: accelerator.prepare(first, strange))
        loader = torch.utils.data.DataLoader(torch.zeros(16, 8), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(first, sgd, loader, schedule)
        prepared = (model, optimizer, loader, schedule)
        assert all(o is given for o, given in zip(accelerator.prepare(*prepared), prepared, strict=True))
        for twice in (sgd, *(() if first is model else (first,))):
            raised(LoopError, "already prepared", by=lambda twice=twice: accelerator.prepare(twice))
        raised(LoopError, "a second optimizer of the Sequential", by=lambda: accelerator.prepare(other))
        assert accelerator.prepare("a text") == "a text"
        assert accelerator.prepare(1, None) == (1, None)
        again = start(path)  # a notebook's cell that runs again
        raised(LoopError, "another Accelerator has prepared", by=lambda: again.prepare(model, optimizer, loader))


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_two_models_train_side_by_side(path: str) -> None:
    """Each backward finds the model of its loss. Each model trains as it would alone."""
    plain, sgd = net_and_sgd()
    take_plain_steps(plain, sgd, range(2))
    with running(path) as accelerator:
        one, optimizer_one = prepared(accelerator)
        two, optimizer_two = prepared(accelerator)
        for i in range(2):
            for model in (one, two):
                accelerator.backward(loss_of(model, own_batch(i)))
            for optimizer in (optimizer_one, optimizer_two):
                optimizer.step()
                optimizer.zero_grad()
        assert_near(weights(accelerator, one), plain.state_dict())
        assert_near(weights(accelerator, two), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_backward_takes_tensors_arguments(path: str) -> None:
    """`gradient` weighs the loss, and `retain_graph` works, as for `Tensor.backward`."""
    plain, sgd = net_and_sgd()
    (3 * loss_of(plain, global_batch(0))).backward()
    sgd.step()
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)), gradient=torch.tensor(2.0), retain_graph=True)
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_gather_reduce_and_print(path: str) -> None:
    """Collectives run over the processes, and each process knows its own facts."""
    with running(path) as accelerator:
        rank, world = accelerator.process_index, accelerator.num_processes
        assert (accelerator.is_main_process, accelerator.is_last_process) == (rank == 0, rank == world - 1)
        assert accelerator.is_local_main_process is (accelerator.local_process_index == 0)
        rows = accelerator.gather({"x": torch.full((2,), float(rank))})["x"]
        assert rows.tolist() == [float(r) for r in range(world) for _ in range(2)]
        assert accelerator.gather(torch.tensor(rank)).tolist() == list(range(world))
        assert float(accelerator.reduce(torch.tensor(rank + 1.0))) == world * (world + 1) / 2
        assert float(accelerator.reduce(torch.tensor(rank + 1.0), "mean")) == (world + 1) / 2
        accelerator.wait_for_everyone()
        accelerator.print("printed by", rank)


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_end_training_twice(path: str) -> None:
    """A second call does nothing. The prepared optimizer then says that training has ended."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        accelerator.end_training()
        accelerator.end_training()
        raised(LoopError, "has ended", by=lambda: optimizer.param_groups)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_last_micro_batch_without_a_backward(path: str) -> None:
    """If the script skips a bad batch at the end of a window, the processes average the other gradients."""
    for by_script in (False, True):
        plain = make_net()
        size = 1 if by_script else 2  # if the script ends windows itself, they have as many micro-batches as backwards
        (loss_of(plain, global_batch(0)) / size).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        with running(path, gradient_accumulation_steps=2) as accelerator:
            model, optimizer = prepared(accelerator)
            for i in range(2):
                with contextlib.nullcontext() if by_script else accelerator.accumulate(model):
                    if by_script:
                        accelerator.sync_gradients = i == 1
                    if i == 0:
                        accelerator.backward(loss_of(model, own_batch(i)))
                    optimizer.step()
            assert optimizer.applied_steps == 1
            assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_a_backward_that_fails_inside_a_micro_batch_is_not_counted(path: str) -> None:
    """After `zero_grad()` and the next batch, the window has as many micro-batches as losses."""
    plain = make_net()
    for i in (1, 2):
        (loss_of(plain, global_batch(i)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with running(path, gradient_accumulation_steps=2) as accelerator:
        model, optimizer = prepared(accelerator)
        for i in range(3):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, own_batch(i)))
                if i == 0:
                    optimizer.session.on_failure()
                    optimizer.zero_grad()
                    continue
                optimizer.step()
        assert optimizer.applied_steps == 1
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_a_step_hook_that_raises(path: str) -> None:
    """The step is not applied, and `zero_grad()` drops its gradients, so the next step does not apply them either."""
    plain = make_net()
    loss_of(plain, global_batch(1)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)

        def fail(*_: Any) -> None:
            raise ArithmeticError

        hook = optimizer.register_step_pre_hook(fail)
        accelerator.backward(loss_of(model, own_batch(0)))
        raised(ArithmeticError, by=optimizer.step)
        hook.remove()
        raised(LoopError, "zero_grad()", by=optimizer.step)
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, own_batch(1)))
        optimizer.step()
        assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clipping_twice(path: str) -> None:
    """The tighter limit holds, whichever comes first. The second norm is that of clipped gradients."""
    for limits in ((0.02, 0.03), (0.03, 0.02)):
        plain = make_net()
        loss_of(plain, global_batch(0)).backward()
        norms = [float(torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)) for limit in limits]
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        with running(path) as accelerator:
            model, optimizer = prepared(accelerator)
            accelerator.backward(loss_of(model, own_batch(0)))
            found = [float(accelerator.clip_grad_norm_(model.parameters(), limit)) for limit in limits]
            assert found == pytest.approx(norms, rel=1e-3)
            optimizer.step()
            assert_near(weights(accelerator, model), plain.state_dict())


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_clipping_before_the_first_backward(path: str) -> None:
    """The call clips nothing, and the loop continues."""
    with running(path) as accelerator:
        model, optimizer = prepared(accelerator)
        for limit in (1.0, math.inf):
            assert float(accelerator.clip_grad_norm_(model.parameters(), limit)) == 0.0
        accelerator.backward(loss_of(model, own_batch(0)))
        assert float(accelerator.clip_grad_norm_(model.parameters(), 1.0)) > 0.0
        optimizer.step()
        assert optimizer.applied_steps == 1
