"""The keys of DeepSpeed's configuration, as a JSON Schema, and what became of old ones.

What each DeepSpeed release knows: its configuration keys as a JSON Schema, for checks, editors and explanations.

The schema of any DeepSpeed release, derived from the newest one and the history written beside its keys.

Keys and types that no known DeepSpeed release follows, or that none has any more, with what to write instead.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, Final

from zero_plugin.config.document import LAUNCH_FIELDS, SHORT_FIELDS
from zero_plugin.config.launch_settings import REFUSED_KEYS, WITHOUT_MEANING, compiler_schema, launch_schema
from zero_plugin.config.packages import installed_version
from zero_plugin.config.tree import KeyPath
from zero_plugin.errors import ConfigError, Problem

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


def key_schema(path: KeyPath, kind: str | None = None, release: str | None = None) -> Mapping[str, Any] | None:
    """What a release's schema says of the key at `path`, or None where it has no such key.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's `type` as the schema spells it.
        release: one of `KNOWN_RELEASES`; by default what stands for the installed DeepSpeed.
    """
    return _find(deepspeed_schema(release), path, kind)


def default_changes(path: KeyPath, kind: str | None = None) -> tuple[tuple[str, Any], ...]:
    """The releases that gave the key at `path` another default, oldest first, each with the default before it.

    Args:
        path: a key of the configuration.
        kind: as for `key_schema`.
    """
    node = _find(_newest(), path, kind) or {}
    changes = [(release, older["default"]) for release, older in node.get("x-before", {}).items() if "default" in older]
    return tuple(sorted(changes, key=lambda change: release_order(change[0])))


@functools.cache
def changed_defaults() -> tuple[KeyPath, ...]:
    """Every key, but parameters by type, whose default is not the same in all known releases."""
    return tuple(path for path, node in walk_keys(_newest()) if default_changes(path) and "x-renamed" not in node)


@functools.cache
def renamed_keys() -> Mapping[KeyPath, KeyPath]:
    """Each older spelling of a key that DeepSpeed or this package still takes, and the key that it stands for."""
    spellings = {path: node["x-renamed"] for path, node in walk_keys(_newest()) if "x-renamed" in node}
    return {path: (*path[:-1], *target.split(".")) for path, target in spellings.items()}


def walk_keys(schema: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
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


def _find(schema: Mapping[str, Any], path: KeyPath, kind: str | None) -> Mapping[str, Any] | None:
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


_NO_SUCCESSOR = "Delete it; nothing replaces it."
_ACTS = "DeepSpeed's `compile` section no longer has it"

# path -> (what became of it, what to write)
RETIRED_KEYS: Final[Mapping[KeyPath, tuple[str, str]]] = {
    ("zero_optimization", "grad_hooks"): ("no key of DeepSpeed, although its pages show it", _NO_SUCCESSOR),
    ("zero_optimization", "cpu_offload_use_pin_memory"): (
        "DeepSpeed drops its value",
        "Write pin_memory inside offload_optimizer or offload_param.",
    ),
    ("activation_checkpointing", "partitioned_activations"): ("DeepSpeed ignores it", "Write partition_activations."),
    ("optimizer", "params", "max_grad_norm"): ("DeepSpeed refuses it here", "Delete it; write gradient_clipping."),
    ("allgather_size",): ("read only beside the retired zero_optimization: true", "Write allgather_bucket_size."),
    **{
        ("compile", key): (_ACTS, "Delete it; call torch.compile in the script.")
        for key in ("enabled", "disable", "backend", "kwargs")
    },
}

_REMOVED_OPTIMIZER = "DeepSpeed removed it by 0.19.7. Write AdamW (or Lamb)."
RETIRED_OPTIMIZERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _REMOVED_OPTIMIZER),
    "fusedadam": "Write AdamW: DeepSpeed uses its fused kernel by itself.",
    "deepspeedcpuadam": "Write AdamW: DeepSpeed uses its CPU kernel by itself under offload.",
}
