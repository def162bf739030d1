"""Random lives of one model: prepared, trained, left mid-loop, freed, changed and prepared again, a few times."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loops import FEATURES, OUT, SIZE, Plain, Prepared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from zero_plugin.utils import extract_model_from_parallel

BATCHES = 7  # of an epoch; divisible only by windows of one micro-batch
OPTIMIZERS = ("sgd", "momentum", "adamw", "groups")
LEAVES = ("nothing", "backward", "clip", "failed forward", "failed backward", "in accumulate", "in the loop")


@dataclass(frozen=True)
class Stage:
    """One training of a life.

    Attributes:
        frozen: the layers that are not trained.
        optimizer: its kind.
        accumulation: micro-batches of a window.
        batches: how many batches of the first epoch are trained before `break` leaves the loop.
        epochs: complete epochs before that one.
        loader: whether the batches come from a prepared loader; if not, windows are complete.
        clips, schedules: whether gradients are clipped, and the learning rate changes.
        leaves: the loop's point when the memory is freed.
        resumes: whether it resumes from a checkpoint of the previous training, with the same optimizer.
        evaluates: whether the model is first prepared alone and evaluated.
        edits: whether the script writes the weights at the end.
        keeps: whether the script keeps `prepare`'s results.
    """

    frozen: tuple[int, ...]
    optimizer: str
    accumulation: int
    batches: int
    epochs: int
    loader: bool
    clips: bool
    schedules: bool
    leaves: str
    resumes: bool
    evaluates: bool
    edits: bool
    keeps: bool


@dataclass(frozen=True)
class Life:
    """A model and its trainings."""

    seed: int
    model: str
    stages: tuple[Stage, ...]


def draw(seed: int) -> Life:
    """Draw the life of a seed, the same everywhere."""
    chance = random.Random(seed)
    stages: list[Stage] = []
    for number in range(chance.choice((2, 2, 3))):
        resumes = number > 0 and chance.random() < 0.35
        before = stages[-1] if stages else None
        loader = chance.random() < 0.5
        stages.append(
            Stage(
                frozen=before.frozen if before and resumes else chance.choice(((), (0,), (1,), (2,), (0, 1), (1, 2))),
                optimizer=before.optimizer if before and resumes else chance.choice(OPTIMIZERS),
                accumulation=chance.choice((1, 2, 3)),
                batches=chance.randint(1, BATCHES),
                epochs=chance.choice((0, 0, 1)) if loader else 0,
                loader=loader,
                clips=chance.random() < 0.3,
                schedules=not resumes and chance.random() < 0.3,
                leaves=chance.choice(LEAVES),
                resumes=resumes,
                evaluates=chance.random() < 0.2,
                edits=chance.random() < 0.2,
                keeps=chance.random() < 0.4,
            )
        )
    return Life(seed, chance.choice(("layers", "norms", "tied", "checkpointed")), tuple(stages))


class Layers(nn.Module):
    """Three layers, which can be frozen one by one: [batch, FEATURES] → [batch, OUT].

    Args:
        kind: plain layers; with norms and a scalar; with one weight in two layers; or with a layer computed twice.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        widths = (16, 16)
        self.layers = nn.ModuleList(
            [nn.Linear(FEATURES, widths[0]), nn.Linear(widths[0], widths[1]), nn.Linear(widths[1], OUT)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for width in widths] if kind == "norms" else [])
        self.scale = nn.Parameter(torch.tensor(1.5)) if kind == "norms" else None
        if kind == "tied":
            self.again = nn.Linear(widths[0], widths[1], bias=False)
            self.again.weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        x = self.norms[0](x) if self.norms else x
        x = checkpoint(self._middle, x, use_reentrant=False) if self.kind == "checkpointed" else self._middle(x)
        x = self.norms[1](x) if self.norms else x
        if self.kind == "tied":
            x = x + self.again(x)
        x = self.layers[2](x)
        return x if self.scale is None else x * self.scale

    def _middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers[1](x))


class ScriptError(Exception):
    """An error of the script itself."""


class PlainLife(Plain):
    """Plain torch in one process, with a life's other operations."""

    def save(self, optimizer: Any, folder: Path) -> Any:
        """Save a checkpoint for `resume`."""
        return copy.deepcopy(optimizer.state_dict())

    def resume(self, optimizer: Any, saved: Any) -> None:
        """Continue from `save`'s return value, with the model's own weights."""
        optimizer.load_state_dict(saved)

    def leave(self, stage: Stage, model: Any, optimizer: Any) -> None:
        """Leave the loop as the stage does, and free the memory. Nothing reaches the next training."""
        model.zero_grad()


