"""What each DeepSpeed release knows: its configuration keys, as a JSON Schema derived from the one shipped registry."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from typing import Any, Final

from zero_plugin.config.launch_keys import REFUSED_KEYS, WITHOUT_MEANING
from zero_plugin.config.launch_settings import launch_schema
from zero_plugin.config.translate import LAUNCH_FIELDS, SHORT_FIELDS
from zero_plugin.config.tree import Path
from zero_plugin.errors import ConfigError, Problem

__all__ = [
    "KNOWN_RELEASES",
    "deepspeed_schema",
    "default_changes",
    "installed_release",
    "known_release",
    "release_note",
    "yaml_schema",
]

KNOWN_RELEASES: Final = (
    "0.16.9",
    *(f"0.17.{patch}" for patch in range(7)),
    *(f"0.18.{patch}" for patch in range(10)),
    *(f"0.19.{patch}" for patch in range(9)),
)

# The shipped file is the schema of the newest release. What other releases had differently stands in it as
#   x-added    of a key:     the release that first knew it
#   x-before   of a key:     {release: what its schema said in every release before that one}
#   x-removed  of a section: {key: {"in": release, "advice": …, "was": its schema}}
# and what a derived schema has not says so there:
#   x-absent   of a section: {key: [what became of it, what to write]}
_Release = tuple[int, ...]


def installed_release() -> str:
    """The known release that stands for the installed DeepSpeed: itself, else the newest one before it."""
    installed = _numbers(_installed())
    return next((known for known in reversed(KNOWN_RELEASES) if _numbers(known) <= installed), KNOWN_RELEASES[0])


def release_note() -> str:
    """What a person should know of the installed release, or "" where its keys are known."""
    installed, known = _installed(), installed_release()
    if _numbers(installed) == _numbers(known):
        return ""
    return f"DeepSpeed {installed} is installed, whose keys are not known here; checked as {known}"


def known_release(release: str | None) -> str:
    """`release` itself, or the one that stands for the installed DeepSpeed where it is None.

    Raises:
        ConfigError: it is not known; names those that are, and the nearest.
    """
    if release is None:
        return installed_release()
    if release in KNOWN_RELEASES:
        return release
    near = difflib.get_close_matches(release, KNOWN_RELEASES, n=1, cutoff=0.7)
    hint = f"Did you mean {near[0]}? " if near else ""
    fix = f"{hint}Known: {', '.join(KNOWN_RELEASES)}."
    raise ConfigError([Problem("--deepspeed_version", "", f"{release} is no DeepSpeed release known here", fix)])


def deepspeed_schema(release: str | None = None) -> Mapping[str, Any]:
    """The JSON Schema of a DeepSpeed configuration.

    Args:
        release: one of `KNOWN_RELEASES`; by default what stands for the installed DeepSpeed.

    Raises:
        ConfigError: the release is not known.
    """
    return _derived(known_release(release))


def yaml_schema(release: str | None = None) -> Mapping[str, Any]:
    """The JSON Schema of a launch YAML, whose `deepspeed_config` holds short fields, DeepSpeed's own keys, or both.

    Args:
        release: one of `KNOWN_RELEASES`; by default what stands for the installed DeepSpeed.

    Raises:
        ConfigError: the release is not known.
    """
    deepspeed = deepspeed_schema(release)
    launch = {name: _or_open(field) for name, field in launch_schema()["properties"].items()}
    ignored = {name: {"description": f"Has no effect here ({why})."} for name, why in WITHOUT_MEANING.items()}
    refused = {name: {"description": fix, "deprecated": True} for name, (_, fix) in REFUSED_KEYS.items()}
    short = {name: _at(deepspeed, path) for name, path in SHORT_FIELDS.items()}
    file = {"deepspeed_config_file": {"type": ["string", "null"], "description": "Path of a DeepSpeed JSON."}}
    inside = {**deepspeed["properties"], **short, **{name: launch[name] for name in LAUNCH_FIELDS}, **file}
    closed = {"additionalProperties": False, "patternProperties": {"^_": True}}
    training = {"type": ["object", "null"], "properties": inside, **closed}
    training["description"] = "How DeepSpeed trains: short fields, or DeepSpeed's own keys, or the path of a JSON."
    return {
        "$schema": deepspeed["$schema"],
        "title": "zero_plugin launch configuration",
        "type": "object",
        "properties": {**launch, **ignored, **refused, **file, "deepspeed_config": training},
        **closed,
    }


def default_changes(path: Path) -> tuple[tuple[str, Any], ...]:
    """The releases that gave the key at `path` another default, oldest first, each with the default before it."""
    node: Mapping[str, Any] = _newest()
    for part in path:
        node = node.get("properties", {}).get(part, {})
    changes = [(release, older["default"]) for release, older in node.get("x-before", {}).items() if "default" in older]
    return tuple(sorted(changes, key=lambda change: _numbers(change[0])))


def _or_open(field: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a launch key that may also be null or `auto`, as every launch key may."""
    words = {key: field[key] for key in ("title", "description", "default") if key in field}
    wanted = {key: value for key, value in field.items() if key not in words}
    return {**words, "anyOf": [*wanted.get("anyOf", [wanted]), {"type": "null"}, {"const": "auto"}]}


def _at(schema: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    for part in path:
        schema = schema["properties"][part]
    return schema


@functools.cache
def _newest() -> Mapping[str, Any]:
    text = resources.files("zero_plugin.config").joinpath("schema/deepspeed.schema.json").read_text("utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


@functools.cache
def _derived(release: str) -> Mapping[str, Any]:
    return {**_as_of(_newest(), release), "title": f"DeepSpeed {release} configuration"}


def _as_of(node: Any, release: str) -> Any:
    """A part of the newest schema as it was in `release`."""
    if isinstance(node, list):
        return [_as_of(child, release) for child in node]
    if not isinstance(node, dict):
        return node
    now = _numbers(release)
    kept = {key: child for key, child in node.items() if key not in ("x-before", "x-removed", "properties")}
    for changed, older in sorted(
        node.get("x-before", {}).items(), key=lambda change: _numbers(change[0]), reverse=True
    ):
        if now < _numbers(changed):
            kept |= older
    derived = {key: _as_of(child, release) for key, child in kept.items()}
    if isinstance(node.get("properties"), dict):
        present = dict(_present(node, now))
        derived["properties"] = {name: _as_of(child, release) for name, child in present.items()}
        absent = {name: why for name, why in _absent(node, release) if name not in present}
        if absent:
            derived["x-absent"] = absent
    return derived


def _present(section: Mapping[str, Any], now: _Release) -> Iterator[tuple[str, Any]]:
    """The keys that a section has in a release, with those that were removed since."""
    removed = {name: gone["was"] for name, gone in section.get("x-removed", {}).items() if now < _numbers(gone["in"])}
    for name, child in {**section["properties"], **removed}.items():
        if _numbers(child.get("x-added", "0")) <= now:
            yield name, child


def _absent(section: Mapping[str, Any], release: str) -> Iterator[tuple[str, list[str]]]:
    for name, child in section["properties"].items():
        if "x-added" in child:
            message = f"added in DeepSpeed {child['x-added']}; this is {release}"
            yield name, [message, f"Delete it, or install DeepSpeed {child['x-added']} or newer."]
    for name, gone in section.get("x-removed", {}).items():
        yield name, [gone["message"], gone["advice"]]


def _installed() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return KNOWN_RELEASES[-1]


def _numbers(release: str) -> _Release:
    """`0.19.8+cu130` as (0, 19, 8)."""
    parts = release.split("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
