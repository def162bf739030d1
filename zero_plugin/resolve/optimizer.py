"""Settles the `optimizer` section: from the placeholder or the real optimizer, else that optimizer's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.tree import Tree
from zero_plugin.config.validation import show
from zero_plugin.resolve.defaults import OPTIMIZER_DEFAULTS, deepspeed_default
from zero_plugin.resolve.draft import Draft, agrees, frozen, holds_auto
from zero_plugin.resolve.facts import OptimizerFacts

__all__ = ["settle_optimizer"]

_PARAMS: Final = ("optimizer", "params")
_ADAMS: Final = ("adam", "adamw")


def settle_optimizer(draft: Draft) -> None:
    """Settle every parameter of the section; refuse what contradicts the optimizer of the loop."""
    facts = draft.facts.optimizer
    if not draft.tree.has_section("optimizer"):
        if facts is None or not facts.placeholder or not draft.facts.complete:
            return
        draft.put(("optimizer", "type"), "AdamW", "DummyOptim without an optimizer section is AdamW", aloud=True)
    if draft.is_open("optimizer", "type"):
        _name_type(draft, facts)
    kind = draft.value("optimizer", "type")
    if kind is None:
        if not draft.is_open("optimizer", "type"):
            draft.refuse(("optimizer", "type"), "no optimizer is named.", "Write a type, e.g. AdamW.")
        elif not draft.facts.complete:
            _fill_params(draft, "", facts)  # what is given holds for any type
        return
    if facts is not None and not facts.placeholder and not _check_type(draft, kind.lower(), facts):
        return
    if kind.lower() in _ADAMS:
        _choose_adam(draft, facts)
    _fill_params(draft, kind.lower(), facts)
    if kind.lower() in _ADAMS:
        _check_adam(draft)
        _say_defaults(draft, kind.lower(), facts)


def _name_type(draft: Draft, facts: OptimizerFacts | None) -> None:
    """`type: auto`: the loop's optimizer, or AdamW for a placeholder."""
    path, mode = ("optimizer", "type"), (*_PARAMS, "adam_w_mode")
    if facts is None or (facts.placeholder and not draft.facts.complete):
        fix = "Write a type, e.g. AdamW, or pass an optimizer or DummyOptim to prepare."
        draft.miss(path, "optimizer to tell its type", fix)
    elif facts.placeholder:
        draft.put(path, "AdamW", "DummyOptim without a type is AdamW", aloud=True)
    elif (name := next((name for name in _type_names() if name.lower() == facts.name), None)) is not None:
        draft.put(path, name, "the loop's optimizer")
        if facts.name == "adam" and draft.is_unsettled(*mode):
            draft.put(mode, False, "torch's Adam adds weight decay to the gradient")
    else:
        draft.refuse(path, f"auto, and DeepSpeed has no {facts.name}.", "Remove the section: the loop's runs as it is.")


def _type_names() -> list[str]:
    wanted = deepspeed_schema()["properties"]["optimizer"]["properties"]["type"]
    return [name for branch in (wanted, *wanted.get("anyOf", ())) for name in branch.get("enum", ())]


def _fill_params(draft: Draft, kind: str, facts: OptimizerFacts | None) -> None:
    defaults = OPTIMIZER_DEFAULTS.get(kind, {})
    given = _arguments(kind, facts, draft.tree.section(*_PARAMS))
    giver = "" if facts is None else facts.giver
    for name in sorted({*draft.keys(*_PARAMS), *given, *defaults}):
        path = (*_PARAMS, name)
        entry = draft.tree.get(*path)
        value = None if entry is None else entry.value
        if name in given and entry is not None and not agrees(value, given[name]):
            draft.refuse(
                path,
                f"{show(value)} here, but {giver} says {show(given[name])}.",
                f'Write "auto" or {show(given[name])}, or drop the argument in the code.',
            )
        elif entry is not None and not holds_auto(value):
            continue
        elif name in given:
            draft.put(path, given[name], f"from {giver}")
        elif name == "lr" and (not draft.facts.complete or (facts is None and entry is not None)):
            fix = "Write a number, or pass DummyOptim(params, lr=…) or an optimizer to prepare."
            draft.miss(path, "optimizer to tell the learning rate", fix)
        elif name in defaults:
            why = "the optimizer's default in DeepSpeed; none is given"
            why = why if draft.facts.complete else "DeepSpeed's default, unless the script gives one"
            draft.put(path, defaults[name], why, "default", aloud=name == "lr")
        elif (default := deepspeed_default(path, draft.value("optimizer", "type"))) is not None:
            draft.put(path, default[0], "no rule fills it", "default")
        else:
            fix = f"Write a value, or pass DummyOptim(params, {name}=…)."
            draft.miss(path, "argument of the optimizer that tells it", fix)


