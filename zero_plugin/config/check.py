"""Everything that is wrong with a document, found together."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.amounts import LEAST_MEMORY, read_bytes
from zero_plugin.config.compiler_keys import COMPILER_KEYS, compiler_problems
from zero_plugin.config.contradictions import contradictions
from zero_plugin.config.document import Document
from zero_plugin.config.launch_keys import REFUSED_KEYS, REFUSED_VALUES, SAYS_NOTHING, WITHOUT_MEANING
from zero_plugin.config.launch_settings import LaunchSettings, launch_schema
from zero_plugin.config.registry import KNOWN_RELEASES, deepspeed_schema, key_schema, known_release, renamed_keys
from zero_plugin.config.retired import RETIRED_OPTIMIZERS
from zero_plugin.config.tree import AUTO, Path, Tree, dotted
from zero_plugin.config.unknown_keys import explain_launch_key, explain_training_key
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

_MEMORIES: Final = ("gpu_memory", "host_memory")
_FILE_PLACE: Final = re.compile(r"(.*):(\d+):(\d+)")


def check_document(document: Document, release: str | None = None) -> tuple[Problem, ...]:
    """Refuse a document that cannot run as written. `auto` is never a contradiction.

    Args:
        document: what was read.
        release: the DeepSpeed release whose keys count, one of `KNOWN_RELEASES`; by default the installed one.

    Returns:
        Warnings and notes, the document's own among them.

    Raises:
        ConfigError: every problem of the document, in the order in which they are written; or the release is not known.
    """
    problems = find_problems(document, release)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return tuple(problems)


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
        *_training_problems(document, known_release(release)),
        *_double_spellings(document),
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
            yield _wrong_value(found, _where(document, (), found.path))
    for path, entry in document.launch.entries.items():
        if path[0] in REFUSED_KEYS:
            has_effect, fix = REFUSED_KEYS[path[0]]
            if entry.value not in SAYS_NOTHING and has_effect(path[-1], entry.value):
                yield Problem(entry.origin.where, dotted(path), f"{show(entry.value)} is not supported", fix)
    for name in _MEMORIES:
        memory = document.launch.get(name)
        size = None if memory is None else read_bytes(memory.value)
        if memory is not None and size is not None and size < LEAST_MEMORY:
            message = f"{show(memory.value)} is {size} bytes, which holds no model"
            yield Problem(memory.origin.where, name, message, "Write the unit too, e.g. 24GiB.")
    yield from compiler_problems(document.launch)
    known = [*LaunchSettings.model_fields, *WITHOUT_MEANING, *REFUSED_KEYS, *COMPILER_KEYS, "deepspeed_config"]
    for name in dict.fromkeys(path[0] for path in document.launch):
        if name not in known:
            yield Problem(_where(document, (), (name,)), name, "unknown key", explain_launch_key(name, known, schema))


def _training_problems(document: Document, release: str) -> Iterator[Problem]:
    schema = deepspeed_schema(release)
    for found in violations(document.deepspeed, validator(schema)):
        where = _where(document, ("deepspeed",), found.path)
        if found.kind == "unknown":
            message, fix = explain_training_key(found, schema, in_yaml=bool(document.launch))
            yield Problem(where, _place(found), message, fix)
        elif found.kind == "missing":
            fix = f"Write {found.path[-1]}: {legal(found.wanted['properties'][found.path[-1]])}."
            yield Problem(where, _place(found), "is missing", fix)
        else:
            yield _wrong_value(found, where, release)


def _double_spellings(document: Document) -> Iterator[Problem]:
    for old, new in renamed_keys().items():
        if document.deepspeed.has_section(*old):  # reading has moved it to its present name where that was free
            present = dotted(new[len(old) - 1 :])
            fix = f"Delete it; keep {present}."
            yield Problem(_where(document, ("deepspeed",), old), dotted(old), f"stands beside {present}", fix)


def _wrong_value(found: Violation, where: str, release: str = KNOWN_RELEASES[-1]) -> Problem:
    text = str(found.value).lower()
    if found.path == ("optimizer", "type") and text in RETIRED_OPTIMIZERS:
        return Problem(where, _place(found), f"{show(found.value)} is not supported", RETIRED_OPTIMIZERS[text])
    options = [o for branch in (found.wanted, *found.wanted.get("anyOf", ())) for o in branch.get("enum", ())]
    newest = key_schema(found.path, release=KNOWN_RELEASES[-1]) if release != KNOWN_RELEASES[-1] else None
    if newest is not None and not found.index and validator(newest).is_valid(found.value):
        message = f"{show(found.value)} is legal in DeepSpeed {KNOWN_RELEASES[-1]}, but not in {release}"
        return Problem(where, _place(found), message, f"Write {legal(found.wanted)}.")
    if example := _as_section(found):
        return Problem(where, _place(found), f"{show(found.value)} is not legal here", f"Write {example}.")
    near = did_you_mean(found.value, options) if isinstance(found.value, str) and options else ""
    default = f" (default {show(found.wanted['default'])})" if found.wanted.get("default") not in (None, "") else ""
    message = f"{show(found.value)} is not legal here"
    fix = f"Did you mean {near}? Write" if near else "Write"
    return Problem(where, _place(found), message, f"{fix} {legal(found.wanted)}{default}.")


def _as_section(found: Violation) -> str:
    """The section that a single value stands for, as `"fp16": {"enabled": true}`; "" where it fits no key."""
    for name in ("enabled", "device", "type", "stage"):
        wanted = found.wanted.get("properties", {}).get(name)
        if wanted is not None and not isinstance(found.value, dict | list) and validator(wanted).is_valid(found.value):
            return json.dumps({found.path[-1]: {name: found.value}})[1:-1]
    return ""


def _place(found: Violation) -> str:
    """The key's full path, inside a list too: `layer_specs[0].patterns`."""
    path, key = (found.path, "") if found.kind == "value" else (found.path[:-1], f".{dotted(found.path[-1:])}")
    inside = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in found.index)
    return f"{dotted(path)}{inside}{key}".lstrip(".")


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
