"""Readers of YAML and JSON text that return every value with its place.

YAML has the scalars of YAML 1.2, no duplicate keys and no tags. JSON may have comments, trailing commas, and those
parts of Hjson that have only one meaning. DeepSpeed reads Hjson.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

import yaml

from zero_plugin.config.amounts import as_number
from zero_plugin.config.tree import Entry, KeyPath, Origin, OriginKind, dotted, freeze
from zero_plugin.errors import ConfigError, Problem

# The deepest real configuration has seven levels. The limit keeps broken input from exhausting the stack.
MAX_DEPTH: Final = 50
# Ten times the longest real configuration. The limit also bounds aliases of aliases, which grow exponentially.
_MAX_VALUES: Final = 2_000


@dataclass(frozen=True, slots=True)
class Located:
    """A value and its place.

    Attributes:
        value: a scalar, a list of `Located`, or a dict from key to `Located`.
        where: `file:line:column` of the key that holds the value, or of the value itself if there is no key.
    """

    value: Any
    where: str

    def plain(self) -> Any:
        """Return the value as plain dicts, lists and scalars, without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def leaves(node: Located, kind: OriginKind, prefix: KeyPath = ()) -> dict[KeyPath, Entry]:
    """Return every leaf below `node`. Keys that start with `_` are comments and are left out."""
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
    """Yield the path and the place of every key that holds keys."""
    for key, child in node.value.items():
        if isinstance(child.value, dict):
            yield (*prefix, key), child.where
            yield from sections(child, (*prefix, key))


def syntax_error(where: str, message: str, fix: str) -> ConfigError:
    """Return the error for a file that cannot be read beyond this place."""
    return ConfigError([Problem(where, "", message, fix)])


def text_place(name: str, text: str, at: int) -> str:
    """Return `file:line:column` of a position in the file's text."""
    return f"{name}:{text.count(chr(10), 0, at) + 1}:{at - text.rfind(chr(10), 0, at)}"


def looks_like_json(text: str) -> bool:
    """Return whether the first character other than blanks and comments opens a JSON object or list."""
    return text[_end_of_blank(text, 0) :][:1] in ("{", "[")


def parse_text(text: str, name: str, problems: list[Problem]) -> Located:
    """Parse YAML or JSON; the content decides which, not the name.

    Args:
        text: the file's text.
        name: the file's name, for messages.
        problems: gets findings after which reading could continue: duplicate keys, invalid values, a warning about
            Hjson.

    Raises:
        ConfigError: the text is neither YAML nor JSON.
    """
    if not looks_like_json(text):
        return parse_yaml(text, name, problems)
    if PurePath(name).suffix not in (".yaml", ".yml"):
        return _Json(text, name, problems).document()
    found: list[Problem] = []
    try:
        root = _Json(text, name, found).document()  # a file like this is usually JSON with tabs and comments
    except ConfigError:
        return parse_yaml(text, name, problems)
    return parse_yaml(text, name, problems) if found else root


class _Reader:
    """Base of both readers: limits on nesting and length, and the check for duplicate keys."""

    def __init__(self, name: str, problems: list[Problem], on_length: str) -> None:
        self._name = name
        self._problems = problems
        self._values = 0
        self._on_length = on_length

    def _refuse_depth(self, path: KeyPath, where: str) -> None:
        if len(path) > MAX_DEPTH:
            fix = "No setting is so deep; flatten it."
            raise syntax_error(where, f"nested deeper than {MAX_DEPTH} levels", fix)

    def _count(self, values: int, where: str) -> None:
        self._values += values
        if self._values > _MAX_VALUES:
            fix = f"No configuration is so long; check {self._on_length}."
            raise syntax_error(where, f"holds more than {_MAX_VALUES} values", fix)

    def _add(self, pairs: dict[str, Located], path: KeyPath, child: Located) -> None:
        if path[-1] in pairs:
            message = f"written twice; the first is at {pairs[path[-1]].where}"
            self._problems.append(Problem(child.where, dotted(path), message, "Keep one of the two."))
        else:
            pairs[path[-1]] = child


_WORDS: Final[dict[str, bool | None]] = {"": None, "~": None, "null": None, "true": True, "false": False}

# Part of PyYAML's message, whether the place is the start of the construct, our message, our fix.
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
    """Parse one YAML document; see `parse_text`.

    Raises:
        ConfigError: the text is not YAML, or uses tags, several documents, or endless aliases.
    """
    try:
        return _Yaml(text, name, problems).document()
    except yaml.MarkedYAMLError as error:
        raise _explained(error, name) from None
    except yaml.reader.ReaderError as error:
        message = f"holds a character that YAML forbids: U+{ord(text[error.position]):04X}"
        fix = "Delete it, or save the file as UTF-8 text."
        raise syntax_error(text_place(name, text, error.position), message, fix) from None


