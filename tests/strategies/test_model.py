"""Models of every kind on every path: tied and frozen weights, buffers, evaluation only, and how weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from on_paths import LOOP, on_paths
from paths import (
    ZERO,
    assert_near,
    global_batch,
    is_zero,
    loss_of,
    make_net,
    own_batch,
    running,
    same,
    take_plain_steps,
    take_steps,
    weights,
)
from torch import Tensor, nn


class Tied(nn.Module):
    """A weight under two names, a frozen layer, and buffers, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.encode = nn.Linear(8, 8, bias=False)
        self.fixed = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight
        self.out = nn.Linear(8, 4)
        self.fixed.requires_grad_(False)
        self.register_buffer("scale", torch.full((8,), 0.5))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fixed(torch.tanh(self.encode(x)))) * self.scale
        return self.out(self.decode(x))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def _train_plain(build: Callable[[], nn.Module], optimizer_of: Callable[[Any], Any] = _sgd) -> dict[str, Tensor]:
    model = build()
    optimizer = optimizer_of(model)
    take_plain_steps(model, optimizer, range(3))
    return model.state_dict()


def _train(accelerator: Any, model: Any, optimizer_of: Callable[[Any], Any] = _sgd) -> tuple[Any, Any]:
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    take_steps(accelerator, model, optimizer, range(3))
    return model, optimizer


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_tied_and_frozen_weights(path: str) -> None:
    """They train as in plain torch. The frozen layer is bitwise unchanged, also if the optimizer holds it."""

    def all_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

    for optimizer_of in (_sgd, all_of):
        wanted = _train_plain(Tied, optimizer_of)
        with running(path) as accelerator:
            model, _ = _train(accelerator, Tied(), optimizer_of)
            found = weights(accelerator, model)
            assert_near(found, wanted, 1e-5)
            for name in ("fixed.weight", "fixed.bias", "scale"):
                assert torch.equal(found[name], Tied().state_dict()[name]), name


class Shapes(nn.Module):
    """A zero-dimensional parameter, like CLIP's logit_scale, and a convolution with weights in channels_last.

    Its only buffer is a table of positions as PyTorch's tutorial on Transformers makes it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.convolution = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
        self.register_buffer("positions", torch.randn(5, 4).unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.view(-1, 2, 2, 2)).flatten(1) * self.gain + self.positions[2]


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_parameters_of_any_shape(path: str) -> None:
    """Zero-dimensional and non-contiguous parameters train as in plain torch, keep their shape, and can be set.

    A buffer whose dimension of one element has an unusual stride causes no error.
    """
    with running(path) as accelerator:
        model, _ = _train(accelerator, Shapes())
        found = weights(accelerator, model)
        assert_near(found, _train_plain(Shapes))
        assert found["gain"].shape == ()
        with accelerator.whole_weights(model), torch.no_grad():
            model.gain.fill_(2.0)
        assert float(weights(accelerator, model)["gain"]) == 2.0


@on_paths("zero1")
def test_deepspeed_itself_is_as_it_was(path: str) -> None:
    """Objects that a script builds with DeepSpeed alongside ours are DeepSpeed's own."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__ as compatible
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.engine import DeepSpeedEngine

    with running(path, mixed_precision="bf16") as accelerator:
        _train(accelerator, Shapes())
        assert not hasattr(DeepSpeedEngine._broadcast_model, "__wrapped__")
        assert bf16_optimizer.see_memory_usage is utils.see_memory_usage
        builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
        assert compatible[builder.NAME] == builder.is_compatible()


