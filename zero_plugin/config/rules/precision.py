"""Precision: one half type at a time, and what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.rules.asked import Asked, is_number
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem

__all__ = ["CASTS_ALL_THE_SAME", "check_precision", "idle_keys"]

CASTS_ALL_THE_SAME: Final = "true, but fp16 is off, and DeepSpeed rounds the model's inputs to fp16 all the same"

_DYNAMIC_SCALING: Final = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_OF_SECTION: Final = {
    "fp16": ("loss_scale", *_DYNAMIC_SCALING),
    "bf16": ("immediate_grad_update", "check_grad_overflow"),
}
# Casts of the engine that a model in fp32 does not go through.
_OF_HALVES: Final = ("data_types.buffer_dtype", "data_types.keep_in_fp32_modules")
_MASTERS: Final = {"fp16": "fp16.fp16_master_weights_and_grads", "bf16": "bf16.bf16_master_weights_and_grads"}
_STATES: Final = "bf16.bf16_optimizer_states"


def check_precision(asked: Asked) -> Iterator[Problem]:
    """fp16 against bf16 against `mixed_precision`, loss scaling, 16-bit master weights, data types."""
    yield from _one_precision(asked)
    yield from _of_the_other(asked)
    yield from _loss_scale(asked)
    yield from _master_weights(asked)
    yield from _data_types(asked)


def _one_precision(asked: Asked) -> Iterator[Problem]:
    if asked.is_on("fp16.enabled") and asked.is_on("bf16.enabled"):
        message = f"true, and fp16.enabled is true at {asked.written('fp16.enabled')}"
        yield asked.error("bf16.enabled", message, "Enable one of them.")
    chosen = asked.document.launch.get("mixed_precision")
    if chosen is None or chosen.value not in ("no", "fp16", "bf16"):
        return
    for kind in ("fp16", "bf16"):
        entry = asked.entry(f"{kind}.enabled")
        if entry is None or not isinstance(entry.value, bool):
            continue
        if entry.origin.kind == "file" and chosen.origin.kind == "flag":
            continue  # a flag overrides the file
        if entry.value != (chosen.value == kind):
            message = f"{show(entry.value)}, but mixed_precision is {chosen.value} at {chosen.origin.where}"
            fix = f'Write "auto" here, or {show(not entry.value)}.'
            yield asked.error(f"{kind}.enabled", message, fix)


def idle_keys(precision: str) -> Iterator[tuple[str, str]]:
    """The keys that have no effect in a precision, each with why."""
    for kind, keys in _OF_SECTION.items():
        if precision != kind:
            yield from ((f"{kind}.{key}", f"{kind} is off") for key in keys)
    if precision == "no":
        yield from ((key, "the model is in fp32, of which DeepSpeed casts nothing") for key in _OF_HALVES)


def _of_the_other(asked: Asked) -> Iterator[Problem]:
    for key, why in idle_keys(asked.precision) if asked.precision else ():
        if asked.says_something(key):
            yield asked.no_effect(key, why)
    if asked.is_on("fp16.auto_cast") and asked.precision in ("no", "bf16"):
        yield asked.error("fp16.auto_cast", CASTS_ALL_THE_SAME, "Delete it, or write fp16.enabled: true.")
    key = "bf16.immediate_grad_update"
    if asked.precision not in (None, "bf16") or asked.stage is None or not asked.says_something(key):
        return
    offload, sums = asked.offload("optimizer"), asked.value("data_types.grad_accum_dtype")
    if asked.stage != 1:
        yield asked.no_effect(key, f"only stage 1 reads it, and {asked.stage_said}")
    elif offload in ("cpu", "nvme"):
        yield asked.no_effect(key, f"only an optimizer on the device reads it, and it is offloaded to {offload}")
    elif sums in ("bf16", "fp16"):
        where = asked.written("data_types.grad_accum_dtype")
        yield asked.no_effect(key, f"only sums of gradients in fp32 read it, and grad_accum_dtype is {sums} at {where}")


def _loss_scale(asked: Asked) -> Iterator[Problem]:
    if asked.precision not in (None, "fp16"):
        return
    scale = asked.value("fp16.loss_scale", default=0)
    if not is_number(scale):
        return
    if scale:
        for key in _DYNAMIC_SCALING:
            if asked.says_something(f"fp16.{key}"):
                why = f"fp16.loss_scale is a fixed {show(scale)} at {asked.written('fp16.loss_scale')}"
                yield asked.no_effect(f"fp16.{key}", why, "Delete it, or write fp16.loss_scale: 0 for a dynamic scale.")
        return
    for key in ("loss_scale_window", "min_loss_scale"):
        if asked.precision == "fp16" and asked.value(f"fp16.{key}") == 0:
            message = "0, which DeepSpeed refuses while the loss scale is dynamic (fp16.loss_scale 0)"
            yield asked.error(f"fp16.{key}", message, "Write a number above 0.")


def _master_weights(asked: Asked) -> Iterator[Problem]:
    on = {kind: key for kind, key in _MASTERS.items() if asked.is_on(key)}
    if len(on) == 2:
        message = f"true, and {_MASTERS['fp16']} is true at {asked.written(_MASTERS['fp16'])}"
        yield asked.error(_MASTERS["bf16"], message, "Keep the one whose precision is on.")
    if asked.is_on(_STATES) and not asked.is_on(_MASTERS["bf16"]):
        message = "true, but it needs bf16.bf16_master_weights_and_grads: true"
        yield asked.error(_STATES, message, "Write that beside it.")
    for kind, key in on.items():
        if asked.precision not in (None, kind):
            message = f"true, but {kind} is off: {kind} master weights belong to a {kind} model"
            yield asked.error(key, message, f"Delete it, or write {kind}.enabled: true.")
        if asked.stage == 0:
            message = f"true needs ZeRO stage 1, 2 or 3, but {asked.stage_said}"
            yield asked.error(key, message, "Delete it, or choose such a stage.")
        yield from _cpu_adam(asked, key, needed=not (kind == "bf16" and asked.is_on(_STATES)))


def _cpu_adam(asked: Asked, key: str, *, needed: bool) -> Iterator[Problem]:
    """16-bit master weights are stepped by DeepSpeed's CPU Adam, unless the optimizer states are bf16 on the GPU."""
    device = asked.offload("optimizer")
    if device == "none" and needed and asked.stage:
        message = "true needs the optimizer offloaded, for only DeepSpeed's CPU Adam steps 16-bit master weights"
        yield asked.error(key, message, "Write zero_optimization.offload_optimizer.device: cpu, or delete it.")
    if device in ("cpu", "nvme") and (asked.is_on("optimizer.params.torch_adam") or asked.optimizer not in _ADAMS):
        other = "torch_adam" if asked.is_on("optimizer.params.torch_adam") else "type"
        culprit = f"optimizer.{'params.' if other == 'torch_adam' else ''}{other}"
        message = f"{show(asked.value(culprit))}, but {key} at {asked.written(key)} needs DeepSpeed's CPU Adam"
        yield asked.error(culprit, message, "Write type: AdamW or Adam without torch_adam, or delete the other key.")


_ADAMS: Final = ("", "adam", "adamw")


def _data_types(asked: Asked) -> Iterator[Problem]:
    if asked.is_on("torch_autocast.enabled") and asked.is_on("zero_optimization.zero_quantized_weights"):
        message = f"true beside torch_autocast.enabled: true at {asked.written('torch_autocast.enabled')}"
        yield asked.error("zero_optimization.zero_quantized_weights", message, "Keep one of the two.")
    if asked.precision is None:
        return
    model = {"no": "fp32"}.get(asked.precision, asked.precision)
    params, sums = (asked.value(f"data_types.{name}") for name in ("param_dtype", "grad_accum_dtype"))
    if params in ("fp32", "fp16", "bf16") and params != model:
        message = f"{params}, but the model is in {model}: precision is {asked.precision}"
        yield asked.error("data_types.param_dtype", message, f"Delete it: it follows from the precision ({model}).")
    if asked.stage == 0 and sums in ("fp32", "fp16", "bf16") and sums != model:
        message = f"{sums} with a model in {model} needs ZeRO, but {asked.stage_said}"
        yield asked.error("data_types.grad_accum_dtype", message, f"Write {model}, or choose a stage from 1 to 3.")
