"""One precedence: defaults, file, flags, arguments in code.

The one precedence: defaults, then the file, then launch flags, then arguments in code.

`key=value` from a command line as values of a document, read as a file would read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.document import SHORT_FIELDS, Document, one_spelling
from zero_plugin.config.launch_settings import (
    LAUNCH_KEYS,
    launch_schema,
)
from zero_plugin.config.located import parse_yaml
from zero_plugin.config.schema import deepspeed_schema
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, Tree, dotted
from zero_plugin.config.validation import read_as_wanted, show, validator
from zero_plugin.errors import ConfigError, Problem


def overlay_flags(document: Document, values: Mapping[KeyPath, Any], flags: Mapping[KeyPath, str]) -> Document:
    """Lay launch flags over a document; a flag overrides what the file says, since that is what it is for.

    Args:
        document: what the file says.
        values: by path; a path that starts with `deepspeed` is a training key, any other a launch key.
        flags: the flag that set each path, e.g. `--zero_stage`.
    """
    return _read_laid(document.overlay(values, kind="flag", where=flags))


def overlay_code(document: Document, values: Mapping[KeyPath, Any], calls: Mapping[KeyPath, str]) -> Document:
    """Lay arguments in code over a document. They fill what is open and agree with what is not.

    Args:
        document: what file and flags say.
        values: by path; a path that starts with `deepspeed` is a training key, any other a launch key.
        calls: the call that set each path, e.g. `Accelerator(gradient_accumulation_steps=4)`.

    Raises:
        ConfigError: an argument differs from an explicit value; lists every such pair.
    """
    laid = _read_laid(document.overlay(values, kind="code", where=calls))
    problems: list[Problem] = []
    launch = _keep_explicit(document.launch, laid.launch, problems)
    deepspeed = _keep_explicit(document.deepspeed, laid.deepspeed, problems)
    if problems:
        raise ConfigError(problems)
    return replace(laid, launch=launch, deepspeed=deepspeed)


def _read_laid(document: Document) -> Document:
    """`document` with the values that were laid over it read as a file's are: `BF16`, `2.0` for an integer."""
    launch, of_launch = read_as_wanted(document.launch, validator(launch_schema()))
    deepspeed, of_deepspeed = read_as_wanted(document.deepspeed, validator(deepspeed_schema()))
    notes = tuple(dict.fromkeys([*document.notes, *of_launch, *of_deepspeed]))
    return replace(document, launch=launch, deepspeed=deepspeed, notes=notes)


def same_value(one: Any, other: Any) -> bool:
    """Whether two values mean the same: 1 and 1.0 do, true and 1 do not."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _keep_explicit(before: Tree, after: Tree, problems: list[Problem]) -> Tree:
    """`after`, in which a value of `before` stands where code repeats it or leaves it open."""
    kept: dict[KeyPath, Entry] = {}
    for path, old in before.entries.items():
        new = after.get(*path)
        if new is old or not old.origin.typed_by_user:
            continue
        if old.value is AUTO and new is not None and new.value is AUTO:
            kept[path] = old  # still open, where the file says so
            continue
        if old.value is AUTO or _says_nothing(old.value):
            continue
        if new is None:  # code wrote a whole mapping as null or a scalar, or a key below this one
            new = next(entry for p, entry in after.entries.items() if p[: len(path)] == path or path[: len(p)] == p)
        if new.value is AUTO or same_value(old.value, new.value):
            kept[path] = old
        else:
            problems.append(
                Problem(
                    new.origin.where,
                    dotted(path),
                    f"{show(new.value)} in code, but {show(old.value)} at {old.origin.where}",
                    "Write the same value in both, or auto in the file, or leave the argument out.",
                )
            )
    return after.replace(kept)


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)


_TRAINING: Final = ("deepspeed_config", "deepspeed")  # may stand before a training key, as in the YAML


def read_assignments(texts: Iterable[str], flag: str) -> tuple[dict[KeyPath, Any], dict[KeyPath, str]]:
    """The value of each key, as `overlay_flags` takes them, and where it was said.

    Args:
        texts: e.g. `zero_optimization.stage=3`, `zero_stage=3`, `optimizer.params.betas=[0.9, 0.95]`.
        flag: what they were given to, for messages.

    Raises:
        ConfigError: one is no `key=value`, or its value cannot be read.
    """
    values: dict[KeyPath, Any] = {}
    where: dict[KeyPath, str] = {}
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


def _path(parts: KeyPath) -> KeyPath:
    if len(parts) > 1 and parts[0] in _TRAINING:
        parts = parts[1:]
    elif parts[0] in LAUNCH_KEYS:
        return parts
    if len(parts) == 1 and parts[0] in SHORT_FIELDS:
        return ("deepspeed", *SHORT_FIELDS[parts[0]])
    return ("deepspeed", *parts)