@on_paths("zero3")
def test_linear_layers_are_torchs_after_the_last_engine(path: str) -> None:
    """DeepSpeed replaces `functional.linear` for the whole process. Its function stays as long as an engine needs it.

    `torch.func` does not know it.
    """

    def gradient_of_another_model() -> Tensor:
        other, (x, _) = make_net(), own_batch(0)
        gradient: Any = torch.func.grad(lambda own: torch.func.functional_call(other, own, (x[:2],)).sum())
        return gradient(dict(other.named_parameters()))["2.bias"]  # type: ignore[no-any-return]

    with running(path) as accelerator:
        _train(accelerator, make_net())
        with running(path) as second:
            _train(second, make_net())
        replacing = torch.nn.functional.linear
        assert "zero3" in replacing.__name__
        _train(accelerator, make_net())
    assert gradient_of_another_model().tolist() == [2.0] * 4


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero3", "zero2-cpu"))
def test_state_dict(path: str) -> None:
    """`get_state_dict` gives the main process the module's own, copied to CPU memory. It gives the others None."""
    with running(path) as accelerator:
        model, _ = _train(accelerator, Tied())
        state = accelerator.get_state_dict(model)
        if not accelerator.is_main_process:
            assert state is None
            return
        assert state is not None
        wanted = Tied().state_dict()
        assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in wanted.items()}
        assert torch.equal(state["decode.weight"], state["encode.weight"])
        Tied().load_state_dict(state)
        assert {t.device.type for t in state.values()} == {"cpu"}


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero0", "zero3"))
def test_unwrap_model(path: str) -> None:
    """The prepared model and the object itself unwrap to the user's own object.

    A foreign object is returned unchanged.
    """
    with running(path) as accelerator:
        own, stranger = Tied(), make_net()
        model, _ = _train(accelerator, own)
        assert accelerator.unwrap_model(model) is own
        assert accelerator.unwrap_model(own) is own
        assert accelerator.unwrap_model(stranger) is stranger


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_attributes_of_the_module(path: str) -> None:
    """The prepared model has the attributes of the user's class, such as a configuration or `generate`.

    Others are errors.
    """

    class Generating(nn.Linear):
        words = ("a", "b")

        def generate(self, x: Tensor) -> Tensor:
            return self(x).argmax(-1)

    with running(path) as accelerator:
        net = Generating(8, 4)
        model, optimizer = accelerator.prepare(net, _sgd(net))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        assert model.words == ("a", "b")
        with torch.no_grad():
            assert model.generate(torch.ones(2, 8)).shape == (2,)
        assert not hasattr(model, "sentences")


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero3", "zero2-cpu"))
def test_evaluation_without_an_optimizer(path: str) -> None:
    """An untrained model computes as plain torch does, and its weights can be read."""
    with running(path) as accelerator:
        plain = Tied().eval()
        model = accelerator.prepare(Tied())
        assert model.eval() is model
        x, _ = own_batch(0)
        with torch.no_grad():
            assert torch.allclose(model(x), plain(x), atol=1e-6)
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-9)


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero0", "zero3"))
def test_inference_mode(path: str) -> None:
    """A model evaluated inside `torch.inference_mode`, before training and between backward and step, still trains.

    At stage 3, weights gathered for this forward are not kept for the next one. This includes the module itself.
    """
    plain = make_net()
    expected = _sgd(plain)
    take_plain_steps(plain, expected, range(4))
    for threshold in (0, 100_000):
        zero = ZERO.get(path, {}) | ({"stage3_param_persistence_threshold": threshold} if path == "zero3" else {})
        with running(path, deepspeed={"zero_optimization": zero} if zero else {}) as accelerator:
            model = make_net()
            model, optimizer = accelerator.prepare(model, _sgd(model))
            module = accelerator.unwrap_model(model)
            for i in range(4):
                with torch.inference_mode():
                    for step in (8, 9):
                        (module if i == 2 else model)(own_batch(step)[0])
                accelerator.backward(loss_of(module if i == 3 and is_zero(path) else model, own_batch(i)))
                if i == 1:
                    with torch.inference_mode():
                        model(own_batch(9)[0])
                optimizer.step()
                optimizer.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_a_teacher_beside_a_student(path: str) -> None:
    """In distillation one model trains against another that is only evaluated. backward needs no `model`."""
    plain, teacher = make_net(), make_net()
    for p in teacher.parameters():
        p.data.mul_(2)
    optimizer = _sgd(plain)
    for i in range(2):
        x, _ = global_batch(i)
        (plain(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with running(path) as accelerator:
        student = make_net()
        student, optimizer = accelerator.prepare(student, _sgd(student))
        teacher = accelerator.prepare(teacher.eval())
        for i in range(2):
            x, _ = own_batch(i)
            with torch.no_grad():
                wanted = teacher(x)
            accelerator.backward((student(x) - wanted).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert_near(weights(accelerator, student), plain.state_dict(), 1e-5)


class Normed(nn.Module):
    """Running statistics, a buffer that each process would draw for itself, and a buffer that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        self.register_buffer("drawn", torch.full((), 2.0 + dist.get_rank(), dtype=torch.float64))
        self.register_buffer("flags", torch.tensor([True, False, dist.get_rank() > 0]))
        self.register_buffer("own", torch.tensor(dist.get_rank()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.drawn.to(x.dtype)


def _train_normed_plainly() -> Normed:
    """Train like DDP: each process normalises its own batch, and the statistics are the first process's."""
    model, world = Normed(), dist.get_world_size()
    model.drawn.fill_(2.0)
    optimizer = _sgd(model)
    for i in range(3):
        inputs, targets = global_batch(i)
        for rank in reversed(range(world)):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            batch = inputs.chunk(world)[rank], targets.chunk(world)[rank]
            (loss_of(model, batch) / world).backward()
            if rank > 0:
                for name, buffer in model.named_buffers():
                    buffer.copy_(before[name])
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_batch_norm(path: str) -> None:
    """Every process immediately has the first process's running statistics and persistent buffers, and saves have them.

    At stages 0 to 2 a forward on one process alone works.
    """
    wanted = _train_normed_plainly()
    with running(path) as accelerator:
        net = Normed()
        model, optimizer = accelerator.prepare(net, _sgd(net))
        assert not path.startswith("zero") or int(net.own) == dist.get_rank()
        for i in range(3):
            accelerator.backward(loss_of(model, own_batch(i)))
            if path in ("zero0", "zero1", "zero2") and accelerator.is_main_process:
                with torch.no_grad():
                    model.eval()(own_batch(7)[0])
                    model.train()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        x = global_batch(9)[0]
        with torch.no_grad():
            assert torch.allclose(model(x), wanted(x), atol=1e-5)
        assert float(net.drawn) == 2.0
        assert net.flags.tolist() == [True, False, False]
        state = weights(accelerator, model)
        assert int(state["layers.1.num_batches_tracked"]) == 3
        plain = wanted.state_dict()
        plain["flags"] = net.flags
        assert_near({k: t.float() for k, t in state.items()}, {k: t.float() for k, t in plain.items()}, 1e-5)


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero1", "zero3"))
def test_16_bit_weights(path: str) -> None:
    """Under bf16, ZeRO's weights are bf16 and DDP's fp32. Integer buffers and inputs keep their dtype."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embed = nn.Embedding(600, 8)
            self.out = nn.Linear(8, 4)
            self.register_buffer("index", torch.arange(600))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.embed(self.index[tokens]))

    with running(path, mixed_precision="bf16") as accelerator:
        model = Lookup()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        tokens = torch.tensor([0, 257, 513, 599])  # not representable in bf16
        accelerator.backward(model(tokens).float().square().mean())
        optimizer.step()
        state = weights(accelerator, model)
        assert state["index"].dtype == torch.int64
        assert torch.equal(state["index"], torch.arange(600))
        assert state["out.weight"].dtype == (torch.bfloat16 if path.startswith("zero") else torch.float32)
        start = Lookup().embed.weight.detach()
        start = start.to(state["embed.weight"].dtype)
        moved = (state["embed.weight"] != start).any(1)
        assert accelerator.mixed_precision == "bf16"
        assert set(moved.nonzero().flatten().tolist()) == set(tokens.tolist())


@on_paths(*LOOP, "zero3-gathered", daily=("single", "zero3", "zero2-cpu"))
def test_a_16_bit_checkpoint(path: str) -> None:
    """A bf16 model with a frozen layer trains in fp32 if no mixed precision is configured."""

    def halved() -> nn.Module:
        return Tied().to(torch.bfloat16)

    wanted = _train_plain(lambda: halved().float())
    with running(path) as accelerator:
        model, _ = _train(accelerator, halved())
        assert model.train() is model
        assert_near(weights(accelerator, model), wanted, 1e-5)


@on_paths("single", "ddp")
def test_overflow_skips_the_step(path: str) -> None:
    """In fp16, an infinite gradient changes no weight and no schedule, and halves the scale by DeepSpeed's rule."""
    with running(path, mixed_precision="fp16") as accelerator:
        model = make_net()
        sgd = _sgd(model)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 0.5**step)
        model, optimizer, schedule = accelerator.prepare(model, sgd, schedule)
        session = optimizer.session
        before, scale = weights(accelerator, model), session.loss_scale
        assert scale > 1
        for clips in (False, True):
            # One process's overflow counts for all.
            factor = float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 1.0
            accelerator.backward(loss_of(model, own_batch(0)) * factor)
            if clips:
                assert not torch.isfinite(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            assert optimizer.step_was_skipped
            assert accelerator.optimizer_step_was_skipped
            assert same(weights(accelerator, model), before)
            scale /= 2 if clips else 1  # the first is forgiven: hysteresis is 2
            assert optimizer.loss_scale == session.loss_scale == scale
            assert optimizer.skipped_in_a_row == 1 + clips
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert optimizer.applied_steps == 0
        accelerator.backward(loss_of(model, own_batch(0)))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        assert not optimizer.step_was_skipped
        assert optimizer.skipped_in_a_row == 0
        assert not same(weights(accelerator, model), before)
        assert optimizer.param_groups[0]["lr"] == 0.05
        plain = make_net()
        loss_of(plain, global_batch(0)).backward()
        wanted = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        assert abs(float(norm) - float(wanted)) < 1e-2 * float(wanted), "the norm is of unscaled gradients"
