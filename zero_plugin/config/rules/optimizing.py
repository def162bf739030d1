"""Optimizer and schedule: what each type can do, and what is said twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.rules.asked import Asked, is_count, is_number
from zero_plugin.errors import Problem

__all__ = ["check_optimizing"]

_PARAMS: Final = "optimizer.params"
_TESTED_WITH_ZERO: Final = ("adam", "adamw", "adagrad", "lion", "muon")
_OF_WHOLE_TENSORS: Final = {
    "lamb": "scales each tensor's update by its norm",
    "adafactor": "factors each tensor's second moment",
}
_NEVER: Final = {
    "lbfgs": "computes the loss itself, several times a step, and gradients come from accelerator.backward",
    "sparseadam": "steps sparse gradients alone, and a model that has them is refused under DeepSpeed",
}


def check_optimizing(asked: Asked) -> Iterator[Problem]:
    """Optimizers that ZeRO or offload cannot run, Adam's two spellings, schedules."""
    yield from _optimizer(asked)
    yield from _adam(asked)
    yield from _schedule(asked)


def _optimizer(asked: Asked) -> Iterator[Problem]:
    kind, name = asked.optimizer, asked.value("optimizer.type")
    if kind in _OF_WHOLE_TENSORS and asked.stage and not asked.is_on("zero_allow_untested_optimizer"):
        message = f"{name} {_OF_WHOLE_TENSORS[kind]}, and ZeRO updates flat pieces of them; {asked.stage_said}"
        fix = "Write AdamW, or stage 0. If you know better: zero_allow_untested_optimizer: true."
        yield asked.error("optimizer.type", f"{message}. It would train, and differ", fix)
    if kind in _NEVER:
        yield asked.error("optimizer.type", f"{name} {_NEVER[kind]}", "Write another, such as AdamW.")
    on_cpu = asked.document.launch.get("use_cpu")
    if kind == "lamb" and on_cpu is not None and on_cpu.value is True:
        message = f"{name} needs a GPU, but use_cpu is true at {on_cpu.origin.where}"
        yield asked.error("optimizer.type", message, "Write AdamW, or train on a GPU.")
    states = f"{_PARAMS}.fp32_optimizer_states"
    in_halves = any(asked.is_on(f"{kind}.{kind}_master_weights_and_grads") for kind in ("bf16", "fp16"))
    if asked.value(states) is False and not in_halves:
        yield asked.no_effect(states, "the weights that the optimizer steps are in fp32, and so are its states")
    scale = asked.value("fp16.loss_scale")
    if kind == "lamb" and is_number(scale) and scale != 0:
        message = f"{scale}, but DeepSpeed's Lamb needs a dynamic loss scale"
        yield asked.error("fp16.loss_scale", message, "Write 0, or another optimizer.type.")
    if kind == "muon" and asked.stage == 3:
        if asked.value("zero_optimization.reduce_scatter", default=True) is True:
            message = f"{name} at ZeRO stage 3 needs zero_optimization.reduce_scatter: false, and it is true"
            yield asked.error("optimizer.type", message, "Write that, or stage 1 or 2.")
        if asked.is_on("zero_optimization.zero_quantized_gradients"):
            message = f"true, but {name} at ZeRO stage 3 does not reduce gradients that way"
            yield asked.error("zero_optimization.zero_quantized_gradients", message, "Delete it.")
    if asked.is_on("optimizer.legacy_fusion") and (asked.stage or asked.precision in ("no", "bf16")):
        yield asked.no_effect("optimizer.legacy_fusion", "only fp16 at stage 0 reads it")
    untested = kind not in ("", *_NEVER, *_TESTED_WITH_ZERO, *_OF_WHOLE_TENSORS)
    if untested and asked.value("zero_allow_untested_optimizer") is False and asked.stage:
        message = f"false, but DeepSpeed has not tried {name} with ZeRO and refuses it then"
        fix = "Delete it: this package checks by itself that an optimizer works on flat pieces."
        yield asked.error("zero_allow_untested_optimizer", message, fix)


def _adam(asked: Asked) -> Iterator[Problem]:
    if asked.optimizer == "adamw" and asked.value(f"{_PARAMS}.adam_w_mode") is False:
        message = (
            f"false, but the type is AdamW at {asked.written('optimizer.type')}, which decays weights as AdamW does"
        )
        yield asked.error(f"{_PARAMS}.adam_w_mode", message, "Write type: Adam for L2 decay, or delete it.")


def _schedule(asked: Asked) -> Iterator[Problem]:
    path = "scheduler.params.warmup_num_steps"
    warmup, total = asked.value(path), asked.value("scheduler.params.total_num_steps")
    if is_count(warmup) and is_count(total) and warmup > total:
        message = f"{warmup} steps of warm-up are more than the total_num_steps of {total}"
        yield asked.error(path, message, f"Write at most {total}, or raise total_num_steps.")
    mode = "scheduler.params.scale_mode"
    if asked.value(mode) not in (None, "cycle") and asked.value("scheduler.params.scale_fn") is None:
        yield asked.no_effect(mode, "only scale_fn reads it, a function, which no file can hold")
    top, rate = "scheduler.params.warmup_max_lr", f"{_PARAMS}.lr"
    if is_number(asked.value(top)) and is_number(asked.value(rate)) and asked.value(top) != asked.value(rate):
        why = f"the schedule sets the learning rate, up to warmup_max_lr {asked.value(top)} at {asked.written(top)}"
        yield asked.no_effect(rate, why, f"Write {asked.value(top)}, or auto for warmup_max_lr.")
