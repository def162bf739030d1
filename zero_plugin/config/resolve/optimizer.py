"""Rules for the `optimizer` and `scheduler` sections. Scheduler steps are applied optimizer steps.

Parameters come from the placeholder or the real optimizer, otherwise from that optimizer's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.resolve.facts import Draft, OptimizerFacts, SchedulerFacts
from zero_plugin.config.schema import OPTIMIZER_DEFAULTS, SCHEDULER_DEFAULTS, SCHEDULER_REQUIRED, key_schema
from zero_plugin.config.tree import AUTO, KeyPath, Tree, freeze, holds_auto, same_value, show

_PARAMS: Final = ("optimizer", "params")
_ADAMS: Final = ("adam", "adamw")
_DECAY_OF_TORCH: Final = 0.01  # torch.optim.AdamW's default


def settle_optimizer(draft: Draft) -> None:
    """Settle every parameter of the section. Refuse values that contradict the loop's optimizer."""
    facts = draft.facts.optimizer
    if not draft.tree.has_section("optimizer"):
        if facts is None or not facts.placeholder or not draft.facts.complete:
            return
        draft.put(("optimizer", "type"), "AdamW", "DummyOptim without an optimizer section is AdamW", logged=True)
    if draft.is_open("optimizer", "type"):
        _name_type(draft, facts)
    kind = draft.value("optimizer", "type")
    if kind is None:
        if not draft.facts.complete:
            _fill_params(draft, "", facts)  # given values apply to any type
        return
    if facts is not None and not facts.placeholder and not _check_type(draft, kind.lower(), facts):
        return
    if kind.lower() in _ADAMS:
        _choose_adam(draft, facts)
    _fill_params(draft, kind.lower(), facts)
    if kind.lower() in _ADAMS:
        _check_adam(draft)
        _say_defaults(draft, kind.lower(), facts)
    if draft.facts.complete and draft.facts.machine.accelerator == "cpu":
        _check_on_cpu(draft, kind)


def _check_on_cpu(draft: Draft, kind: str) -> None:
    """Refuse settings that need a GPU. Unlike the rules, also for a CPU that was chosen without a key."""
    if kind.lower() == "lamb" and draft.on_deepspeed:
        message = f"{kind} needs a GPU, but this run is on a CPU."
        draft.refuse(("optimizer", "type"), message, "Write AdamW, or train on a GPU.")
    graphs, device = (*_PARAMS, "capturable"), ("zero_optimization", "offload_optimizer", "device")
    if draft.value(*graphs) is True and draft.value(*device, default="none") == "none":
        message = "true is for CUDA graphs, which need a GPU, but this run is on a CPU."
        draft.refuse(graphs, message, "Delete capturable, or train on a GPU.")


def _name_type(draft: Draft, facts: OptimizerFacts | None) -> None:
    """Settle `type: auto`: the type of the loop's optimizer, or AdamW for a placeholder."""
    path, mode = ("optimizer", "type"), (*_PARAMS, "adam_w_mode")
    if facts is None or (facts.placeholder and not draft.facts.complete):
        fix = "Write a type, e.g. AdamW, or pass an optimizer or DummyOptim to prepare."
        draft.miss(path, "optimizer to tell its type", fix)
    elif facts.placeholder:
        draft.put(path, "AdamW", "DummyOptim without a type is AdamW", logged=True)
    elif (name := next((name for name in _type_names() if name.lower() == facts.name), None)) is not None:
        draft.put(path, name, "the loop's optimizer")
        if facts.name == "adam" and draft.is_unsettled(*mode):
            draft.put(mode, False, "torch's Adam adds weight decay to the gradient")
    else:
        draft.refuse(path, f"auto, and DeepSpeed has no {facts.name}.", "Remove the section to train with the loop's.")


def _type_names() -> list[str]:
    wanted = key_schema(("optimizer", "type")) or {}
    return [name for branch in (wanted, *wanted.get("anyOf", ())) for name in branch.get("enum", ())]