class _Yaml(_Reader):
    """Reader of YAML. The parser's events come without recursion, so deep nesting cannot exhaust the stack there."""

    def __init__(self, text: str, name: str, problems: list[Problem]) -> None:
        super().__init__(name, problems, "aliases")
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._anchors: dict[str, tuple[Located, int]] = {}

    def document(self) -> Located:
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
            self._count(size, self._where(event))
            return Located(target.value, where)
        if event.tag is not None and event.tag != "!":
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._refuse(event, f"the tag {tag} is not understood", "Delete the tag; write plain values.")
        self._refuse_depth(path, self._where(event))
        before = self._values
        self._count(1, self._where(event))
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = read_scalar(event.value) if event.style is None else event.value
        elif isinstance(event, yaml.SequenceStartEvent):
            value = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                value.append(self._node(item, (*path, str(len(value)))))
        else:
            value = self._mapping(path)
        node = Located(value, where)
        if event.anchor:
            self._anchors[event.anchor] = (node, self._values - before)
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
            else:
                self._add(pairs, (*path, key), child)
        return {**merged, **pairs}

    def _where(self, event: Any) -> str:
        return f"{self._name}:{event.start_mark.line + 1}:{event.start_mark.column + 1}"

    def _refuse(self, event: yaml.Event, message: str, fix: str) -> ConfigError:
        return syntax_error(self._where(event), message, fix)


def read_scalar(text: str) -> Any:
    """Return the value of a plain YAML 1.2 scalar: null, true, false, a number, or the text."""
    word = text.lower()
    if word in _WORDS and text in (word, word.capitalize(), word.upper()):
        return _WORDS[word]
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}|0o[0-7]{1,20}", text):
        return int(text, 0)
    number = as_number(text)
    return text if number is None else number


def _explained(error: yaml.MarkedYAMLError, name: str) -> ConfigError:
    """Translate PyYAML's error into words for authors of a configuration."""
    found = f"{error.context or ''} {error.problem}"
    hint = "Look at this place and the line before it: indentation, quotes, brackets, a missing colon."
    unknown = ("", False, str(error.problem), hint)
    _, at_start, message, fix = next((mistake for mistake in _MISTAKES if mistake[0] in found), unknown)
    mark = (error.context_mark if at_start else None) or error.problem_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    return syntax_error(where, f"not YAML: {message}", fix)


_BLANK: Final = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BARE_VALUE: Final = re.compile(r"\$\{\w*\}|[-+.\w$]+")
_HJSON_KEY: Final = re.compile(r"([A-Za-z_][\w.-]*)(?=\s*:)")
_HJSON_TEXT: Final = re.compile(r"'([^'\\\n]*)'")
_PYTHON: Final[dict[str, tuple[Any, str]]] = {"True": (True, "true"), "False": (False, "false"), "None": (None, "null")}


