"""`key=value` from a command line as values of a document, read as a file would read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from zero_plugin.config.compiler_keys import COMPILER_KEYS
from zero_plugin.config.launch_keys import REFUSED_KEYS, WITHOUT_MEANING
from zero_plugin.config.launch_settings import LaunchSettings
from zero_plugin.config.translate import SHORT_FIELDS, one_spelling
from zero_plugin.config.tree import Origin, Path, Tree
from zero_plugin.config.yaml_reader import parse_yaml
from zero_plugin.errors import ConfigError, Problem

__all__ = ["read_assignments"]

_TRAINING: Final = ("deepspeed_config", "deepspeed")  # may stand before a training key, as in the YAML


def read_assignments(texts: Iterable[str], flag: str) -> tuple[dict[Path, Any], dict[Path, str]]:
    """The value of each key, as `overlay_flags` takes them, and where it was said.

    Args:
        texts: e.g. `zero_optimization.stage=3`, `zero_stage=3`, `optimizer.params.betas=[0.9, 0.95]`.
        flag: what they were given to, for messages.

    Raises:
        ConfigError: one is no `key=value`, or its value cannot be read.
    """
    values: dict[Path, Any] = {}
    where: dict[Path, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            fix = f"Write {flag} zero_optimization.stage=3."
            raise ConfigError([Problem(flag, "", f"{text!r} is no key=value", fix)])
        place, problems = f"{flag} {key}", list[Problem]()
        read = parse_yaml(value, place, problems).plain()
        if problems:
            raise ConfigError(problems)
        path = _path(tuple(key.split(".")))
        if path[0] == "deepspeed":
            nested: Any = read
            for part in reversed(path[1:]):
                nested = {part: nested}
            tree, _ = one_spelling(Tree.from_nested(nested, lambda _, place=place: Origin("flag", place)))  # type: ignore[misc]
            found = {("deepspeed", *leaf): entry.value for leaf, entry in tree.entries.items()}
        else:
            found = {path: read}
        values.update(found)
        where.update(dict.fromkeys(found, place))
    return values, where


def _path(parts: Path) -> Path:
    if len(parts) > 1 and parts[0] in _TRAINING:
        parts = parts[1:]
    elif parts[0] in {*LaunchSettings.model_fields, *WITHOUT_MEANING, *REFUSED_KEYS, *COMPILER_KEYS}:
        return parts
    if len(parts) == 1 and parts[0] in SHORT_FIELDS:
        return ("deepspeed", *SHORT_FIELDS[parts[0]])
    return ("deepspeed", *parts)