def _fill_params(draft: Draft, kind: str, facts: OptimizerFacts | None) -> None:
    of_torch = _defaults_of_torch(draft, kind)
    defaults = {**OPTIMIZER_DEFAULTS.get(kind, {}), **of_torch}
    given = _arguments(kind, facts, draft.tree.section(*_PARAMS))
    giver = "" if facts is None else facts.giver
    for name in sorted({*draft.keys(*_PARAMS), *given, *defaults}):
        path = (*_PARAMS, name)
        if name in given:
            _take(draft, path, given[name], f"from {giver}", f"{giver} says {show(given[name])}")
        elif not draft.is_unsettled(*path):
            continue
        elif name == "lr" and (not draft.facts.complete or (facts is None and path in draft.tree)):
            fix = "Write a number, or pass DummyOptim(params, lr=…) or an optimizer to prepare."
            draft.miss(path, "optimizer to tell the learning rate", fix)
        elif name in defaults:
            why = "the optimizer's default in DeepSpeed; none is given"
            if name in of_torch:
                why = "torch's default, because of torch_adam: true; none is given"
            why = why if draft.facts.complete else "DeepSpeed's default, unless the script gives one"
            draft.put(path, defaults[name], why, "default", logged=name == "lr")
        else:
            fix = f"Write a value, or pass DummyOptim(params, {name}=…)."
            draft.put_default(path, "argument of the optimizer that tells it", fix)


def _defaults_of_torch(draft: Draft, kind: str) -> Mapping[str, Any]:
    """Return torch's defaults for a written `torch_adam: true`, where DeepSpeed leaves absent arguments to torch.

    If a run chooses torch's Adam instead of DeepSpeed's kernel, absent arguments keep DeepSpeed's meaning.
    """
    typed = draft.tree.get(*_PARAMS, "torch_adam")
    is_torchs = kind in _ADAMS and typed is not None and typed.value is True and typed.origin.typed_by_user
    decouples = kind == "adamw" or draft.value(*_PARAMS, "adam_w_mode", default=True)
    return {"weight_decay": _DECAY_OF_TORCH} if is_torchs and decouples else {}


def _take(draft: Draft, path: KeyPath, value: Any, reason: str, said: str) -> None:
    """Fill an open parameter with the loop's value. Refuse a different typed value."""
    entry = draft.tree.get(*path)
    if entry is not None and not _agrees(entry.value, value):
        fix = f'Write "auto" or {show(value)}, or drop the argument in the code.'
        draft.refuse(path, f"{show(entry.value)} here, but {said}.", fix)
    elif draft.is_unsettled(*path):
        draft.put(path, value, reason)


def _agrees(typed: Any, given: Any) -> bool:
    """Return whether a typed value, without its open parts, is the loop's: `["auto", 0.95]` agrees with (0.9, 0.95)."""
    if typed is AUTO:
        return True
    if isinstance(typed, tuple) and isinstance(given, tuple) and len(typed) == len(given):
        return all(map(_agrees, typed, given))
    return same_value(typed, given)


def _arguments(kind: str, facts: OptimizerFacts | None, typed: Tree) -> Mapping[str, Any]:
    """Return the loop's arguments that belong into the section.

    A real optimizer's `defaults` hold everything its class knows (`foreach`, `capturable`, …). Only arguments that the
    section has, or that every implementation of the algorithm has, count.
    """
    if facts is None:
        return {}
    own = {*OPTIMIZER_DEFAULTS.get(kind, {}), *(path[0] for path in typed)} - {"adam_w_mode"}
    return {name: freeze(value) for name, value in facts.given.items() if facts.placeholder or name in own}


