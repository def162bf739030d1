"""Weights that the script writes and reads between steps take effect as in plain torch, or are refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from on_paths import ALL, ENGINE, on_paths
from paths import (
    FURTHER,
    ZERO,
    assert_near,
    global_batch,
    loss_of,
    make_net,
    own_batch,
    raised,
    running,
    same,
    take_plain_steps,
    take_steps,
    weights,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from zero_plugin.errors import LoopError
from zero_plugin.utils import GatheredParameters

Write = Callable[[Any], None]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _load(model: Any) -> None:
    torch.manual_seed(23)
    model.load_state_dict({name: torch.randn_like(tensor) for name, tensor in make_net().state_dict().items()})


def _clamp(model: Any) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def _plain(write: Write) -> dict[str, Tensor]:
    model = make_net()
    sgd = _sgd(model)
    for step in range(4):
        take_plain_steps(model, sgd, [step])
        if step == 1:
            write(model)
    return model.state_dict()


def _trained(path: str, precision: str, write: Callable[[Any, Any], None]) -> dict[str, Tensor]:
    with running(path, mixed_precision=precision) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        for step in range(4):
            take_steps(accelerator, model, optimizer, [step])
            if step == 1:
                write(accelerator, model)
        return weights(accelerator, model)


@on_paths(*ALL, daily=("single", "zero3", "zero1-cpu"))
def test_loaded_weights(path: str) -> None:
    """`load_state_dict` of the unwrapped model or a part of it works. At stage 3 it needs the context.

    At stage 3 without the context it fails for ungathered weights.
    """

    def load(accelerator: Any, model: Any) -> None:
        module = accelerator.unwrap_model(model)
        if path in ("zero3", "zero3-cpu"):
            raised(LoopError, "whole_weights", by=lambda: module.load_state_dict(make_net().state_dict()))
            with accelerator.whole_weights(model):
                _load(module)
        else:
            _load(module)

    for precision in ("no", "bf16"):
        assert_near(_trained(path, precision, load), _plain(_load), 1e-5 if precision == "no" else 2e-2)

    def load_part(accelerator: Any, model: Any) -> None:
        with accelerator.whole_weights(model):
            part = accelerator.unwrap_model(model)[0]
            part.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in part.state_dict().items()})

    def zero_part(model: Any) -> None:
        model[0].load_state_dict({name: torch.zeros_like(tensor) for name, tensor in model[0].state_dict().items()})

    assert_near(_trained(path, "no", load_part), _plain(zero_part), 1e-5)


@on_paths("zero3", "zero3-cpu", "zero3-gathered", daily=("zero3", "zero3-gathered"))
def test_loaded_weights_that_stay_gathered(path: str) -> None:
    """At stage 3 `load_state_dict` works for small weights, which DeepSpeed leaves gathered, trained or not."""
    section = {key: value for key, value in (ZERO | FURTHER)[path].items() if "persistence" not in key}
    for precision in ("no", "bf16"):
        with running(path, mixed_precision=precision, deepspeed={"zero_optimization": section}) as accelerator:
            torch.manual_seed(0)
            model, teacher = make_net(), make_net().requires_grad_(False)
            model, optimizer, teacher = accelerator.prepare(model, _sgd(model), teacher)
            for step in range(4):
                take_steps(accelerator, model, optimizer, [step])
                teacher(own_batch(step)[0])  # gathers its weights, which then stay
                if step == 1:
                    _load(model)
                    _load(teacher)
            near = 1e-5 if precision == "no" else 2e-2
            assert_near(weights(accelerator, model), _plain(_load), near)
            loaded = make_net()
            _load(loaded)
            assert_near(weights(accelerator, teacher), loaded.state_dict(), near)


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_clamped_weights(path: str) -> None:
    """WGAN's clipping of weights works in the context."""

    def clamp(accelerator: Any, model: Any) -> None:
        with accelerator.whole_weights(model):
            _clamp(model)

    for precision in ("no", "bf16"):
        assert_near(_trained(path, precision, clamp), _plain(_clamp), 1e-5 if precision == "no" else 2e-2)


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_read_weights(path: str) -> None:
    """Reading in the context, like an average outside the model, changes nothing.

    Loading the present values does not either.
    """

    def read(accelerator: Any, model: Any) -> None:
        with accelerator.whole_weights(model):
            state = accelerator.unwrap_model(model).state_dict()
            accelerator.unwrap_model(model).load_state_dict({name: tensor.clone() for name, tensor in state.items()})

    for precision in ("no", "bf16"):
        undisturbed = _trained(path, precision, lambda *_: None)
        assert same(_trained(path, precision, read), undisturbed), precision


