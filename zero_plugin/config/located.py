"""A parsed file before it has a meaning: plain values, each with the place where its key is written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from zero_plugin.config.tree import Entry, Origin, OriginKind, Path, dotted, freeze
from zero_plugin.errors import ConfigError, Problem

__all__ = ["MAX_DEPTH", "MAX_VALUES", "Located", "as_number", "duplicate_key", "leaves", "sections", "syntax_error"]

MAX_DEPTH: Final = (
    50  # the deepest real configuration has seven levels; a bound keeps nonsense from exhausting the stack
)

MAX_VALUES: Final = 2_000  # ten times the longest real one; also bounds aliases of aliases, which grow exponentially

_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Located:
    """A value and where it is written.

    Attributes:
        value: a scalar, a list of `Located`, or a dict from key to `Located`.
        where: `file:line:column` of the key that holds the value (of the value itself where there is no key).
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def leaves(node: Located, kind: OriginKind, prefix: Path = ()) -> dict[Path, Entry]:
    """Every leaf below `node`; keys that start with `_` are comments and are left out."""
    found: dict[Path, Entry] = {}
    for key, child in node.value.items():
        if key.startswith("_"):
            continue
        path = (*prefix, key)
        if isinstance(child.value, dict) and any(not name.startswith("_") for name in child.value):
            found.update(leaves(child, kind, path))
        else:
            value = {} if isinstance(child.value, dict) else child.plain()
            found[path] = Entry(freeze(value), Origin(kind, child.where))
    return found


def sections(node: Located, prefix: Path = ()) -> Iterator[tuple[Path, str]]:
    """The path of every key that holds keys, and where it is written."""
    for key, child in node.value.items():
        if isinstance(child.value, dict):
            yield (*prefix, key), child.where
            yield from sections(child, (*prefix, key))


def as_number(text: str) -> int | float | None:
    """A decimal number as YAML 1.2 and JSON spell it (`2e8`, `5e-5`); None for any other text, or if it is endless."""
    if not _NUMBER.fullmatch(text):
        return None
    if text.lstrip("+-").isdigit():
        # Python refuses to read integers of thousands of digits; so long a number is no setting
        return int(text) if len(text) < 100 else None
    number = float(text)
    return number if math.isfinite(number) else None


def syntax_error(where: str, message: str, fix: str) -> ConfigError:
    """The file cannot be read beyond this place."""
    return ConfigError([Problem(where, "", message, fix)])


def duplicate_key(where: str, path: Path, first: str) -> Problem:
    """A key that is written twice in one mapping."""
    return Problem(where, dotted(path), f"written twice; the first is at {first}", "Keep one of the two.")
