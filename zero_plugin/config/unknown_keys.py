"""What to say of a key that its section does not have: what became of it, where it belongs, what it was meant to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.launch_settings import LaunchSettings
from zero_plugin.config.registry import types_of, walk_keys
from zero_plugin.config.retired import RETIRED_KEYS
from zero_plugin.config.translate import LAUNCH_FIELDS, SHORT_FIELDS
from zero_plugin.config.tree import Path, dotted
from zero_plugin.config.validation import Violation, did_you_mean

__all__ = ["explain_launch_key", "explain_training_key"]

_MANY: Final = 12  # more legal keys than this are not listed in a message
_FEW: Final = 3  # a key that is at home in more sections than this says too little of where it belongs
_FIELDS_OF_YAML: Final = (*SHORT_FIELDS, *LAUNCH_FIELDS, "deepspeed_config_file")
_DELETE: Final = "Delete it; a comment key starts with _."


def explain_launch_key(name: str, known: list[str], schema: Mapping[str, Any]) -> str:
    """What to write instead of an unknown key at the top of a launch YAML.

    Args:
        name: the key.
        known: the launch keys.
        schema: the schema of the training configuration.
    """
    training = [*SHORT_FIELDS, *schema["properties"]]
    if name in training:
        return f"Write it below deepspeed_config: {{{name}: …}}."
    near = did_you_mean(name, known)
    if near:
        return f"Did you mean {near}?"
    homes = _homes(name, (), schema)
    if homes:
        return _belongs([("deepspeed_config", *home) for home in homes])
    near = did_you_mean(name, training)
    return f"Did you mean {near}, below deepspeed_config?" if near else _DELETE


def explain_training_key(found: Violation, schema: Mapping[str, Any], *, in_yaml: bool) -> tuple[str, str]:
    """What is wrong with an unknown key of the training configuration, and what to write instead.

    Args:
        found: the key, with the schema of its section.
        schema: the schema of the whole.
        in_yaml: whether the configuration stands in a launch YAML, with its short fields.
    """
    path, key = found.path, found.path[-1]
    absent = found.wanted.get("x-absent", {})
    if key in absent:
        message, fix = absent[key]
        return message, fix
    if path in RETIRED_KEYS:
        return RETIRED_KEYS[path]
    is_top = len(path) == 1
    if is_top and key in SHORT_FIELDS:
        return "a field of the launch YAML", f"Write {dotted(SHORT_FIELDS[key])} here."
    if is_top and key in LaunchSettings.model_fields:
        return "a key of the launch YAML", "Write it at the top level of the launch YAML."
    known = list(found.wanted.get("properties", {}))
    if path[0] == "bf16" and key in schema["properties"]["fp16"]["properties"]:
        return "only fp16 has it: bf16 needs no scaling of the loss", "Delete it."
    if types := _types_with(path, schema):
        fix = f"Delete it, or write another {path[0]}.type, that has it: {', '.join(types)}."
    elif homes := _homes(key, path[:-1], schema):
        fix = _belongs(homes)
    elif near := did_you_mean(key, [*known, *(_FIELDS_OF_YAML if is_top and in_yaml else ())]):
        fix = f"Did you mean {near}?"
    elif known and len(known) <= _MANY:
        fix = f"Legal here: {', '.join(known)}."
    else:
        fix = _DELETE
    return "unknown key", fix


def _types_with(path: Path, schema: Mapping[str, Any]) -> list[str]:
    """The optimizers or schedules whose parameters have the last key of `path`."""
    if path[1:2] != ("params",):
        return []
    branches = schema["properties"][path[0]].get("allOf", ())
    having = [branch for branch in branches if path[-1] in branch["then"]["properties"]["params"]["properties"]]
    return [name for branch in having for name in types_of(branch)]


def _homes(key: str, section: Path, schema: Mapping[str, Any]) -> list[Path]:
    """The few sections that have `key`: those above and below `section` if there are any, else any."""
    homes = list(dict.fromkeys(path[:-1] for path, _ in walk_keys(schema) if path[-1] == key and path[:-1] != section))
    related = [home for home in homes if home[: len(section)] == section or home == section[: len(home)]]
    nearest = related if section and related else homes
    return nearest if len(nearest) <= _FEW else []


def _belongs(homes: list[Path]) -> str:
    *first, last = [dotted(home) for home in homes if home] or [""]
    places = [f"in {', '.join(first)} or {last}" if first else f"in {last}"] if last else []
    if () in homes:
        places.append("at the top level")
    return f"It belongs {' or '.join(places)}."