@on_paths(*ALL, daily=("single", "zero3", "zero3-cpu"))
def test_weights_written_outside(path: str) -> None:
    """Values that a script writes under `no_grad` take effect. At stage 3 it is an error that shows the right way.

    The same holds for new values of a layer after `prepare`, and for WGAN's clipping after a step.
    """

    def write(_: Any, model: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    for precision in ("no", "bf16"):
        if path.startswith("zero3"):
            raised(LoopError, "0.weight", "whole_weights", by=lambda: _trained(path, precision, write))  # noqa: B023
        else:
            assert_near(_trained(path, precision, write), _plain(_clamp), 1e-5 if precision == "no" else 2e-2)
    with running(path) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        nn.init.constant_(accelerator.unwrap_model(model)[0].bias, 0.25)
        accelerator.backward(loss_of(model, own_batch(0)))
        if path.startswith("zero3"):
            raised(LoopError, "0.bias", "whole_weights", by=optimizer.step)
            return
        optimizer.step()
        plain = make_net()
        nn.init.constant_(plain[0].bias, 0.25)
        loss_of(plain, global_batch(0)).backward()
        _sgd(plain).step()
        assert_near(weights(accelerator, model), plain.state_dict(), 1e-5)


@on_paths(
    "zero2-one-process", "zero1", "zero2", "zero2-cpu", "zero1-cpu", "zero3-gathered", daily=("zero2", "zero1-cpu")
)
def test_weights_written_past_autograd(path: str) -> None:
    """Writes through `p.data` outside the context are logged once. A loop without writes logs nothing.

    At stage 3 this covers gathered weights only. Others are empty, so no write can be seen.
    """
    for precision in ("no", "bf16"):
        for write, times in ((lambda _, model: _clamp(model), 1), (lambda *_: None, 0)):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                _trained(path, precision, write)
            assert said.getvalue().count("through p.data") == times


@on_paths(
    "zero2-one-process", "zero1", "zero2", "zero2-cpu", "zero1-cpu", "zero3-gathered", daily=("zero2", "zero1-cpu")
)
def test_weights_that_are_replaced(path: str) -> None:
    """`p.data = …` detaches a parameter from ZeRO's step. Below stage 3 the next step raises an error.

    At stage 3 gathered weights get their values back, which is logged like other writes.
    """

    def replace(_: Any, model: Any) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5

    if path == "zero3-gathered":  # the step gathers the other values again
        with contextlib.redirect_stderr(io.StringIO()) as said:
            _trained(path, "no", replace)
        assert said.getvalue().count("through p.data") == 1
        return
    for precision in ("no", "bf16"):
        raised(LoopError, "0.weight", "whole_weights", by=lambda: _trained(path, precision, replace))  # noqa: B023


@on_paths(*ENGINE, daily=("zero3", "zero3-cpu"))
def test_written_weights_that_are_read(path: str) -> None:
    """Before the next step they read as written. At stage 3 the step's error comes."""
    for read in ("state", "folder"):
        with running(path) as accelerator, tempfile.TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)
            model = make_net()
            model, optimizer = accelerator.prepare(model, _sgd(model))
            accelerator.backward(loss_of(model, own_batch(0)))
            optimizer.step()
            with torch.no_grad():
                accelerator.unwrap_model(model)[0].bias.fill_(0.25)

            def written(read=read, model=model, accelerator=accelerator, folder=folder[0]) -> Tensor:
                if read == "state":
                    return weights(accelerator, model)["0.bias"]
                accelerator.save_model(model, folder)
                return load_file(f"{folder}/model.safetensors")["0.bias"]

            if path.startswith("zero3"):
                raised(LoopError, "0.bias", "whole_weights", by=written)
            else:
                assert written().eq(0.25).all()


@on_paths("zero3", "zero3-cpu", "zero3-gathered", daily=("zero3", "zero3-gathered"))
def test_weights_written_in_deepspeeds_own_context(path: str) -> None:
    """At stage 3 one process's writes in `GatheredParameters` with a `modifier_rank` take effect, trained or not."""

    def halve(model: nn.Module, *, past_autograd: bool) -> None:
        with torch.no_grad():
            for p in model.parameters():
                (p.data if past_autograd else p).mul_(0.5)

    for past_autograd in (True, False):
        halves = functools.partial(halve, past_autograd=past_autograd)
        wanted = _plain(halves)
        with running(path) as accelerator:
            model, teacher = make_net(), make_net().requires_grad_(False)
            model, optimizer, teacher = accelerator.prepare(model, _sgd(model), teacher)
            for step in range(4):
                take_steps(accelerator, model, optimizer, [step])
                with torch.no_grad():
                    teacher(own_batch(step)[0])
                for part in (model, teacher) if step == 1 else ():
                    module = accelerator.unwrap_model(part)
                    with GatheredParameters(module.parameters(), modifier_rank=0):
                        if accelerator.is_main_process:
                            halves(module)
            assert_near(weights(accelerator, model), wanted, 1e-5)
            plain = make_net()
            halves(plain)
            assert_near(weights(accelerator, teacher), plain.state_dict(), 1e-6)


