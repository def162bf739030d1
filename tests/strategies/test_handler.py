"""Settings for torch's own objects: they take effect, or are refused or logged if a path has no matching object."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
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
    net_and_sgd,
    own_batch,
    raised,
    running,
    same,
    take_plain_steps,
    take_steps,
    weights,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import profile

from zero_plugin.config.choices import DDPCommunicationHookType
from zero_plugin.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    TorchDynamoPlugin,
)
from zero_plugin.distributed import messages
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.plan.run_plan import predict_memory

STEPS = 3


class Branches(nn.Module):
    """A model that takes its left or its right layer, by the step. The other layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return self.left(x) if left else self.right(x)


@on_paths("single", "ddp")
def test_forward_and_step_are_torchs(path: str) -> None:
    """Both are torch's own functions, not copies, so every hook and a running profiler see them."""
    seen: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: seen.append(name)

    with running(path) as accelerator:
        net, sgd = net_and_sgd()
        schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda _: 1.0)
        model, optimizer, schedule = accelerator.prepare(net, sgd, schedule)
        assert optimizer.optimizer is sgd
        assert type(sgd) is torch.optim.SGD
        if path == "ddp":
            assert type(model).forward is DistributedDataParallel.forward
            assert "forward" not in model.__dict__
        handles = [
            sgd.register_step_pre_hook(note("before")),
            sgd.register_step_post_hook(note("after")),
            register_optimizer_step_post_hook(note("after all")),
            model.register_forward_pre_hook(note("forward")),
        ]
        with profile() as profiled:
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            schedule.step()  # torch warns if it saw no step before, and a warning is an error here
        for handle in handles:
            handle.remove()
        assert seen == ["forward", "before", "after", "after all"]
        marks = {event.key for event in profiled.key_averages()}
        assert "Optimizer.step#SGD.step" in marks
        assert ("DistributedDataParallel.forward" in marks) is (path == "ddp")


@on_paths("ddp")
def test_ddp_arguments(path: str) -> None:
    """Every argument of DDP arrives at torch's object. Arguments not given keep torch's default."""
    given = DistributedDataParallelKwargs(
        broadcast_buffers=False, bucket_cap_mb=7, find_unused_parameters=True, static_graph=True
    )
    with running(path, kwargs_handlers=[given]) as accelerator:
        net = make_net()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert isinstance(model, DistributedDataParallel)
        assert (model.broadcast_buffers, model.bucket_bytes_cap) == (False, 7 * 2**20)
        assert (model.find_unused_parameters, model.static_graph) == (True, True)
        assert not model.gradient_as_bucket_view
        assert accelerator.ddp_handler is given
    with running(path, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]) as accelerator:
        net = make_net()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert model.gradient_as_bucket_view
        assert "gradient_as_bucket_view" not in accelerator._run.strategy.savings(accelerator.resolved)[0].text


@on_paths("ddp")
def test_a_view_of_the_buckets_is_offered(path: str) -> None:
    """The out-of-memory report offers it and counts the gradients' bytes as its saving."""
    with running(path) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        first = accelerator._run.strategy.savings(accelerator.resolved)[0]
        assert "gradient_as_bucket_view=True" in first.text
        training = accelerator._prepared.trainings[0]
        run = predict_memory(net, training.resolved, None, training.facts, accelerator._run.processes)
        saved = run.footprint.phases["step"].values(), run.changed(**first.changes).footprint.phases["step"].values()
        elements = sum(p.numel() for p in net.parameters())
        assert sum(saved[0]) - sum(saved[1]) == pytest.approx(4 * elements, rel=0.1)


@on_paths("zero2-one-process", "zero2")
def test_a_smaller_bucket_is_offered(path: str) -> None:
    """The out-of-memory report offers it if the configured bucket is larger than is useful."""
    for size, offered in ((5e12, True), (5e8, False)):
        with running(path, deepspeed={"zero_optimization": {**ZERO[path], "reduce_bucket_size": size}}) as accelerator:
            net = make_net()
            accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            first = accelerator._run.strategy.savings(accelerator.resolved)[0].text
            assert first.startswith("reduce_bucket_size: 500000000 (it is 5e+12)") is offered


@on_paths("ddp")
def test_unused_parameters(path: str) -> None:
    """With `find_unused_parameters`, DDP does not wait for an unused branch, though the last forward used it."""
    for accumulation in (1, 2):
        with running(
            path,
            gradient_accumulation_steps=accumulation,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        ) as accelerator:
            net = Branches()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            plain = Branches()
            sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
            for step in range(2 * STEPS):
                x, y = own_batch(step)
                last = (step + 1) % accumulation == 0
                loss = (model(x, step % 2 == 0) - y).square().mean()
                held_out = (
                    (model(x, step % 2 == 1) - y).square().mean().detach()
                )  # a second forward before the backward
                accelerator.backward(loss + 0 * held_out)
                optimizer.step()
                optimizer.zero_grad()
                ((plain(x, step % 2 == 0) - y).square().mean() / accumulation).backward()
                if last:
                    for p in plain.parameters():
                        if p.grad is not None:
                            dist.all_reduce(p.grad)
                            p.grad /= dist.get_world_size()
                    sgd.step()
                    sgd.zero_grad()
            assert_near(weights(accelerator, model), plain.state_dict())


