"""The plan of a run: values for the config fields that only a plan can fill, and the memory that it predicts.

A launcher plans before the run, from what is known then. In a run, process 0 plans for all processes, from the loop,
the model and the machines. torch is imported only where a model exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from zero_plugin.config.amounts import show_bytes
from zero_plugin.config.document import Document
from zero_plugin.config.keys import ACCUMULATION, GLOBAL_BATCH, PLACEMENT, TRAINING, ZERO
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, Resolved
from zero_plugin.config.resolve.resolve import resolve, unplanned_micro_batch
from zero_plugin.config.schema import deepspeed_default
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, dotted
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.machine.hardware import available_cpu_memory, memory_available_bytes
from zero_plugin.plan.costs import Footprint, footprint
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.model_source import ModelSource, changed_activations, model_sizes, open_model
from zero_plugin.plan.search import Choice, Wanted, plan
from zero_plugin.plan.situation import CPU, Activations, Cluster, ModelSizes, Setup, Stage, Workload, asked_optimizer
from zero_plugin.plan.what_if import WhatIf, what_if

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from zero_plugin.distributed.processes import Processes


def probe_loop(
    loaders: Sequence[DataLoader[Any]],
    prepared: Sequence[Sized],
    *,
    processes: int = 1,
    split_batches: bool = False,
    cut: int = 1,
) -> LoopFacts:
    """Return the facts of the training loader: the first of `loaders` that shuffles, otherwise the first.

    Args:
        loaders: the DataLoaders of one `prepare`, as the user passed them.
        prepared: this process's part of each.
        processes: data-parallel processes.
        split_batches: whether a loader's batch is the global batch, to be split among the processes.
        cut: number of micro-batches into which each batch of a loader is cut.
    """
    if not loaders:
        return LoopFacts()
    from torch.utils.data import RandomSampler

    shuffles = [isinstance(getattr(loader, "sampler", None), RandomSampler) for loader in loaders]
    index = shuffles.index(True) if True in shuffles else 0
    size, reason, fixed = _batch_size(loaders[index])
    if size is not None and split_batches:
        size, reason = max(1, size // processes), f"{reason} {size} ÷ {processes} processes (split_batches)"
    if size is not None and cut > 1:
        size, reason = max(1, size // cut), f"{reason} {size} ÷ {cut}, since memory ran out with more"
    given = _length(loaders[index])
    return LoopFacts(size, reason, fixed, _length(prepared[index]), None if given is None else given * cut)


def surely_train(loaders: Sequence[DataLoader[Any]]) -> bool:
    """Return whether some loader is not for evaluation: evaluation loaders go through their data in order."""
    from torch.utils.data import SequentialSampler

    return any(not isinstance(getattr(loader, "sampler", None), SequentialSampler) for loader in loaders)


def _batch_size(loader: DataLoader[Any]) -> tuple[int | None, str, bool]:
    """Return the samples per batch, the origin of this number, and whether every full batch has this size."""
    if loader.batch_size is not None:
        return loader.batch_size, "the training DataLoader's batch_size", True
    from torch.utils.data import BatchSampler

    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    declared = getattr(batches, "batch_size", None)
    if isinstance(declared, int):
        return declared, "the training DataLoader's batch_sampler.batch_size", True
    if isinstance(batches, list | tuple) and batches:
        return len(batches[0]), "the first batch that the training DataLoader lists", False
    return None, "", False  # drawing a batch might lose it for the loop, or change the order


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream or a sampler has no length
        return None


AcceleratorKind = Literal["cpu", "cuda", "xla"]


def probe_machine(accelerator: AcceleratorKind | None = None, processes: int = 1) -> MachineFacts:
    """Return the facts of this process's device.

    Args:
        accelerator: device kind of the run; None takes CUDA if a GPU is visible, otherwise the CPU.
        processes: data-parallel world size.
    """
    import torch

    kind: AcceleratorKind = accelerator or ("cuda" if torch.cuda.is_available() else "cpu")
    return MachineFacts(accelerator=kind, processes=processes, bf16=_computes_in_bf16(kind), fp16=kind == "cuda")


def accelerator_kind(device: torch.device) -> AcceleratorKind:
    """Return the kind of a device, which is all that resolution reads of a device."""
    return "cuda" if device.type == "cuda" else "xla" if device.type == "xla" else "cpu"


def _computes_in_bf16(kind: AcceleratorKind) -> bool:
    """Return whether bf16 runs in hardware; otherwise torch emulates it slowly."""
    import torch

    if kind == "cuda":
        return bool(torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        # oneDNN's answer for this processor (AVX-512 or better on x86, BF16 instructions on ARM)
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
    return True


# The config key that determines each field of a setup; `pin_memory` has two.
KEYS: Final = {key.setup: key.path for key in TRAINING if key.setup}

Planned = Mapping[KeyPath, tuple[Any, str]]

_PINNED: Final = ((ZERO, "offload_optimizer", "pin_memory"), (ZERO, "offload_param", "pin_memory"))
# Fields that a plan chooses if they are open.
_CHOSEN: Final = ("stage", "offload_optimizer", "offload_param", "ratio", "sub_group_size", "micro_batch")
_SIZES: Final = (
    *("reduce_bucket", "prefetch_bucket", "persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance"),
)


def open_fields(tree: Tree, facts: Facts) -> tuple[KeyPath, ...]:
    """Return the fields that only a plan can fill and that a training configuration leaves open.

    The micro-batch is one of them if DeepSpeed trains and no loader determines it, or no loader exists yet.

    Args:
        tree: the training configuration.
        facts: of the loop, and whether a loop may still follow.
    """
    paths = (*PLACEMENT, KEYS["ratio"], *([KEYS["micro_batch"]] if _plans_micro_batch(facts) else ()))
    return tuple(path for path in paths if tree.value(*path) is AUTO)


def nvme_folder(tree: Tree) -> Path | None:
    """Return the folder for NVMe offload in a training configuration; None without one."""
    folders = [tree.value(ZERO, f"offload_{what}", "nvme_path") for what in ("optimizer", "param")]
    return next((Path(folder) for folder in folders if isinstance(folder, str)), None)


def fixed_fields(document: Document, resolved: Resolved, facts: Facts, activations: Activations) -> Wanted:
    """Return which settings of a strategy the configuration fixes.

    Args:
        document: the requested configuration, with ZeRO.
        resolved: the same, resolved as far as possible without a plan.
        facts: of the loop and the machine.
        activations: a plan chooses no micro-batch if the bytes of a sample are unknown.
    """
    tree, asked = resolved.tree, document.deepspeed
    total = _number(asked.value(*GLOBAL_BATCH.path))
    steps = _number(asked.value(*ACCUMULATION.path))
    stage, ratio = (_settled(tree, KEYS[name]) for name in ("stage", "ratio"))
    micro = facts.loop.micro_batch or _number(asked.value(*KEYS["micro_batch"]))
    if micro is None and not (activations.saved.per_sample and _plans_micro_batch(facts)):
        micro, _ = unplanned_micro_batch(total, steps, facts.machine.processes)
    unpinned = facts.machine.accelerator == "cpu" or any(asked.value(*path) is False for path in _PINNED)
    sizes: dict[str, Any] = {name: _number(_settled(tree, KEYS[name])) for name in _SIZES}
    # If the stage, device or ratio is open, a plan also chooses `sub_group_size` and `overlap_comm`. An open
    # micro-batch alone opens no other field.
    is_placed = all(asked.value(*path) is not AUTO for path in (*PLACEMENT, KEYS["ratio"]))
    sub_group_size = _settled(tree, KEYS["sub_group_size"]) if is_placed else asked.value(*KEYS["sub_group_size"])
    overlaps = asked.value(*KEYS["overlap_comm"])
    if not isinstance(overlaps, bool):  # DeepSpeed's default for a fixed stage
        overlaps = stage == 3 if is_placed else None
    return Wanted(
        stage=stage,
        ddp=False,
        precision=resolved.precision,
        gradient_bytes=_ELEMENT_BYTES.get(str(tree.value("data_types", "grad_accum_dtype"))),
        offload_optimizer=_settled(tree, KEYS["offload_optimizer"]),
        offload_param=_settled(tree, KEYS["offload_param"]),
        ratio=None if ratio is None else float(ratio),
        sub_group_size=_number(sub_group_size),
        micro_batch=micro,
        accumulation=steps or (None if total else 1),
        activation_checkpointing=False,  # the script's own checkpointing is part of the model
        overlap_comm=overlaps,
        param_buffer=_number(tree.value(*KEYS["param_buffer"])),  # no default: if it is open, the model determines it
        pin_memory=False if unpinned else (True if is_placed else None),
        global_batch=total,
        margin=activations.margin,
        **sizes,
    )


def _settled(tree: Tree, path: KeyPath) -> Any:
    """Return the resolved value, otherwise DeepSpeed's default; None if a plan or the model determines it."""
    value = tree.value(*path)
    if value is None:
        (value,) = deepspeed_default(path) or (None,)
    return None if value is AUTO else value


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def planned_values(choice: Choice, wanted: Wanted, asked: Tree) -> dict[KeyPath, tuple[Any, str]]:
    """Return the value and the reason for every field that is open in `asked` and that the plan has chosen.

    Args:
        choice: a choice in which something fits.
        wanted: the question to the plan.
        asked: the training configuration.
    """
    assert choice.chosen is not None, "nothing fits, so there are no values"
    setup = choice.chosen.setup
    chosen = {name: asked.value(*KEYS[name]) is AUTO for name in _CHOSEN}
    chosen["ratio"] &= setup.offload_optimizer != "none"
    # A resolution rule fills in DeepSpeed's own size. The plan may rely on smaller sub-groups even if the user did not
    # leave them open.
    is_small = setup.sub_group_size != Setup().sub_group_size
    chosen["sub_group_size"] = is_small and asked.value(*KEYS["sub_group_size"]) in (None, AUTO)
    chosen["micro_batch"] = wanted.micro_batch is None
    chosen["overlap_comm"] = setup.stage == 2 and setup.overlap_comm and wanted.overlap_comm is None
    found = {KEYS[name]: (getattr(setup, name), choice.reasons[name]) for name, is_its in chosen.items() if is_its}
    if not setup.pin_memory and wanted.pin_memory is None:
        pinned = (path for path in _PINNED if asked.has_section(*path[:-1]))
        found |= dict.fromkeys(pinned, (False, choice.reasons["pin_memory"]))
    return found


