"""A document as one environment variable, from the launcher to its workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, replace
from types import MappingProxyType
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Entry, Origin, Tree
from zero_plugin.errors import ConfigError, Problem

__all__ = ["ENVIRONMENT_VARIABLE", "from_environment", "to_environment"]

ENVIRONMENT_VARIABLE: Final = "ZERO_PLUGIN_DOCUMENT"

_LARGEST: Final = 128 * 1024 - len(ENVIRONMENT_VARIABLE) - 2  # Linux: MAX_ARG_STRLEN, 32 pages for `NAME=value\0`


def to_environment(document: Document, processes: int | None = None) -> str:
    """The document as compact JSON in ASCII, with its origins; `AUTO` stays distinct from any text.

    Args:
        document: checked.
        processes: how many are started, on all machines; written into a document that leaves it open, so that they
            can see whether all have met.

    Raises:
        ConfigError: the text is longer than one environment variable can be.
    """
    assert not document.problems, "a document is checked before it is handed over"
    if processes is not None and document.launch.value("num_processes") in (None, AUTO):
        started = Entry(processes, Origin("rule", "launch", "as many as are started"))
        document = replace(document, launch=document.launch.replace({("num_processes",): started}))
    text = json.dumps(
        {
            "launch": _encode_tree(document.launch),
            "deepspeed": _encode_tree(document.deepspeed),
            "sources": document.sources,
            "sections": [[path, where] for path, where in document.sections.items()],
            "notes": [astuple(note) for note in document.notes],
        },
        separators=(",", ":"),
    )
    if len(text) > _LARGEST:
        message = f"needs {len(text)} bytes to hand over to the workers"
        where = document.sources[0] if document.sources else "the configuration"
        raise ConfigError([Problem(where, "", message, f"Shorten it: the system takes at most {_LARGEST} bytes.")])
    return text


def from_environment(environ: Mapping[str, str]) -> Document | None:
    """The document that a launcher handed over, or None where there was none."""
    text = environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    data = json.loads(text)
    return Document(
        launch=_decode_tree(data["launch"]),
        deepspeed=_decode_tree(data["deepspeed"]),
        sources=tuple(data["sources"]),
        sections={tuple(path): where for path, where in data["sections"]},
        notes=tuple(Problem(*row) for row in data["notes"]),
    )


def _encode_tree(tree: Tree) -> list[Any]:
    return [
        [path, _encode(entry.value), entry.origin.kind, entry.origin.where, entry.origin.reason]
        for path, entry in tree.entries.items()
    ]


def _decode_tree(rows: list[Any]) -> Tree:
    return Tree(
        {tuple(path): Entry(_decode(value), Origin(kind, where, reason)) for path, value, kind, where, reason in rows}
    )


def _encode(value: Any) -> Any:
    """JSON in which an object is always a tag: `{"auto": …}` for AUTO, `{"keys": …}` for a mapping."""
    if value is AUTO:
        return {"auto": True}
    if isinstance(value, Mapping):
        return {"keys": {key: _encode(child) for key, child in value.items()}}
    if isinstance(value, tuple):
        return [_encode(child) for child in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "auto" in value:
            return AUTO
        return MappingProxyType({key: _decode(child) for key, child in value["keys"].items()})
    if isinstance(value, list):
        return tuple(_decode(child) for child in value)
    return value
