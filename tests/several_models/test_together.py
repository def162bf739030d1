"""Several models on every path: teachers, joint losses, gradient penalties, shared calls, and refusals."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from gan import Case, discriminator_loss, generator_loss, make_nets, make_optimizer
from loops import Plain, Prepared, assert_trains_as_plain
from on_paths import LOOP, on_paths, without
from packaging.version import Version
from paths import (
    ZERO,
    assert_near,
    global_batch,
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset

from zero_plugin import DummyOptim
from zero_plugin.errors import LoopError
from zero_plugin.loop.together import set_loss_scale
from zero_plugin.strategies.precision import LossScale

SGD = Case(frozen=False)


def _sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_frozen_judge_passes_gradients_on(path: str) -> None:
    """In a perceptual loss, the gradient of a frozen model without an optimizer trains the model before it."""

    def train(loop: Plain) -> dict[str, Tensor]:
        torch.manual_seed(3)
        judge = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in judge.state_dict().items()}
        model = make_net()
        model, optimizer, other = loop.prepare(model, _sgd(model), judge)
        for i in range(3):
            x, y = loop.batch(i)
            loop.backward((other(model(x)) - other(y)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert same(loop.weights(other), before)
        if path == "zero3" and isinstance(loop, Prepared):
            partitioned = loop.unwrap(other)[0].weight
            assert partitioned.numel() == 0, "at stage 3 no process holds the whole of a model that is not trained"
        return loop.weights(model)

    assert_trains_as_plain(path, train)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_two_models_with_one_loss(path: str) -> None:
    """One backward serves two optimizers. One is a placeholder, and one has a schedule."""

    def train(loop: Plain) -> dict[str, Tensor]:
        one, two = make_net(), nn.Linear(4, 4)
        torch.manual_seed(9)
        two.reset_parameters()
        sgd = _sgd(one)
        adamw = DummyOptim if isinstance(loop, Prepared) else torch.optim.AdamW
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
        # In another order than that of the models.
        other = adamw(two.parameters(), lr=0.01, weight_decay=0.1, eps=1e-3)
        optimizer_two, one, schedule, two, optimizer_one = loop.prepare(other, one, schedule, two, sgd)
        for i in range(3):
            x, y = loop.batch(i)
            loop.backward((two(one(x)) - y).square().mean())
            for optimizer in (optimizer_one, optimizer_two):
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
        assert optimizer_one.param_groups[0]["lr"] == 0.1 * 0.5**3
        return loop.weights_of(one=one, two=two)

    assert_trains_as_plain(path, train, tolerance=1e-4)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_gradient_penalty(path: str) -> None:
    """WGAN-GP: `torch.autograd.grad` with a graph runs through the discriminator. At stage 3 it is an error."""

    def penalty(discriminator: Any, x: Tensor) -> Tensor:
        x = x[:, :6].clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(discriminator(x).sum(), x, create_graph=True)
        return (gradient.norm(2, dim=1) - 1).square().mean() + discriminator(x).mean()

    def train(loop: Plain) -> dict[str, Tensor]:
        generator, discriminator = make_nets()
        objects = generator, discriminator, make_optimizer(generator, SGD), make_optimizer(discriminator, SGD)
        _, discriminator, _, optimizer = loop.prepare(*objects)
        for i in range(3):
            loop.backward(penalty(discriminator, loop.batch(i)[0]))
            optimizer.step()
            optimizer.zero_grad()
        return loop.weights(discriminator)

    if path == "zero3":
        raised(LoopError, "create_graph=True", "stage 3", by=lambda: assert_trains_as_plain(path, train))
    else:
        assert_trains_as_plain(path, train, tolerance=1e-4)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_forwards_before_backwards(path: str) -> None:
    """Two losses of one model precede the first backward. Their gradients add up, also in a window."""
    plain = make_net()
    sgd = _sgd(plain)
    for i in range(3):
        for loss in [loss_of(plain, global_batch(2 * i)), loss_of(plain, global_batch(2 * i + 1))]:
            loss.backward()
        sgd.step()
        sgd.zero_grad()
    for steps in (1, 2):
        with running(path, gradient_accumulation_steps=steps) as accelerator:
            model = make_net()
            model, optimizer = accelerator.prepare(model, _sgd(model))
            for i in range(3):
                for loss in [loss_of(model, own_batch(2 * i)), loss_of(model, own_batch(2 * i + 1))]:
                    accelerator.backward(loss * steps)
                optimizer.step()
                optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_batch_norm_twice_in_a_loss(path: str) -> None:
    """A discriminator with running statistics runs on real and on generated samples before its one backward.

    Each process normalises by its own samples. The reference does too, and averages gradients by hand. If torch's own
    DDP fails, as in release 2.9, the path fails too.
    """

    def build() -> list[Any]:
        generator, plain = make_nets()
        models = generator, nn.Sequential(plain[0], nn.BatchNorm1d(10), nn.Tanh(), plain[2])
        return [*models, *(make_optimizer(model, SGD) for model in models)]

    def train(models: list[Any], backward: Any, average: Any) -> None:
        generator, discriminator, first, second = models
        for step in range(3):
            x, noise = own_batch(step)
            second.zero_grad()
            backward(discriminator_loss(generator, discriminator, noise, x[:, :6]))
            average(discriminator)
            second.step()
            first.zero_grad()
            backward(generator_loss(generator, discriminator, noise))
            average(generator)
            first.step()

    def average(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    plain = build()
    train(plain, lambda loss: loss.backward(), average)
    with running(path) as accelerator:
        models = list(accelerator.prepare(*build()))
        if path == "ddp" and Version(torch.__version__) < Version("2.10"):
            inplace = "modified by an inplace operation"
            theirs = build()
            theirs[1] = DistributedDataParallel(theirs[1])
            raised(RuntimeError, inplace, by=lambda: train(theirs, lambda loss: loss.backward(), lambda _: None))
            raised(RuntimeError, inplace, by=lambda: train(models, accelerator.backward, lambda _: None))
            return
        train(models, accelerator.backward, lambda _: None)
        for model, wanted in zip(models[:2], plain[:2], strict=True):
            state = weights(accelerator, model)
            assert_near({name: state[name] for name, _ in wanted.named_parameters()}, dict(wanted.named_parameters()))


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_reentrant_checkpoints(path: str) -> None:
    """In a backward inside the backward, the gradients' origin is found, though no walk of the graph would show it."""

    class Checkpointed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=True)

    def train(loop: Plain) -> dict[str, Tensor]:
        torch.manual_seed(14)
        one, two = Checkpointed(8), Checkpointed(4)
        one, two, first, second = loop.prepare(one, two, _sgd(one), _sgd(two))
        for i in range(3):
            x, y = loop.batch(i)
            x = x.clone().requires_grad_(True)  # reentrant checkpoints need it
            first.zero_grad()
            loop.backward((two(one(x)) - y).square().mean())
            first.step()
            second.zero_grad()
            loop.backward(two(y.clone().requires_grad_(True)).square().mean())
            second.step()
        return loop.weights_of(one=one, two=two)

    assert_trains_as_plain(path, train)