class PreparedLife(Prepared):
    """The same operations on a path of the package."""

    def save(self, optimizer: Any, folder: Path) -> Path:
        """Save with `save_state`, in an open window too."""
        self.accelerator.save_state(folder)
        return folder

    def resume(self, optimizer: Any, saved: Any) -> None:
        """Resume with `load_state`."""
        self.accelerator.load_state(saved)

    def leave(self, stage: Stage, model: Any, optimizer: Any) -> None:
        """Leave at any point of a script's loop where it may call `free_memory`, also inside a step."""
        accelerator, batch = self.accelerator, self.batch(50)
        if stage.leaves in ("backward", "clip", "failed backward"):
            with accelerator.accumulate(model):
                loss = _loss(model, batch)
                if stage.leaves == "failed backward":
                    loss.register_hook(_raise)
                    with suppress(ScriptError):
                        accelerator.backward(loss)
                else:
                    accelerator.backward(loss)
                if stage.leaves == "clip":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
        elif stage.leaves == "failed forward":
            hook = self.unwrap(model).layers[2].register_forward_pre_hook(_raise)
            with suppress(ScriptError):
                model(batch[0])
            hook.remove()
        elif stage.leaves == "in accumulate":
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, batch))
                self.free()
        elif stage.leaves == "in the loop":
            for other in self.loader(_samples()):
                accelerator.backward(_loss(model, other))
                self.free()
                break
        self.free()
        assert all(p.grad is None for p in optimizer_parameters(model)), "free_memory() leaves gradients"


def optimizer_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters of the user's own module."""
    return list(extract_model_from_parallel(model).parameters())


def live(life: Life, loop: PlainLife | PreparedLife, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights after each training of a life."""
    torch.manual_seed(life.seed)
    net = Layers(life.model)
    found: list[dict[str, Tensor]] = []
    kept: list[Any] = []
    state: Any = None
    for number, stage in enumerate(life.stages):
        net.requires_grad_(True)
        for layer in stage.frozen:
            net.layers[layer].requires_grad_(False)
        if stage.evaluates:
            found.append(_evaluate(loop, net))
        objects, state = _train(loop, stage, net, folder / str(number), state)
        found.append(loop.weights(objects[0]))
        loop.leave(stage, *objects[:2])
        kept += objects if stage.keeps else ()
        del objects
    return found


def _evaluate(loop: Any, net: nn.Module) -> dict[str, Tensor]:
    model = loop.prepare(net)
    with torch.no_grad():
        total = loop.mean(_loss(model, loop.batch(77)))
    loop.free()
    return {"loss": total.reshape(1).cpu()}


def _train(loop: Any, stage: Stage, net: Layers, folder: Path, state: Any) -> tuple[list[Any], Any]:
    """Train as the stage does, and save. Return the objects from `prepare` and a checkpoint to resume from."""
    loop.accumulate_over(stage.accumulation)
    given = _optimizer(stage, net)
    schedules = [torch.optim.lr_scheduler.StepLR(given, 2, 0.5)] if stage.schedules else []
    model, optimizer, *schedules = objects = list(loop.prepare(net, given, *schedules))
    if stage.resumes:
        loop.resume(optimizer, state)
    for index, batch, length in _batches(loop, stage):
        with loop.accumulate(model, index, length):
            loop.backward(_loss(model, batch))
            ends = loop.ends_window
            if stage.clips and ends:
                loop.clip(model.parameters(), 0.5)
            loop.step(optimizer)
            if schedules and ends:
                schedules[0].step()
    if stage.edits:
        with loop.whole_weights(model), torch.no_grad():
            for p in net.parameters():
                p.mul_(0.9)
    return objects, loop.save(optimizer, folder)


def _batches(loop: Any, stage: Stage) -> Iterator[tuple[int, Any, int]]:
    """Yield each batch with its index and the number of batches. A loader's windows end with the epoch."""
    if not stage.loader:
        windows = max(1, stage.batches // stage.accumulation)
        yield from ((i, loop.batch(i), BATCHES * 9) for i in range(windows * stage.accumulation))
        return
    loader = loop.loader(_samples())
    for epoch in range(stage.epochs + 1):
        for index, batch in enumerate(loader):
            if epoch == stage.epochs and index == stage.batches:
                break
            yield index, batch, BATCHES


def _samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(11)
    return TensorDataset(*(torch.randn(BATCHES * SIZE, width, generator=generator) for width in (FEATURES, OUT)))


def _optimizer(stage: Stage, net: Layers) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    if stage.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
    if stage.optimizer == "groups":
        groups = [{"params": trained[:1], "lr": 0.02}, {"params": trained[1:]}]
        return torch.optim.SGD(groups, lr=0.05, weight_decay=0.1)
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9 if stage.optimizer == "momentum" else 0.0)


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def _raise(*_: Any) -> None:
    raise ScriptError
