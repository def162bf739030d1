"""YAML as located values.

A parsed file before it has a meaning: plain values, each with the place where its key is written.

YAML text as located values: YAML 1.2 scalars, no duplicate keys, no tags.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from zero_plugin.config.tree import Entry, KeyPath, Origin, OriginKind, dotted, freeze
from zero_plugin.errors import ConfigError, Problem

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


def leaves(node: Located, kind: OriginKind, prefix: KeyPath = ()) -> dict[KeyPath, Entry]:
    """Every leaf below `node`; keys that start with `_` are comments and are left out."""
    found: dict[KeyPath, Entry] = {}
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


def sections(node: Located, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
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


def duplicate_key(where: str, path: KeyPath, first: str) -> Problem:
    """A key that is written twice in one mapping."""
    return Problem(where, dotted(path), f"written twice; the first is at {first}", "Keep one of the two.")


_WORDS: Final[dict[str, bool | None]] = {"": None, "~": None, "null": None, "true": True, "false": False}

# What PyYAML says, whether the place is where the construct starts, and what to tell.
_MISTAKES: Final = (
    ("'\\t' that cannot start", False, "a tab", "Indent with spaces: YAML does not allow tabs."),
    ("that cannot start any token", False, "a character that no value starts with", "Put quotes around the value."),
    (
        "mapping values are not allowed",
        False,
        "a colon that belongs to no key",
        "Write one `key: value` on a line, also on the line before; put quotes around a value that holds a colon.",
    ),
    ("could not find expected ':'", True, "a line without a colon", "Write `key: value`."),
    ("scanning a quoted scalar found unexpected end", True, "a quote that is not closed", "Close the quote."),
    ("unknown escape character", False, "an unknown escape", "Write \\ as \\\\, or take single quotes."),
    ("expected ',' or", True, "a bracket that is not closed", "Close it, or add the comma that is missing in it."),
    ("expected <block end>", False, "an indentation that fits no key above", "Indent the keys of one section alike."),
    ("<document start>", False, "text that belongs to no key", "Write `key: value`."),
)


def parse_yaml(text: str, name: str, problems: list[Problem]) -> Located:
    """Parse one YAML document.

    Args:
        text: the file's text.
        name: the file's name for messages.
        problems: duplicate keys are added here, so that they are reported with everything else.

    Raises:
        ConfigError: the text is not YAML, or uses tags, several documents, or endless aliases.
    """
    try:
        return _Builder(text, name, problems).build()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, name) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = f"{name}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        message = f"holds a character that YAML forbids: U+{ord(text[error.position]):04X}"
        raise syntax_error(where, message, "Delete it, or save the file as UTF-8 text.") from None


class _Builder:
    """Builds values from the parser's events, which come without recursion however deep the file nests."""

    def __init__(self, text: str, name: str, problems: list[Problem]) -> None:
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._name = name
        self._problems = problems
        self._anchors: dict[str, tuple[Located, int]] = {}
        self._nodes = 0

    def build(self) -> Located:
        root: Located | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._refuse(event, "a second YAML document starts here", "Keep one document in the file.")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, ())
        return root or Located(None, f"{self._name}:1:1")

    def _node(self, event: Any, path: KeyPath, where: str = "") -> Located:
        where = where or self._where(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._refuse(event, f"*{event.anchor} has no anchor before it", f"Define &{event.anchor} first.")
            target, size = self._anchors[event.anchor]
            self._count(event, size)
            return Located(target.value, where)
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"the tag {tag} is not understood", "Delete the tag; write plain values.")
        if len(path) > MAX_DEPTH:
            raise self._refuse(event, f"nested deeper than {MAX_DEPTH} levels", "No setting is so deep; flatten it.")
        before = self._nodes
        self._count(event, 1)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = _scalar(event.value) if event.style is None else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                value.append(self._node(item, (*path, str(len(value)))))
        else:
            value = self._mapping(path)
        node = Located(value, where)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._nodes - before)
        return node

    def _mapping(self, path: KeyPath) -> dict[str, Located]:
        pairs: dict[str, Located] = {}
        merged: dict[str, Located] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._refuse(event, "a key must be plain text", "Write `key: value`.")
            key, where = event.value, self._where(event)
            child = self._node(next(self._events), (*path, key), where)
            if key == "<<" and event.style is None:
                for source in child.value if isinstance(child.value, list) else [child]:
                    if not isinstance(source.value, dict):
                        raise self._refuse(event, "<< merges mappings only", "Point it at an anchor of a mapping.")
                    merged = {**source.value, **merged}
            elif key in pairs:
                self._problems.append(duplicate_key(where, (*path, key), pairs[key].where))
            else:
                pairs[key] = child
        return {**merged, **pairs}

    def _count(self, event: yaml.Event, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > MAX_VALUES:
            raise self._refuse(
                event, f"holds more than {MAX_VALUES} values", "No configuration is so long; check aliases."
            )

    def _where(self, event: Any) -> str:
        return f"{self._name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"

    def _refuse(self, event: yaml.Event, message: str, fix: str) -> ConfigError:
        return syntax_error(self._where(event), message, fix)


def _scalar(text: str) -> Any:
    word = text.lower()
    if word in _WORDS and text in (word, word.capitalize(), word.upper()):
        return _WORDS[word]
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}|0o[0-7]{1,20}", text):
        return int(text, 0)
    number = as_number(text)
    return text if number is None else number


def _explained(error: yaml.MarkedYAMLError, name: str) -> ConfigError:
    """PyYAML's error in the words of one who writes a configuration."""
    found = f"{error.context or ''} {error.problem}"
    hint = "Look at this place and the line before it: indentation, quotes, brackets, a missing colon."
    unknown = ("", False, str(error.problem), hint)
    _, at_start, message, fix = next((mistake for mistake in _MISTAKES if mistake[0] in found), unknown)
    mark = (error.context_mark if at_start else None) or error.problem_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    return syntax_error(where, f"not YAML: {message}", fix)