# In fp32, the optimizer of stage 0 is torch's own, which has no loss scale.
@on_paths(*without(LOOP, "zero0"), daily=("ddp", "zero2"))
def test_a_loss_scale_changes_inside_a_window(path: str) -> None:
    """Earlier gradients are rescaled. One loss through two models uses the smaller of their scales."""
    plain = make_net()
    sgd = _sgd(plain)
    for i in range(2):
        (loss_of(plain, global_batch(i)) / 2).backward()
    sgd.step()
    precision = "no" if is_zero(path) else "fp16"  # DeepSpeed trains in fp16 on GPUs only, but scales in fp32 too
    with running(path, gradient_accumulation_steps=2, mixed_precision=precision) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        session = optimizer.session
        if is_zero(path):
            session.scales_loss, session._scale = True, LossScale({})
        for i, scale in enumerate((1024.0, 64.0)):
            set_loss_scale(scale, optimizer.window, optimizer.session)
            accelerator.backward(loss_of(model, own_batch(i)))
            optimizer.step()
        assert session.loss_scale == 64.0
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5 if is_zero(path) else 1e-2)


@on_paths("single", "ddp")
def test_an_overflow_of_one_model(path: str) -> None:
    """In fp16 without DeepSpeed, one model's skipped steps lower its scale and that of a loss through both."""
    with running(path, mixed_precision="fp16") as accelerator:
        one, two = make_net(), make_net()[2:].append(nn.Linear(4, 16))
        one, two, first, second = accelerator.prepare(one, two, _sgd(one), _sgd(two))
        for _ in range(3):
            accelerator.backward(loss_of(one, own_batch(0)) * float("inf"))
            first.step()
            assert first.step_was_skipped
        scales = first.session.loss_scale, second.session.loss_scale
        assert scales[0] < scales[1]
        before = weights(accelerator, two)
        accelerator.backward(two(torch.cat([one(own_batch(0)[0])] * 4, dim=1)).square().mean())
        assert {first.session.loss_scale, second.session.loss_scale} == {scales[0]}
        for optimizer in (first, second):
            optimizer.step()
            assert not optimizer.step_was_skipped
        assert not same(weights(accelerator, two), before)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_a_loop_that_never_steps(path: str) -> None:
    """A loop that calls only `backward` gets one warning at its epoch's end."""
    with running(path) as accelerator, redirect_stderr(StringIO()) as said:
        model = make_net()
        loader: Any = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, _sgd(model), loader)
        for _ in range(3):
            for x in loader:
                accelerator.backward(model(x).square().mean())
                optimizer.zero_grad()
        accelerator.end_training()
    assert said.getvalue().count("optimizer.step() was never called") == accelerator.is_main_process


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_bf16_beside_a_teacher(path: str) -> None:
    """Under bf16, a model without an optimizer takes fp32 inputs like the trained one, and teaches the same."""

    def distill(student: Any, teacher: Any, x: Tensor) -> Tensor:
        return (student(x).float() - 2 * teacher(x).float()).square().mean()

    plain, judge = make_net(), make_net().requires_grad_(False)
    sgd = _sgd(plain)
    wanted = []
    for step in range(4):
        loss = distill(plain, judge, global_batch(step)[0])
        loss.backward()
        wanted.append(float(loss))
        sgd.step()
        sgd.zero_grad()
    with running(path, mixed_precision="bf16") as accelerator:
        student, teacher = make_net(), make_net().requires_grad_(False)
        student, optimizer, teacher = accelerator.prepare(student, _sgd(student), teacher)
        for step in range(4):
            loss = distill(student, teacher, own_batch(step)[0])
            accelerator.backward(loss)
            loss = accelerator.reduce(loss.detach(), "mean")
            assert abs(float(loss) - wanted[step]) < 0.02 * wanted[step]
            optimizer.step()
            optimizer.zero_grad()
        found, start = weights(accelerator, student), judge.state_dict()
        moved = {name: p.detach() - start[name] for name, p in plain.named_parameters()}
        assert_near({name: found[name].float() - start[name] for name in moved}, moved, 0.1)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_gradients_stay_until_zero_grad(path: str) -> None:
    """Gradients from another model's loss enter the next step, as in plain torch. `zero_grad` drops them."""

    def train(drops: bool, loop: Plain) -> dict[str, Tensor]:
        torch.manual_seed(2)
        models = nn.Linear(8, 4), nn.Linear(4, 2)
        one, first = loop.prepare(models[0], _sgd(models[0]))
        two, second = loop.prepare(models[1], _sgd(models[1]))
        x = loop.batch(0)[0]
        for _ in range(2):
            loop.backward(two(one(x)).square().mean())
            first.step()
            first.zero_grad()
            if drops:
                second.zero_grad()
            loop.backward((two(x[:, :4]) - 1).square().mean())
            second.step()
            second.zero_grad()
        return loop.weights_of(one=one, two=two)

    for drops in (False, True):
        assert_trains_as_plain(path, functools.partial(train, drops))