@on_paths("ddp")
def test_static_graph(path: str) -> None:
    """With `static_graph` the loop trains as without. With accumulation, at which torch fails, it is refused."""
    static = [DistributedDataParallelKwargs(static_graph=True)]
    assert_near(train(path, kwargs_handlers=static), train(path), 1e-6)
    raised(
        ConfigError,
        "static_graph",
        "gradient_accumulation_steps 2",
        by=lambda: train(path, gradient_accumulation_steps=2, kwargs_handlers=static),
    )


@on_paths("ddp")
def test_communication_hook(path: str) -> None:
    """The requested hook reduces the gradients: in half precision, their last digits are gone."""
    kinds = DDPCommunicationHookType
    plain = train(path)
    for how in (
        {"comm_hook": kinds.FP16},
        {"comm_hook": kinds.POWER_SGD, "comm_wrapper": kinds.FP16, "comm_state_option": {"start_powerSGD_iter": 2}},
    ):
        hooked = train(path, kwargs_handlers=[DistributedDataParallelKwargs(**how)])
        assert any(not torch.equal(hooked[name], plain[name]) for name in plain)
        assert_near(hooked, plain, 0.05)


@on_paths("single", "ddp")
def test_loss_scale(path: str) -> None:
    """The scale begins at the configured value and grows and falls by the configured factors."""
    given = GradScalerKwargs(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=1)
    with running(path, mixed_precision="fp16", kwargs_handlers=[given]) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-4))
        scales = []
        for step in range(5):
            scales.append(accelerator._prepared.trainings[0].session.loss_scale)
            accelerator.backward(loss_of(model, own_batch(step), scale=1e30 if step >= 3 else 1e-3))
            optimizer.step()
            optimizer.zero_grad()
        assert scales[:4] == [1024.0, 1024.0, 4096.0, 16384.0]
        assert (
            accelerator._prepared.trainings[0].session.loss_scale == 4096.0
        )  # the first skip is forgiven, as by DeepSpeed
        assert optimizer.step_was_skipped


@on_paths("single", "ddp")
def test_steps_are_skipped_as_by_torchs_scaler(path: str) -> None:
    """Only the optimizer with non-finite gradients skips. With `hysteresis` 1 the scale falls as torch's does."""
    section = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 10}}
    with running(path, deepspeed=section) as accelerator:
        nets, plain = [make_net(), make_net()], [make_net(), make_net()]
        made = [torch.optim.SGD(net.parameters(), lr=0.05) for net in nets]
        first, second, *optimizers = accelerator.prepare(*nets, *made)
        models = [first, second]
        by_hand = [torch.optim.SGD(net.parameters(), lr=0.05) for net in plain]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(5):
            scales = [1e30 if step in (1, 3) else 1e-2, 1e30 if step == 3 else 1e-2]
            assert scaler.get_scale() == accelerator._prepared.trainings[0].session.loss_scale, step
            for model, scale in zip(models, scales, strict=True):
                accelerator.backward(loss_of(model, global_batch(step), scale=scale))
            for net, sgd, scale in zip(plain, by_hand, scales, strict=True):
                with torch.autocast("cpu", torch.float16):
                    output = net(global_batch(step)[0])
                loss = (scale * (output.float() - global_batch(step)[1])).square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(sgd)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            for sgd in by_hand:
                scaler.step(sgd)
                sgd.zero_grad()
            scaler.update()
            assert [optimizer.step_was_skipped for optimizer in optimizers] == [scale == 1e30 for scale in scales]
        for net, other in zip(nets, plain, strict=True):
            assert_near(net.state_dict(), other.state_dict(), 1e-3)


@on_paths("single", "ddp")
def test_no_loss_scale(path: str) -> None:
    """`enabled=False` trains in fp16 without a scale."""
    with running(path, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)]) as accelerator:
        net = make_net()
        accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert accelerator._prepared.trainings[0].session.loss_scale == 1.0


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", daily=("ddp", "zero2"))
def test_autocast(path: str) -> None:
    """Computations inside use the run's dtype unless the script overrides it. Under ZeRO the context has no effect."""
    a = torch.ones(4, 4)
    with running(path, mixed_precision="bf16") as accelerator:
        with accelerator.autocast():
            assert (a @ a).dtype == (torch.float32 if is_zero(path) else torch.bfloat16)
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.float32
    with running(path) as accelerator, accelerator.autocast():
        assert (a @ a).dtype == torch.float32


