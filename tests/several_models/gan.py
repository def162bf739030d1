"""A small GAN and its training, by hand in plain torch and as a loop over zero_plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator

NOISE, FEATURES, BATCH, EPOCHS = 4, 6, 8, 2


@dataclass(frozen=True)
class Case:
    """One way of training it.

    Attributes:
        frozen: whether the discriminator is frozen for the generator's loss.
        accumulation: micro-batches per step of both.
        style: `context` wraps micro-batches in one `accumulate` of both models, `contexts` each half in its own,
            `hand` in none.
        clip: largest gradient norm for both.
        one_call: whether one call prepares all objects.
        batches: per epoch.
        adam: AdamW instead of SGD with momentum.
        late: whether both optimizers step at the end, when the discriminator is still frozen.
        precision: `mixed_precision`.
    """

    frozen: bool
    accumulation: int = 1
    style: str = "hand"
    clip: float | None = None
    one_call: bool = False
    batches: int = 4
    adam: bool = False
    late: bool = False
    precision: str = "no"


@dataclass
class Result:
    """Losses of the discriminator and the generator, norms if they were clipped, and the weights of both."""

    losses: list[list[float]]
    norms: list[float]
    weights: list[dict[str, Tensor]]


def make_nets() -> tuple[nn.Module, nn.Module]:
    """Build generator and discriminator, with the same weights everywhere."""
    torch.manual_seed(11)
    generator = nn.Sequential(nn.Linear(NOISE, 10), nn.Tanh(), nn.Linear(10, FEATURES))
    discriminator = nn.Sequential(nn.Linear(FEATURES, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))
    return generator, discriminator


def make_data(batches: int) -> TensorDataset:
    """Return noise and real samples of an epoch, for all processes together."""
    generator = torch.Generator().manual_seed(12)
    real = 2 + torch.randn(BATCH * batches, FEATURES, generator=generator)
    return TensorDataset(torch.randn(BATCH * batches, NOISE, generator=generator), real)


def make_optimizer(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Build the case's optimizer."""
    if case.adam:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def discriminator_loss(generator: Any, discriminator: Any, noise: Tensor, real: Tensor) -> Tensor:
    """Compute the loss of two forwards of the discriminator."""
    with torch.no_grad():
        fake = generator(noise)
    on_real, on_fake = discriminator(real), discriminator(fake)
    return binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real)) + binary_cross_entropy_with_logits(
        on_fake, torch.zeros_like(on_fake)
    )


def generator_loss(generator: Any, discriminator: Any, noise: Tensor) -> Tensor:
    """Compute the loss, which runs through the discriminator."""
    on_fake = discriminator(generator(noise))
    return binary_cross_entropy_with_logits(on_fake, torch.ones_like(on_fake))


def train_plain(case: Case) -> Result:
    """Train one process on the global batch, by hand."""
    generator, discriminator = make_nets()
    optimizers = [make_optimizer(model, case) for model in (generator, discriminator)]
    loader = DataLoader(make_data(case.batches), batch_size=BATCH)
    result = Result([], [], [])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if case.clip is not None:
            result.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()

    for _ in range(EPOCHS):
        for i, (noise, real) in enumerate(loader):
            first = i % case.accumulation == 0
            start = i - i % case.accumulation
            size = min(case.accumulation, case.batches - start)
            last = i == start + size - 1
            if first:
                optimizers[1].zero_grad()
            loss_d = discriminator_loss(generator, discriminator, noise, real)
            (loss_d / size).backward()
            if last and not case.late:
                step(discriminator, optimizers[1])
            if first:
                optimizers[0].zero_grad()
            discriminator.requires_grad_(not case.frozen)
            loss_g = generator_loss(generator, discriminator, noise)
            (loss_g / size).backward()
            if last and case.late:
                step(discriminator, optimizers[1])
            discriminator.requires_grad_(True)
            if last:
                step(generator, optimizers[0])
            result.losses.append([loss_d.item(), loss_g.item()])
    result.weights = [model.state_dict() for model in (generator, discriminator)]
    return result


def train(accelerator: Accelerator, case: Case, weights: Callable[[Accelerator, Any], dict[str, Tensor]]) -> Result:
    """Train the same over zero_plugin. Every micro-batch calls `zero_grad` and `step`."""
    nets = make_nets()
    optims = [make_optimizer(model, case) for model in nets]
    loader: Any = DataLoader(make_data(case.batches), batch_size=BATCH // accelerator.num_processes)
    if case.one_call:
        generator, discriminator, optimizer_g, optimizer_d, loader = accelerator.prepare(*nets, *optims, loader)
    else:
        generator, optimizer_g, loader = accelerator.prepare(nets[0], optims[0], loader)
        discriminator, optimizer_d = accelerator.prepare(nets[1], optims[1])
    result = Result([], [], [])

    def step(model: Any, optimizer: Any) -> None:
        if case.clip is not None:
            norm = float(accelerator.clip_grad_norm_(model.parameters(), case.clip))
            if norm == norm:
                result.norms.append(norm)
        optimizer.step()

    def train_discriminator(noise: Tensor, real: Tensor) -> Tensor:
        optimizer_d.zero_grad()
        loss = discriminator_loss(generator, discriminator, noise, real)
        accelerator.backward(loss)
        if not case.late:
            step(discriminator, optimizer_d)
        return loss

    def train_generator(noise: Tensor) -> Tensor:
        optimizer_g.zero_grad()
        discriminator.requires_grad_(not case.frozen)
        loss = generator_loss(generator, discriminator, noise)
        accelerator.backward(loss)
        if case.late:
            step(discriminator, optimizer_d)
        discriminator.requires_grad_(True)
        step(generator, optimizer_g)
        return loss

    for _ in range(EPOCHS):
        for noise, real in loader:
            if case.style == "context":
                with accelerator.accumulate(generator, discriminator):
                    losses = [train_discriminator(noise, real), train_generator(noise)]
            elif case.style == "contexts":
                with accelerator.accumulate(discriminator):
                    losses = [train_discriminator(noise, real)]
                with accelerator.accumulate(generator):
                    losses.append(train_generator(noise))
            else:
                losses = [train_discriminator(noise, real), train_generator(noise)]
            result.losses.append([float(accelerator.reduce(loss.detach(), "mean")) for loss in losses])
    result.weights = [weights(accelerator, model) for model in (generator, discriminator)]
    return result