def _arguments(kind: str, facts: OptimizerFacts | None, typed: Tree) -> Mapping[str, Any]:
    """The loop's arguments that belong into the section.

    A real optimizer's `defaults` hold everything its class knows (`foreach`, `capturable`, …): of those count the
    section's own and the ones that every implementation of the algorithm has.
    """
    if facts is None:
        return {}
    own = {*OPTIMIZER_DEFAULTS.get(kind, {}), *(path[0] for path in typed)} - {"adam_w_mode"}
    return {name: frozen(value) for name, value in facts.given.items() if facts.placeholder or name in own}


def _check_type(draft: Draft, kind: str, facts: OptimizerFacts) -> bool:
    """Whether the loop's real optimizer is what the section describes."""
    if kind == facts.name and kind != "adam":
        return True
    if kind in _ADAMS and facts.name in _ADAMS:
        decoupled = kind == "adamw" or draft.value(*_PARAMS, "adam_w_mode", default=True)
        if decoupled == (facts.name == "adamw") or not facts.given.get("weight_decay"):
            return True  # without weight decay the two are one algorithm
        fix = "Write adam_w_mode: false into optimizer.params, or use torch.optim.AdamW."
        if facts.name == "adamw":
            fix = "Write type AdamW, or use torch.optim.Adam."
        draft.refuse(
            ("optimizer", "type"),
            f"{'AdamW' if decoupled else 'Adam with L2'} is described (DeepSpeed's Adam is AdamW unless adam_w_mode is "
            f"false), but the loop's optimizer is torch's {facts.name}.",
            fix,
        )
        return False
    draft.refuse(
        ("optimizer", "type"),
        f"{draft.value('optimizer', 'type')}, but the loop's optimizer is {facts.name}.",
        "Remove the section to train with the loop's optimizer, or pass DummyOptim to train with the section's.",
    )
    return False


def _choose_adam(draft: Draft, facts: OptimizerFacts | None) -> None:
    """`torch_adam`: which implementation of Adam runs, where neither the file nor the loop says it."""
    path = (*_PARAMS, "torch_adam")
    given = facts.given if facts is not None and facts.placeholder else {}
    if not draft.is_unsettled(*path) or "torch_adam" in given:
        return
    device = ("zero_optimization", "offload_optimizer", "device")
    if draft.is_open(*device):  # before a run
        return
    offloaded = draft.value(*device, default="none") != "none"
    corrected = draft.value(*_PARAMS, "bias_correction", default=given.get("bias_correction", True))
    if draft.on_deepspeed and draft.facts.machine.accelerator == "cpu" and not offloaded and corrected:
        draft.put(path, True, "on a CPU, building DeepSpeed's fused kernel would take over a minute")


def _check_adam(draft: Draft) -> None:
    """Refuse what the implementation that runs cannot do."""
    bias_correction, amsgrad = (*_PARAMS, "bias_correction"), (*_PARAMS, "amsgrad")
    if draft.value(*_PARAMS, "torch_adam"):
        if not draft.value(*bias_correction, default=True):
            fix = "Remove torch_adam, or write true."
            draft.refuse(bias_correction, "false, but torch's Adam always corrects.", fix)
        draft.drop(bias_correction)  # true is all that torch knows; it takes no such argument
    elif draft.value(*amsgrad) and draft.on_deepspeed and (draft.facts.complete or draft.facts.optimizer is not None):
        fix = "Write torch_adam: true beside it, or remove it."
        draft.refuse(amsgrad, "true, but DeepSpeed's own Adam kernels have no AMSGrad.", fix)


def _say_defaults(draft: Draft, kind: str, facts: OptimizerFacts | None) -> None:
    """Say where DeepSpeed's documented meaning is not the one that the name suggests."""
    decay = draft.tree.get(*_PARAMS, "weight_decay")
    if decay is not None and decay.origin.kind == "default" and draft.facts.complete:
        draft.say(
            "optimizer.params.weight_decay = 0: none is given, and DeepSpeed's default is 0 (torch's AdamW: 0.01)."
        )
    decays = bool(decay is not None and decay.value)
    if kind == "adam" and decays and (facts is None or facts.placeholder) and draft.value(*_PARAMS, "adam_w_mode"):
        mode = draft.tree.get(*_PARAMS, "adam_w_mode")
        if mode is not None and not mode.origin.typed_by_user:
            draft.say("optimizer.type Adam decouples its weight decay, as AdamW does; adam_w_mode: false gives L2.")
