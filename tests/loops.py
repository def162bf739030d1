"""The same training code in plain torch over complete batches, and prepared, over each process's part of them."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from device import DEVICE, ON_GPU
from paths import assert_near, differences, running, weights
from torch import Tensor, nn
from torch.distributed.nn import functional as collectives
from torch.utils.data import DataLoader

from zero_plugin import Accelerator
from zero_plugin.errors import ZeroPluginError
from zero_plugin.utils import send_to_device

SIZE, FEATURES, OUT = 12, 8, 4  # samples of a global batch, which two and three processes divide
ZERO = ("zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu")
STAGE_3 = ("zero3", "zero3-cpu")
EVERYWHERE = ("single", "ddp", *ZERO)


class Plain:
    """Plain torch in one process.

    Attributes:
        world: number of processes in the group that this process is compared with.
        ranks: ranks whose parts of a global batch this process computes.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.ranks = list(range(world))
        self._window = self._size = self._left = 1

    def prepare(self, *objects: Any) -> Any:
        """Return the objects themselves, on the device."""
        for module in objects:
            if isinstance(module, nn.Module):
                module.to(DEVICE)
        return objects if len(objects) > 1 else objects[0]

    def free(self, *objects: Any) -> None:
        """Undo `prepare`."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model from before `prepare`."""
        return model

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of a global batch."""
        return whole

    def share(self, whole: Tensor, rank: int) -> Tensor:
        """Return process `rank`'s part of a global batch."""
        return whole.chunk(self.world)[rank]

    def mean_over_ranks(self, loss: Callable[[int], Tensor]) -> Tensor:
        """Return the mean of a loss that each process computes of its own part; prepared, this process's own."""
        return torch.stack([loss(rank) for rank in self.ranks]).mean()

    def gathered(self, own: dict[int, Tensor], *, with_gradients: bool = False) -> list[Tensor]:
        """Return each process's result, by its rank."""
        return [tensor if with_gradients else tensor.detach() for tensor in own.values()]

    def for_metrics(self, value: Tensor) -> Tensor:
        """Return the samples of a batch of all processes, once each."""
        return value

    def loader(self, dataset: Any, **options: Any) -> Iterable[Any]:
        """Yield batches of the dataset, which together are global ones."""
        loader = DataLoader(dataset, batch_size=SIZE, **options)
        return Moved(loader) if ON_GPU else loader

    def accumulate_over(self, steps: int) -> None:
        """Set the number of the loader's batches per optimizer step."""
        self._window = steps

    @contextmanager
    def accumulate(self, model: nn.Module, index: int = 0, length: int = 0) -> Iterator[None]:
        """Surround the work on batch `index` of `count`. The last window may be shorter."""
        begin = index - index % self._window
        self._size = min(begin + self._window, length) - begin
        self._left = begin + self._size - index
        yield

    @property
    def ends_window(self) -> bool:
        """Return whether the coming step changes weights."""
        return self._left == 1

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Surround a backward whose gradients are not averaged yet."""
        return nullcontext()

    def whole_weights(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Surround reads or writes of weights."""
        return nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients of the mean over the global batch."""
        (loss / self._size).backward(**options)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Apply gradients and drop them, at a window's end."""
        if self._left == 1:
            optimizer.step()
            optimizer.zero_grad()

    def clip(self, parameters: Any, norm: float) -> Tensor:
        """Clip the gradients and return their norm before clipping."""
        return nn.utils.clip_grad_norm_(parameters, norm)

    def clip_values(self, parameters: Any, value: float) -> None:
        """Clamp every gradient."""
        nn.utils.clip_grad_value_(parameters, value)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        return value.detach()

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the processes."""
        return value.detach()

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of all weights."""
        return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}

    def weights_of(self, **models: nn.Module) -> dict[str, Tensor]:
        """Return the weights of several models, each under a name."""
        return {f"{name}.{key}": value for name, model in models.items() for key, value in self.weights(model).items()}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(SIZE, FEATURES, generator=generator)
        y = torch.randn(SIZE, OUT, generator=generator)
        return self.part(x.to(DEVICE)), self.part(y.to(DEVICE))

    def words(self, step: int, length: int = 6, vocabulary: int = 20) -> Tensor:
        """Return token ids."""
        generator = torch.Generator().manual_seed(500 + step)
        return self.part(torch.randint(0, vocabulary, (SIZE, length), generator=generator).to(DEVICE))


