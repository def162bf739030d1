"""Values that are legal one by one and cannot hold together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from zero_plugin.config.document import Document
from zero_plugin.config.translate import SHORT_FIELDS
from zero_plugin.config.tree import Entry, Path, dotted
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem

__all__ = ["contradictions"]

_STAGE = ("zero_optimization", "stage")


def contradictions(document: Document) -> Iterator[Problem]:
    """Every contradiction between explicit values; a field that is `auto`, or of a wrong type, takes part in none."""
    for rule in (_precision, _offload, _batch, _schedule, _gradients, _machines):
        yield from rule(document)


def _precision(document: Document) -> Iterator[Problem]:
    enabled = {kind: _value(document, (kind, "enabled")) for kind in ("fp16", "bf16")}
    if enabled["fp16"] is True and enabled["bf16"] is True:
        other = _written(document, ("fp16", "enabled"))
        yield _problem(
            document, ("bf16", "enabled"), f"true, and fp16.enabled is true at {other}", "Enable one of them."
        )
    asked = document.launch.get("mixed_precision")
    if asked is None or asked.value not in ("no", "fp16", "bf16"):
        return
    for kind, is_on in enabled.items():
        entry = document.deepspeed.get(kind, "enabled")
        if entry is not None and entry.origin.kind == "file" and asked.origin.kind == "flag":
            continue  # a flag overrides the file
        if isinstance(is_on, bool) and is_on != (asked.value == kind):
            message = f"{show(is_on)}, but mixed_precision is {asked.value} at {asked.origin.where}"
            yield _problem(document, (kind, "enabled"), message, f'Write "auto" here, or {show(not is_on)}.')


def _offload(document: Document) -> Iterator[Problem]:
    stage = _value(document, _STAGE, default=0)
    low = isinstance(stage, int) and stage < 3
    because = f"needs ZeRO stage 3, but the stage is {stage}"
    entry = document.deepspeed.get(*_STAGE)
    if entry is not None and entry.origin.typed_by_user:
        because += f" at {entry.origin.where}"
    else:
        because += " where none is written"
    for what, legal in (("optimizer", ("none", "cpu")), ("param", ("none",))):
        section = ("zero_optimization", f"offload_{what}")
        at, path = (*section, "device"), (*section, "nvme_path")
        device, typed = _value(document, at), document.deepspeed.get(*at)
        if low and device in ("cpu", "nvme") and device not in legal:
            fix = f"{_how_to_set(_STAGE, '3', entry, typed)}, or offload to {' or '.join(legal)} instead."
            yield _problem(document, at, f"{device} {because}", fix)
        if device == "nvme" and _value(document, path) in (None, "", "none"):
            yield _problem(document, at, "nvme without a path", f"{_how_to_set(path, 'a local folder', typed)}.")
    section = ("zero_optimization", "offload_optimizer")
    fix = f"{_how_to_set(_STAGE, '3', entry)}, or delete it."
    ratio = _value(document, (*section, "ratio"))
    if low and isinstance(ratio, int | float) and ratio < 1:
        yield _problem(document, (*section, "ratio"), f"{ratio} {because}", fix)
    if low and _value(document, (*section, "super_offload")) is True:
        yield _problem(document, (*section, "super_offload"), f"true {because}", fix)


def _batch(document: Document) -> Iterator[Problem]:
    if any(document.deepspeed.has_section(*key) for key in (("sequence_parallel_size",), ("tensor_parallel",))):
        return  # the data-parallel size is then not the number of processes
    total = _value(document, ("train_batch_size",))
    parts = {
        "train_micro_batch_size_per_gpu": _value(document, ("train_micro_batch_size_per_gpu",)),
        "gradient_accumulation_steps": _value(document, ("gradient_accumulation_steps",)),
        "num_processes": document.launch.value("num_processes"),
    }
    known = {name: n for name, n in parts.items() if _counts(n)}
    if not _counts(total) or not known:
        return
    product = math.prod(known.values())
    arithmetic = " × ".join(f"{name} {n}" for name, n in known.items())
    if len(known) == len(parts) and total != product:
        fix = f"Write {product}, or auto, or delete it: it follows from the others."
        yield _problem(document, ("train_batch_size",), f"{total}, but {arithmetic} = {product}", fix)
    elif total % product:
        fix = f"Write a multiple of {product}, e.g. {max(1, round(total / product)) * product}."
        yield _problem(document, ("train_batch_size",), f"{total} is not a multiple of {arithmetic} = {product}", fix)


def _schedule(document: Document) -> Iterator[Problem]:
    path = ("scheduler", "params", "warmup_num_steps")
    warmup, total = _value(document, path), _value(document, ("scheduler", "params", "total_num_steps"))
    if isinstance(warmup, int) and isinstance(total, int) and warmup > total:
        message = f"{warmup} steps of warm-up are more than the total_num_steps of {total}"
        yield _problem(document, path, message, f"Write at most {total}, or raise total_num_steps.")


def _gradients(document: Document) -> Iterator[Problem]:
    norm, clipping = ("optimizer", "params", "max_grad_norm"), ("gradient_clipping",)
    if norm in document.deepspeed and clipping in document.deepspeed:
        message = f"clipping in two places: gradient_clipping is at {_written(document, clipping)}"
        yield _problem(document, norm, message, "Delete max_grad_norm; DeepSpeed refuses it here.")
    if _value(document, ("zero_optimization", "reduce_scatter"), default=True) is not True:
        return
    if _value(document, _STAGE, default=0) not in (1, 2):
        return
    needs = "while ZeRO reduces by reduce_scatter"
    fix = "Delete it, or write zero_optimization.reduce_scatter: false."
    if _value(document, ("prescale_gradients",)) is True:
        yield _problem(document, ("prescale_gradients",), f"true {needs}", fix)
    factor = _value(document, ("gradient_predivide_factor",), default=1)
    if isinstance(factor, int | float) and factor != 1:
        yield _problem(document, ("gradient_predivide_factor",), f"{factor} {needs}", fix)


def _machines(document: Document) -> Iterator[Problem]:
    machines = document.launch.value("num_machines", default=1)
    rank, processes = document.launch.get("machine_rank"), document.launch.get("num_processes")
    if _counts(machines) and rank is not None and isinstance(rank.value, int) and rank.value >= machines:
        message = f"{rank.value}, but num_machines is {machines} and ranks count from 0"
        yield Problem(rank.origin.where, "machine_rank", message, f"Write at most {machines - 1}.")
    if _counts(machines) and processes is not None and _counts(processes.value) and processes.value % machines:
        message = f"{processes.value} processes do not divide among {machines} machines"
        yield Problem(processes.origin.where, "num_processes", message, f"Write a multiple of {machines}.")
    alone = document.launch.value("distributed_type") == "NO"
    if alone and processes is not None and _counts(processes.value) and processes.value > 1:
        message = f"{processes.value}, but distributed_type NO is one process"
        fix = "Write num_processes: 1, or a distributed_type that has several (MULTI_GPU, MULTI_CPU, DEEPSPEED)."
        if processes.origin.kind == "flag":
            fix = "Give --num_processes 1, or one of --multi_gpu, --cpu and --use_deepspeed."
        yield Problem(processes.origin.where, "num_processes", message, fix)
    inclusion, exclusion = (document.launch.get(f"deepspeed_{way}_filter") for way in ("inclusion", "exclusion"))
    if inclusion is not None and exclusion is not None and inclusion.value and exclusion.value:
        message = f"stands beside deepspeed_inclusion_filter at {inclusion.origin.where}"
        yield Problem(exclusion.origin.where, "deepspeed_exclusion_filter", message, "Keep one of the two.")


def _how_to_set(path: Path, value: str, *causes: Entry | None) -> str:
    """By the flag, where one of `causes`, the values at fault, came from a flag; else by the key."""
    name = next((name for name, key in SHORT_FIELDS.items() if key == path), None)
    if name and any(cause is not None and cause.origin.kind == "flag" for cause in causes):
        return f"Give --{name} {value}"
    return f"Write {dotted(path)}: {value}"


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _value(document: Document, path: Path, default: Any = None) -> Any:
    return document.deepspeed.value(*path, default=default)


def _written(document: Document, path: Path) -> str:
    return document.deepspeed.entries[path].origin.where


def _problem(document: Document, path: Path, message: str, fix: str) -> Problem:
    return Problem(_written(document, path), dotted(path), message, fix)