def _check_type(draft: Draft, kind: str, facts: OptimizerFacts) -> bool:
    """Return whether the section describes the loop's real optimizer. Refuse the type if not."""
    if kind == facts.name and kind != "adam":
        return True
    if kind in _ADAMS and facts.name in _ADAMS:
        decoupled = kind == "adamw" or draft.value(*_PARAMS, "adam_w_mode", default=True)
        if decoupled == (facts.name == "adamw") or not facts.given.get("weight_decay"):
            return True  # without weight decay the two are one algorithm
        fix = "Write adam_w_mode: false into optimizer.params, or use torch.optim.AdamW."
        if facts.name == "adamw":
            fix = "Write type AdamW, or use torch.optim.Adam."
        described = f"{'AdamW' if decoupled else 'Adam with L2'} is described (DeepSpeed's Adam is AdamW unless "
        message = f"{described}adam_w_mode is false), but the loop's optimizer is torch's {facts.name}."
    else:
        message = f"{draft.value('optimizer', 'type')}, but the loop's optimizer is {facts.name}."
        fix = "Remove the section to train with the loop's optimizer, or pass DummyOptim to train with the section's."
    draft.refuse(("optimizer", "type"), message, fix)
    return False


def _choose_adam(draft: Draft, facts: OptimizerFacts | None) -> None:
    """Settle `torch_adam`: which implementation of Adam runs, if neither the file nor the loop decides."""
    path = (*_PARAMS, "torch_adam")
    given = facts.given if facts is not None and facts.placeholder else {}
    if not draft.is_unsettled(*path) or "torch_adam" in given:
        return
    device = ("zero_optimization", "offload_optimizer", "device")
    if draft.is_open(*device):  # only before a run
        return
    offloaded = draft.value(*device, default="none") != "none"
    corrected = draft.value(*_PARAMS, "bias_correction", default=given.get("bias_correction", True))
    if draft.on_deepspeed and draft.facts.machine.accelerator == "cpu" and not offloaded and corrected:
        draft.put(path, True, "on a CPU, building DeepSpeed's fused kernel would take over a minute")


def _check_adam(draft: Draft) -> None:
    """Refuse settings that the chosen implementation lacks."""
    bias_correction, amsgrad = (*_PARAMS, "bias_correction"), (*_PARAMS, "amsgrad")
    if draft.value(*_PARAMS, "torch_adam"):
        if not draft.value(*bias_correction, default=True):
            fix = "Remove torch_adam, or write true."
            draft.refuse(bias_correction, "false, but torch's Adam always corrects.", fix)
        draft.tree = draft.tree.without(*bias_correction)  # torch's Adam has no such argument: it always corrects
    elif draft.value(*amsgrad) and draft.on_deepspeed and (draft.facts.complete or draft.facts.optimizer is not None):
        fix = "Write torch_adam: true too, or remove it."
        draft.refuse(amsgrad, "true, but DeepSpeed's own Adam kernels have no AMSGrad.", fix)


def _say_defaults(draft: Draft, kind: str, facts: OptimizerFacts | None) -> None:
    """Log where DeepSpeed's defaults differ from what the names suggest."""
    decay = draft.tree.get(*_PARAMS, "weight_decay")
    if decay is not None and decay.origin.kind == "default" and not decay.value and draft.facts.complete:
        why = "none is given, and DeepSpeed's default is 0 (torch's AdamW: 0.01)."
        draft.log(f"optimizer.params.weight_decay = 0: {why}")
    decays = bool(decay is not None and decay.value)
    if kind == "adam" and decays and (facts is None or facts.placeholder) and draft.value(*_PARAMS, "adam_w_mode"):
        mode = draft.tree.get(*_PARAMS, "adam_w_mode")
        if mode is not None and not mode.origin.typed_by_user:
            draft.log("optimizer.type Adam decouples its weight decay, as AdamW does; adam_w_mode: false gives L2.")


_SCHEDULER_PARAMS: Final = ("scheduler", "params")
_PEAKS: Final = ("warmup_max_lr", "cycle_max_lr", "max_lr")
# Required parameters of a scheduler, and how the loop can give them.
_NEEDS: Final[Mapping[str, str]] = {
    "total_num_steps": "Write a number of optimizer steps, or pass DummyScheduler(optimizer, total_num_steps=…).",
    "warmup_num_steps": "Write a number of optimizer steps (0 for none), or pass DummyScheduler(optimizer, "
    "warmup_num_steps=…).",
    "cycle_min_lr": "Write a learning rate, or pass DummyScheduler(optimizer, cycle_min_lr=…).",
    "cycle_max_lr": "Write a learning rate, or pass DummyScheduler(optimizer, cycle_max_lr=…).",
}


