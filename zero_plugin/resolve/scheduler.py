"""Settles the `scheduler` section, in applied optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.overlay import same_value
from zero_plugin.config.validation import show
from zero_plugin.resolve.defaults import SCHEDULER_DEFAULTS, SCHEDULER_REQUIRED, deepspeed_default
from zero_plugin.resolve.draft import Draft, agrees, frozen, holds_auto
from zero_plugin.resolve.facts import SchedulerFacts

__all__ = ["settle_scheduler"]

_PARAMS: Final = ("scheduler", "params")
_PEAKS: Final = ("warmup_max_lr", "cycle_max_lr", "max_lr")
# What the schedule cannot do without, and how the loop can tell it.
_NEEDS: Final[Mapping[str, str]] = {
    "total_num_steps": "Write a number of optimizer steps, or pass DummyScheduler(optimizer, total_num_steps=…).",
    "warmup_num_steps": "Write a number of optimizer steps (0 for none), or pass DummyScheduler(optimizer, "
    "warmup_num_steps=…).",
    "cycle_min_lr": "Write a learning rate, or pass DummyScheduler(optimizer, cycle_min_lr=…).",
    "cycle_max_lr": "Write a learning rate, or pass DummyScheduler(optimizer, cycle_max_lr=…).",
}


def settle_scheduler(draft: Draft) -> None:
    """Settle every parameter of the section; refuse what contradicts the placeholder of the loop."""
    _settle_counting(draft)
    facts, path = draft.facts.scheduler, ("scheduler", "type")
    described = draft.tree.has_section("scheduler")
    if not described and (facts is None or not facts.placeholder or not draft.facts.complete):
        return
    if not described or draft.is_open(*path):
        _describe(draft, facts)
    kind = draft.value(*path)
    if kind is None:
        if not draft.is_open(*path):
            draft.refuse(path, "no schedule is named.", "Write a type, e.g. WarmupDecayLR.")
        return
    if facts is not None and not facts.placeholder:
        draft.refuse(
            ("scheduler", "type"),
            f"{kind}, but the loop brings a schedule of its own, and one of them would not run.",
            "Remove the section, or pass DummyScheduler(optimizer) in the place of the loop's schedule.",
        )
        return
    _fill_params(draft, kind, facts)


def _settle_counting(draft: Draft) -> None:
    entry = draft.launch.get("scheduler_counts")
    if entry is None or holds_auto(entry.value) or entry.value is None:
        why = "absent, so schedules count as under Accelerate: one step per process and optimizer step"
        draft.put_launch("scheduler_counts", "processes", why)
    elif entry.value not in ("steps", "processes"):
        fix = "Write steps (applied optimizer steps) or processes (Accelerate's way: one per process and step)."
        draft.refuse(("scheduler_counts",), f"{entry.value!r} is not a way to count.", fix)


def _describe(draft: Draft, facts: SchedulerFacts | None) -> None:
    """The schedule of a DummyScheduler without a section or a type: linear warm-up, then linear decay to 0."""
    if facts is None or not facts.placeholder or not draft.facts.complete:
        fix = "Write a type, e.g. WarmupDecayLR, or pass DummyScheduler(optimizer) to prepare."
        draft.miss(("scheduler", "type"), "DummyScheduler to describe one", fix)
        return
    if facts.total_num_steps is None and draft.get(*_PARAMS, "total_num_steps") is None:
        why = "DummyScheduler without a type and without total_num_steps: constant after a linear warm-up"
        draft.put(("scheduler", "type"), "WarmupLR", why, aloud=True)
    else:
        why = "DummyScheduler without a type in the configuration: linear warm-up, then linear decay to 0"
        draft.put(("scheduler", "type"), "WarmupDecayLR", why, aloud=True)
    if draft.is_unsettled(*_PARAMS, "warmup_type"):
        draft.put((*_PARAMS, "warmup_type"), "linear", "the described warm-up is linear")


def _fill_params(draft: Draft, kind: str, facts: SchedulerFacts | None) -> None:
    defaults = SCHEDULER_DEFAULTS.get(kind, {})
    ours = draft.tree.get("scheduler", "type")
    described = ours is not None and not ours.origin.typed_by_user
    known = {*defaults, *SCHEDULER_REQUIRED.get(kind, ())}
    given = {name: found for name, found in _given(draft, facts).items() if name in known or name not in _NEEDS}
    for name in sorted({*draft.keys(*_PARAMS), *given, *known}):
        path = (*_PARAMS, name)
        entry = draft.tree.get(*path)
        if entry is not None and name in given and not agrees(entry.value, given[name][0]):
            value, reason = given[name]
            fix = f'Write "auto" or {show(value)}, or drop the argument in the code.'
            draft.refuse(path, f"{show(entry.value)} here, but the loop says {show(value)}: {reason}.", fix)
            continue
        if entry is not None and not holds_auto(entry.value):
            continue
        filled = given.get(name)
        if filled is None and (entry is not None or described):
            filled = _filled(draft, name, facts)
        if filled is not None:
            draft.put(path, *filled)
        elif entry is not None and name in _PEAKS and not draft.facts.complete:
            draft.miss(path, "optimizer to tell the learning rate", _NEEDS.get(name, _NEEDS["cycle_max_lr"]))
        elif name in defaults and not (entry is not None and name in _NEEDS):
            draft.put(path, defaults[name], "the schedule's default in DeepSpeed", "default")
        elif (default := deepspeed_default(path, kind)) is not None and name not in _NEEDS:
            draft.put(path, default[0], "no rule fills it", "default")
        else:
            fix = _NEEDS.get(name, f"Write a value, or pass DummyScheduler(optimizer, {name}=…).")
            draft.miss(path, "DummyScheduler to tell it", fix)
    for name in sorted({*_given(draft, facts)} - {*given}):
        draft.say(f"scheduler.type {kind} knows no {name}: DummyScheduler's does not shape it.")
    _say_defaults(draft, kind)


def _given(draft: Draft, facts: SchedulerFacts | None) -> dict[str, tuple[Any, str]]:
    """The placeholder's arguments with reasons, its step numbers turned into optimizer steps."""
    if facts is None:
        return {}
    given = {name: (frozen(value), f"from {facts.given_by}") for name, value in facts.given.items()}
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
    """What the loop says of a parameter that is open, None where it says nothing."""
    if name in _PEAKS:
        return _peak_lr(draft)
    if name in ("warmup_min_lr", "warmup_min_ratio"):
        return 0.0, "a warm-up starts from 0"
    if name == "warmup_type":
        return "linear", "what this package fills is linear (DeepSpeed's own default is log)"
    if name == "warmup_num_steps" and facts is not None and draft.facts.complete:
        return 0, "DummyScheduler asks for no warm-up"
    return None


