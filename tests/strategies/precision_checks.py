"""What goes into a model and what comes out, in every precision and on every path."""

from __future__ import annotations

from typing import Any

import torch
from paths import PAIR, SINGLE, checks_on, is_zero, make_net, raised, running
from torch import Tensor, nn

from zero_plugin import DummyOptim
from zero_plugin.errors import LoopError


class Echo(nn.Module):
    """Returns what it saw: the types of all it was given, and tensors of every kind."""

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


def check_types_in_and_out(path: str) -> None:
    """Nested and keyword inputs come in the type of computation, integers and booleans never change; fp32 comes out."""
    computed = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for precision in ("no", "bf16") if is_zero(path) else ("no", "bf16", "fp16"):
        with running(path, mixed_precision=precision) as accelerator:
            model: Any = Echo()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            inner = accelerator.unwrap_model(model)
            tokens = torch.tensor([[2**24 + 1]])  # in no floating type of 32 bits or less
            nested = {"pair": (torch.ones(2, 4), tokens), "mask": torch.tensor([True])}
            out = model(torch.ones(2, 4), nested=nested, flag="as it is")
            seen = inner.seen
            assert seen["y"] == computed[precision]
            assert (seen["tokens"], seen["mask"]) == (torch.int64, torch.bool)
            # Engines hold weights of that type; under autocast each operation casts for itself.
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


class Table(nn.Module):
    """Adds a table of positions to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(8))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.table)


def check_floating_buffers(path: str) -> None:
    """Positions, running statistics, spectral norms: trained under bf16, or refused by name with what to write."""

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


def check_placeholders_get_fused_kernels(path: str) -> None:
    """Adam and AdamW of a section run fused, unless the section says how; a real optimizer stays as it is."""
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


CHECKS = {
    **checks_on(dict.fromkeys((*SINGLE, *PAIR)), [check_types_in_and_out, check_floating_buffers]),
    **checks_on(("single", "ddp"), [check_placeholders_get_fused_kernels]),
}