def settle_scheduler(draft: Draft) -> None:
    """Settle every parameter of the section. Refuse values that contradict the loop's placeholder."""
    _settle_counting(draft)
    facts, path = draft.facts.scheduler, ("scheduler", "type")
    described = draft.tree.has_section("scheduler")
    if not described and (facts is None or not facts.placeholder or not draft.facts.complete):
        return
    if not described or draft.is_open(*path):
        _describe(draft, facts)
    kind = draft.value(*path)
    if kind is None:
        return
    if facts is not None and not facts.placeholder:
        fix = "Remove the section, or pass DummyScheduler(optimizer) instead of the loop's schedule."
        draft.refuse(path, f"{kind}, but the loop brings a schedule of its own, and one of them would not run.", fix)
    else:
        _fill_scheduler_params(draft, kind, facts)


def _settle_counting(draft: Draft) -> None:
    entry = draft.launch.get("scheduler_counts")
    if entry is None or holds_auto(entry.value) or entry.value is None:
        why = "absent, so schedules count as under Accelerate: one step per process and optimizer step"
        draft.put_launch("scheduler_counts", "processes", why)


def _describe(draft: Draft, facts: SchedulerFacts | None) -> None:
    """Describe the scheduler of a DummyScheduler without a section or type: linear warm-up, then linear decay to 0."""
    if facts is None or not facts.placeholder or not draft.facts.complete:
        fix = "Write a type, e.g. WarmupDecayLR, or pass DummyScheduler(optimizer) to prepare."
        draft.miss(("scheduler", "type"), "DummyScheduler to describe one", fix)
        return
    if facts.total_num_steps is None and draft.get(*_SCHEDULER_PARAMS, "total_num_steps") is None:
        why = "DummyScheduler without a type and without total_num_steps: constant after a linear warm-up"
        draft.put(("scheduler", "type"), "WarmupLR", why, logged=True)
    else:
        why = "DummyScheduler without a type in the configuration: linear warm-up, then linear decay to 0"
        draft.put(("scheduler", "type"), "WarmupDecayLR", why, logged=True)
    if draft.is_unsettled(*_SCHEDULER_PARAMS, "warmup_type"):
        draft.put((*_SCHEDULER_PARAMS, "warmup_type"), "linear", "the described warm-up is linear")


def _fill_scheduler_params(draft: Draft, kind: str, facts: SchedulerFacts | None) -> None:
    defaults = SCHEDULER_DEFAULTS.get(kind, {})
    ours = draft.tree.get("scheduler", "type")
    described = ours is not None and not ours.origin.typed_by_user
    what = "{} in the DummyScheduler" if facts is not None and facts.placeholder else "DummyScheduler to tell it"
    known = {*defaults, *SCHEDULER_REQUIRED.get(kind, ())}
    given = {name: found for name, found in _given(draft, facts).items() if name in known or name not in _NEEDS}
    for name in sorted({*draft.keys(*_SCHEDULER_PARAMS), *given, *known}):
        path = (*_SCHEDULER_PARAMS, name)
        is_written = path in draft.tree
        if name in given:
            value, reason = given[name]
            _take(draft, path, value, reason, f"the loop says {show(value)}: {reason}")
        elif not draft.is_unsettled(*path):
            continue
        elif (is_written or described) and (filled := _filled(draft, name, facts)) is not None:
            draft.put(path, *filled)
        elif is_written and name in _PEAKS and not draft.facts.complete:
            draft.miss(path, "optimizer to tell the learning rate", _NEEDS.get(name, _NEEDS["cycle_max_lr"]))
        elif name in defaults and not (is_written and name in _NEEDS):
            draft.put(path, defaults[name], "the schedule's default in DeepSpeed", "default")
        elif name in _NEEDS:
            draft.miss(path, what.format(name), _NEEDS[name])
        else:
            draft.put_default(path, what.format(name), f"Write a value, or pass DummyScheduler(optimizer, {name}=…).")
    for name in sorted({*_given(draft, facts)} - {*given}):
        draft.log(f"scheduler.type {kind} has no {name}: DummyScheduler's value has no effect.")
    _log_scheduler_defaults(draft, kind)


