"""Everything that is wrong with a document, found together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.contradictions import contradictions
from zero_plugin.config.document import Document
from zero_plugin.config.launch_keys import REFUSED_KEYS, REFUSED_VALUES, SAYS_NOTHING, WITHOUT_MEANING
from zero_plugin.config.launch_settings import LaunchSettings, launch_schema
from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.retired import RETIRED_KEYS, RETIRED_OPTIMIZERS
from zero_plugin.config.translate import SHORT_FIELDS
from zero_plugin.config.tree import AUTO, Path, Tree, dotted
from zero_plugin.config.validation import (
    Violation,
    did_you_mean,
    legal,
    show,
    validator,
    violations,
)
from zero_plugin.errors import ConfigError, Problem

__all__ = ["check_document", "find_problems"]

_FILE_PLACE: Final = re.compile(r"(.*):(\d+):(\d+)")
_MANY: Final = 12  # more legal keys than this are not listed in a message


def check_document(document: Document, release: str | None = None) -> None:
    """Refuse a document that cannot run as written. `auto` is never a contradiction.

    Args:
        document: what was read.
        release: the DeepSpeed release whose keys count, one of `KNOWN_RELEASES`; by default the installed one.

    Raises:
        ConfigError: every problem of the document, in the order in which they are written; or the release is not known.
    """
    errors = [problem for problem in find_problems(document, release) if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)


def find_problems(document: Document, release: str | None = None) -> list[Problem]:
    """Errors, warnings and notes of a document, in the order in which they are written.

    Args:
        document: what was read.
        release: the DeepSpeed release whose keys count, one of `KNOWN_RELEASES`; by default the installed one.

    Raises:
        ConfigError: the release is not known.
    """
    schema = deepspeed_schema(release)
    problems = [
        *document.problems,
        *document.notes,
        *_launch_problems(document, schema),
        *_training_problems(document, schema),
        *contradictions(document),
    ]
    shown = dict.fromkeys(_with_value(problem, document) for problem in problems)
    return sorted(shown, key=lambda problem: _reading_order(problem, document))


def _launch_problems(document: Document, schema: Mapping[str, Any]) -> Iterator[Problem]:
    settings = document.launch.where(
        lambda path, entry: path[0] in LaunchSettings.model_fields and entry.value not in (None, AUTO)
    )
    for found in violations(settings, validator(launch_schema())):
        refused = REFUSED_VALUES.get((found.path[0], str(found.value)))
        if refused:
            yield Problem(
                _where(document, (), found.path), dotted(found.path), f"{show(found.value)} is not supported", refused
            )
        else:
            yield _wrong_value(found, _where(document, (), found.path), found.path)
    for path, entry in document.launch.entries.items():
        if path[0] in REFUSED_KEYS:
            has_effect, fix = REFUSED_KEYS[path[0]]
            if entry.value not in SAYS_NOTHING and has_effect(path[-1], entry.value):
                yield Problem(entry.origin.where, dotted(path), f"{show(entry.value)} is not supported", fix)
    known = [*LaunchSettings.model_fields, *WITHOUT_MEANING, *REFUSED_KEYS, "deepspeed_config"]
    for name in dict.fromkeys(path[0] for path in document.launch):
        if name not in known:
            yield Problem(_where(document, (), (name,)), name, "unknown key", _launch_key_fix(name, known, schema))


def _launch_key_fix(name: str, known: list[str], schema: Mapping[str, Any]) -> str:
    if name in SHORT_FIELDS or name in schema["properties"]:
        return f"Write it below deepspeed_config: {{{name}: …}}."
    near = did_you_mean(name, known)
    if near:
        return f"Did you mean {near}?"
    near = did_you_mean(name, [*SHORT_FIELDS, *schema["properties"]])
    return f"Did you mean {near}, below deepspeed_config?" if near else "Delete it; a comment key starts with _."


def _training_problems(document: Document, schema: Mapping[str, Any]) -> Iterator[Problem]:
    for found in violations(document.deepspeed, validator(schema)):
        where = _where(document, ("deepspeed",), found.path)
        if found.kind == "unknown":
            yield _unknown_key(found, where, schema, in_yaml=bool(document.launch))
        elif found.kind == "missing":
            fix = f"Write {found.path[-1]}: {legal(found.wanted['properties'][found.path[-1]])}."
            yield Problem(where, dotted(found.path), "is missing", fix)
        else:
            yield _wrong_value(found, where, found.path)


def _unknown_key(found: Violation, where: str, schema: Mapping[str, Any], *, in_yaml: bool) -> Problem:
    key, known = found.path[-1], list(found.wanted.get("properties", {}))
    if found.path in RETIRED_KEYS:
        message, fix = RETIRED_KEYS[found.path]
        return Problem(where, dotted(found.path), message, fix)
    top = len(found.path) == 1
    if top and key in SHORT_FIELDS:
        return Problem(where, key, "a field of the launch YAML", f"Write {dotted(SHORT_FIELDS[key])} here.")
    if top and key in LaunchSettings.model_fields:
        return Problem(where, key, "a key of the launch YAML", "Write it at the top level of the launch YAML.")
    near = did_you_mean(key, [*known, *(SHORT_FIELDS if top and in_yaml else ())])
    homes = [path for path in _homes(schema, key) if path != found.path]
    types = list(_types_with(found.path, schema))
    if types:
        fix = f"Delete it, or write a {found.path[0]}.type that has it: {', '.join(types)}."
    elif near:
        fix = f"Did you mean {near}?"
    elif len(homes) == 1:
        fix = f"It belongs in {dotted(homes[0][:-1]) or 'the top level'}."
    elif known and len(known) <= _MANY:
        fix = f"Legal here: {', '.join(known)}."
    else:
        fix = "Delete it; a comment key starts with _."
    return Problem(where, dotted(found.path), "unknown key", fix)


def _types_with(path: Path, schema: Mapping[str, Any]) -> Iterator[str]:
    """The optimizers or schedules whose parameters have the last key of `path`."""
    if path[1:2] == ("params",):
        for branch in schema["properties"][path[0]].get("allOf", ()):
            if path[-1] in branch["then"]["properties"]["params"].get("properties", {}):
                yield branch["if"]["properties"]["type"]["const"]


def _homes(schema: Mapping[str, Any], key: str, path: Path = ()) -> Iterator[Path]:
    """Every path at which the schema knows `key`."""
    for name, child in schema.get("properties", {}).items():
        if name == key:
            yield (*path, name)
        yield from _homes(child, key, (*path, name))


def _wrong_value(found: Violation, where: str, path: Path) -> Problem:
    place = "".join(f"[{step}]" for step in found.index)
    if path == ("optimizer", "type") and str(found.value).lower() in RETIRED_OPTIMIZERS:
        return Problem(
            where, dotted(path), f"{show(found.value)} is not supported", RETIRED_OPTIMIZERS[str(found.value).lower()]
        )
    options = [o for branch in (found.wanted, *found.wanted.get("anyOf", ())) for o in branch.get("enum", ())]
    near = did_you_mean(found.value, options) if isinstance(found.value, str) and options else ""
    default = f" (default {show(found.wanted['default'])})" if found.wanted.get("default") not in (None, "") else ""
    message = f"{show(found.value)} is not legal here"
    fix = f"Did you mean {near}? Write" if near else "Write"
    return Problem(where, dotted(path) + place, message, f"{fix} {legal(found.wanted)}{default}.")


def _where(document: Document, root: Path, path: Path) -> str:
    """Where a leaf or section is written; for a missing one, where the section that lacks it is."""
    tree: Tree = document.deepspeed if root else document.launch
    entry = tree.get(*path)
    if entry is not None:
        return entry.origin.where
    for n in range(len(path), 0, -1):
        if root + path[:n] in document.sections:
            return document.sections[root + path[:n]]
        inside = next((e for p, e in tree.entries.items() if p[:n] == path[:n]), None)
        if inside is not None:
            return inside.origin.where
    return document.sources[0] if document.sources else "the configuration"


def _with_value(problem: Problem, document: Document) -> Problem:
    """`problem` with the value that is written where it points, for reports that show it apart."""
    path = tuple(problem.key.partition("[")[0].split("."))
    for tree in (document.launch, document.deepspeed):
        entry = tree.get(*path)
        if not problem.value and entry is not None and entry.origin.where == problem.where:
            return replace(problem, value=show(entry.value))
    return problem


def _reading_order(problem: Problem, document: Document) -> tuple[int, int, int]:
    place = _FILE_PLACE.fullmatch(problem.where)
    if not place or place[1] not in document.sources:
        return len(document.sources), 0, 0
    return document.sources.index(place[1]), int(place[2]), int(place[3])