class _Json(_Reader):
    """Reader of JSON with `//`, `#` and `/* */` comments and trailing commas.

    Bare keys, single quotes and line ends instead of commas, which DeepSpeed also reads, give one warning. Hjson text
    without quotes is an error, because it extends to the end of the line with everything on it.
    """

    def __init__(self, text: str, name: str, problems: list[Problem]) -> None:
        super().__init__(name, problems, "the path")
        self._text = text
        self._at = 0
        self._is_hjson = False
        self._open: list[int] = []  # offsets of the brackets that are still open

    def document(self) -> Located:
        self._skip()
        root = self._value(())
        self._skip()
        if self._next():
            raise self._refuse("there is text after the end of the JSON", "Delete it, or close the braces later.")
        return root

    def key_span(self, at: int) -> tuple[int, int, int]:
        """Return where the key at an offset begins and ends, and where its value ends."""
        self._at = at
        self._key(())
        key_end = self._at
        self._skip()
        if self._next() != ":":
            raise self._refuse("no colon", "")
        self._skip(1)
        self._value(())
        return at, key_end, self._at

    def _value(self, path: KeyPath, where: str = "") -> Located:
        where = where or self._where()
        self._refuse_depth(path, self._where())
        self._count(1, self._where())
        if self._next() == "{":
            return Located(self._object(path), where)
        if self._next() == "[":
            items: list[Located] = []
            for _ in self._items("]"):
                items.append(self._value((*path, str(len(items)))))
            return Located(items, where)
        return Located(self._scalar(path), where)

    def _object(self, path: KeyPath) -> dict[str, Located]:
        pairs: dict[str, Located] = {}
        for _ in self._items("}"):
            where, key = self._where(), self._key(path)
            self._skip()
            if self._next() != ":":
                raise self._refuse(f'a colon is missing after "{key}"', f'Write "{key}": value.')
            self._skip(1)
            self._add(pairs, (*path, key), self._value((*path, key), where))
        return pairs

    def _items(self, closing: str) -> Iterator[None]:
        """Stop at each item between the bracket here and its closing one, and end after that."""
        self._open.append(self._at)
        self._skip(1)
        while self._next() != closing:
            if not self._next():
                raise self._refuse_end(closing)
            yield
            end = self._at
            self._skip()
            found = self._next()
            if found == ",":
                self._skip(1)
            elif found and found not in ",}]:" and "\n" in self._text[end : self._at]:
                self._note_hjson()
            elif found and found != closing:
                is_open = self._text.startswith("/*", self._at)
                fix = "Close the comment with */." if is_open else "Add the comma or bracket."
                raise self._refuse(f"{self._glimpse()} where `,` or `{closing}` is expected", fix)
        self._open.pop()
        self._at += 1

    def _key(self, path: KeyPath) -> str:
        if self._next() == '"':
            return str(self._scalar(path))
        hjson = _HJSON_KEY.match(self._text, self._at) or _HJSON_TEXT.match(self._text, self._at)
        if hjson is None:
            fix = "Delete it." if self._next() == "," else 'Write "key": value, in double quotes.'
            raise self._refuse(f"{self._glimpse()} where a key is expected", fix)
        self._note_hjson()
        self._at = hjson.end()
        return hjson[1]

    def _scalar(self, path: KeyPath) -> Any:
        start = self._at
        try:
            value, self._at = _SCALARS.raw_decode(self._text, start)
        except json.JSONDecodeError as error:
            if self._next() == '"':
                self._at = max(start, error.pos)
                if "escape" in error.msg:
                    raise self._refuse("an unknown escape in a text", "Write \\ as \\\\.") from None
                raise self._refuse("a text that is not closed on its line", "Close the quotes.") from None
            if quoted := _HJSON_TEXT.match(self._text, start):
                self._note_hjson()
                self._at = quoted.end()
                return quoted[1]
            return self._no_value(path)
        except ValueError:  # NaN, Infinity, or a number out of range
            return self._no_value(path)
        if not isinstance(value, str) and _BARE_VALUE.match(self._text, self._at):  # 0x10, 1_000
            self._at = start
            return self._no_value(path)
        return value

    def _no_value(self, path: KeyPath) -> Any:
        """Note the bare word here as a problem and continue after it. Return its obvious meaning, or an open value."""
        message = f"{self._glimpse()} where a value is expected"
        fix = "Write a number, true, false, null or a quoted text."
        bare = _BARE_VALUE.match(self._text, self._at)
        if bare is None:
            raise self._refuse(message, fix)
        meaning: Any = "auto"
        if bare[0] in _PYTHON:
            meaning, spelling = _PYTHON[bare[0]]
            fix = f"Write {spelling}, as JSON spells it."
        elif (number := as_number(bare[0])) is not None:
            meaning, fix = number, f"Write {number}, as JSON spells it."
        self._problems.append(Problem(self._where(), dotted(path), message, fix))
        self._at = bare.end()
        return meaning

    def _note_hjson(self) -> None:
        if not self._is_hjson:
            self._is_hjson = True
            message = "Hjson, which DeepSpeed reads, but Accelerate and transformers do not"
            fix = 'Write "key": "value", in double quotes and with commas.'
            self._problems.append(Problem(self._where(), "", message, fix, severity="warning"))

    def _next(self) -> str:
        """Return the character here, "" at the end."""
        return self._text[self._at : self._at + 1]

    def _skip(self, characters: int = 0) -> None:
        """Step over this number of characters, and over the blanks and comments that follow."""
        self._at = _end_of_blank(self._text, self._at + characters)

    def _glimpse(self) -> str:
        word = _BARE_VALUE.match(self._text, self._at)
        seen = word[0][:40] if word else self._next()
        if not seen:
            return "the end of the file"
        return f"`{seen}`" if seen.isprintable() else f"U+{ord(seen):04X}"

    def _where(self) -> str:
        return text_place(self._name, self._text, self._at)

    def _refuse_end(self, closing: str) -> ConfigError:
        opened = text_place("", self._text, self._open[-1]).lstrip(":")
        fix = f"Close the bracket of {opened}, or one inside it."
        return self._refuse(f"the end of the file where `{closing}` is expected", fix)

    def _refuse(self, message: str, fix: str) -> ConfigError:
        return syntax_error(self._where(), message, fix)


def _end_of_blank(text: str, start: int) -> int:
    match = _BLANK.match(text, start)
    assert match is not None, "the pattern matches the empty text too"
    return match.end()


def _read_number(text: str) -> int | float:
    number = as_number(text)
    if number is None:
        raise ValueError(text)
    return number


_SCALARS: Final = json.JSONDecoder(parse_int=_read_number, parse_float=_read_number, parse_constant=_read_number)


def key_span_of_json(text: str, at: int) -> tuple[int, int, int]:
    """Return where a key of a JSON text begins and ends, and where its value ends.

    Args:
        text: what `parse_text` has read without an error.
        at: where the key begins.

    Raises:
        ValueError: no key begins there.
    """
    try:
        return _Json(text, "", []).key_span(at)
    except ConfigError as error:
        raise ValueError(str(error)) from error
