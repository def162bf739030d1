"""Whether a run has room, before it allocates and after its first steps.

Refuses what this machine has no room for before any of it is allocated: host memory, page-locked memory, NVMe.

Compares what the plan has predicted with what a run takes, once its first steps are through.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zero_plugin.checkpoint.layout import described_fragments
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import dropped_zero, launch_settings
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.distributed.collectives import broadcast_object_list, gather_object
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import CheckpointError, MachineError, StrategyError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.machine.device_memory import peak_bytes
from zero_plugin.machine.memory import available_cpu_memory, lockable_bytes
from zero_plugin.plan.footprint import Footprint
from zero_plugin.plan.live_model import model_sizes
from zero_plugin.plan.options import Stage
from zero_plugin.plan.run_plan import RunMemory, find_activations, free_bytes, local_processes, predict_memory
from zero_plugin.plan.situation import Activations
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.fragments import MASTER, WEIGHT

_log = logging.getLogger(__name__)

_SCARCE: Final = 0.9  # of what is there: a run that takes more is warned
_CPU_FIX: Final = (
    "fewer processes per machine, more machines, offload_optimizer_device: nvme in place of cpu, or pin_memory: false "
    "(page-locked tensors are rounded up to powers of two)"
)
_LOCKED_FIX: Final = "ulimit -l unlimited (docker run --ulimit memlock=-1), or a smaller offload_param.buffer_size"


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """What one machine has for a run.

    Attributes:
        host: bytes of host memory that can be had, for all processes together.
        lockable: bytes that one process may lock, None without a limit.
        nvme: free bytes by folder.
    """

    host: int
    lockable: int | None
    nvme: Mapping[str, int]


def check_memory(
    model: nn.Module,
    resolved: Resolved,
    stage: Stage,
    facts: Facts,
    processes: Processes,
) -> None:
    """Refuse offload that finds no room, and warn where there is little; collective where something is offloaded.

    Args:
        model: the user's module, not prepared yet.
        resolved: its configuration.
        stage: of ZeRO that it runs; None without.
        facts: it was resolved from.
        processes: this process and its peers.

    Raises:
        MachineError: on every process, with what is needed and what is there, on the machine that has least.
    """
    if stage is None or {resolved.offload_device(what) for what in ("optimizer", "param")} == {"none"}:
        return
    needs = predict_memory(model, resolved, stage, facts, processes).footprint
    # What the model takes there already is given back, or is a part of it.
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu")
    own = find_available_memory(resolved, held * local_processes(processes))
    # Of each machine's disk the process is asked that has just removed what killed runs had left there.
    room = _least(gather_object([own if processes.local_rank == 0 else replace(own, nvme={})]))
    found = list(insufficient_memory(needs, room, local_processes(processes)))
    wrong = [line for is_short, line in found if is_short]
    if wrong:
        raise MachineError("\n".join(["there is no room for this run; nothing was allocated:", *wrong]))
    for _, line in found:
        _log.info(line)


def find_available_memory(resolved: Resolved, held: int = 0) -> AvailableMemory:
    """What this machine has now.

    Args:
        resolved: names the folders of NVMe offload.
        held: bytes of host memory that the run has already.
    """
    folders = {
        str(resolved.tree.value("zero_optimization", f"offload_{what}", "nvme_path"))
        for what in ("optimizer", "param")
        if resolved.offload_device(what) == "nvme"
    }
    return AvailableMemory(
        available_cpu_memory() + held,
        lockable_bytes(),
        {folder: shutil.disk_usage(_existing(Path(folder))).free for folder in folders},
    )


def insufficient_memory(needs: Footprint, room: AvailableMemory, processes: int) -> Iterator[tuple[bool, str]]:
    """What does not suffice, or hardly: whether it cannot work, and both numbers with what to do.

    Args:
        needs: of the run.
        room: of the machine.
        processes: on it.
    """
    terms = {name: size for name, size in needs.host.items() if name != "processes"}  # which run already
    told = ", ".join(f"{name} {show_bytes(size)}" for name, size in sorted(terms.items(), key=lambda term: -term[1]))
    host = sum(terms.values())
    if host > _SCARCE * room.host:
        what = f"{processes} processes keep {show_bytes(host)} in host memory ({told})"
        yield _shortage(host, room.host, what, "can be had", _CPU_FIX)
    if room.lockable is not None and needs.locked > room.lockable:
        what = f"each process locks {show_bytes(needs.locked)} for the NVMe drive's buffers"
        yield _shortage(needs.locked, room.lockable, what, "may be locked (ulimit -l)", _LOCKED_FIX)
    for folder, free in room.nvme.items():
        if needs.nvme_bytes > _SCARCE * free:
            what = f"{processes} processes keep {show_bytes(needs.nvme_bytes)} in {folder}"
            yield _shortage(needs.nvme_bytes, free, what, "are free there", "make room, or name a larger disk's folder")


def check_memory_without_zero(
    document: Document,
    model: nn.Module,
    resolved: Resolved,
    facts: Facts,
    peek: Callable[[], Any],
    processes: Processes,
    *,
    gradient_views: bool = False,
) -> RunMemory | None:
    """Refuse to train without the ZeRO that is asked for, where the model does not fit without; collective.

    Args:
        document: what was asked for.
        model: the user's module, not prepared yet.
        resolved: its configuration.
        facts: it was resolved from.
        peek: an example of what the loop's batches hold; None where none can be had.
        processes: this process and its peers.
        gradient_views: see `Setup`.

    Returns:
        The memory of training then; None where no ZeRO is dropped, or nothing tells what a device has.

    Raises:
        StrategyError: on every process, with what is needed and what is there.
    """
    settings = launch_settings(document)
    dropped = dropped_zero(document, settings)
    if not dropped or facts.optimizer is None:
        return None
    if processes.device.type == "cpu":
        free = available_cpu_memory() // local_processes(processes)
    else:
        free = free_bytes(model, processes.device)
    capacity = settings.gpu_memory or min(gather_object([free]))
    if not capacity:
        return None
    traced = [None if processes.rank else find_activations(model, model_sizes(model), peek(), resolved.precision)[0]]
    activations = broadcast_object_list(traced)[0]
    run = predict_memory(model, resolved, None, facts, processes, activations).changed(gradient_views=gradient_views)
    needed = run.footprint.allocated_bytes
    if needed > capacity:
        raise StrategyError(
            f"{dropped}, but without it the model does not fit: training takes {show_bytes(needed)} of each device, "
            f"which has {show_bytes(capacity)}{_told(activations)}.\n"
            "Train with ZeRO (distributed_type: DEEPSPEED, or --use_deepspeed), or take the ZeRO section out of the "
            "configuration."
        )
    return run


def check_memory_to_load(size: int, copies: int, available: int, what: str, fix: str) -> None:
    """Refuse to load a model into host memory that does not hold as many copies of it as there are processes.

    Args:
        size: bytes of the model.
        copies: processes of this machine, each of which holds one.
        available: bytes of host memory that could be had before.
        what: is loaded.
        fix: what to do.

    Raises:
        MachineError: with both numbers.
    """
    if size * copies > available:
        raise MachineError(
            f"{what} takes {show_bytes(size)} of host memory in each of {copies} processes, "
            f"{show_bytes(size * copies)} together, and {show_bytes(available)} can be had; nothing was loaded.\n{fix}"
        )


def _told(activations: Activations) -> str:
    return "" if activations.saved.per_sample else "; the activations, which are not known, come on top"


def _shortage(needed: int, there: int, what: str, kind: str, fix: str) -> tuple[bool, str]:
    is_short = needed > there
    but = "only " if is_short else "little more, "
    return is_short, f"{what}, and {but}{show_bytes(there)} {kind}. What helps: {fix}."


def _least(rooms: list[AvailableMemory]) -> AvailableMemory:
    """Of all machines, for each thing the one that has least of it: all processes have to come to one decision."""
    limits = [room.lockable for room in rooms if room.lockable is not None]
    folders = {folder for room in rooms for folder in room.nvme}
    return AvailableMemory(
        min(room.host for room in rooms),
        min(limits, default=None),
        {folder: min(room.nvme[folder] for room in rooms if folder in room.nvme) for folder in folders},
    )


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


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


def watch_memory(session: Session, optimizer: AcceleratedOptimizer, prediction: Prediction) -> None:
    """After the first steps, log what was predicted and what is measured.

    Args:
        session: that runs.
        optimizer: that steps it.
        prediction: for it.
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
            _log.info(line)

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
    return f"predicted {show_bytes(predicted)}, measured {show_bytes(measured)}{share}"


def _is_off(predicted: int, measured: int) -> bool:
    return abs(measured - predicted) > _OFF * max(predicted, 1)
