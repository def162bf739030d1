"""Scripts copy the model itself, read its signature, and restore attributes that they put on it."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import torch
from on_paths import LOOP, on_paths, without
from paths import assert_near, is_zero, loss_of, make_net, own_batch, raised, running, take_steps, weights
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from zero_plugin.errors import LoopError


class Scaled(nn.Module):
    """A forward with its own names for the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_net()

    def forward(self, inputs: Tensor, position_ids: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(inputs)
        return out if position_ids is None else out + position_ids.sum()


# A model at stage 3 has nothing unpartitioned to copy.
@on_paths(*without(LOOP, "zero3"), daily=("single", "zero0", "zero2"))
def test_a_copy_has_its_own_weights(path: str) -> None:
    """A deep copy of the unwrapped model, as for EMA or a target network, computes with its own weights."""
    for precision in ("no", "bf16"):
        with running(path, mixed_precision=precision) as accelerator:
            net = Scaled()
            model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            average = copy.deepcopy(accelerator.unwrap_model(model))
            with torch.no_grad():
                for p in average.parameters():
                    p.zero_()
            x = own_batch(0)[0]
            dtype = torch.bfloat16 if is_zero(path) and precision == "bf16" else torch.float32
            assert not average(x.to(dtype)).any(), precision
            assert model(x).any()
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            assert not average(x.to(dtype)).any()


@on_paths(*LOOP, daily=("single", "zero0", "zero3"))
def test_the_signature_stays(path: str) -> None:
    """transformers reads which inputs a model takes and leaves out the others."""
    for precision in ("no", "bf16"):
        with running(path, mixed_precision=precision) as accelerator:
            net = Scaled()
            model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            names = list(inspect.signature(accelerator.unwrap_model(model).forward).parameters)
            assert names == ["inputs", "position_ids"]


@on_paths("single", "ddp")
def test_a_forward_of_the_script_s_own(path: str) -> None:
    """A forward that the script set on its object runs, under autocast too, and is restored at the end."""

    def seven(inputs: Tensor) -> Tensor:
        return inputs.new_full((2,), 7.0)

    for bound in (False, True):
        net: Any = Scaled()
        net.forward = (lambda self, inputs: self.inner(inputs) * 0 + 7).__get__(net) if bound else seven
        before = net.forward
        with running(path, mixed_precision="bf16") as accelerator:
            model = accelerator.prepare(net.requires_grad_(False))
            out = model(own_batch(0)[0])
            assert out.eq(7).all()
            assert out.dtype == torch.float32
            assert accelerator.unwrap_model(model, keep_fp32_wrapper=False)(own_batch(0)[0]).eq(7).all()
        assert net.forward is before
    plain = Scaled()
    with running(path, mixed_precision="bf16") as accelerator:
        accelerator.prepare(plain.requires_grad_(False))
    assert "forward" not in vars(plain)


@on_paths("single", "ddp")
def test_a_whole_model_is_pickled(path: str) -> None:
    """`torch.save(model)` works with autocast: the loaded model computes like its class."""
    with running(path, mixed_precision="bf16") as accelerator:
        net = accelerator.prepare(make_net().requires_grad_(False))
        file = io.BytesIO()
        torch.save(accelerator.unwrap_model(net), file)
        file.seek(0)
        back = torch.load(file, weights_only=False)
        x = own_batch(0)[0]
        assert torch.equal(back(x), make_net()(x))


@on_paths("ddp")
def test_a_prepared_model_is_not_pickled(path: str) -> None:
    """Under DDP, pickling raises an error that says what to pickle. A deep copy of the model still works."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        for pickle_it in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            raised(LoopError, "Sequential", "accelerator.unwrap_model(model)", by=lambda: pickle_it(model))  # noqa: B023
        copied = copy.deepcopy(model)
        assert copied is not model
        x = own_batch(1)[0]
        assert torch.equal(copied(x), model(x))
        with torch.no_grad():
            for p in copied.parameters():
                p.zero_()
        assert model(x).any()


@on_paths("zero2-one-process", "ddp", "zero2", "zero3", daily=("ddp", "zero3"))
def test_an_average_of_weights(path: str) -> None:
    """torch's `AveragedModel` works if built before `prepare` and updated inside `whole_weights`.

    Otherwise an error says so.
    """
    with running(path) as accelerator:
        net = make_net()
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        wanted: dict[str, Tensor] = {}
        for index in range(2):
            take_steps(accelerator, model, optimizer, [index])
            now = weights(accelerator, model)
            wanted = {name: wanted[name].lerp(tensor, 0.5) if wanted else tensor for name, tensor in now.items()}
            with accelerator.whole_weights(model):
                average.update_parameters(model)
        assert_near(average.module.state_dict(), wanted, 1e-6)
        inputs = own_batch(0)[0]
        assert average(inputs).shape == (len(inputs), 4)
        if is_zero(path):
            raised(LoopError, "Sequential", "unwrap_model", "whole_weights", by=lambda: AveragedModel(model))
        if path == "zero3":
            raised(LoopError, "before prepare()", "whole_weights", by=lambda: AveragedModel(net))
            raised(LoopError, "(EMA)", "whole_weights", by=model.state_dict)
