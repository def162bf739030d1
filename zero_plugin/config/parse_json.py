"""JSON text, and what of Hjson, which DeepSpeed reads, has only one meaning, as located values."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from typing import Any, Final

from zero_plugin.config.parse_yaml import MAX_DEPTH, MAX_VALUES, Located, as_number, duplicate_key, syntax_error
from zero_plugin.config.tree import KeyPath, dotted
from zero_plugin.errors import ConfigError, Problem

_BLANK: Final = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_BARE_VALUE: Final = re.compile(r"\$\{\w*\}|[-+.\w$]+")
_HJSON_KEY: Final = re.compile(r"([A-Za-z_][\w.-]*)(?=\s*:)")
_HJSON_TEXT: Final = re.compile(r"'([^'\\\n]*)'")
_PYTHON: Final[dict[str, tuple[Any, str]]] = {"True": (True, "true"), "False": (False, "false"), "None": (None, "null")}


def looks_like_json(text: str) -> bool:
    """Whether the first character that is not blank or a comment opens a JSON object or list."""
    return text[_end_of_blank(text, 0) :][:1] in ("{", "[")


def parse_json(text: str, name: str, problems: list[Problem]) -> Located:
    """Parse JSON that may hold `//`, `#` and `/* */` comments and trailing commas.

    Bare keys, single quotes and line ends for commas, which DeepSpeed reads too, are one warning. An Hjson text without
    quotes, which runs to the end of its line whatever stands there, is an error.

    Args:
        text: the file's text.
        name: the file's name for messages.
        problems: what could be read past is added here: duplicate keys, values that are none, a warning of Hjson.

    Raises:
        ConfigError: the text is not such JSON.
    """
    return _Scanner(text, name, problems).document()


class _Scanner:
    def __init__(self, text: str, name: str, problems: list[Problem]) -> None:
        self._text = text
        self._name = name
        self._problems = problems
        self._at = 0
        self._values = 0
        self._is_hjson = False
        self._open: list[int] = []  # where the brackets that are still open stand
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def document(self) -> Located:
        self._skip_blank()
        root = self._value(())
        self._skip_blank()
        if self._at < len(self._text):
            raise self._refuse("there is text after the end of the JSON", "Delete it, or close the braces later.")
        return root

    def _value(self, path: KeyPath, where: str = "") -> Located:
        where = where or self._where(self._at)
        if len(path) > MAX_DEPTH:
            raise self._refuse(f"nested deeper than {MAX_DEPTH} levels", "No setting is so deep; flatten it.")
        self._values += 1
        if self._values > MAX_VALUES:
            raise self._refuse(f"holds more than {MAX_VALUES} values", "No configuration is so long; check the path.")
        opening = self._text[self._at : self._at + 1]
        if opening == "{":
            return Located(self._object(path), where)
        if opening == "[":
            return Located(self._list(path), where)
        return Located(self._scalar(path), where)

    def _object(self, path: KeyPath) -> dict[str, Located]:
        pairs: dict[str, Located] = {}
        self._open.append(self._at)
        while not self._closed("}"):
            where, key = self._where(self._at), self._key(path)
            self._skip_blank()
            if self._text[self._at : self._at + 1] != ":":
                raise self._refuse(f'a colon is missing after "{key}"', f'Write "{key}": value.')
            self._at += 1
            self._skip_blank()
            child = self._value((*path, key), where)
            if key in pairs:
                self._problems.append(duplicate_key(where, (*path, key), pairs[key].where))
            else:
                pairs[key] = child
            self._separator("}")
        return pairs

    def _key(self, path: KeyPath) -> str:
        if self._text[self._at] == '"':
            return str(self._scalar(path))
        hjson = _HJSON_KEY.match(self._text, self._at) or _HJSON_TEXT.match(self._text, self._at)
        if hjson is None:
            fix = "Delete it." if self._text[self._at] == "," else 'Write "key": value, in double quotes.'
            raise self._refuse(f"{self._glimpse()} where a key must stand", fix)
        self._note_hjson()
        self._at = hjson.end()
        return hjson[1]

    def _list(self, path: KeyPath) -> list[Located]:
        items: list[Located] = []
        self._open.append(self._at)
        while not self._closed("]"):
            items.append(self._value((*path, str(len(items)))))
            self._separator("]")
        return items

    def _closed(self, closing: str) -> bool:
        """Step over the opening bracket or comma, and over `closing` where it follows."""
        self._at += 1
        self._skip_blank()
        if self._at >= len(self._text):
            raise self._refuse_end(closing)
        if self._text[self._at] != closing:
            return False
        self._open.pop()
        self._at += 1
        return True

    def _separator(self, closing: str) -> None:
        """Leave the position where `_closed` expects it: at a comma, or just before what follows without one."""
        end = self._at
        self._skip_blank()
        found = self._text[self._at : self._at + 1]
        if found == closing:
            self._at -= 1
        elif found and found not in ",}]:" and "\n" in self._text[end : self._at]:
            self._note_hjson()
            self._at -= 1
        elif not found:
            raise self._refuse_end(closing)
        elif found != ",":
            fix = "Close the comment with */." if self._text.startswith("/*", self._at) else "Add the comma or bracket."
            raise self._refuse(f"{self._glimpse()} where `,` or `{closing}` must stand", fix)

    def _scalar(self, path: KeyPath) -> Any:
        start = self._at
        try:
            value, self._at = _SCALARS.raw_decode(self._text, start)
        except json.JSONDecodeError as error:
            if self._text[start : start + 1] == '"':
                self._at = max(start, error.pos)
                if "escape" in error.msg:
                    raise self._refuse("an unknown escape in a text", "Write \\ as \\\\.") from None
                raise self._refuse("a text that is not closed on its line", "Close the quotes.") from None
            if quoted := _HJSON_TEXT.match(self._text, start):
                self._note_hjson()
                self._at = quoted.end()
                return quoted[1]
            return self._no_value(path)
        except ValueError:  # NaN, Infinity, or beyond what a number can hold
            return self._no_value(path)
        if not isinstance(value, str) and _BARE_VALUE.match(self._text, self._at):  # 0x10, 1_000
            self._at = start
            return self._no_value(path)
        return value

    def _no_value(self, path: KeyPath) -> Any:
        """Note the bare word here as a problem and read past it, as an open value unless its meaning is plain."""
        message = f"{self._glimpse()} where a value must stand"
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
        self._problems.append(Problem(self._where(self._at), dotted(path), message, fix))
        self._at = bare.end()
        return meaning

    def _note_hjson(self) -> None:
        if not self._is_hjson:
            self._is_hjson = True
            message = "Hjson, which DeepSpeed reads, but Accelerate and transformers do not"
            fix = 'Write "key": "value", in double quotes and with commas.'
            self._problems.append(Problem(self._where(self._at), "", message, fix, severity="warning"))

    def _skip_blank(self) -> None:
        self._at = _end_of_blank(self._text, self._at)

    def _glimpse(self) -> str:
        word = _BARE_VALUE.match(self._text, self._at)
        seen = word[0][:40] if word else self._text[self._at : self._at + 1]
        if not seen:
            return "the end of the file"
        return f"`{seen}`" if seen.isprintable() else f"U+{ord(seen):04X}"

    def _where(self, at: int) -> str:
        line = bisect_right(self._line_starts, at)
        return f"{self._name}:{line}:{at - self._line_starts[line - 1] + 1}"

    def _refuse_end(self, closing: str) -> ConfigError:
        opened = self._where(self._open[-1]).removeprefix(f"{self._name}:")
        return self._refuse(
            f"the end of the file where `{closing}` must stand", f"Close the bracket of {opened}, or one inside it."
        )

    def _refuse(self, message: str, fix: str) -> ConfigError:
        return syntax_error(self._where(self._at), message, fix)


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