def _given(draft: Draft, facts: SchedulerFacts | None) -> dict[str, tuple[Any, str]]:
    """Return the placeholder's arguments with reasons; its step numbers become optimizer steps."""
    if facts is None:
        return {}
    given = {name: (freeze(value), f"from {facts.given_by}") for name, value in facts.given.items()}
    for name, steps in (("total_num_steps", facts.total_num_steps), ("warmup_num_steps", facts.warmup_num_steps)):
        if steps is not None:
            given[name] = _in_optimizer_steps(draft, steps, facts.given_by)
    return given


def _in_optimizer_steps(draft: Draft, steps: int, given_by: str) -> tuple[int, str]:
    world = draft.facts.machine.counted
    if draft.launch.value("scheduler_counts") == "steps" or draft.facts.split_batches or world == 1:
        return int(steps), f"from {given_by}"
    return -(-int(steps) // world), f"{given_by}'s {steps} ÷ {world} processes (scheduler_counts: processes)"


def _filled(draft: Draft, name: str, facts: SchedulerFacts | None) -> tuple[Any, str] | None:
    """Return the loop's value for an open parameter, with a reason; None if it has none."""
    if name in _PEAKS:
        return _peak_lr(draft)
    if name in ("warmup_min_lr", "warmup_min_ratio"):
        return 0.0, "a warm-up starts from 0"
    if name == "warmup_type":
        return "linear", "this package fills in linear (DeepSpeed's own default is log)"
    if name == "warmup_num_steps" and facts is not None and draft.facts.complete:
        return 0, "DummyScheduler requests no warm-up"
    return None


def _peak_lr(draft: Draft) -> tuple[Any, str] | None:
    """Return the optimizer's learning rate: one number, or one per parameter group if they differ."""
    optimizer = draft.facts.optimizer
    if optimizer is not None and len(set(optimizer.group_lrs)) > 1:
        return optimizer.group_lrs, "the learning rates of the optimizer's parameter groups"
    settled = draft.value("optimizer", "params", "lr")
    if settled is not None:
        return settled, "optimizer.params.lr"
    if optimizer is not None and "lr" in optimizer.given:
        return optimizer.given["lr"], "the learning rate of the loop's optimizer"
    return None


def _log_scheduler_defaults(draft: Draft, kind: str) -> None:
    """Log DeepSpeed's defaults that differ from common expectations."""
    shape = draft.tree.get(*_SCHEDULER_PARAMS, "warmup_type")
    if shape is not None and shape.origin.kind == "default" and draft.value(*_SCHEDULER_PARAMS, "warmup_num_steps"):
        draft.log("scheduler.params.warmup_type = log: none is given, and DeepSpeed's warm-up is logarithmic then.")
    steps = draft.tree.get(*_SCHEDULER_PARAMS, "warmup_num_steps")
    if steps is not None and steps.origin.kind == "default":
        draft.log(f"scheduler.params.warmup_num_steps = {steps.value}: none is given, and that is DeepSpeed's default.")
    peak, own = draft.get(*_SCHEDULER_PARAMS, "warmup_max_lr"), _peak_lr(draft)
    if peak is not None and own is not None and peak.origin.kind == "default" and not same_value(peak.value, own[0]):
        draft.log(f"scheduler.params.warmup_max_lr = {peak.value:g}: none is given; it replaces the rate {own[0]}.")
    total = draft.value(*_SCHEDULER_PARAMS, "total_num_steps")
    warmup = draft.value(*_SCHEDULER_PARAMS, "warmup_num_steps", default=0)
    if total is not None and total < warmup:
        draft.log(f"scheduler.type {kind} ends at step {total}, inside its warm-up of {warmup} steps.")
