"""The paths that checks run on, and the models that they train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, ON_GPU, distributed_type
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero_plugin import Accelerator
from zero_plugin.distributed import collectives

ZERO = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero2-cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
FURTHER = {  # for few checks
    "zero1-cpu": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "zero3-cpu": {**ZERO["zero3"], "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    # DeepSpeed's default: between forwards it keeps weights of up to 100,000 elements gathered, all of those here.
    "zero3-gathered": {"stage": 3},
}
PAIR = ("ddp", *ZERO)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Record the messages that this process logs inside; process 0 logs those that are the same on all."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("zero_plugin")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class Reads(TorchDispatchMode):
    """A counter of the numbers read from the device. Each read waits for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def is_zero(path: str) -> bool:
    """Return whether an engine runs the path."""
    return path.startswith("zero")


def start(
    path: str,
    *,
    deepspeed: dict[str, Any] | None = None,
    counts: str = "steps",
    checks: str = "all",
    **arguments: Any,
) -> Accelerator:
    """Create an Accelerator on `path`.

    Args:
        path: one of the paths above.
        deepspeed: merged into the DeepSpeed part of the configuration.
        counts: `scheduler_counts`.
        checks: the key of a launch config.
        **arguments: arguments of `Accelerator`.
    """
    section = {**({"zero_optimization": (ZERO | FURTHER)[path]} if is_zero(path) else {}), **(deepspeed or {})}
    kind = distributed_type(path)
    config = {"distributed_type": kind, "use_cpu": not ON_GPU, "scheduler_counts": counts, "checks": checks}
    config["deepspeed_config"] = section
    return Accelerator(config=config, **arguments)


@contextmanager
def running(path: str, **arguments: Any) -> Iterator[Accelerator]:
    """Yield `start`'s Accelerator, and end it."""
    accelerator = start(path, **arguments)
    try:
        yield accelerator
    finally:
        accelerator.end_training()


def make_net() -> nn.Module:
    """Build a small model with the same weights everywhere: [batch, 8] → [batch, 4]."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(DEVICE)


def net_and_sgd(**options: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the small model and its SGD."""
    net = make_net()
    return net, torch.optim.SGD(net.parameters(), lr=0.1, **options)


def global_batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of all processes together."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(size, 8, generator=generator, device="cpu")
    return x.to(DEVICE), torch.randn(size, 4, generator=generator, device="cpu").to(DEVICE)


def own_batch(step: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return this process's part of `global_batch`."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x, y = global_batch(step, size)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def loss_of(model: Any, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> Tensor:
    """Return the mean squared error in fp32."""
    x, y = batch
    return (scale * (model(x).float() - y)).square().mean()


def prepare_net(accelerator: Accelerator) -> tuple[Any, Any]:
    """Prepare the small model and its AdamW."""
    net = make_net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return model, optimizer


def take_step(accelerator: Accelerator, model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> float:
    """Take one step, and return the loss over all processes."""
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(collectives.reduce(loss.detach()))


def take_steps(accelerator: Accelerator, model: Any, optimizer: Any, batches: Iterable[int]) -> None:
    """Take a step for each of these batches, on this process's part."""
    for batch in batches:
        accelerator.backward(loss_of(model, own_batch(batch)))
        optimizer.step()
        optimizer.zero_grad()


def take_plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[int]) -> None:
    """Take the same steps in plain torch, over the batches of all processes."""
    for batch in batches:
        loss_of(model, global_batch(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the unpartitioned weights, on every process."""
    state = [accelerator.get_state_dict(model)]
    dist.broadcast_object_list(state)
    assert state[0] is not None
    return {name: tensor.to(DEVICE, copy=True) for name, tensor in state[0].items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether two models are bitwise equal."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Check that every tensor is within `tolerance` of the wanted one, norm-wise."""
    for name, off in differences(got, wanted).items():
        assert off < tolerance, f"{name}: off by {off:.2e}"


def differences(got: dict[str, Tensor], wanted: dict[str, Tensor], *, least: float = 1e-8) -> dict[str, float]:
    """Return each tensor's relative norm-wise difference, relative to `least` if the tensor's norm is smaller."""
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    return {
        name: float((got[name].cpu().float() - tensor.cpu().float()).norm() / tensor.float().norm().clamp_min(least))
        for name, tensor in wanted.items()
    }


def assert_numbers(what: str, got: list[Any], wanted: list[Any], tolerance: float = 1e-5) -> None:
    """Check that numbers, or rows of them, have the wanted count and values within `tolerance`.

    Infinities equal each other, NaNs differ.
    """
    assert len(got) == len(wanted), f"{what}: {len(got)} values, {len(wanted)} expected"
    left, right = (
        torch.nan_to_num(torch.tensor(numbers, dtype=torch.float64, device="cpu"), nan=torch.nan)
        for numbers in (got, wanted)
    )
    off = (left - right).abs().max().item() if got else 0.0
    assert off <= tolerance, f"{what}: off by {off:.2e}\n got {got}\n expected {wanted}"


def tolerance_of(*paths: str, half: bool = False, exact: float = 1e-5) -> float:
    """Return the relative difference of losses and weights that a path may have from plain torch.

    Args:
        *paths: the paths that have trained.
        half: whether they train in 16 bits.
        exact: the tolerance in fp32 without offload. With offload DeepSpeed's own kernels compute the update.
    """
    if half:
        return 1e-2
    return 1e-4 if any("-cpu" in path or "nvme" in path for path in paths) else exact


def raised(kind: type[Exception], *words: str, by: Callable[[], Any]) -> None:
    """Check that `by` raises `kind` with all `words` in its message."""
    with pytest.raises(kind) as caught:
        by()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
