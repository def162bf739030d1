"""One step of a small model against the same step in one process, and a checkpoint of it."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin.optimizers import build_optimizer
from zero_plugin.placeholders import DummyOptim
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.seeding import set_seed
from zero_plugin.selftest.outcome import CheckError, LeftOut
from zero_plugin.selftest.run import Run, Trained, speed, stopwatch

__all__ = ["check_checkpoint", "check_optimizer_step"]

_WIDTH = 512  # a weight of 0.26 million elements: ZeRO-3 keeps smaller ones whole
_OUTPUTS = 8
_ROWS = 8  # per process
# Adam's first step is lr * g / (|g| + eps): with an eps as large as the gradients, it shows a gradient that is wrong by
# a factor, and no sign flips by a rounding.
_ARGUMENTS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 0.05, "weight_decay": 0.0}
_TOLERANCE = {"no": 1e-3, "bf16": 0.1, "fp16": 0.1}  # of the step's length
_MOST_ATTEMPTS = 25  # fp16 begins with a loss scale that may have to be halved


def check_optimizer_step(run: Run) -> str:
    """Train one step on the global batch; on the main process, take it again in fp32 with plain torch, and compare."""
    accelerator = run.accelerator
    set_seed(0)
    hidden = [layer for _ in range(2) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(_WIDTH, _OUTPUTS))
    reference = copy.deepcopy(model)
    rows = _ROWS * run.processes
    inputs, targets = torch.randn(rows, _WIDTH), torch.randn(rows, _OUTPUTS)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=_ROWS)
    described = accelerator.document.deepspeed.has_section("optimizer")
    make: Any = DummyOptim if described else torch.optim.AdamW
    optimizer = make(model.parameters(), **_ARGUMENTS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    before = accelerator.get_state_dict(model)
    trained = Trained(model, optimizer, next(iter(loader)))
    with stopwatch(run.device) as watch:
        _step(run, trained)
    after = accelerator.get_state_dict(model)
    run.trained = trained
    if before is None or after is None:  # not the main process
        return ""
    reference.load_state_dict({name: tensor.float() for name, tensor in before.items()})
    section = _resolved(run).optimizer if described else None
    torch_optimizer = (
        torch.optim.AdamW(reference.parameters(), **_ARGUMENTS)
        if section is None
        else build_optimizer(section, reference.parameters())
    )
    torch.autograd.backward(_loss(reference, (inputs, targets)))
    torch_optimizer.step()
    apart = _distance(after, reference.state_dict(), before)
    allowed = _TOLERANCE[_resolved(run).precision]
    if not apart <= allowed:
        raise CheckError(
            f"the step differs by {apart:.2g} of its length from that of one process with plain torch "
            f"(allowed: {allowed:g})"
        )
    return f"as in one process, but for {apart:.1g} of its length ({watch.seconds * 1e3:.0f} ms)"


def check_checkpoint(run: Run) -> str:
    """Save; step; load: the weights are those saved, and the same step leads to where it led before."""
    if run.trained is None:
        raise LeftOut("it takes the model of the optimizer step, which failed")
    if run.folder is None:
        raise LeftOut("the machines need a folder that all of them see: --folder FOLDER")
    accelerator, trained = run.accelerator, run.trained
    saved = accelerator.get_state_dict(trained.model)
    with stopwatch(run.device) as saving:
        accelerator.save_state(run.folder)
    _step(run, trained)
    after = accelerator.get_state_dict(trained.model)
    with stopwatch(run.device) as loading:
        accelerator.load_state(run.folder)
    loaded = accelerator.get_state_dict(trained.model)
    _step(run, trained)
    again = accelerator.get_state_dict(trained.model)
    if saved is None or after is None or loaded is None or again is None:
        return ""
    if wrong := [name for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]:
        raise CheckError(f"weights differ after load_state: {', '.join(wrong)}")
    apart = _distance(again, after, saved)
    if not apart <= _TOLERANCE[_resolved(run).precision]:
        raise CheckError(
            f"the step after load_state differs by {apart:.2g} of its length from the one before: the optimizer's "
            "states were not restored"
        )
    size = sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file())
    rates = f"written at {speed(size, saving.seconds)}, read at {speed(size, loading.seconds)}"
    return f"values equal; {size / 1e6:.3g} MB {rates}"


def _resolved(run: Run) -> Resolved:
    resolved = run.accelerator.resolved
    assert resolved is not None, "a model is prepared"
    return resolved


def _step(run: Run, trained: Trained) -> None:
    for _ in range(_MOST_ATTEMPTS):
        run.accelerator.backward(_loss(trained.model, trained.batch))
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        if not run.accelerator.optimizer_step_was_skipped:
            return
    raise CheckError(f"fp16 overflowed {_MOST_ATTEMPTS} times in a row, at every loss scale")


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype)
    predicted: Tensor = model(inputs.to(kind))
    return (predicted.float() - targets).square().sum(1).mean()


def _distance(found: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far two steps from one start end from each other, in lengths of the wanted one."""

    def length(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in start))

    return length(found, wanted) / max(length(wanted, start), 1e-30)
