"""A configuration while it is resolved, and DeepSpeed's own defaults.

A configuration while it is being resolved: what is settled so far, what is wrong, what to say.

DeepSpeed's own defaults, for fields that are written out or say `auto` and have no better rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.config.schema import deepspeed_schema, key_schema, walk_keys
from zero_plugin.config.tree import (
    AUTO,
    Entry,
    KeyPath,
    Origin,
    OriginKind,
    Tree,
    dotted,
    freeze,
    holds_auto,
    same_value,
)
from zero_plugin.config.validation import show
from zero_plugin.errors import ConfigError, Problem


class Draft:
    """The working copy that the rules fill, topic after topic; the document itself never changes.

    Attributes:
        document: what was configured.
        facts: what the rules may look at besides the values.
        tree, launch: the trees as far as they are settled.
    """

    def __init__(self, document: Document, facts: Facts) -> None:
        self.document = document
        self.facts = facts
        self.tree = document.deepspeed
        self.launch = document.launch
        self._problems: list[Problem] = []
        self._missing: dict[KeyPath, str] = {}
        self._refused: set[KeyPath] = set()
        self._said: list[str] = []

    @property
    def on_deepspeed(self) -> bool:
        """Whether the run goes through DeepSpeed's engine."""
        return self.facts.strategy == "deepspeed"

    def get(self, *path: str) -> Entry | None:
        """The settled leaf at `path`; None where it is absent, null or still open."""
        entry = self.tree.get(*path)
        return None if entry is None or entry.value is None or holds_auto(entry.value) else entry

    def value(self, *path: str, default: Any = None) -> Any:
        """The settled value at `path`, or `default`."""
        entry = self.get(*path)
        return default if entry is None else entry.value

    def is_open(self, *path: str) -> bool:
        """Whether the leaf says `auto`, as a whole or inside a list."""
        return path in self.tree and holds_auto(self.tree.value(*path))

    def is_missing(self, *path: str) -> bool:
        """Whether the leaf stays open, since a fact is not there; see `miss`."""
        return path in self._missing

    def is_unsettled(self, *path: str) -> bool:
        """Whether a rule has still to find this value: it is absent or open."""
        return path not in self.tree or self.is_open(*path)

    def put(self, path: KeyPath, value: Any, reason: str, kind: OriginKind = "rule", *, logged: bool = False) -> None:
        """Settle `path`. Of a list such as `["auto", 0.95]` only the open elements are taken from `value`.

        Args:
            path: where.
            value: what; lists become tuples.
            reason: why this value, for `explain`.
            kind: "rule", or "default" for a value that DeepSpeed would have taken too.
            logged: whether the choice changes training and has to be logged at start.
        """
        before, value = self.tree.get(*path), freeze(value)
        if before is not None and isinstance(before.value, tuple) and holds_auto(before.value):
            template = before.value
            if not isinstance(value, tuple) or len(value) != len(template):
                fix = f"Write the whole list, or auto in its place, which is {show(value)}: {reason}."
                self.refuse(path, f"{show(template)} has an open element that nothing fills.", fix)
                return
            value = tuple(found if holds_auto(typed) else typed for typed, found in zip(template, value, strict=True))
            reason += "; the other elements are typed"
        self.tree = self.tree.replace({path: self._entry(path, value, reason, kind)})
        if logged:
            self.say(f"{dotted(path)} = {_shown(value)}: {reason}")

    def put_planned(self, path: KeyPath) -> bool:
        """Settle `path` as the plan of the memory has chosen, and say so; False where it has chosen nothing there."""
        found = self.facts.planned.get(path)
        if found is not None:
            self.put(path, *found, logged=True)
        return found is not None

    def drop(self, path: KeyPath) -> None:
        """Take a leaf away."""
        self.tree = self.tree.without(*path)

    def keys(self, *section: str) -> list[str]:
        """The keys written in a section that holds plain values; none where it is absent, null or empty."""
        return [path[-1] for path in self.tree if path[:-1] == section]

    def put_launch(self, key: str, value: Any, reason: str, *, logged: bool = False) -> None:
        """Settle a launch key; see `put`."""
        self.launch = self.launch.replace({(key,): self._entry((key,), value, reason, "rule")})
        if logged:
            self.say(f"{key} = {value}: {reason}")

    def say(self, sentence: str) -> None:
        """Note a choice that has to be logged once at start."""
        self._said.append(sentence)

    def refuse(self, path: KeyPath, message: str, fix: str) -> None:
        """Note a problem that no further fact fixes; `finish` raises all of them at once."""
        entry = self.tree.get(*path) or self.launch.get(*path)
        found = entry.origin.where if entry else self.document.place(("deepspeed", *path))
        self.add(Problem(found, dotted(path), message, fix))
        self._refused.add(path)

    def add(self, problem: Problem) -> None:
        """Note a problem as it was found elsewhere; see `refuse`."""
        self._problems.append(problem)

    def miss(self, path: KeyPath, what: str, fix: str) -> None:
        """Note a field that stays open because a fact is not there: an error in a run, before one only open.

        Args:
            path: where.
            what: what would fill it, to follow "there is no …".
            fix: what to write or pass.
        """
        if self.facts.complete:
            state = "auto" if self.is_open(*path) else "absent"
            self.refuse(path, f"{state}, and there is no {what}.", fix)
        else:
            self._missing[path] = what
            self._refused.add(path)

    def still_open(self) -> list[KeyPath]:
        """The open leaves for which no rule has found a value or a problem, there or with their section's type."""
        refused = self._refused
        return [p for p in self.tree if self.is_open(*p) and p not in refused and (p[0], "type") not in refused]

    def finish(self) -> Resolved:
        """The resolved configuration; before a run, with the fields that it may still fill.

        Raises:
            ConfigError: listing every problem that the rules found.
        """
        if self._problems:
            raise ConfigError(self._problems)
        kept = {key: self.launch.entries[(key,)] for key in ("mixed_precision", "scheduler_counts")}
        launch = Tree({(key,): entry for key, entry in kept.items()})
        return Resolved(self.tree, launch, tuple(self._said), self._missing)

    @staticmethod
    def _entry(path: KeyPath, value: Any, reason: str, kind: OriginKind) -> Entry:
        where = "DeepSpeed's default" if kind == "default" else f"rule for {dotted(path)}"
        return Entry(freeze(value), Origin(kind, where, reason))