@on_paths("zero3", "zero3-cpu", "zero3-gathered", daily=("zero3", "zero3-gathered"))
def test_a_teacher_written_outside(path: str) -> None:
    """Outside the context, at stage 3, its next forward raises an error, since no step would report the write."""
    with running(path) as accelerator:
        student, teacher = make_net(), make_net().requires_grad_(False)
        student, _, teacher = accelerator.prepare(student, _sgd(student), teacher)
        for _ in range(2):
            with torch.inference_mode():
                teacher(own_batch(0)[0])
        with torch.no_grad():
            for p in accelerator.unwrap_model(teacher).parameters():
                p.mul_(0.5)
        raised(LoopError, "0.weight", "whole_weights", by=lambda: teacher(own_batch(0)[0]))


@on_paths(*ENGINE, daily=("zero3", "zero3-cpu"))
def test_masters_beside_written_weights(path: str) -> None:
    """Writing 16-bit weights does not reduce the precision of the other weights' masters."""
    with running(path, mixed_precision="bf16") as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        before = _masters(optimizer)
        with accelerator.whole_weights(model):
            accelerator.unwrap_model(model)[0].bias.data.fill_(0.25)
        after = _masters(optimizer)
    for name, master in after.items():
        wanted = torch.full_like(master, 0.25) if name == "0.bias" else before[name]
        assert torch.equal(master, wanted), name


def _masters(optimizer: Any) -> dict[str, Tensor]:
    """Return this process's masters, by name."""
    return {
        piece.name: piece.stepped.detach().view(-1)[piece.offset : piece.offset + piece.count].clone()
        for block in optimizer.session.blocks(changing=False)
        for piece in block
    }


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_a_mean_teacher(path: str) -> None:
    """A prepared average of a prepared model moves in the context of both."""
    plain, average = make_net(), make_net()
    sgd = _sgd(plain)
    for step in range(2):
        take_plain_steps(plain, sgd, [step])
        for slow, fast in zip(average.parameters(), plain.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.5)
    with running(path) as accelerator:
        student, teacher = make_net(), make_net().requires_grad_(False)
        student, optimizer, teacher = accelerator.prepare(student, _sgd(student), teacher)
        for step in range(2):
            take_steps(accelerator, student, optimizer, [step])
            with accelerator.whole_weights(student, teacher), torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.5)
        assert_near(weights(accelerator, teacher), average.state_dict(), 1e-5)
        assert_near(weights(accelerator, student), plain.state_dict(), 1e-5)
        bare = make_net()
        with accelerator.whole_weights(bare):  # complete already
            assert same(bare.state_dict(), make_net().state_dict())


@on_paths(*ALL, daily=("single", "zero3", "zero2-cpu"))
def test_partitions_are_no_weights(path: str) -> None:
    """At stage 3 `state_dict` of the module or a part of it, and saving its parameters, are refused by name."""
    with running(path) as accelerator:
        model = make_net()
        model, _ = accelerator.prepare(model, _sgd(model))
        module = accelerator.unwrap_model(model)
        for part in (module, module[0]):
            if path.startswith("zero3"):
                raised(LoopError, "get_state_dict", by=part.state_dict)
            else:
                assert part.state_dict()
        if path.startswith("zero3"):
            raised(LoopError, "get_state_dict", by=lambda: accelerator.save(list(module.parameters()), "/nowhere"))
    assert list(module.state_dict()) == list(make_net().state_dict())


@on_paths("zero2-one-process", "zero0", "zero1", "zero2", "zero2-cpu", "zero1-cpu", daily=("zero1", "zero2"))
def test_copies_are_by_themselves(path: str) -> None:
    """A copy's `load_state_dict` is not taken for the model's."""
    with running(path, mixed_precision="bf16") as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, _sgd(model))
        twin = copy.deepcopy(accelerator.unwrap_model(model))
        _load(twin)
        assert not optimizer.session.masters._is_written
