"""A document as text again: a launch YAML with Accelerate's keys, which YAML 1.1 and 1.2 read as the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from zero_plugin.config.translate import LAUNCH_FIELDS, SHORT_FIELDS, translate_short_fields
from zero_plugin.config.tree import Path, Tree

__all__ = ["accelerate_values", "yaml_text"]

_LINE: Final = 120  # columns; a comment that would end beyond stands on its own line

# Text that needs no quotes: it starts as no number, no date and no indicator of YAML's does, and ends in none.
_PLAIN: Final = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+@=-]*|~/[A-Za-z0-9_./+@=-]*")
_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # in YAML 1.1, not text
# What YAML does not print or would take for a line break, and what JSON escapes in pairs, which YAML does not.
_TO_ESCAPE: Final = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def accelerate_values(launch: Tree, deepspeed: Tree) -> dict[str, Any]:
    """Both parts of a document as plain nested values under Accelerate's keys; AUTO as `auto`.

    A training key that Accelerate has a short field for is written as that, the others under DeepSpeed's own names.
    ZeRO that was asked for without a stage is written as stage 0, which DeepSpeed runs; left out it would be read as 2.
    """
    top = launch.nested(auto="auto")
    below: dict[str, Any] = {name: top.pop(name) for name in LAUNCH_FIELDS if name in top}
    if top.get("distributed_type") == "DEEPSPEED" and not deepspeed.has_section("zero_optimization", "stage"):
        below["zero_stage"] = 0
    for name, path in SHORT_FIELDS.items():
        entry = deepspeed.get(*path)
        if entry is not None and translate_short_fields({(name,): entry}):
            below[name] = Tree({(name,): entry}).nested(auto="auto")[name]
            deepspeed = deepspeed.without(*path)
    below |= deepspeed.nested(auto="auto")
    return {**top, "deepspeed_config": below} if below else top


def yaml_text(values: Mapping[str, Any], comments: Mapping[Path, str] = MappingProxyType({})) -> str:
    """Plain nested values as YAML.

    Args:
        values: keys with numbers, text, booleans, None, lists and mappings.
        comments: by the path of a key, one sentence that is written beside it.
    """
    return "\n".join(_lines(values, (), comments)) + "\n" if values else "{}\n"


def _lines(values: Mapping[str, Any], path: Path, comments: Mapping[Path, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in values.items():
        is_section = isinstance(value, Mapping) and value
        line = f"{indent}{_text(key)}:" if is_section else f"{indent}{_text(key)}: {_flow(value)}"
        comment = comments.get((*path, key))
        if comment and len(line) + len(comment) + 4 <= _LINE:
            yield f"{line}  # {comment}"
        else:
            yield from [f"{indent}# {comment}", line] if comment else [line]
        if is_section:
            yield from _lines(value, (*path, key), comments)


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(key)}: {_flow(child)}" for key, child in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")  # YAML 1.1 reads a number without a point as text
        return mantissa + (".0" if "." not in mantissa else "") + e + exponent
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _TO_ESCAPE.sub(lambda found: f"\\U{ord(found[0]):08x}", escaped) + '"'
