"""Check that a run fits into the memory of its machine, and compare predicted with measured memory.

Before anything is allocated, CPU memory, page-locked memory and NVMe space are checked; before transformers'
`from_pretrained` loads a model in each process, CPU memory. After the first steps, the prediction of the plan is
compared with the memory that the run uses.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zero_plugin.checkpoint.tensor_files import described_fragments
from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import dropped_zero, launch_settings
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.distributed.collectives import broadcast_value, gather_values
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import CheckpointError, MachineError, StrategyError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.machine.hardware import available_cpu_memory, existing_folder, lockable_bytes
from zero_plugin.plan.activations import find_activations
from zero_plugin.plan.costs import Footprint
from zero_plugin.plan.model_source import model_sizes
from zero_plugin.plan.run_plan import RunMemory, free_bytes, local_processes, predict_memory
from zero_plugin.plan.situation import Activations, Stage
from zero_plugin.strategies.base import Session
from zero_plugin.tensors.modules import MASTER_WEIGHT, WEIGHT
from zero_plugin.tensors.safetensors_files import read_model_folder

_log = logging.getLogger(__name__)

_SCARCE: Final = 0.9  # warn a run that needs more than this part of the available memory
_CPU_FIX: Final = (
    "fewer processes per machine, more machines, offload_optimizer_device: nvme instead of cpu, or pin_memory: false "
    "(page-locked tensors are rounded up to powers of two)"
)
_LOCKED_FIX: Final = "ulimit -l unlimited (docker run --ulimit memlock=-1), or a smaller offload_param.buffer_size"
# With these arguments, the loaded model does not have the size of its files, or is not in CPU memory.
_OTHERWISE: Final = ("device_map", "quantization_config", "gguf_file", "load_in_8bit", "load_in_4bit")
_LOADING_FIX: Final = (
    "Start fewer processes on this machine. Or build the model inside `with accelerator.init_model(weights=folder):`, "
    "which reads it straight to each device. Or use ZeRO stage 3: each process then holds a partition."
)


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """The memory and disk space that one machine has available for a run.

    Attributes:
        cpu: bytes of CPU memory, for all processes together.
        lockable: bytes that one process may lock; None without a limit.
        nvme: free bytes of the disk of each folder.
    """

    cpu: int
    lockable: int | None
    nvme: Mapping[str, int]


def check_memory(model: nn.Module, resolved: Resolved, stage: Stage, facts: Facts, processes: Processes) -> None:
    """Refuse offload that does not fit, and warn if little memory is left; collective if something is offloaded.

    Args:
        model: the user's module, not prepared yet.
        resolved: its configuration.
        stage: the ZeRO stage; None without ZeRO.
        facts: the facts that the configuration was resolved from.
        processes: this process and its peers.

    Raises:
        MachineError: on every process, with the needed bytes and the smallest available amount of any machine.
    """
    if stage is None or {resolved.offload_device(what) for what in ("optimizer", "param")} == {"none"}:
        return
    needs = predict_memory(model, resolved, stage, facts, processes).footprint
    # The memory that the model takes now counts as available: it is released later, or is part of the needs.
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type == "cpu")
    own = find_available_memory(resolved, held * local_processes(processes))
    # Local rank 0 measures the disk, because it has just removed files that killed runs had left there.
    shown = own if processes.local_rank == 0 else replace(own, nvme={})
    available = _least([AvailableMemory(**one) for one in gather_values(asdict(shown))])
    found = list(insufficient_memory(needs, available, local_processes(processes)))
    wrong = [line for is_short, line in found if is_short]
    if wrong:
        raise MachineError("\n".join(["this run does not fit into memory; nothing was allocated:", *wrong]))
    for _, line in found:
        _log.info(line)


def find_available_memory(resolved: Resolved, held: int = 0) -> AvailableMemory:
    """Return the memory and disk space that this machine has available now.

    Args:
        resolved: the configuration, with the folders of NVMe offload.
        held: bytes of CPU memory that the run already uses. They count as available.
    """
    folders = {
        str(resolved.tree.value("zero_optimization", f"offload_{what}", "nvme_path"))
        for what in ("optimizer", "param")
        if resolved.offload_device(what) == "nvme"
    }
    return AvailableMemory(
        available_cpu_memory() + held,
        lockable_bytes(),
        {folder: shutil.disk_usage(existing_folder(Path(folder))).free for folder in folders},
    )


def insufficient_memory(needs: Footprint, available: AvailableMemory, processes: int) -> Iterator[tuple[bool, str]]:
    """Yield each kind of memory that is scarce: whether the run is impossible, and a message.

    Args:
        needs: the memory of the run.
        available: the memory of the machine.
        processes: the number of processes on the machine.
    """
    terms = {name: size for name, size in needs.host.items() if name != "processes"}  # already allocated
    listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in sorted(terms.items(), key=lambda term: -term[1]))
    needed = sum(terms.values())
    if needed > _SCARCE * available.cpu:
        what = f"{processes} processes keep {show_bytes(needed)} in CPU memory ({listed})"
        yield _describe(needed, available.cpu, what, "are available", _CPU_FIX)
    if available.lockable is not None and needs.locked > available.lockable:
        what = f"each process locks {show_bytes(needs.locked)} for the buffers of NVMe offload"
        yield _describe(needs.locked, available.lockable, what, "may be locked (ulimit -l)", _LOCKED_FIX)
    for folder, free in available.nvme.items():
        if needs.nvme_bytes > _SCARCE * free:
            what = f"{processes} processes keep {show_bytes(needs.nvme_bytes)} in {folder}"
            fix = "free disk space, or a folder on a larger disk"
            yield _describe(needs.nvme_bytes, free, what, "are free there", fix)


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
    """Refuse to train without the configured ZeRO if the model does not fit without it; collective.

    Args:
        document: the configuration as the user wrote it.
        model: the user's module, not prepared yet.
        resolved: its configuration.
        facts: the facts that the configuration was resolved from.
        peek: returns an example batch, or None if no loader can give one.
        processes: this process and its peers.
        gradient_views: see `Setup`.

    Returns:
        The predicted memory; None if no ZeRO configuration is ignored, or the memory of the device is unknown.

    Raises:
        StrategyError: on every process, with the needed and the available bytes.
    """
    settings = launch_settings(document)
    dropped = dropped_zero(document, settings)
    if not dropped or facts.optimizer is None:
        return None
    if processes.device.type == "cpu":
        free = available_cpu_memory() // local_processes(processes)
    else:
        free = free_bytes(model, processes.device)
    capacity = settings.gpu_memory or min(gather_values(free))
    if not capacity:
        return None
    traced = None
    if processes.rank == 0:
        traced = find_activations(model, model_sizes(model), peek(), resolved.precision)
        traced = traced.of_a_part(processes.shared_by)
    activations = Activations.from_dict(broadcast_value(None if traced is None else asdict(traced)))
    run = predict_memory(model, resolved, None, facts, processes, activations).changed(gradient_views=gradient_views)
    needed = run.footprint.allocated_bytes
    if needed > capacity:
        unknown = "" if activations.saved.per_sample else "; the activations, whose size is unknown, are not included"
        raise StrategyError(
            f"{dropped}, but without it the model does not fit: training takes {show_bytes(needed)} of each device, "
            f"which has {show_bytes(capacity)}{unknown}.\n"
            "Train with ZeRO (distributed_type: DEEPSPEED, or --use_deepspeed), or remove the ZeRO section from the "
            "configuration."
        )
    return run


def check_memory_to_load(size: int, copies: int, available: int, what: str, fix: str) -> None:
    """Refuse to load a model if CPU memory does not hold a copy for each process of the machine.

    Args:
        size: bytes of the model.
        copies: the number of processes of this machine; each holds a copy.
        available: bytes of available CPU memory.
        what: the subject of the message, e.g. the name of the model.
        fix: the end of the message: what the user can do.

    Raises:
        MachineError: the copies do not fit.
    """
    if size * copies > available:
        raise MachineError(
            f"{what} takes {show_bytes(size)} of CPU memory in each of {copies} processes, "
            f"{show_bytes(size * copies)} together, and {show_bytes(available)} are available; nothing was loaded.\n"
            f"{fix}"
        )


_checking: Final[list[tuple[int, int]]] = []  # `copies` and `available` of all open contexts; the last one counts


@contextmanager
def checking_pretrained(copies: int, available: int) -> Iterator[None]:
    """Make `from_pretrained` raise if CPU memory does not hold the unpartitioned model in every process.

    Nothing is checked if transformers is not imported yet, or if the files of the model are not on this machine. These
    contexts may be exited in any order.

    Args:
        copies: the number of processes of this machine; each loads a copy.
        available: bytes of CPU memory that were available when the processes started.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    entered = (copies, available)
    if not _checking:
        _replace_from_pretrained(modeling.PreTrainedModel)
    _checking.append(entered)
    try:
        yield
    finally:
        _checking.remove(entered)
        if not _checking:
            modeling.PreTrainedModel.from_pretrained = modeling.PreTrainedModel.from_pretrained.__func__.replaced