def agrees(typed: Any, given: Any) -> bool:
    """Whether what is typed, where it is not open, is what the loop gives: `["auto", 0.95]` agrees with (0.9, 0.95)."""
    if typed is AUTO:
        return True
    if isinstance(typed, tuple) and isinstance(given, tuple) and len(typed) == len(given):
        return all(map(agrees, typed, given))
    return same_value(typed, given)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


_ADAM: Final = ("lr", "betas", "eps", "weight_decay")
# What is written out for an optimizer where nobody gives it: by type, the parameters that every implementation has.
_WRITTEN_OUT: Final = {
    "Adam": (*_ADAM, "adam_w_mode"),
    "AdamW": _ADAM,
    "Adagrad": ("lr", "eps", "weight_decay"),
    "Lamb": (*_ADAM, "bias_correction", "max_coeff", "min_coeff"),
    "Lion": ("lr", "betas", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
}


def deepspeed_default(path: KeyPath, kind: str | None = None) -> tuple[Any] | None:
    """The default at `path` in a one-element tuple (a default may be None), or None where none is known.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's type.
    """
    node = key_schema(path, kind) or {}
    return (node["default"],) if "default" in node else None


def _parameters(section: str, kind: str) -> dict[str, Mapping[str, Any]]:
    """What the schema says of the parameters of a type."""
    described = key_schema((section, "params"), kind)
    assert described is not None, kind
    return {name: key for name, key in described["properties"].items() if name != "last_batch_iteration"}


def _defaults(section: str, kind: str) -> dict[str, Any]:
    return {name: freeze(key["default"]) for name, key in _parameters(section, kind).items() if "default" in key}


# DeepSpeed's defaults by type in lower case. Adam's and Lion's are those of its kernels: there an absent weight_decay
# is 0, where torch.optim.AdamW has 0.01, and Lion's second beta is 0.999, where its paper has 0.99.
OPTIMIZER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    kind.lower(): {name: _defaults("optimizer", kind)[name] for name in names} for kind, names in _WRITTEN_OUT.items()
}
_SCHEDULES: Final = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# By type, as DeepSpeed writes it: the parameters that have a default, and those that have none.
SCHEDULER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {kind: _defaults("scheduler", kind) for kind in _SCHEDULES}
SCHEDULER_REQUIRED: Final[Mapping[str, frozenset[str]]] = {
    kind: frozenset(_parameters("scheduler", kind).keys() - SCHEDULER_DEFAULTS[kind].keys()) for kind in _SCHEDULES
}
# Fields in which DeepSpeed itself understands the word "auto": it must reach DeepSpeed as it is.
DEEPSPEED_AUTO: Final = frozenset(path for path, key in walk_keys(deepspeed_schema()) if key.get("default") == "auto")
