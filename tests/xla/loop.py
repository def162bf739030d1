"""A small training that every path runs, and the same training by hand in plain torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = [
    "ACCUMULATION",
    "EPOCHS",
    "SAMPLES",
    "Run",
    "by_hand",
    "largest_difference",
    "make_parts",
    "part_of",
    "train",
]

SAMPLES, BATCH, ACCUMULATION, EPOCHS, CLIPPING, LR = 52, 4, 4, 3, 0.35, 1e-2


class Run(NamedTuple):
    """A training's records: loss of each micro-batch, norm and learning rate of each step, final weights."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, Tensor]


class Model(nn.Module):
    """A model with tied weights, a changing buffer, and layers that autocast runs in 16 bits and in 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16, bias=False)  # a bias before a norm has no gradient but noise
        self.norm = nn.BatchNorm1d(16)
        self.inner = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.inner.weight
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.norm(self.first(inputs)))
        return self.last(nn.functional.gelu(self.again(nn.functional.gelu(self.inner(hidden)))))


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    """Create model, optimizer, scheduler and loader. 13 batches leave incomplete windows and steps of two replicas."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    inputs, targets = torch.randn(SAMPLES, 8), torch.randint(0, 4, (SAMPLES,))
    return model, optimizer, schedule, DataLoader(TensorDataset(inputs, targets), batch_size=BATCH)


def train(
    accelerator: Any, parts: Sequence[Any], epochs: Sequence[int] = range(EPOCHS), *, load: str = "", save: str = ""
) -> Run:
    """Run a script's loop. Losses are this process's part; the other values are equal on every process."""
    model, optimizer, schedule, loader = accelerator.prepare(*parts)
    if load:
        accelerator.load_state(load)
    losses, norms, rates = [], [], []
    for _ in epochs:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), CLIPPING))
                    rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    if save:
        accelerator.save_state(save)
    weights = {name: tensor.detach().cpu() for name, tensor in accelerator.unwrap_model(model).state_dict().items()}
    return Run([float(loss) for loss in losses], [float(norm) for norm in norms], rates, weights)


def by_hand(world: int, *, bf16: bool = False, parts: Sequence[Any] | None = None) -> list[Run]:
    """Train as `world` processes, one after the other, in plain torch.

    The last step of an epoch is completed with its first batches. Statistics are process 0's.
    """
    model, optimizer, schedule, loader = parts or make_parts()
    batches = list(loader)
    steps = [[batches[i + r] if i + r < len(batches) else batches[r - 1] for r in range(world)]
             for i in range(0, len(batches), world)]  # fmt: skip
    losses: list[list[float]] = [[] for _ in range(world)]
    norms, rates = [], []
    for _ in range(EPOCHS):
        for begin in range(0, len(steps), ACCUMULATION):
            window = steps[begin : begin + ACCUMULATION]
            for step in window:
                for rank, (inputs, targets) in reversed(list(enumerate(step))):
                    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
                    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                        outputs = model(inputs).float()
                    loss = nn.functional.cross_entropy(outputs, targets)
                    (loss / len(window) / world).backward()
                    losses[rank].append(loss.item())
                    if rank:
                        model.load_state_dict(before, strict=False)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING).item())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert min(norms) < CLIPPING < max(norms), f"{norms}: some steps are to be clipped, and some not"
    return [Run(own, norms, rates, model.state_dict()) for own in losses]


def part_of(run: Run, epochs: range) -> Run:
    """Return the records of some epochs of a complete run, with its last weights."""

    def cut(numbers: list[float]) -> list[float]:
        each = len(numbers) // EPOCHS
        return numbers[epochs.start * each : epochs.stop * each]

    return Run(cut(run.losses), cut(run.norms), cut(run.rates), run.weights)


def largest_difference(ours: Run, theirs: Run, what: str) -> float:
    """Return the largest difference in `losses`, `norms` or `rates`, or the norm-wise difference of all `weights`.

    A running variance is excluded: torch_xla uses the batch's own, and torch that times n / (n - 1).
    """
    if what == "weights":
        names = [n for n, tensor in theirs.weights.items() if tensor.is_floating_point() and "running_var" not in n]
        flat, wanted = (torch.cat([run.weights[n].flatten() for n in names]) for run in (ours, theirs))
        return float((flat - wanted).norm() / wanted.norm())
    found, expected = getattr(ours, what), getattr(theirs, what)
    assert len(found) == len(expected), (what, len(found), len(expected))
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))