class Moved:
    """A loader that moves its batches to the device."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return (send_to_device(batch, DEVICE) for batch in self._loader)


class Prepared(Plain):
    """The same code on a path of the package."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(dist.get_world_size())
        self.accelerator = accelerator
        self.ranks = [dist.get_rank()]

    def prepare(self, *objects: Any) -> Any:
        """Prepare the objects with `Accelerator.prepare`."""
        return self.accelerator.prepare(*objects)

    def free(self, *objects: Any) -> None:
        """Free the objects with the accelerator."""
        self.accelerator.free_memory(*objects)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Unwrap the model with the accelerator."""
        return self.accelerator.unwrap_model(model)

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's chunk."""
        return self.share(whole, dist.get_rank())

    def gathered(self, own: dict[int, Tensor], *, with_gradients: bool = False) -> list[Tensor]:
        """Gather with the accelerator, or with torch if gradients must come back."""
        (tensor,) = own.values()
        if with_gradients:
            return list(collectives.all_gather(tensor))
        return list(self.accelerator.gather(tensor.detach()).chunk(self.world))

    def for_metrics(self, value: Tensor) -> Tensor:
        """Gather with the accelerator."""
        return self.accelerator.gather_for_metrics(value)

    def loader(self, dataset: Any, **options: Any) -> Iterable[Any]:
        """Return a prepared loader of this process's parts."""
        return self.accelerator.prepare(DataLoader(dataset, batch_size=SIZE // self.world, **options))

    def accumulate_over(self, steps: int) -> None:
        """Set the accelerator's accumulation."""
        self.accelerator.gradient_accumulation_steps = steps

    def accumulate(self, model: nn.Module, index: int = 0, length: int = 0) -> AbstractContextManager[None]:
        """Use the accelerator's context."""
        return self.accelerator.accumulate(model)

    @property
    def ends_window(self) -> bool:
        """Return the accelerator's answer."""
        return self.accelerator.sync_gradients

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Use the accelerator's context."""
        return self.accelerator.no_sync(model)

    def whole_weights(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Use the accelerator's context."""
        return self.accelerator.whole_weights(*models)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the accelerator's backward."""
        self.accelerator.backward(loss, **options)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step at every batch: inside a window nothing happens."""
        optimizer.step()
        optimizer.zero_grad()

    def clip(self, parameters: Any, norm: float) -> Tensor:
        """Clip with the accelerator."""
        return self.accelerator.clip_grad_norm_(parameters, norm)

    def clip_values(self, parameters: Any, value: float) -> None:
        """Clamp with the accelerator."""
        self.accelerator.clip_grad_value_(parameters, value)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        return self.total(value) / self.world

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a number over the processes."""
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of the unpartitioned weights, on every process."""
        return {name: tensor.cpu() for name, tensor in weights(self.accelerator, model).items()}


@contextmanager
def prepared(path: str) -> Iterator[Prepared]:
    """Yield a loop on `path`, and end it."""
    with running(path) as accelerator:
        yield Prepared(accelerator)


def assert_trains_as_plain(
    path: str, train: Callable[[Plain], dict[str, Tensor]], *, tolerance: float = 1e-5, **arguments: Any
) -> None:
    """Fail unless a loop that runs on `path` returns the weights of the same loop in plain torch.

    Args:
        path: where to train.
        train: prepares, trains and returns weights, with the loop that it gets.
        tolerance: largest relative difference of a tensor, norm-wise.
        **arguments: arguments of `running`.
    """
    wanted = train(Plain(dist.get_world_size()))
    with running(path, **arguments) as accelerator:
        assert_near(train(Prepared(accelerator)), wanted, tolerance)


def difference(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest relative difference of a tensor, norm-wise, without counters and complex numbers."""
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    floating = [name for name, tensor in wanted.items() if tensor.is_floating_point()]
    return max(differences({n: got[n] for n in floating}, {n: wanted[n] for n in floating}, least=1e-6).values())


def outcome_of(
    path: str, plain: Callable[[], list[dict[str, Tensor]]], trained: Callable[[Prepared], list[dict[str, Tensor]]]
) -> tuple[float | None, str]:
    """Return the largest difference from plain torch, or None and the error in which the path ends.

    Args:
        path: where to train.
        plain: trains in plain torch, and returns weights.
        trained: trains on the path.
    """
    gc.collect()
    try:
        torch.manual_seed(0)
        wanted = plain()
        torch.manual_seed(0)
        with prepared(path) as loop:
            found = trained(loop)
        assert len(found) == len(wanted)
        return max(map(difference, found, wanted)), ""
    except ZeroPluginError as error:
        return None, f"refused: {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the other paths are shown as well
        return None, traceback.format_exc()
