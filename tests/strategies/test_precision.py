"""Inputs and outputs of a model, in every precision and on every path."""

from __future__ import annotations

import warnings
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
    own_batch,
    raised,
    running,
    take_plain_steps,
    weights,
)
from torch import Tensor, nn

from zero_plugin import DummyOptim
from zero_plugin.errors import LoopError


class Echo(nn.Module):
    """Returns its observations: the dtypes of all its inputs, and tensors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, nested: dict[str, Any], flag: str = "") -> dict[str, Any]:
        a, tokens = nested["pair"]
        self.seen = {"x": x.dtype, "a": a.dtype, "tokens": tokens.dtype, "mask": nested["mask"].dtype}
        y = self.layer(x) + self.layer(a)
        self.seen["y"] = y.dtype
        return {"y": y, "list": [y[:1], tokens], "mask": nested["mask"], "flag": flag, "sum": tokens.sum()}


@on_paths(*LOOP, daily=("ddp", "zero1", "zero2"))
def test_types_in_and_out(path: str) -> None:
    """Nested and keyword inputs arrive in the compute dtype. Integers and booleans never change. Outputs are fp32."""
    computed = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for precision in ("no", "bf16") if is_zero(path) else ("no", "bf16", "fp16"):
        with running(path, mixed_precision=precision) as accelerator:
            model: Any = Echo()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            inner = accelerator.unwrap_model(model)
            tokens = torch.tensor([[2**24 + 1]])  # not exact in any floating dtype of 32 bits or fewer
            nested = {"pair": (torch.ones(2, 4), tokens), "mask": torch.tensor([True])}
            out = model(torch.ones(2, 4), nested=nested, flag="as it is")
            seen = inner.seen
            assert seen["y"] == computed[precision]
            assert (seen["tokens"], seen["mask"]) == (torch.int64, torch.bool)
            # Engines hold weights of that dtype. Under autocast each operation casts for itself.
            inside = computed[precision] if is_zero(path) else torch.float32
            assert (seen["x"], seen["a"]) == (inside, inside)
            assert out["y"].dtype == out["list"][0].dtype == torch.float32
            assert out["flag"] == "as it is"
            assert torch.equal(out["list"][1], tokens)
            assert int(out["sum"]) == 2**24 + 1
            assert out["mask"].dtype == torch.bool
            accelerator.backward(out["y"].square().mean() * 1e-3)  # fits into fp16, scaled by 65536
            optimizer.step()
            assert not optimizer.step_was_skipped


class Encoder(nn.Module):
    """Has a method in addition to its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


@on_paths("single", "ddp")
def test_a_method_past_the_forward(path: str) -> None:
    """It computes in fp32 when the forward computes in bf16: one warning, and none inside `autocast()`."""
    x = torch.ones(2, 4)
    with running(path, mixed_precision="bf16") as accelerator, warnings.catch_warnings():
        warnings.simplefilter("error")
        net = Encoder()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        model(x)
        with accelerator.autocast():
            assert accelerator.unwrap_model(model).encode(x).dtype == torch.bfloat16
        with torch.no_grad():
            model.encode(x)
        with pytest.warns(UserWarning, match="accelerator.autocast"):
            assert model.encode(x).dtype == torch.float32
        model.encode(x)
        model(x)


class Wide(nn.Module):
    """Has a parameter of a dtype other than fp32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.wide = nn.Parameter(torch.arange(1, 5).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.wide.abs()
        return out


@on_paths("single", "zero2-one-process", "ddp", "zero2", "zero3", daily=("ddp", "zero2"))
def test_wide_types(path: str) -> None:
    """float64 and complex parameters train as in plain torch, or are refused if an engine would truncate them."""
    for dtype in (torch.float64, torch.complex64):
        torch.manual_seed(1)
        net, plain = Wide(dtype), Wide(dtype)
        plain.load_state_dict(net.state_dict())
        sgd = torch.optim.SGD(net.parameters(), lr=0.01)
        with running(path) as accelerator:
            if is_zero(path):
                raised(LoopError, "wide", str(dtype), "without ZeRO", by=lambda: accelerator.prepare(net, sgd))  # noqa: B023
                continue
            model, optimizer = accelerator.prepare(net, sgd)
            by_hand = torch.optim.SGD(plain.parameters(), lr=0.01)
            for step in range(2):
                accelerator.backward(loss_of(model, own_batch(step)))
                accelerator.clip_grad_norm_(model.parameters(), 100.0)
                optimizer.step()
                optimizer.zero_grad()
                take_plain_steps(plain, by_hand, [step])
            assert torch.allclose(net.wide, plain.wide, rtol=1e-5)
            assert net.wide.dtype == dtype


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_gradients_written_after_clipping(path: str) -> None:
    """The step applies them, as in plain torch. From stage 1 on, no gradients exist to write to."""
    with running(path) as accelerator:
        net = make_net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(loss_of(model, own_batch(0)))
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        own = list(accelerator.unwrap_model(model).parameters())
        if is_zero(path) and path != "zero0":
            assert [p.grad for p in own] == [None] * len(own)
            return
        for p in own:
            assert p.grad is not None
            p.grad.mul_(0.5)
        optimizer.step()
        plain = make_net()
        sgd = torch.optim.SGD(plain.parameters(), lr=0.05)
        loss_of(plain, global_batch(0)).backward()
        sgd.step()
        assert_near(weights(accelerator, model), plain.state_dict())


class Table(nn.Module):
    """Adds a table of positions to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table)


@on_paths(*LOOP, daily=("ddp", "zero2-cpu"))
def test_floating_buffers(path: str) -> None:
    """Positions, running statistics and spectral norms train under bf16, or are refused by name with the fix."""

    def make(kind: str) -> nn.Module:
        if kind == "table":
            return Table()
        if kind == "running_mean":
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)))

    for kind in ("table", "running_mean", "_u"):
        for trains in (True, False):
            for said in (False, True) if is_zero(path) else (False,):
                deepspeed = {"data_types": {"buffer_dtype": "bf16"}} if said else None
                with running(path, mixed_precision="bf16", deepspeed=deepspeed) as accelerator:
                    model = make(kind)
                    prepared = [model, *([torch.optim.SGD(model.parameters(), lr=0.1)] if trains else [])]
                    model = accelerator.prepare(*prepared)[0] if trains else accelerator.prepare(model.eval())
                    x = torch.randn(4, 8)
                    if is_zero(path) and not said:
                        raised(LoopError, kind, "buffer_dtype", by=lambda model=model, x=x: model(x))
                        continue
                    out = model(x)
                    assert out.dtype == torch.float32
                    if trains:
                        accelerator.backward(out.square().mean())


@on_paths("single", "ddp")
def test_placeholders_get_fused_kernels(path: str) -> None:
    """A section's Adam and AdamW run fused unless the section sets `fused` or `foreach`.

    A real optimizer is unchanged.
    """
    for kind, params, fused in (
        ("AdamW", {}, True),
        ("Adam", {"adam_w_mode": False}, True),
        ("AdamW", {"foreach": False}, None),
        ("SGD", {}, None),
    ):
        section = {"type": kind, "params": {"lr": "auto", **params}}
        with running(path, deepspeed={"optimizer": section}) as accelerator:
            model = make_net()
            model, optimizer = accelerator.prepare(model, DummyOptim(model.parameters(), lr=0.01))
            assert optimizer.param_groups[0].get("fused") is fused, (kind, params)
    with running(path) as accelerator:
        model = make_net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        assert optimizer.param_groups[0]["fused"] is None
