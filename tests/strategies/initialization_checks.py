"""An engine at stage 3 is made without gathering the model, and trains as one that DeepSpeed makes by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload_checks import prepared, train, zero3
from paths import checks_on, loss_of, own_batch, raised, running, same, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Gathers(TorchDispatchMode):
    """Counts the all-gathers of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.c10d._allgather_base_.default
        return func(*args, **(kwargs or {}))


class Twice(nn.Module):
    """A layer that is called twice, a frozen one, and weights that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.encode = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.shift = nn.Parameter(torch.ones(1, 1, 7))
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(torch.tanh(self.fixed(torch.tanh(self.encode(x)))))
        return self.out(x * self.gain + self.shift.sum())


def _sgd(model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD([{"params": trained[:3]}, {"params": trained[3:], "lr": 0.05}], lr=0.1, momentum=0.9)


def _adagrad(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad((p for p in model.parameters() if p.requires_grad), lr=0.1)


def _trained(path: str, optimizer_of: Callable[[Any], Any], **arguments: Any) -> tuple[int, dict[str, Tensor]]:
    """How often `prepare` gathered a parameter, and the weights after three steps."""
    with running(path, **arguments) as accelerator:
        model = Twice()
        with Gathers() as gathers:
            model, optimizer = accelerator.prepare(model, optimizer_of(model))
        for step in range(3):
            accelerator.backward(loss_of(model, own_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        return gathers.count, weights(accelerator, model)


def check_nothing_is_gathered(path: str) -> None:
    """Nor is anything else than bitwise what DeepSpeed trains, which gathers each of the trained parameters."""
    from zero_plugin.strategies.deepspeed import initialization_shortcuts as shortcuts

    trained = sum(p.requires_grad for p in Twice().parameters())
    for optimizer_of, precision in ((_sgd, "no"), (_adagrad, "bf16")):
        count, found = _trained(path, optimizer_of, mixed_precision=precision)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shortcuts, "_is_as_known", lambda: False)
            own_count, wanted = _trained(path, optimizer_of, mixed_precision=precision)
        assert (count, own_count) == (0, trained)
        assert same(found, wanted)


def check_weights_on_nvme(folder: Path) -> None:
    """Weights there are gathered no more than others, and train the same."""
    from zero_plugin.strategies.deepspeed import initialization_shortcuts as shortcuts

    found = []
    for shortens in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shortcuts, "_is_as_known", lambda: shortens)  # noqa: B023
            with running("zero3", deepspeed=zero3(folder, optimizer="nvme", param="nvme")) as accelerator:
                with Gathers() as gathers:
                    model, optimizer = prepared(accelerator)
                assert gathers.count == (0 if shortens else len(list(model.parameters())))
                for step in range(2):
                    train(accelerator, model, optimizer, step)
                found.append(weights(accelerator, model))
    assert same(*found)


def check_a_weight_that_is_twice_in_the_optimizer(path: str) -> None:
    """It is refused by its name, as by DeepSpeed."""
    from zero_plugin.strategies.deepspeed.initialization_shortcuts import _refuse_duplicates

    model = Twice()
    engine, optimizer = SimpleNamespace(module=model), _sgd(model)
    _refuse_duplicates(engine, optimizer)
    optimizer.param_groups[1]["params"].append(model.gain)
    raised(AssertionError, "gain", by=lambda: _refuse_duplicates(engine, optimizer))


CHECKS = checks_on(["zero3", "zero3-cpu"], [check_nothing_is_gathered]) | checks_on(
    ["zero3"], [check_a_weight_that_is_twice_in_the_optimizer]
)
CHECKS["zero3-weights_on_nvme"] = ([2], check_weights_on_nvme)