def fits_nowhere(choice: Choice, answers: WhatIf, where: str) -> ConfigError:
    """Return the error if no candidate fits: it names the closest one, its missing memory, and changes that are enough.

    Args:
        choice: a choice without a candidate that fits.
        answers: the result of `what_if`.
        where: the place of the `auto` that left the choice to the plan.
    """
    ways = "; ".join(_as_key(change.what) for change in answers.changes[:3])
    fix = (
        f"Any one of these changes is enough: {ways}."
        if ways
        else "No single change is enough; use a smaller model, or more GPUs."
    )
    if less := "; ".join(f"{what} ({show_bytes(size)})" for what, size in answers.savings):
        fix += f" These take less on each device: {less}."
    return ConfigError([Problem(where, ZERO, f"auto, but nothing fits: {choice.why_not}", fix)])


def _as_key(change: str) -> str:
    """Return a change of a `Wanted` field as the text that the user has to write."""
    field, free, rest = change.partition(" free instead of ")
    if not free:
        return change
    if field == "activation_checkpointing":
        return "activation checkpointing (transformers: gradient_checkpointing_enable())"
    if field == "pin_memory":
        return f"{' and '.join(dotted(path) for path in _PINNED)}: auto instead of {rest}"
    return f"{dotted(KEYS[field])}: auto instead of {rest}"


