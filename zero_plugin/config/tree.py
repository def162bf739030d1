"""Immutable configuration trees: every leaf has a value and an origin. Also the check of a tree against a schema.

The check returns violations by path, legal values in plain words, and likely meanings.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal

from zero_plugin.config.amounts import as_number
from zero_plugin.config.choices import FALSE_WORDS, TRUE_WORDS
from zero_plugin.errors import Problem

KeyPath = tuple[str, ...]
_SHOWS: Final = re.compile(r"[\w.*/$-]+", re.ASCII)
OriginKind = Literal["file", "flag", "code", "rule", "default"]


class Auto(Enum):
    """Type of `AUTO`, an open field: resolution has to find its value."""

    AUTO = "the only one"

    def __repr__(self) -> str:
        return "AUTO"

    __str__ = __repr__


AUTO: Final = Auto.AUTO


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value.

    Attributes:
        kind: the kind of source.
        where: `file:line:column`, the flag, the call in code, or the rule's name.
        reason: why a rule or default has this value; empty for a value that a user typed.
        key: the key as the user typed it, if that differs from the leaf's path, e.g. `zero_stage`; otherwise empty.
    """

    kind: OriginKind
    where: str
    reason: str = ""
    key: str = ""

    @property
    def typed_by_user(self) -> bool:
        """Whether a user wrote this value, and not a rule or a default."""
        return self.kind not in ("rule", "default")

    def __str__(self) -> str:
        return f"{self.where} ({self.reason})" if self.reason else self.where


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf: its value (scalar, tuple, frozen empty mapping, None or AUTO) and its origin."""

    value: Any
    origin: Origin


def dotted(path: KeyPath) -> str:
    """Return a path as `zero_optimization.stage`. Keys with unusual characters get quotes."""
    return ".".join(part if _SHOWS.fullmatch(part) else json.dumps(part) for part in path)


@dataclass(frozen=True, slots=True)
class Tree:
    """Leaves by path. A list is one leaf (a tuple). An object without keys is a leaf with an empty mapping."""

    entries: Mapping[KeyPath, Entry] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))

    def __contains__(self, path: KeyPath) -> bool:
        return path in self.entries

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __reduce__(self) -> tuple[type[Tree], tuple[dict[KeyPath, Entry]]]:
        return Tree, (dict(self.entries),)

    def get(self, *path: str) -> Entry | None:
        """Return the leaf at `path`, or None."""
        return self.entries.get(path)

    def value(self, *path: str, default: Any = None) -> Any:
        """Return the value at `path`, or `default` if there is no leaf."""
        entry = self.entries.get(path)
        return default if entry is None else entry.value

    def typed(self, *path: str) -> str:
        """Return the key of the leaf at `path` as the user typed it: `zero_stage` for `zero_optimization.stage`."""
        entry = self.entries.get(path)
        return (entry.origin.key if entry else "") or dotted(path)

    def has_section(self, *prefix: str) -> bool:
        """Return whether `prefix` is a leaf or the parent of one."""
        return any(path[: len(prefix)] == prefix for path in self.entries)

    def section(self, *prefix: str) -> Tree:
        """Return the leaves below `prefix`, with `prefix` removed from their paths."""
        n = len(prefix)
        return Tree({p[n:]: e for p, e in self.entries.items() if len(p) > n and p[:n] == prefix})

    def under(self, *prefix: str) -> Tree:
        """Return the same leaves with `prefix` before their paths."""
        return Tree({prefix + p: e for p, e in self.entries.items()})

    def replace(self, changes: Mapping[KeyPath, Entry]) -> Tree:
        """Return a copy with `changes` laid over it.

        A leaf below a path replaces a leaf at that path (`null`, `{}`). A leaf at a path replaces all leaves below it,
        unless it is an empty object, which says nothing.
        """
        merged = dict(self.entries)
        for path, entry in changes.items():
            for n in range(1, len(path)):
                merged.pop(path[:n], None)
            below = [p for p in merged if len(p) > len(path) and p[: len(path)] == path]
            if below and isinstance(entry.value, Mapping):
                continue
            for p in below:
                del merged[p]
            merged[path] = entry
        return Tree(merged)

    def without(self, *prefix: str) -> Tree:
        """Return a copy without the leaf or section at `prefix`."""
        return Tree({p: e for p, e in self.entries.items() if p[: len(prefix)] != prefix})

    def where(self, keep: Callable[[KeyPath, Entry], bool]) -> Tree:
        """Return the leaves for which `keep(path, entry)` holds."""
        return Tree({p: e for p, e in self.entries.items() if keep(p, e)})

    def nested(self, *, auto: Any = AUTO) -> dict[str, Any]:
        """Return plain dicts and lists, with `auto` for AUTO."""
        root: dict[str, Any] = {}
        for path, entry in self.entries.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = plain(entry.value, auto)
        return root

    @staticmethod
    def from_nested(values: Mapping[str, Any], origin: Callable[[KeyPath], Origin]) -> Tree:
        """Freeze plain nested values. The string `auto` (in any case) becomes AUTO, also inside lists."""
        return Tree(dict(_leaves((), values, origin)))


def _leaves(prefix: KeyPath, node: Any, origin: Callable[[KeyPath], Origin]) -> Iterable[tuple[KeyPath, Entry]]:
    if isinstance(node, Mapping) and node:
        for key, child in node.items():
            yield from _leaves((*prefix, str(key)), child, origin)
    elif prefix:
        yield prefix, Entry(freeze(node), origin(prefix))


def freeze(value: Any) -> Any:
    """Return a value as a tree holds it: lists as tuples, mappings read-only, the string `auto` as AUTO."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return MappingProxyType({str(k): freeze(v) for k, v in value.items()})
    return value


