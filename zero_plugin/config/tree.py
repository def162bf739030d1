"""Immutable configuration trees in which every leaf remembers where it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

KeyPath = tuple[str, ...]
_SHOWS: Final = re.compile(r"[\w.*/$-]+", re.ASCII)
OriginKind = Literal["file", "flag", "code", "rule", "default"]


class Auto:
    """Type of `AUTO`, the open field: a value that resolution has still to find. There is one instance."""

    __slots__ = ()
    _instance: Auto | None = None

    def __new__(cls) -> Auto:  # noqa: D102 - the class docstring says it
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "AUTO"

    def __reduce__(self) -> tuple[type[Auto], tuple[()]]:
        return Auto, ()


AUTO: Final = Auto()


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from.

    Attributes:
        kind: who set it.
        where: `file:line:column`, the flag, the call in code, or the rule's name.
        reason: for rules and defaults, why this value; empty for what a user typed.
    """

    kind: OriginKind
    where: str
    reason: str = ""

    @property
    def typed_by_user(self) -> bool:
        """Whether a person wrote this value, as opposed to a rule or a default finding it."""
        return self.kind not in ("rule", "default")

    def __str__(self) -> str:
        return f"{self.where} ({self.reason})" if self.reason else self.where


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf: its value (scalar, tuple, frozen empty mapping, None or AUTO) and its origin."""

    value: Any
    origin: Origin


def dotted(path: KeyPath) -> str:
    """`("zero_optimization", "stage")` as `zero_optimization.stage`; a key that would not show as it is, in quotes."""
    return ".".join(part if _SHOWS.fullmatch(part) else json.dumps(part) for part in path)


@dataclass(frozen=True, slots=True)
class Tree:
    """Leaves by path. A list is one leaf (a tuple); an object without keys is a leaf holding an empty mapping."""

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
        """The leaf at `path`, or None."""
        return self.entries.get(path)

    def value(self, *path: str, default: Any = None) -> Any:
        """The value at `path`, or `default` where there is no leaf."""
        entry = self.entries.get(path)
        return default if entry is None else entry.value

    def has_section(self, *prefix: str) -> bool:
        """Whether `prefix` is a leaf or the parent of one."""
        return any(path[: len(prefix)] == prefix for path in self.entries)

    def section(self, *prefix: str) -> Tree:
        """The leaves below `prefix`, with `prefix` cut off their paths."""
        n = len(prefix)
        return Tree({p[n:]: e for p, e in self.entries.items() if len(p) > n and p[:n] == prefix})

    def under(self, *prefix: str) -> Tree:
        """The same leaves with `prefix` put before their paths."""
        return Tree({prefix + p: e for p, e in self.entries.items()})

    def replace(self, changes: Mapping[KeyPath, Entry]) -> Tree:
        """A copy with `changes` laid over it.

        A leaf below a path replaces a leaf at that path (`null`, `{}`); a leaf at a path replaces all below it, but an
        empty object, which says nothing, leaves them.
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
        """A copy without the leaf or section at `prefix`."""
        return Tree({p: e for p, e in self.entries.items() if p[: len(prefix)] != prefix})

    def where(self, keep: Callable[[KeyPath, Entry], bool]) -> Tree:
        """The leaves for which `keep(path, entry)` holds."""
        return Tree({p: e for p, e in self.entries.items() if keep(p, e)})

    def nested(self, *, auto: Any = AUTO) -> dict[str, Any]:
        """Plain dicts and lists, with `auto` for AUTO, which otherwise stays for the caller to have resolved."""
        root: dict[str, Any] = {}
        for path, entry in self.entries.items():
            node = root
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = plain(entry.value, auto)
        return root

    @staticmethod
    def from_nested(values: Mapping[str, Any], origin: Callable[[KeyPath], Origin]) -> Tree:
        """Freeze plain nested values; the string `auto` (any case) becomes AUTO, also inside lists."""
        return Tree(dict(_leaves((), values, origin)))


def _leaves(prefix: KeyPath, node: Any, origin: Callable[[KeyPath], Origin]) -> Iterable[tuple[KeyPath, Entry]]:
    if isinstance(node, Mapping) and node:
        for key, child in node.items():
            yield from _leaves((*prefix, str(key)), child, origin)
    elif prefix:
        yield prefix, Entry(freeze(node), origin(prefix))


def freeze(value: Any) -> Any:
    """A leaf's value as a tree holds it: lists as tuples, mappings read-only, the string `auto` as AUTO."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return AUTO
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return MappingProxyType({str(k): freeze(v) for k, v in value.items()})
    return value


def plain(value: Any, auto: Any = "auto") -> Any:
    """A value of a tree with plain dicts and lists, and with `auto` for AUTO."""
    if value is AUTO:
        return auto
    if isinstance(value, Mapping):
        return {key: plain(child, auto) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, auto) for child in value]
    return value


def holds_auto(value: Any) -> bool:
    """Whether `value` is AUTO or a list or mapping with AUTO somewhere inside."""
    if isinstance(value, Mapping):
        return any(holds_auto(child) for child in value.values())
    if isinstance(value, tuple):
        return any(holds_auto(child) for child in value)
    return value is AUTO


def same_value(one: Any, other: Any) -> bool:
    """Whether two values mean the same: 1 and 1.0 do, true and 1 do not."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
