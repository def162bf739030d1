"""What the checks of the self-test share: the accelerator, a folder, and the model that one prepares for the next."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin.accelerator import Accelerator

__all__ = ["Run", "Stopwatch", "Trained", "speed", "stopwatch"]


@dataclass(frozen=True, slots=True)
class Trained:
    """The small model as it was prepared, with the batch of this process."""

    model: Any
    optimizer: Any
    batch: tuple[Tensor, Tensor]


@dataclass(slots=True)
class Run:
    """One self-test on one process.

    Attributes:
        accelerator: as the configuration says.
        folder: for the checkpoint; None where no folder of all machines is known.
        trained: what `optimizer step` leaves for `checkpoint`; None before, and where it failed.
    """

    accelerator: Accelerator
    folder: Path | None = None
    trained: Trained | None = None

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.accelerator.device

    @property
    def carried(self) -> torch.device:
        """Where the process group takes tensors from: the device, or the CPU beside XLA's own all-reduce."""
        return torch.device("cpu") if self.device.type == "xla" else self.device

    @property
    def processes(self) -> int:
        """How many there are."""
        return int(self.accelerator.num_processes)


@dataclass(slots=True)
class Stopwatch:
    """Seconds, once the block is left."""

    seconds: float = 0.0


@contextmanager
def stopwatch(device: torch.device) -> Iterator[Stopwatch]:
    """Measure a block with all that it started on the device."""
    watch = Stopwatch()
    _synchronize(device)
    began = time.perf_counter()
    yield watch
    _synchronize(device)
    watch.seconds = max(time.perf_counter() - began, 1e-9)


def speed(size: float, seconds: float) -> str:
    """Bytes in seconds as GB/s."""
    return f"{size / seconds / 1e9:.3g} GB/s"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