class _Stream(IterableDataset[Tensor]):
    """Samples of unknown number."""

    def __init__(self, samples: Tensor) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        yield from self._samples


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_gradients_of_another_window(path: str) -> None:
    """Gradients left at the end of an epoch are divided by their window's size, not by the own window's shorter one.

    Data of unknown length ends before this is possible. There they are refused unless the script drops them.
    """
    batches, accumulation, epochs = 5, 3, 2
    samples = torch.cat([global_batch(i)[0] for i in range(batches)])

    def losses(one: Any, two: Any, x: Tensor) -> tuple[Any, Any]:
        return (lambda: (two(x[:, :4]) - 1).square().mean(), lambda: two(one(x)).square().mean())

    def build() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(2)
        models: list[nn.Module] = [nn.Linear(8, 4), nn.Linear(4, 2)]
        return models, [_sgd(model) for model in models]

    def train_plainly(drops: bool) -> list[nn.Module]:
        models, sgds = build()
        for i in range(batches * epochs):
            start = i % batches - i % batches % accumulation
            size = min(accumulation, batches - start)
            for loss, sgd in zip(losses(*models, samples.chunk(batches)[i % batches]), reversed(sgds), strict=True):
                if drops and i % batches == start:
                    sgd.zero_grad()
                (loss() / size).backward()
                if i % batches == start + size - 1:
                    sgd.step()
                    if not drops:
                        sgd.zero_grad()
        return models

    for length_is_known, drops in ((True, False), (True, True), (False, True), (False, False)):
        with running(path, gradient_accumulation_steps=accumulation) as accelerator:
            data: Any = samples if length_is_known else _Stream(samples)
            loader: Any = torch.utils.data.DataLoader(data, batch_size=8 // accelerator.num_processes)
            models, sgds = build()
            one, two, first, second, loader = accelerator.prepare(*models, *sgds, loader)

            def train(one: Any = one, two: Any = two, both: Any = (second, first), loader: Any = loader) -> None:
                for x in loader:
                    for loss, model, optimizer in zip(losses(one, two, x), (two, one), both, strict=True):
                        with accelerator.accumulate(model):
                            if drops:  # noqa: B023
                                optimizer.zero_grad()
                            accelerator.backward(loss())
                            optimizer.step()
                            if not drops:  # noqa: B023
                                optimizer.zero_grad()

            if not (length_is_known or drops):
                raised(LoopError, "its own has 2 micro-batches, another model's has 3", "map-style", by=train)
                continue
            for _ in range(epochs):
                train()
            for model, wanted in zip((one, two), train_plainly(drops), strict=True):
                assert_near(weights(accelerator, model), wanted.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero0", "zero2"))
def test_whose_micro_batch(path: str) -> None:
    """With accumulation by hand, a loss that reaches two models is refused. Under `accumulate` it works."""
    with running(path, gradient_accumulation_steps=2) as accelerator:
        one, two = make_net(), nn.Linear(4, 4)
        one, two, first, second = accelerator.prepare(one, two, _sgd(one), _sgd(two))

        def joint() -> Tensor:
            return two(one(own_batch(0)[0])).square().mean()

        raised(LoopError, "Sequential and Linear", "accumulate", "requires_grad_(False)",
               by=lambda: accelerator.backward(joint()))  # fmt: skip
        for optimizer in (first, second):
            optimizer.zero_grad()
        before = weights(accelerator, two)
        for i in range(2):
            with accelerator.accumulate(one, two):
                accelerator.backward(joint())
                assert accelerator.sync_gradients is (i == 1)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
        assert (first.applied_steps, second.applied_steps) == (1, 1)
        assert not same(weights(accelerator, two), before)
        raised(LoopError, "Bilinear", "not prepared", by=lambda: accelerator.accumulate(nn.Bilinear(1, 1, 1)))


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_a_loss_inside_accumulate_of_another_model(path: str) -> None:
    """A model that is not named there steps when the named model's window ends, by the window's complete gradients."""
    plain = make_net(), make_net()[2:].append(nn.Linear(4, 16))
    for i in range(2):
        (plain[1](plain[0](global_batch(i)[0]).repeat(1, 4)).square().mean() / 2).backward()
    for model in plain:
        _sgd(model).step()
    for asks in (False, True):
        with running(path, gradient_accumulation_steps=2) as accelerator:
            nets = make_net(), make_net()[2:].append(nn.Linear(4, 16))
            one, two, first, second = accelerator.prepare(*nets, *map(_sgd, nets))
            for i in range(2):
                with accelerator.accumulate(one):
                    accelerator.backward(two(one(own_batch(i)[0]).repeat(1, 4)).square().mean())
                    if not asks or accelerator.sync_gradients:
                        for optimizer in (first, second):
                            optimizer.step()
                            optimizer.zero_grad()
            assert (first.applied_steps, second.applied_steps) == (1, 1)
            for model, wanted in zip((one, two), plain, strict=True):
                assert_near(weights(accelerator, model), wanted.state_dict(), 1e-5)


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_clipping_is_of_one_model(path: str) -> None:
    """A call with parameters of two models is an error, since under ZeRO they have no common norm."""
    with running(path) as accelerator:
        one, two = make_net(), nn.Linear(4, 4)
        one, two, first, second = accelerator.prepare(one, two, _sgd(one), _sgd(two))
        accelerator.backward(two(one(own_batch(0)[0])).square().mean())
        both = [*one.parameters(), *two.parameters()]
        raised(LoopError, "2 prepared models", by=lambda: accelerator.clip_grad_norm_(both, 1.0))
        assert float(accelerator.clip_grad_norm_(two.parameters(), 1.0)) > 0
        second.step()
        first.zero_grad()
        accelerator.backward(loss_of(one, own_batch(1)))
        accelerator.clip_grad_norm_(one.parameters(), 1.0)
        accelerator.backward(two(own_batch(1)[1]).mean())
        if is_zero(path):
            raised(LoopError, "after clip_grad_norm_()", by=lambda: accelerator.backward(loss_of(one, own_batch(2))))


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_each_model_has_its_own_configuration(path: str) -> None:
    """Each model's open values follow from its own optimizer and sizes. The first model's stay unchanged."""
    deepspeed = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {**(ZERO[path] if is_zero(path) else {}), "reduce_bucket_size": "auto"},
    }
    with running(path, deepspeed=deepspeed) as accelerator:
        small, large = make_net(), nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 4))
        found = []
        for model, lr, betas in ((small, 0.1, (0.9, 0.99)), (large, 0.2, (0.5, 0.9))):
            _, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=lr, betas=betas))
            assert optimizer.param_groups[0]["lr"] == lr
            assert tuple(optimizer.param_groups[0]["betas"]) == betas
            found.append((accelerator.resolved, lr, betas))
        for resolved, lr, betas in found:
            assert resolved is not None
            assert resolved.optimizer is not None
            assert (resolved.optimizer.params["lr"], tuple(resolved.optimizer.params["betas"])) == (lr, betas)
        buckets = [resolved.tree.value("zero_optimization", "reduce_bucket_size") for resolved, *_ in found]
        assert not is_zero(path) or buckets[0] != buckets[1], buckets


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_what_is_not_prepared(path: str) -> None:
    """A loss that trains an unprepared model, or one without an optimizer, is refused, and the error has the fix."""
    with running(path) as accelerator:
        model, stranger, judge = make_net(), nn.Linear(4, 3), nn.Linear(4, 2)
        model, optimizer, judge = accelerator.prepare(model, _sgd(model), judge)
        x, _ = own_batch(0)
        if accelerator.num_processes == 1:  # the script may train it without this package
            accelerator.backward(stranger(model(x)).mean())
            optimizer.zero_grad()
            assert float(stranger.bias.grad.sum()) == 1.0
        else:
            raised(LoopError, "2 parameters of no prepared model", "(3, 4)", "requires_grad_(False)",
                   by=lambda: accelerator.backward(stranger(model(x)).mean()))  # fmt: skip
        raised(LoopError, "Linear, which was prepared without an optimizer",
               by=lambda: accelerator.backward(judge(model(x)).mean()))  # fmt: skip
        stranger.requires_grad_(False)
        judge.requires_grad_(False)
        accelerator.backward(stranger(model(x)).mean() + judge(model(x)).mean())
        optimizer.step()
        model.requires_grad_(True)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_what_prepare_refuses(path: str) -> None:
    """Each mistake in the objects is named, and nothing is prepared."""
    with running(path) as accelerator:
        one, two = make_net(), nn.Linear(4, 4)
        both = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
        raised(LoopError, "several models (Sequential and Linear)", by=lambda: accelerator.prepare(one, two, both))
        raised(LoopError, "two optimizers", by=lambda: accelerator.prepare(one, _sgd(one), _sgd(one)))
        raised(LoopError, "2 parameters (of 2)", by=lambda: accelerator.prepare(one, _sgd(nn.Linear(1, 1))))
        raised(LoopError, "twice", by=lambda: accelerator.prepare(one, one))
        raised(LoopError, "shares parameters", by=lambda: accelerator.prepare(one, one[0]))
        spread: Any = nn.Linear(4, 4)
        spread.hf_device_map = {"a": 0, "b": "cpu"}
        raised(LoopError, "device_map", "0, cpu", "stage 3", by=lambda: accelerator.prepare(spread, _sgd(spread)))
        sgd = _sgd(one)
        model, _ = accelerator.prepare(one, sgd)
        raised(LoopError, "shares parameters", by=lambda: accelerator.prepare(one[0]))
        raised(LoopError, "already prepared", by=lambda: accelerator.prepare(sgd))
        if is_zero(path):
            raised(LoopError, "accelerator.backward(loss)", by=lambda: model.backward(model(own_batch(0)[0]).mean()))
            raised(LoopError, "optimizer.step()", by=model.step)