def _replace_from_pretrained(model_class: Any) -> None:
    before = model_class.__dict__["from_pretrained"]

    @functools.wraps(before.__func__)
    def from_pretrained(cls: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        size = None if any(kwargs.get(name) is not None for name in _OTHERWISE) else _bytes_of(source, kwargs)
        if size is not None:
            name = f"{cls.__name__}.from_pretrained({str(source)!r})"
            check_memory_to_load(size, *_checking[-1], name, _LOADING_FIX)
        return before.__func__(cls, source, *args, **kwargs)

    from_pretrained.replaced = before  # type: ignore[attr-defined]  # a function takes any
    model_class.from_pretrained = classmethod(from_pretrained)


def _bytes_of(source: Any, kwargs: Mapping[str, Any]) -> int | None:
    """Return the bytes of a model in the requested dtype; None if this machine has no safetensors files of it."""
    folder = _folder_of(source, kwargs)
    if folder is None:
        return None
    try:
        places = read_model_folder(folder).places.values()
    except CheckpointError:
        return None
    requested: Any = kwargs.get("dtype", kwargs.get("torch_dtype"))
    requested = getattr(torch, requested, None) if isinstance(requested, str) else requested
    if not isinstance(requested, torch.dtype):
        return sum(place.size for place in places)
    return sum(requested.itemsize * math.prod(place.shape) for place in places)


def _folder_of(source: Any, kwargs: Mapping[str, Any]) -> Path | None:
    folder = Path(str(source), kwargs.get("subfolder") or "")
    if source is None or folder.is_dir():
        return None if source is None else folder
    hub = sys.modules.get("huggingface_hub")
    cached = hub and hub.try_to_load_from_cache(
        str(source), "config.json", cache_dir=kwargs.get("cache_dir"), revision=kwargs.get("revision")
    )
    return Path(cached).parent if isinstance(cached, str) else None


def _describe(needed: int, available: int, what: str, kind: str, fix: str) -> tuple[bool, str]:
    is_short = needed > available
    but = "only " if is_short else "little more, "
    return is_short, f"{what}, and {but}{show_bytes(available)} {kind}. What helps: {fix}."


def _least(machines: list[AvailableMemory]) -> AvailableMemory:
    """Return the minimum of each kind of memory over all machines: all processes must reach the same decision."""
    limits = [machine.lockable for machine in machines if machine.lockable is not None]
    folders = {folder for machine in machines for folder in machine.nvme}
    return AvailableMemory(
        min(machine.cpu for machine in machines),
        min(limits, default=None),
        {folder: min(machine.nvme[folder] for machine in machines if folder in machine.nvme) for folder in folders},
    )


_OFF: Final = 0.1  # warn of a larger relative error of the prediction
_LEAST: Final = 2**26  # bytes; the allocator's rounding dominates a smaller peak
_STEPS: Final = 2  # optimizer states are allocated in the first step, so its backward ran without them
_STATES: Final = ("weights", "optimizer states")


@dataclass(frozen=True, slots=True)
class Prediction:
    """The memory that a plan predicts for this process.

    Attributes:
        run: the plan's model of the run's memory.
        processes: the number of processes of one machine.
        device: the device of this process.
        peak_before: the allocator's peak before `prepare`, see `peak_bytes`; None if peaks cannot be compared.
    """

    run: RunMemory
    processes: int
    device: torch.device
    peak_before: int | None

    @property
    def states(self) -> dict[str, int]:
        """Bytes of the weights (with fp32 master weights) and optimizer states on the device.

        On a CPU these include offloaded states.
        """
        terms = Counter(self.run.footprint.phases["forward"])
        if self.device.type == "cpu":
            terms.update({name: size // self.processes for name, size in self.run.footprint.host.items()})
        return {
            "weights": terms["parameters"] + terms["master weights"] + terms["buffers"],
            "optimizer states": terms["optimizer states"],
        }


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest number of bytes that torch's allocator has allocated on the device; None on a CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None


def watch_memory(session: Session, optimizer: AcceleratedOptimizer, prediction: Prediction) -> None:
    """Log the predicted and the measured memory after the first steps.

    Args:
        session: the session to measure.
        optimizer: its optimizer.
        prediction: the prediction for it.
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
        except CheckpointError:  # the states are not accessible by name
            found = {}
        peak = peak_bytes(prediction.device)
        new = peak is not None and prediction.peak_before is not None and peak > prediction.peak_before
        for line in compare_memory(prediction, found, peak if new else None):
            _log.info(line)

    optimizer.call_after_step(look)


def measure_states(session: Session, device: torch.device) -> dict[str, int]:
    """Return the bytes of a session's weights (with fp32 master weights) and optimizer states on a device."""
    sizes: Counter[str] = Counter(dict.fromkeys(_STATES, 0))
    seen: set[int] = set()
    for fragment in described_fragments(session):
        storage = fragment.values.untyped_storage()
        if fragment.values.device.type == device.type and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes["weights" if fragment.kind in (WEIGHT, MASTER_WEIGHT) else "optimizer states"] += storage.nbytes()
    return dict(sizes)


def compare_memory(prediction: Prediction, states: Mapping[str, int], peak: int | None) -> list[str]:
    """Return a line with predicted and measured memory; if they differ by more than 10 %, also one with the main cause.

    Args:
        prediction: the prediction of the plan.
        states: the measurement of `measure_states`.
        peak: the peak of torch's allocator in bytes; None if unknown, as on a CPU.
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
    name, planned, measured = max(terms, key=lambda term: abs(term[1] - term[2]))
    meaning = "a configuration that fits according to the plan may not fit"
    if peak is not None and peak <= wanted:
        meaning = "a faster configuration may fit too: write it instead of auto"
    return [line, f"warning: the plan was off most in {name}: {_both(planned, measured)}; {meaning}"]


def _both(predicted: int, measured: int) -> str:
    difference = f" ({(measured - predicted) / predicted:+.0%})" if predicted > 0 else ""
    return f"predicted {show_bytes(predicted)}, measured {show_bytes(measured)}{difference}"


def _is_off(predicted: int, measured: int) -> bool:
    return abs(measured - predicted) > _OFF * max(predicted, 1)