def _plans_micro_batch(facts: Facts) -> bool:
    """Return whether a plan chooses the micro-batch.

    A model that is not trained has none, and without DeepSpeed no setting needs the number.
    """
    trains = facts.optimizer is not None or not facts.complete
    return trains and facts.strategy == "deepspeed" and facts.loop.micro_batch is None


def fill_fields(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: ModelSizes,
    activations: Activations,
    cluster: Cluster,
    changed: Callable[[], Mapping[str, Activations]] = dict,
) -> Planned:
    """Return the values of the fields that only a plan can fill, with their reasons.

    Args:
        document: the requested configuration, with ZeRO and an open field.
        resolved: the same, resolved as far as possible without a plan.
        facts: of the loop and the machine; complete in a run.
        model: sizes of the model.
        activations: in the resolved precision.
        cluster: the machines.
        changed: see `what_if`.

    Raises:
        ConfigError: nothing fits, or the fixed settings contradict each other.
    """
    on_gpu = facts.machine.accelerator == "cuda"
    work = Workload(model, activations, asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu))
    wanted = fixed_fields(document, resolved, facts, activations)
    if document.deepspeed.value(*KEYS["reduce_bucket"]) is None and wanted.reduce_bucket and model.elements:
        # Resolution applies the same limit once the stage is known.
        wanted = replace(wanted, reduce_bucket=min(wanted.reduce_bucket, model.elements))
    cluster = replace(cluster, shared_by=facts.machine.shared_by)
    choice = plan(work, cluster, wanted)
    if choice.chosen is None:
        first = open_fields(document.deepspeed, facts)[0]
        where = document.deepspeed.entries[first].origin.where
        raise fits_nowhere(choice, what_if(work, cluster, wanted, changed), where)
    return planned_values(choice, wanted, document.deepspeed)


