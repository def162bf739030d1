"""The same training code in plain torch over whole batches, and prepared, over each process' part of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin import Accelerator

SIZE, FEATURES, OUT = 12, 8, 4  # samples of a global batch, which two and three processes divide
ZERO = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero2-cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3-cpu": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
PATHS = ("single", "ddp", *ZERO)


class Plain:
    """Plain torch in one process.

    Attributes:
        world: processes of the group that this one is compared with.
    """

    def __init__(self, world: int) -> None:
        self.world = world

    def prepare(self, *objects: Any) -> Any:
        """The objects themselves."""
        return objects if len(objects) > 1 else objects[0]

    def part(self, whole: Tensor) -> Tensor:
        """What of a global batch is this process'."""
        return whole

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean over the global batch."""
        loss.backward()

    def clip(self, model: nn.Module, norm: float) -> Tensor:
        """The norm of all gradients before they are clipped."""
        return nn.utils.clip_grad_norm_(model.parameters(), norm)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a number over the processes."""
        return value.detach()

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number over the processes."""
        return value.detach()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of all weights."""
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(SIZE, FEATURES, generator=generator)
        return self.part(x), self.part(torch.randn(SIZE, OUT, generator=generator))

    def words(self, step: int, length: int = 6, vocabulary: int = 20) -> Tensor:
        """Token ids."""
        generator = torch.Generator().manual_seed(500 + step)
        return self.part(torch.randint(0, vocabulary, (SIZE, length), generator=generator))


class Prepared(Plain):
    """On a path of the package."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(dist.get_world_size())
        self.accelerator = accelerator

    def prepare(self, *objects: Any) -> Any:
        """What `Accelerator.prepare` makes of them."""
        return self.accelerator.prepare(*objects)

    def part(self, whole: Tensor) -> Tensor:
        """This process' chunk."""
        return whole.chunk(self.world)[dist.get_rank()]

    def backward(self, loss: Tensor) -> None:
        """The accelerator's."""
        self.accelerator.backward(loss)

    def clip(self, model: nn.Module, norm: float) -> Tensor:
        """The accelerator's."""
        return self.accelerator.clip_grad_norm_(model.parameters(), norm)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a number over the processes."""
        return self.total(value) / self.world

    def total(self, value: Tensor) -> Tensor:
        """The sum of a number over the processes."""
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of the whole weights, on every process."""
        state = [self.accelerator.get_state_dict(model)]
        dist.broadcast_object_list(state)
        assert state[0] is not None
        return {name: tensor.clone() for name, tensor in state[0].items()}


@contextmanager
def prepared(path: str) -> Iterator[Prepared]:
    """A loop on `path`, ended in the end."""
    section: dict[str, Any] = {"zero_optimization": ZERO[path]} if path in ZERO else {}
    kind = "DEEPSPEED" if path in ZERO else "MULTI_CPU" if path == "ddp" else "NO"
    accelerator = Accelerator(
        config={"distributed_type": kind, "use_cpu": True, "scheduler_counts": "steps", "deepspeed_config": section}
    )
    try:
        yield Prepared(accelerator)
    finally:
        accelerator.end_training()


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor, norm-wise."""
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    floating = {name: tensor for name, tensor in wanted.items() if tensor.is_floating_point()}
    return max(
        float((got[name].float() - tensor.float()).norm() / tensor.float().norm().clamp_min(1e-6))
        for name, tensor in floating.items()
    )