def _peak_lr(draft: Draft) -> tuple[Any, str] | None:
    """The optimizer's learning rate: one number, or one per parameter group where they differ."""
    optimizer = draft.facts.optimizer
    if optimizer is not None and len(set(optimizer.group_lrs)) > 1:
        return optimizer.group_lrs, "the learning rates of the optimizer's parameter groups"
    settled = draft.value("optimizer", "params", "lr")
    if settled is not None:
        return settled, "optimizer.params.lr"
    if optimizer is not None and "lr" in optimizer.given:
        return optimizer.given["lr"], "the learning rate of the loop's optimizer"
    return None


def _say_defaults(draft: Draft, kind: str) -> None:
    """Say where DeepSpeed's default is not what one expects."""
    shape = draft.tree.get(*_PARAMS, "warmup_type")
    if shape is not None and shape.origin.kind == "default" and draft.value(*_PARAMS, "warmup_num_steps"):
        draft.say("scheduler.params.warmup_type = log: none is given, and DeepSpeed's warm-up is logarithmic then.")
    steps = draft.tree.get(*_PARAMS, "warmup_num_steps")
    if steps is not None and steps.origin.kind == "default":
        draft.say(f"scheduler.params.warmup_num_steps = {steps.value}: none is given, and that is DeepSpeed's default.")
    peak, own = draft.get(*_PARAMS, "warmup_max_lr"), _peak_lr(draft)
    if peak is not None and own is not None and peak.origin.kind == "default" and not same_value(peak.value, own[0]):
        draft.say(f"scheduler.params.warmup_max_lr = {peak.value:g}: none is given; it replaces the rate {own[0]}.")
    total, warmup = draft.value(*_PARAMS, "total_num_steps"), draft.value(*_PARAMS, "warmup_num_steps", default=0)
    if total is not None and total < warmup:
        draft.say(f"scheduler.type {kind} ends at step {total}, inside its warm-up of {warmup} steps.")
