"""A configuration while it is being resolved: what is settled so far, what is wrong, what to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_plugin.config.document import Document
from zero_plugin.config.overlay import same_value
from zero_plugin.config.tree import AUTO, Entry, Origin, OriginKind, Path, Tree, dotted
from zero_plugin.config.validation import show
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolved import Resolved

__all__ = ["Draft", "agrees", "frozen", "holds_auto"]


class Draft:
    """The working copy that the rules fill, topic after topic; the document itself never changes.

    Attributes:
        facts: what the rules may look at besides the values.
        tree, launch: the trees as far as they are settled.
    """

    def __init__(self, document: Document, facts: Facts) -> None:
        self.facts = facts
        self.tree = document.deepspeed
        self.launch = document.launch
        self._document = document
        self._problems: list[Problem] = []
        self._missing: dict[Path, str] = {}
        self._refused: set[Path] = set()
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

    def put(self, path: Path, value: Any, reason: str, kind: OriginKind = "rule", *, aloud: bool = False) -> None:
        """Settle `path`. Of a list such as `["auto", 0.95]` only the open elements are taken from `value`.

        Args:
            path: where.
            value: what; lists become tuples.
            reason: why this value, for `explain`.
            kind: "rule", or "default" for a value that DeepSpeed would have taken too.
            aloud: whether the choice changes training and has to be printed at start.
        """
        before, value = self.tree.get(*path), frozen(value)
        if before is not None and isinstance(before.value, tuple) and holds_auto(before.value):
            template = before.value
            if not isinstance(value, tuple) or len(value) != len(template):
                fix = f"Write the whole list, or auto in its place, which is {show(value)}: {reason}."
                self.refuse(path, f"{show(template)} has an open element that nothing fills.", fix)
                return
            value = tuple(found if holds_auto(typed) else typed for typed, found in zip(template, value, strict=True))
            reason += "; the other elements are typed"
        self.tree = self.tree.replace({path: self._entry(path, value, reason, kind)})
        if aloud:
            self.say(f"{dotted(path)} = {_shown(value)}: {reason}")

    def put_planned(self, path: Path) -> bool:
        """Settle `path` as the plan of the memory has chosen, and say so; False where it has chosen nothing there."""
        found = self.facts.planned.get(path)
        if found is not None:
            self.put(path, *found, aloud=True)
        return found is not None

    def drop(self, path: Path) -> None:
        """Take a leaf away."""
        self.tree = self.tree.without(*path)

    def keys(self, *section: str) -> list[str]:
        """The keys written in a section that holds plain values; none where it is absent, null or empty."""
        return [path[-1] for path in self.tree if path[:-1] == section]

    def put_launch(self, key: str, value: Any, reason: str, *, aloud: bool = False) -> None:
        """Settle a launch key; see `put`."""
        self.launch = self.launch.replace({(key,): self._entry((key,), value, reason, "rule")})
        if aloud:
            self.say(f"{key} = {value}: {reason}")

    def say(self, sentence: str) -> None:
        """Note a choice that has to be printed once at start."""
        self._said.append(sentence)

    def refuse(self, path: Path, message: str, fix: str) -> None:
        """Note a problem that no further fact mends; `finish` raises all of them at once."""
        entry = self.tree.get(*path) or self.launch.get(*path)
        found = entry.origin.where if entry else self._section(path)
        self._problems.append(Problem(found, dotted(path), message, fix))
        self._refused.add(path)

    def miss(self, path: Path, what: str, fix: str) -> None:
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

    def still_open(self) -> list[Path]:
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

    def _section(self, path: Path) -> str:
        """Where the innermost written section around an absent key is."""
        prefixes = [("deepspeed", *path[:depth]) for depth in range(len(path) - 1, -1, -1)]
        places = [self._document.sections[prefix] for prefix in prefixes if prefix in self._document.sections]
        return next(iter([*places, *self._document.sources]), "the configuration")

    @staticmethod
    def _entry(path: Path, value: Any, reason: str, kind: OriginKind) -> Entry:
        where = "DeepSpeed's default" if kind == "default" else f"rule for {dotted(path)}"
        return Entry(frozen(value), Origin(kind, where, reason))


def frozen(value: Any) -> Any:
    """A list as the tuple that a tree holds, anything else as it is."""
    return tuple(frozen(child) for child in value) if isinstance(value, list | tuple) else value


def holds_auto(value: Any) -> bool:
    """Whether `value` is AUTO or a list or mapping with AUTO somewhere inside."""
    if isinstance(value, Mapping):
        return any(holds_auto(child) for child in value.values())
    if isinstance(value, tuple):
        return any(holds_auto(child) for child in value)
    return value is AUTO


def agrees(typed: Any, given: Any) -> bool:
    """Whether what is typed, where it is not open, is what the loop gives: `["auto", 0.95]` agrees with (0.9, 0.95)."""
    if typed is AUTO:
        return True
    if isinstance(typed, tuple) and isinstance(given, tuple) and len(typed) == len(given):
        return all(map(agrees, typed, given))
    return same_value(typed, given)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
