"""A resolved configuration as a list of values, each with where it came from, for people and for files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.tree import Entry, Path, Tree, dotted
from zero_plugin.resolve.defaults import deepspeed_default
from zero_plugin.resolve.draft import holds_auto
from zero_plugin.resolve.resolved import Resolved, plain

__all__ = ["Row", "list_defaults", "list_values"]


@dataclass(frozen=True, slots=True)
class Row:
    """One value.

    Attributes:
        path: the key; launch keys have one part.
        value: plain; `"auto"` where it is open, or DeepSpeed's own word.
        kind: who set it; `open` for what only a run can fill, `unset` for DeepSpeed's default of a key nobody wrote.
        where: where it, or the `auto` that was filled, is written; "" for what was added.
        reason: why this value, for what nobody typed; of an open one, what would fill it.
        was_auto: whether it fills an `auto`.
    """

    path: Path
    value: Any
    kind: Literal["file", "flag", "code", "rule", "default", "open", "unset"]
    where: str
    reason: str = ""
    was_auto: bool = False

    def as_json(self) -> dict[str, Any]:
        """The row for a JSON file."""
        return {
            "path": dotted(self.path),
            "value": self.value,
            "kind": self.kind,
            "where": self.where,
            "reason": self.reason,
        }


def list_values(document: Document, resolved: Resolved) -> list[Row]:
    """Every value: the launch keys, then the training keys, in the order of the file; what was added follows.

    Args:
        document: what was asked for.
        resolved: what it was resolved to.
    """
    launch = document.launch.replace(resolved.launch.entries)
    missing = dict(resolved.missing)
    rows = [_row(path, entry, document.launch, missing) for path, entry in launch.entries.items()]
    rows += [_row(path, entry, document.deepspeed, missing) for path, entry in resolved.tree.entries.items()]
    return [*rows, *(Row(path, "auto", "open", "", what) for path, what in missing.items())]


def list_defaults(resolved: Resolved) -> list[Row]:
    """DeepSpeed's default of every key that is neither written nor added."""
    kind = resolved.tree.value("optimizer", "type")
    rows = []
    for path in _keys(deepspeed_schema()):
        default = deepspeed_default(path, kind)
        if path not in resolved.tree and path not in resolved.missing and default is not None:
            rows.append(Row(path, default[0], "unset", "", "nobody wrote the key"))
    return rows


def _row(path: Path, entry: Entry, asked: Tree, missing: dict[Path, str]) -> Row:
    """One row; a missing value that has a leaf is taken out of `missing`."""
    written = asked.get(*path)
    place = "" if written is None else written.origin.where
    what = missing.pop(path, None)
    if what is not None:
        return Row(path, plain(entry.value), "open", place, what, was_auto=True)
    was_auto = written is not None and holds_auto(written.value) and not entry.origin.typed_by_user
    where = entry.origin.where if entry.origin.typed_by_user else place
    return Row(path, plain(entry.value), entry.origin.kind, where, entry.origin.reason, was_auto)


def _keys(section: Any, path: Path = ()) -> Iterator[Path]:
    for name, child in section.get("properties", {}).items():
        if "default" in child:
            yield (*path, name)
        yield from _keys(child, (*path, name))
