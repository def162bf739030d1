"""YAML text as located values: YAML 1.2 scalars, no duplicate keys, no tags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from zero_plugin.config.located import MAX_DEPTH, MAX_VALUES, Located, as_number, duplicate_key, syntax_error
from zero_plugin.config.tree import Path
from zero_plugin.errors import ConfigError, Problem

__all__ = ["parse_yaml"]

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

    def _node(self, event: Any, path: Path, where: str = "") -> Located:
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

    def _mapping(self, path: Path) -> dict[str, Located]:
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
