"""The schema of any DeepSpeed release, derived from the newest one and the history written beside its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["derive_schema", "release_order"]

# The shipped file is the schema of the newest release. What other releases had differently stands in it as
#   x-added    of a key: the release that first knew it
#   x-renamed  of a key: the key of its section that it is an older spelling of, or a key below that
#   x-before   of a key: {release: what its schema said in every release before that one}
#   x-removed  of a section: {key: {"in": release, "message": …, "advice": …, "was": its schema}}
#   x-until    of an item of a list: the release that no longer has it
# and a derived schema says of what it lacks
#   x-absent   of a section: {key: [what became of it, what to write]}
_HOLDERS: Final = ("properties", "additionalProperties", "items", "allOf", "then")  # keywords with keys' schemas below


def release_order(release: str) -> tuple[int, ...]:
    """By what releases sort: `0.19.8+cu130` as (0, 19, 8), `0.17` as (0, 17, 0)."""
    parts = release.split("+")[0].split(".")
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
    return numbers + (0,) * (3 - len(numbers))


def derive_schema(newest: Mapping[str, Any], release: str) -> dict[str, Any]:
    """`newest`, or a part of it, as it was in `release`; shares with `newest` what did not change."""
    now = release_order(release)
    schema = {key: value for key, value in newest.items() if key not in ("x-before", "x-removed")}
    changes = sorted(newest.get("x-before", {}).items(), key=lambda change: release_order(change[0]), reverse=True)
    for changed, older in changes:
        if now < release_order(changed):
            schema |= older
    if "properties" in newest:
        schema["properties"] = dict(_present(newest, now))
        absent = {name: why for name, why in _absent(newest, release) if name not in schema["properties"]}
        if absent:
            schema["x-absent"] = absent
    for holder in _HOLDERS:
        held = schema.get(holder)
        if holder == "properties" and held:
            schema[holder] = {name: derive_schema(child, release) for name, child in held.items()}
        elif isinstance(held, list):
            schema[holder] = [derive_schema(child, release) for child in held if not _is_over(child, now)]
        elif isinstance(held, dict):
            schema[holder] = derive_schema(held, release)
    return schema


def _present(section: Mapping[str, Any], now: tuple[int, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The keys that a section had, those that were removed since included."""
    keys = section["properties"]
    removed = {
        name: gone["was"] for name, gone in section.get("x-removed", {}).items() if now < release_order(gone["in"])
    }
    for name, child in {**keys, **removed}.items():
        if release_order(child.get("x-added", "0")) <= now:
            yield name, {**keys.get(child.get("x-renamed"), {}), **child}


def _absent(section: Mapping[str, Any], release: str) -> Iterator[tuple[str, list[str]]]:
    for name, child in section["properties"].items():
        if "x-added" in child:
            message = f"added in DeepSpeed {child['x-added']}; this is {release}"
            yield name, [message, f"Delete it, or install DeepSpeed {child['x-added']} or newer."]
    for name, gone in section.get("x-removed", {}).items():
        yield name, [gone["message"], gone["advice"]]


def _is_over(item: Mapping[str, Any], now: tuple[int, ...]) -> bool:
    return "x-until" in item and now >= release_order(item["x-until"])