def waits_for_plan(document: Document, facts: Facts) -> bool:
    """Return whether a field is open that only a plan can fill."""
    asked = open_fields(document.deepspeed, facts)
    missing = resolve(document, replace(facts, complete=False)).missing if asked else ()
    return any(path in missing for path in asked)


def plan_before_run(
    document: Document, facts: Facts, source: ModelSource, sequence_length: int | None, cluster: Cluster
) -> Planned:
    """Return what a plan chooses for the fields that wait for it, including an open micro-batch.

    Args:
        document: the requested configuration, with ZeRO.
        facts: of the machine, and whatever is known about the run; not complete. If a GPU's memory is stated, the
            workers have GPUs.
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        cluster: the machines.

    Raises:
        ConfigError: the model does not exist, nothing fits, or the fixed settings contradict each other.
    """
    if launch_settings(document).gpu_memory is not None:
        facts = replace(facts, machine=replace(facts.machine, accelerator="cuda", fp16=True))
    resolved = resolve(document, replace(facts, complete=False))
    model, activations = open_model(source, sequence_length, resolved.precision)
    activations = activations.of_a_part(facts.machine.shared_by)
    changed = partial(changed_activations, source, sequence_length, resolved.precision)
    return fill_fields(document, resolved, facts, model, activations, cluster, changed)


def lay_plan(document: Document, planned: Planned) -> Document:
    """Return the document with open fields replaced by the plan's choices, each value with its reason."""
    chosen = {path: Entry(value, Origin("rule", "the plan", reason)) for path, (value, reason) in planned.items()}
    return replace(document, deepspeed=document.deepspeed.replace(chosen))