@on_paths("single", "ddp")
def test_autocast_of_models(path: str) -> None:
    """A handler given at the start applies to prepared models too."""
    with running(path, mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)]) as accelerator:
        net = nn.Sequential(nn.Linear(8, 8))
        seen: list[torch.dtype] = []
        net[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
        model = accelerator.prepare(net)
        model(torch.ones(2, 8))
        assert seen == [torch.float32]


@on_paths("zero2-one-process", "zero2", "zero3", daily="zero2")
def test_what_engines_lack(path: str) -> None:
    """Settings that would change the training are refused with their places. Settings without effect are logged."""
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    scale = GradScalerKwargs(growth_factor=3.0)
    raised(
        ConfigError,
        "comm_hook",
        "communication_data_type",
        "growth_factor=3.0",
        by=lambda: running(path, kwargs_handlers=[hook, scale]).__enter__(),
    )
    with running(path, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]) as accelerator:
        lines = map(str, messages._DONE[accelerator._run])
        assert any("find_unused_parameters" in line and "ZeRO" in line for line in lines)


@on_paths(*LOOP, daily=("ddp", "zero2"))
def test_compiled(path: str) -> None:
    """A compiled model, complete or by blocks, trains as uncompiled and unwraps to the user's own module."""
    plain = train(path)
    for plugin in (
        TorchDynamoPlugin(backend="eager"),
        TorchDynamoPlugin(backend="eager", use_regional_compilation=True),
    ):
        compiled: list[int] = []
        assert_near(train(path, compiled, dynamo_plugin=plugin), plain, 1e-6)
        assert compiled == [1]


@on_paths(*LOOP, daily=("ddp", "zero2"))
def test_compiled_by_the_script(path: str) -> None:
    """Models or layers compiled by `torch.compile` before `prepare` train the same, compiled, under the plain names."""
    plain = train(path)
    for part in ("model", "layer"):
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        with running(path) as accelerator:
            net: Any = make_net()
            if part == "model":
                net = torch.compile(net, backend=backend)
            else:
                net[0] = torch.compile(net[0], backend=backend)
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            take_steps(accelerator, model, optimizer, range(STEPS))
            assert graphs
            assert_near(weights(accelerator, model), plain, 1e-6)


@on_paths("single", "zero2-one-process", "ddp", "zero2", daily=("ddp", "zero2"))
def test_models_as_they_come(path: str) -> None:
    """An unprepared model is saved unchanged. On request, the names equal the prepared model's."""
    with running(path, mixed_precision="bf16") as accelerator:
        net = make_net()
        before = net.state_dict()
        state = accelerator.get_state_dict(net)
        assert (state is not None) == accelerator.is_main_process
        assert state is None or same(state, before)
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        state = accelerator.get_state_dict(model, unwrap=False)
        assert state is None or state.keys() == model.state_dict().keys()
        assert accelerator.unwrap_model(model) is net
        bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert bare is not net
        assert bare[0].weight is net[0].weight
        if not is_zero(path):
            assert bare(torch.ones(1, 8)).dtype == torch.float32
            pickle.dumps(bare)


def train(path: str, compiled: list[int] | None = None, **arguments: Any) -> dict[str, Tensor]:
    """Return the weights after a few steps."""
    with running(path, **arguments) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        steps = STEPS * accelerator.gradient_accumulation_steps
        for step in range(steps):
            with accelerator.accumulate(model):
                take_steps(accelerator, model, optimizer, [step])
        assert accelerator.unwrap_model(model) is net
        if compiled is not None:
            compiled.append(sum(module._compiled_call_impl is not None for module in net.modules()))
        return weights(accelerator, model)


@on_paths("single", "zero2-one-process", "ddp", "zero2", daily=("ddp", "zero2"))
def test_a_scaler_of_the_scripts_own(path: str) -> None:
    """It divides unpartitioned gradients, as in plain torch. If it cannot, an error is raised."""
    plain, sgd = net_and_sgd()
    take_plain_steps(plain, sgd, range(3))
    for accumulation in (1, 2):
        with running(path, gradient_accumulation_steps=accumulation) as accelerator:
            net = make_net()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

            def train(model=model, optimizer=optimizer, scaler=scaler, accelerator=accelerator) -> None:
                for step in range(3):
                    accelerator.backward(scaler.scale(loss_of(model, own_batch(step))))
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()

            if path.startswith("zero"):
                raised(LoopError, "GradScaler", "under ZeRO", "mixed_precision: fp16", by=train)
            elif accumulation > 1:
                raised(LoopError, "GradScaler", "accumulation window", by=train)
            else:
                train()
                assert_near(net.state_dict(), plain.state_dict())