def plain(value: Any, auto: Any = "auto") -> Any:
    """Return a value of a tree with plain dicts and lists, and with `auto` for AUTO."""
    if value is AUTO:
        return auto
    if isinstance(value, Mapping):
        return {key: plain(child, auto) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, auto) for child in value]
    return value


def holds_auto(value: Any) -> bool:
    """Return whether `value` is AUTO or a list or mapping with AUTO somewhere inside."""
    if isinstance(value, Mapping):
        return any(holds_auto(child) for child in value.values())
    if isinstance(value, tuple):
        return any(holds_auto(child) for child in value)
    return value is AUTO


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values mean the same: 1 and 1.0 do, true and 1 do not."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


_LARGEST: Final = 2**63 - 1  # the largest integer of torch and DeepSpeed; 1e30 is above it


@dataclass(frozen=True, slots=True)
class Violation:
    """One place where a tree breaks its schema.

    Attributes:
        path: the leaf or section, without list indices.
        index: positions inside the leaf, if it is a list.
        value: the value there.
        wanted: the schema of that place; for an unknown or missing key, the schema of its section.
        kind: whether the value is wrong, the key is unknown in its section, or a required key is missing.
    """

    path: KeyPath
    index: tuple[int | str, ...]
    value: Any
    wanted: Mapping[str, Any]
    kind: str  # "value", "unknown" or "missing"


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a schema allows a plain value."""
    return bool(_validator()(schema).is_valid(value))


@functools.cache  # making the class takes longer than a check
def _validator() -> Any:
    """Return jsonschema's validator with a stricter integer: not `2e8`, so it gets converted, and not `1e30`."""
    from jsonschema import Draft202012Validator, validators  # here, because a document made in code may need no check

    def is_integer(_: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    return validators.extend(Draft202012Validator, type_checker=types)  # type: ignore[no-untyped-call]


def violations(tree: Tree, schema: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield every place where `tree` breaks a schema."""
    if not tree and "required" not in schema:
        return  # without jsonschema, whose import takes 0.05 s
    for error in _validator()(schema).iter_errors(tree.nested(auto="auto")):
        steps = list(error.absolute_path)
        depth = next((n for n, step in enumerate(steps) if not isinstance(step, str)), len(steps))
        path, index = tuple(str(step) for step in steps[:depth]), tuple(steps[depth:])
        if error.validator == "additionalProperties":
            known = error.schema.get("properties", {})
            for key in error.instance:
                if key not in known and not key.startswith("_"):
                    yield Violation((*path, key), index, error.instance[key], error.schema, "unknown")
        elif error.validator == "required":
            for key in error.validator_value:
                if key not in error.instance:
                    yield Violation((*path, key), index, None, error.schema, "missing")
        else:
            yield Violation(path, index, error.instance, error.schema, "value")


def read_as_wanted(tree: Tree, schema: Mapping[str, Any]) -> tuple[Tree, list[Problem]]:
    """Convert values in another spelling to the type of their keys: `"true"`, `"5e8"`, `2e8`, `CPU`.

    Returns:
        The tree with converted values, and a warning for each conversion that the user should know.
    """
    notes: list[Problem] = []
    for _ in range(2):  # twice: an optimizer type that the first pass corrects makes its parameters checkable
        changes: dict[KeyPath, Entry] = {}
        for found in violations(tree, schema):
            if found.kind != "value" or found.path not in tree or found.index:
                continue
            reading = next((r for r in _readings(found.value, found.wanted) if is_valid(r[0], found.wanted)), None)
            if reading is not None:
                value, goes_without_saying = reading
                origin = tree.entries[found.path].origin
                changes[found.path] = Entry(freeze(value), origin)
                if not goes_without_saying:
                    message = f"read {show(found.value)} as {show(value)}"
                    fix, shown = f"Write {show(value)}.", show(found.value)
                    notes.append(Problem(origin.where, tree.typed(*found.path), message, fix, shown, "warning"))
        tree = tree.replace(changes)
    return tree, notes


def _readings(value: Any, wanted: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield likely meanings of `value`, each with whether it is too obvious for a warning."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST:
        yield int(value), True
    if isinstance(value, str):
        text = value.strip()
        for branch in (wanted, *wanted.get("anyOf", ())):
            for option in branch.get("enum", ()):
                if isinstance(option, str) and option.lower() == text.lower():
                    yield option, True
        number = as_number(text)
        if number is not None:
            if float(number).is_integer() and abs(number) <= _LARGEST:
                yield int(number), False
            yield number, False
        if (switch := as_switch(value)) is not None:
            yield switch, False
        yield [value], False
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if (switch := as_switch(value)) is not None:
            yield switch, False
        yield str(value), True


def as_switch(value: Any) -> bool | None:
    """Return a boolean, also for what DeepSpeed reads as one: `"true"`, `"y"`, `"1"`, 1, 1.0; None for other values."""
    if isinstance(value, str):
        word = value.strip().lower()
        return word in TRUE_WORDS if word in TRUE_WORDS + FALSE_WORDS else None
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def did_you_mean(word: str, known: Iterable[str], *, only: bool = False) -> str:
    """Return the known word nearest to `word`, or "" if none is near; with `only`, also if several are."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_lower, n=2, cutoff=0.7)
    return by_lower[near[0]] if near and not (only and len(near) > 1) else ""


def show(value: Any) -> str:
    """Return a value as a user would write it, shortened."""
    text = "auto" if value is AUTO else json.dumps(plain(value), default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def legal(schema: Mapping[str, Any]) -> str:
    """Return what a schema allows, in plain words."""
    *first, last = dict.fromkeys(_options(schema))
    return f"{', '.join(first)} or {last}" if first else last


def _options(schema: Mapping[str, Any]) -> list[str]:
    if "anyOf" in schema:
        return [option for branch in schema["anyOf"] for option in _options(branch)]
    if "const" in schema:
        return ["auto" if schema["const"] == "auto" else show(schema["const"])]
    if "enum" in schema:
        return [str(option) for option in schema["enum"]]
    kinds = schema.get("type", "object")
    words = [_legal_type(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "boolean"]
    return ["true", "false", *words] if "boolean" in kinds else words


def _legal_type(kind: str, schema: Mapping[str, Any]) -> str:
    if kind in ("integer", "number"):
        noun = "an integer" if kind == "integer" else "a number"
        low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
        high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
        if low is not None and high is not None:
            return f"{noun} from {low} to {high}"
        bounds = {"of at least": low, "above": above, "of at most": high, "below": below}
        words = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
        return f"{noun} {words}".rstrip()
    if kind == "array":
        items = schema.get("items")
        count = f"{schema['minItems']} values" if "minItems" in schema else "values"
        return f"a list of {count} (each {legal(items)})" if items else "a list"
    if kind == "string" and "examples" in schema:
        return f"text such as {schema['examples'][0]}"
    return {"string": "text", "null": "null", "object": "a mapping of keys"}[kind]
