"""Edits of a configuration file's text at the place of a key. All other text stays as it is, with its comments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import yaml

from zero_plugin.config.located import key_span_of_json, looks_like_json

_COMMA_AFTER: Final = re.compile(r"[ \t]*,[ \t]*")
_COMMA_BEFORE: Final = re.compile(r",\s*$")


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of a file.

    Attributes:
        line: the line of the key, from 1.
        column: the column of the key, from 1.
        key: the new name of the key. "" removes the key with its value.
        text: the text to write instead of the key and its value; None for an edit of the key alone.
    """

    line: int
    column: int
    key: str = ""
    text: str | None = None


class _Span(NamedTuple):
    """A key and its value, as offsets in the text.

    Attributes:
        begin: where the key begins.
        key_end: where the key ends.
        end: where the value ends.
        block: whether lines separate the keys of the section, as in YAML, and not commas.
        only_key_of: where the key of the section ends, if that section has no other key; otherwise None.
    """

    begin: int
    key_end: int
    end: int
    block: bool = False
    only_key_of: int | None = None


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text with the edits.

    Raises:
        ValueError: no key is at the place of an edit.
    """
    # The last edit first: then the places of the others stay valid.
    for edit in sorted(edits, key=lambda edit: (edit.line, edit.column), reverse=True):
        span = _span_at(text, edit.line, edit.column)
        if edit.text is not None:
            text = text[: span.begin] + edit.text + text[span.end :]
        elif edit.key:
            quote = text[span.begin] if text[span.begin] in "\"'" else ""
            text = text[: span.begin] + f"{quote}{edit.key}{quote}" + text[span.key_end :]
        else:
            text = _remove(text, span)
    return text


def _span_at(text: str, line: int, column: int) -> _Span:
    at = 0
    for _ in range(line - 1):
        at = text.index("\n", at) + 1
    at += column - 1
    if looks_like_json(text):
        return _Span(*key_span_of_json(text, at))
    for span in _yaml_spans(text):
        if span.begin == at:
            return span
    raise ValueError(f"no key at {line}:{column}")


def _remove(text: str, span: _Span) -> str:
    """Remove a key with its value, its comma, and its lines if they hold only blanks or comments otherwise."""
    before, after = text[: span.begin], text[span.end :]
    if not span.block:
        if comma := _COMMA_AFTER.match(after):
            after = after[comma.end() :]
        elif comma := _COMMA_BEFORE.search(before):
            before = before[: comma.start()] + before[comma.start() + 1 :].rstrip(" \t")
    line_end = after.find("\n")
    rest = after if line_end < 0 else after[:line_end]
    line = before[before.rfind("\n") + 1 :]
    if not line.strip() and (not rest.strip() or rest.lstrip().startswith(("#", "//"))):
        before, after = before[: len(before) - len(line)], "" if line_end < 0 else after[line_end + 1 :]
    if span.only_key_of is not None:
        colon = before.index(":", span.only_key_of) + 1
        before = before[:colon] + " {}" + before[colon:]
    return before + after


def _yaml_spans(text: str) -> Iterator[_Span]:
    """Yield the keys of a YAML text."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    waiting: list[tuple[Any, int | None]] = [] if root is None else [(root, None)]
    while waiting:
        node, key_end = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            block = not node.flow_style
            only_key_of = key_end if block and len(node.value) == 1 else None
            for key, value in node.value:
                end = _end(key, value, text)
                yield _Span(key.start_mark.index, key.end_mark.index, end, block, only_key_of)
                waiting.append((value, key.end_mark.index))
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(item, None) for item in node.value]


def _end(key: Any, value: Any, text: str) -> int:
    """Return where the value of a key ends. The mark of a block is behind the comments that follow the block."""
    if value.start_mark.index < key.start_mark.index:  # an alias: its node is that of the anchor
        line_end = text.find("\n", key.end_mark.index)
        return len(text) if line_end < 0 else line_end
    if isinstance(value, yaml.ScalarNode):
        end = max(int(value.end_mark.index), text.index(":", key.end_mark.index) + 1)  # an empty value ends earlier
        return len(text[:end].rstrip()) if value.style in ("|", ">") else end
    if value.flow_style or not value.value:
        return int(value.end_mark.index)
    last = value.value[-1] if isinstance(value, yaml.MappingNode) else (key, value.value[-1])
    return _end(last[0], last[1], text)
