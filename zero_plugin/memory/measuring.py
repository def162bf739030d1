"""Compares what the plan has predicted with what a run takes, once its first steps are through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from zero_plugin.checkpoint.session_tensors import described_fragments
from zero_plugin.errors import CheckpointError
from zero_plugin.memory.predicting import RunMemory
from zero_plugin.meter import peak_bytes
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.plan.amounts import show_gib
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import MASTER, WEIGHT

__all__ = ["Prediction", "compare_memory", "measure_states", "watch_memory"]

_OFF: Final = 0.1
_LEAST: Final = 2**26  # bytes of a peak, below which the allocator's rounding decides
_STEPS: Final = 2  # the first backward has run before there were states of the optimizer
_STATES: Final = ("weights", "optimizer states")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan says that this process takes.

    Attributes:
        run: what it is computed from.
        processes: of one node.
        device: where this process computes.
        peak_before: the most that torch's allocator had handed out before, see `peak_bytes`; None tells no peak.
    """

    run: RunMemory
    processes: int
    device: torch.device
    peak_before: int | None

    @property
    def states(self) -> dict[str, int]:
        """Bytes of weights, with their 32-bit copies, and of optimizer states on the device; a CPU has what is
        offloaded too."""
        terms = Counter(self.run.footprint.phases["forward"])
        if self.device.type == "cpu":
            terms.update({name: size // self.processes for name, size in self.run.footprint.host.items()})
        return {
            "weights": terms["parameters"] + terms["master weights"] + terms["buffers"],
            "optimizer states": terms["optimizer states"],
        }


def watch_memory(
    session: Session, optimizer: AcceleratedOptimizer, prediction: Prediction, say: Callable[[str], None]
) -> None:
    """After the first steps, say what was predicted and what is measured.

    Args:
        session: that runs.
        optimizer: that steps it.
        prediction: for it.
        say: prints a line.
    """
    steps = 0

    def look() -> None:
        nonlocal steps
        steps += 1
        if steps < _STEPS:
            return
        optimizer.stop_calling(look)
        try:
            found = measure_states(session, prediction.device)
        except CheckpointError:  # they lie where nobody reaches them
            found = {}
        peak = peak_bytes(prediction.device)
        new = peak is not None and prediction.peak_before is not None and peak > prediction.peak_before
        for line in compare_memory(prediction, found, peak if new else None):
            say(line)

    optimizer.call_after_step(look)


def measure_states(session: Session, device: torch.device) -> dict[str, int]:
    """Bytes of a session's weights, with their 32-bit copies, and of its optimizer states, on a device."""
    sizes: Counter[str] = Counter(dict.fromkeys(_STATES, 0))
    seen: set[int] = set()
    for fragment in described_fragments(session):
        storage = fragment.values.untyped_storage()
        if fragment.values.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes["weights" if fragment.kind in (WEIGHT, MASTER) else "optimizer states"] += storage.nbytes()
    return dict(sizes)


def compare_memory(prediction: Prediction, states: Mapping[str, int], peak: int | None) -> list[str]:
    """A line with what was predicted and measured; a second one names the term that is off by more than a tenth.

    Args:
        prediction: of the plan.
        states: measured, by `measure_states`.
        peak: most bytes that torch's allocator has handed out; None where that is not known, as on a CPU.
    """
    predicted = {name: size for name, size in prediction.states.items() if name in states}
    terms = [(name, predicted[name], states[name]) for name in predicted]
    if peak is None:
        if not terms:
            return []
        wanted, found = sum(predicted.values()), sum(states.values())
        line = f"memory of weights and optimizer states: {_both(wanted, found)}"
        is_off = _is_off(wanted, found)
    else:
        wanted = prediction.run.footprint.allocated_bytes
        line = f"peak memory of the device: {_both(wanted, peak)}"
        rest = "activations, gradients and working space"
        terms.append((rest, wanted - sum(predicted.values()), peak - sum(states.values())))
        is_off = _is_off(wanted, peak) and max(wanted, peak) > _LEAST
    if not is_off:
        return [line]
    name, planned, is_there = max(terms, key=lambda term: abs(term[1] - term[2]))
    return [line, f"warning: the plan was off most in {name}: {_both(planned, is_there)}; {_meaning(wanted, peak)}"]


def _meaning(wanted: int, peak: int | None) -> str:
    if peak is None or peak > wanted:
        return "a configuration that it calls fitting may not fit"
    return "a faster configuration may fit, too: write it in place of auto"


def _both(predicted: int, measured: int) -> str:
    share = f" ({(measured - predicted) / predicted:+.0%})" if predicted > 0 else ""
    return f"predicted {show_gib(predicted)}, measured {show_gib(measured)}{share}"


def _is_off(predicted: int, measured: int) -> bool:
    return abs(measured - predicted) > _OFF * max(predicted, 1)
