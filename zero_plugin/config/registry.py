"""What each DeepSpeed release knows: its configuration keys as a JSON Schema, for checks, editors and explanations."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

from zero_plugin.config.compiler_keys import compiler_schema
from zero_plugin.config.derive import derive_schema, release_order
from zero_plugin.config.launch_keys import REFUSED_KEYS, WITHOUT_MEANING
from zero_plugin.config.launch_settings import launch_schema
from zero_plugin.config.translate import LAUNCH_FIELDS, SHORT_FIELDS
from zero_plugin.config.tree import Path
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.installed import installed_version

__all__ = [
    "KNOWN_RELEASES",
    "changed_defaults",
    "deepspeed_schema",
    "default_changes",
    "installed_release",
    "key_schema",
    "known_release",
    "release_note",
    "renamed_keys",
    "types_of",
    "walk_keys",
    "yaml_schema",
]

KNOWN_RELEASES: Final = (
    "0.16.9",
    *(f"0.17.{patch}" for patch in range(7)),
    *(f"0.18.{patch}" for patch in range(10)),
    *(f"0.19.{patch}" for patch in range(9)),
)

_OPEN: Final = ({"type": "null"}, {"const": "auto"})  # what every launch key may be


def installed_release() -> str:
    """The known release that stands for the installed DeepSpeed: itself, else the newest one before it."""
    return _nearest(_installed())


def release_note() -> str:
    """What a person should know of the installed release, or "" where its keys are known."""
    installed, known = _installed(), installed_release()
    if release_order(installed) == release_order(known):
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
    oldest, newest = KNOWN_RELEASES[0], KNOWN_RELEASES[-1]
    fix = f"Did you mean {_nearest(release)}? Known is every release from {oldest} to {newest}."
    raise ConfigError([Problem("--deepspeed_version", "", f"{release} is no DeepSpeed release known here", fix)])


def deepspeed_schema(release: str | None = None) -> Mapping[str, Any]:
    """The JSON Schema of a DeepSpeed configuration.

    Args:
        release: one of `KNOWN_RELEASES`; by default what stands for the installed DeepSpeed.

    Raises:
        ConfigError: the release is not known.
    """
    return _schema_of(known_release(release))


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
    short = {name: _find(deepspeed, path, None) for name, path in SHORT_FIELDS.items()}
    file = {"deepspeed_config_file": {"description": "Path of a DeepSpeed JSON.", "type": ["string", "null"]}}
    inside = {**deepspeed["properties"], **short, **{name: launch[name] for name in LAUNCH_FIELDS}, **file}
    closed = {"additionalProperties": False, "patternProperties": {"^_": True}}
    training = {
        "description": "How DeepSpeed trains: short fields, or DeepSpeed's own keys, or the path of a JSON.",
        "type": ["object", "null"],
        "properties": inside,
        **closed,
    }
    return {
        "$schema": deepspeed["$schema"],
        "title": f"zero_plugin launch configuration, {deepspeed['title'].removesuffix(' configuration')}",
        "type": "object",
        "properties": {**launch, **ignored, **refused, **compiler_schema(), **file, "deepspeed_config": training},
        **closed,
    }


def key_schema(path: Path, kind: str | None = None, release: str | None = None) -> Mapping[str, Any] | None:
    """What a release's schema says of the key at `path`, or None where it has no such key.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's `type` as the schema spells it.
        release: one of `KNOWN_RELEASES`; by default what stands for the installed DeepSpeed.
    """
    return _find(deepspeed_schema(release), path, kind)


def default_changes(path: Path, kind: str | None = None) -> tuple[tuple[str, Any], ...]:
    """The releases that gave the key at `path` another default, oldest first, each with the default before it.

    Args:
        path: a key of the configuration.
        kind: as for `key_schema`.
    """
    node = _find(_newest(), path, kind) or {}
    changes = [(release, older["default"]) for release, older in node.get("x-before", {}).items() if "default" in older]
    return tuple(sorted(changes, key=lambda change: release_order(change[0])))


@functools.cache
def changed_defaults() -> tuple[Path, ...]:
    """Every key, but parameters by type, whose default is not the same in all known releases."""
    return tuple(path for path, node in walk_keys(_newest()) if default_changes(path) and "x-renamed" not in node)


@functools.cache
def renamed_keys() -> Mapping[Path, Path]:
    """Each older spelling of a key that DeepSpeed or this package still takes, and the key that it stands for."""
    spellings = {path: node["x-renamed"] for path, node in walk_keys(_newest()) if "x-renamed" in node}
    return {path: (*path[:-1], *target.split(".")) for path, target in spellings.items()}


def walk_keys(schema: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Every key below `path` with its schema; parameters of all types included, keys below older spellings not."""
    for name, child in schema.get("properties", {}).items():
        yield (*path, name), child
        if "x-renamed" not in child:
            yield from walk_keys(child, (*path, name))
    for holder in ("additionalProperties", "items"):
        if schema.get(holder):
            yield from walk_keys(schema[holder], path)
    for branch in schema.get("allOf", ()):
        yield from walk_keys(branch["then"]["properties"]["params"], (*path, "params"))


def types_of(branch: Mapping[str, Any]) -> list[str]:
    """The optimizer or scheduler types whose parameters an item of the section's `allOf` describes."""
    wanted = branch["if"]["properties"]["type"]
    return list(wanted["enum"]) if "enum" in wanted else [wanted["const"]]


def _find(schema: Mapping[str, Any], path: Path, kind: str | None) -> Mapping[str, Any] | None:
    sections = [schema]
    for part in path:
        named = [section["properties"][part] for section in sections if part in section.get("properties", {})]
        sections = named or [s["additionalProperties"] for s in sections if s.get("additionalProperties")]
        branches = [branch for section in sections for branch in section.get("allOf", ())]
        sections += [branch["then"] for branch in branches if kind in types_of(branch)]
    return sections[-1] if sections else None


def _or_open(field: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a launch key, which may also be null or `auto`."""
    words = {key: field[key] for key in ("title", "description", "default") if key in field}
    wanted = {key: value for key, value in field.items() if key not in words}
    branches = wanted.get("anyOf", [wanted])
    return {**words, "anyOf": [*branches, *(extra for extra in _OPEN if extra not in branches)]}


@functools.cache
def _newest() -> Mapping[str, Any]:
    text = resources.files("zero_plugin.config").joinpath("schema/deepspeed.schema.json").read_text("utf-8")
    schema: Mapping[str, Any] = json.loads(text)
    return schema


@functools.cache
def _schema_of(release: str) -> Mapping[str, Any]:
    return {**derive_schema(_newest(), release), "title": f"DeepSpeed {release} configuration"}


def _nearest(release: str) -> str:
    """The newest known release that is not above `release`, else the oldest."""
    wanted = release_order(release)
    return next((known for known in reversed(KNOWN_RELEASES) if release_order(known) <= wanted), KNOWN_RELEASES[0])


def _installed() -> str:
    return installed_version("deepspeed") or KNOWN_RELEASES[-1]