def plan_open_fields(
    document: Document, facts: Facts, model: nn.Module, peek: Callable[[], Any], processes: Processes
) -> tuple[Facts, Activations | None]:
    """Fill the fields that only a plan can fill into the facts; unchanged if none is open.

    Process 0 plans for all processes, with the device memory of the process that has the least free. Collective if a
    field is open. An open micro-batch alone never stops a run, because the plan estimates the bytes of a sample.

    Args:
        document: the requested configuration.
        facts: all other facts of the run.
        model: the user's module; without an optimizer none of it is trained.
        peek: returns an example of the loop's batches; None if none is available.
        processes: this process and its peers.

    Returns:
        The facts, and what a forward keeps according to the plan. The latter is None without a plan, or if the plan was
            for the micro-batch only.

    Raises:
        ConfigError: nothing fits, or the fixed settings contradict each other.
    """
    if facts.strategy != "deepspeed" or not (asked := open_fields(document.deepspeed, facts)):
        return facts, None
    from zero_plugin.distributed.collectives import broadcast_value, gather_values

    resolved = resolve(document, replace(facts, complete=False))
    if not (waiting := [path for path in asked if path in resolved.missing]):
        return facts, None
    peers = gather_values([free_bytes(model, processes.device), processes.local_rank == 0])
    free = min(size for size, _ in peers)
    nodes = max(1, sum(is_first for _, is_first in peers))
    outcome: dict[str, Any] = {}
    if processes.rank == 0:
        try:
            measure = partial(_cluster, document, free, len(peers) // nodes, nodes)
            planned, activations = _plan(document, resolved, facts, model, peek(), measure, waiting)
            outcome["planned"] = [[path, *chosen] for path, chosen in planned.items()]
            outcome["activations"] = None if activations is None else asdict(activations)
        except ConfigError as error:
            outcome["problems"] = [asdict(problem) for problem in error.problems]
    found = broadcast_value(outcome)
    if problems := found.get("problems"):
        raise ConfigError([Problem(**problem) for problem in problems])
    planned = {tuple(path): (value, reason) for path, value, reason in found["planned"]}
    known = found["activations"]
    return replace(facts, planned=planned), None if known is None else Activations.from_dict(known)


def _plan(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: nn.Module,
    batch: Any,
    measure: Callable[[], Cluster],
    waiting: list[KeyPath],
) -> tuple[Planned, Activations | None]:
    """Return the values of the fields that wait, and what a forward keeps; None if the micro-batch alone waits.

    The micro-batch alone is planned only if the bytes of a sample are known. If nothing fits, it gets the same value as
    without a plan.
    """
    from zero_plugin.plan.activations import find_activations, trace_changes

    alone = waiting == [KEYS["micro_batch"]]
    sizes = model_sizes(model) if alone else _trained_sizes(model, facts)
    guesses = facts.loop.micro_batch is None
    find = partial(find_activations, model, sizes, batch, resolved.precision, guesses=guesses)
    activations = find().of_a_part(facts.machine.shared_by)
    if alone and not activations.saved.per_sample:
        return {}, None
    try:
        changed = dict if alone else partial(trace_changes, model, find)
        planned = fill_fields(document, resolved, facts, sizes, activations, measure(), changed)
    except ConfigError as error:
        if not alone:
            raise
        total, steps = (_number(document.deepspeed.value(*key.path)) for key in (GLOBAL_BATCH, ACCUMULATION))
        without, _ = unplanned_micro_batch(total, steps, facts.machine.processes)
        reason = f"{error.problems[0].message.removeprefix('auto, but ')}. {error.problems[0].fix}"
        planned = {KEYS["micro_batch"]: (without, f"as without a plan: {reason}")}
    return planned, None if alone else activations


def _trained_sizes(model: nn.Module, facts: Facts) -> ModelSizes:
    """Return a model's sizes; without an optimizer none of it is trained."""
    sizes = model_sizes(model)
    if facts.optimizer is None:
        return replace(sizes, parameters=tuple(replace(p, trainable=False) for p in sizes.parameters))
    return sizes


def _cluster(document: Document, free: int, devices: int, nodes: int) -> Cluster:
    """Return these machines, with the memory that is free now or stated in the configuration."""
    from zero_plugin.plan.speeds import measure_cluster

    settings = launch_settings(document)
    here = measure_cluster(devices, nodes, nvme_folder(document.deepspeed))
    if free:
        here = replace(here, device_bytes=free, sources={**here.sources, "device_bytes": "free now"})
    return state_cluster(
        gpu_memory=settings.gpu_memory, host_memory=settings.host_memory, network=settings.network, here=here
    )


def free_bytes(model: nn.Module, device: torch.device) -> int:
    """Return the bytes of this process's device that the engine may use; 0 on a CPU, whose memory the processes share.

    They include the bytes that the model already occupies there.
    """
    if device.type != "cuda":
        return 0
    own = {p.data_ptr(): p.numel() * p.element_size() for p in model.parameters() if p.device == device}
    return memory_available_bytes(device) + sum(own.values())


@dataclass(frozen=True)
class RunMemory:
    """The inputs from which the memory of a run is computed; see `footprint`."""

    work: Workload
    setup: Setup
    cluster: Cluster

    @cached_property
    def footprint(self) -> Footprint:
        """The memory on one process's device, on its machine and on its NVMe drive."""
        return footprint(self.work, self.setup, self.cluster)

    def changed(self, **fields: Any) -> RunMemory:
        """Return a copy with other `fields` in its setup."""
        return replace(self, setup=replace(self.setup, **fields))


def predict_memory(
    model: nn.Module,
    resolved: Resolved,
    stage: Stage,
    facts: Facts,
    processes: Processes,
    activations: Activations | None = None,
) -> RunMemory:
    """Return the inputs from which the memory of a run is computed.

    Args:
        model: the user's module, not prepared yet.
        resolved: its configuration.
        stage: the ZeRO stage of the run; None without ZeRO.
        facts: the facts from which `resolved` was resolved.
        processes: this process and its peers.
        activations: what a forward keeps; None leaves them out.
    """
    import torch

    on_gpu = processes.device.type == "cuda"
    here = local_processes(processes)
    host = available_cpu_memory()
    device = torch.cuda.get_device_properties(processes.device).total_memory if on_gpu else host // here
    optimizer = asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu)
    work = Workload(_trained_sizes(model, facts), activations or Activations(), optimizer)
    name, nodes = "" if on_gpu else CPU, processes.world_size // here
    cluster = Cluster(device, host, nodes, here, device_name=name, shared_by=processes.shared_by)
    return RunMemory(work, running_setup(resolved, stage), cluster)


_ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}


def running_setup(resolved: Resolved, stage: Stage) -> Setup:
    """Return the setup of a run. Activation checkpointing is the script's own and part of the model.

    Args:
        resolved: its configuration.
        stage: the stage of the run; None without ZeRO, where nothing is offloaded.
    """
    tree = resolved.tree
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Setup)}
    found: dict[str, Any] = {}
    for name, path in KEYS.items():
        if path not in PLACEMENT and (value := _settled(tree, path)) is not None:
            found[name] = kinds[name](value)
    width = _ELEMENT_BYTES.get(str(tree.value("data_types", "grad_accum_dtype")))
    return Setup(
        stage=stage,
        precision=resolved.precision,
        gradient_bytes=width or (4 if resolved.precision == "no" else 2),
        offload_optimizer="none" if stage is None else resolved.offload_device("optimizer"),
        offload_param="none" if stage is None else resolved.offload_device("param"),
        pin_memory=any(tree.value(ZERO, f"offload_{what}", "pin_memory") is True for what in ("optimizer", "param")),
        **found,
    )


def local_processes(processes: Processes) -> int:
    """Return the number of this run's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes.world_size))
