"""Check of a document: finds all problems together, and suggests a legal key for each unknown key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.document import RENAMED_KEYS, Document
from zero_plugin.config.keys import CONFIG_FILE, LAUNCH, LAUNCH_FIELDS, SHORT_FIELDS, TRAINING
from zero_plugin.config.launch_settings import LAUNCH_KEYS, REFUSED_VALUES, launch_schema, refused_keys
from zero_plugin.config.rules.launching import LAUNCHING
from zero_plugin.config.rules.sections import PARALLELISM, check_sections, check_without_engine
from zero_plugin.config.rules.training import OPTIMIZING, PRECISION, Asked, check_batch
from zero_plugin.config.rules.zero import STAGES, check_offload, check_zenflow
from zero_plugin.config.schema import (
    NO_SUCCESSOR,
    RETIRED_KEYS,
    RETIRED_OPTIMIZERS,
    deepspeed_schema,
    types_of,
    walk_keys,
)
from zero_plugin.config.tree import (
    KeyPath,
    Tree,
    Violation,
    did_you_mean,
    dotted,
    is_valid,
    legal,
    show,
    violations,
)
from zero_plugin.errors import ConfigError, Problem

_RULES: Final = (
    *(*PRECISION, *STAGES, check_offload, check_zenflow, check_batch, *OPTIMIZING),
    *(*LAUNCHING, *PARALLELISM, check_sections, check_without_engine),
)


def deletes_key(problem: Problem) -> bool:
    """Return whether the fix of a problem is only to delete its key."""
    fix = problem.fix
    return fix in ("Delete it.", "Delete the key.", _DELETE, NO_SUCCESSOR) or fix.startswith("Delete it; keep ")


def contradictions(document: Document) -> Iterator[Problem]:
    """Yield errors, and warnings about keys without effect. A field that is `auto` or has a wrong type yields nothing.

    An error means that DeepSpeed refuses the configuration, or would train differently from what is written. The rules
    were checked against DeepSpeed 0.19.8.
    """
    asked = Asked(document)
    for rule in _RULES:
        yield from rule(asked)


_MANY: Final = 12  # a message lists legal keys up to this number
_FEW: Final = 3  # a message names the sections that have a key up to this number; more would not help
_FIELDS_OF_YAML: Final = (*SHORT_FIELDS, *LAUNCH_FIELDS, CONFIG_FILE.name)
_DELETE: Final = "Delete it; a comment key starts with _."


# Names in other libraries, mainly transformers, for keys of DeepSpeed that are spelled too differently to be guessed.
_ELSEWHERE: Final[Mapping[str, str]] = {other: key.path[-1] for key in TRAINING for other in key.elsewhere}
# In training configs of axolotl, LLaMA-Factory and transformers' Trainer, this key names a DeepSpeed file.
_NAMES_A_FILE: Final = "deepspeed"
_NAMED_FILE: Final = "If this file is another program's, check and launch with the DeepSpeed file that this key names."


def explain_launch_key(name: str, known: list[str]) -> str:
    """Return the fix for an unknown key at the top of a launch YAML.

    Args:
        name: the unknown key.
        known: all launch keys.
    """
    training = [*SHORT_FIELDS, *deepspeed_schema()["properties"]]
    if name in training:
        return f"Write it below deepspeed_config: {{{name}: …}}."
    if name == _NAMES_A_FILE:
        return _NAMED_FILE
    if _ELSEWHERE.get(name) in training:
        return f"Write it below deepspeed_config: {{{_ELSEWHERE[name]}: …}}."
    near = did_you_mean(name, known)
    if near:
        return f"Did you mean {near}?"
    homes = _homes(name, ())
    if homes:
        return _belongs([("deepspeed_config", *home) for home in homes])
    near = did_you_mean(name, training)
    return f"Did you mean {near}, below deepspeed_config?" if near else _DELETE


def explain_training_key(found: Violation, *, in_yaml: bool) -> tuple[str, str]:
    """Return the message and the fix for an unknown key of the training configuration.

    Args:
        found: the key, with the schema of its section.
        in_yaml: whether the configuration is in a launch YAML, which may have short fields.
    """
    path, key = found.path, found.path[-1]
    if path in RETIRED_KEYS:
        return RETIRED_KEYS[path]
    is_top = len(path) == 1
    if is_top and key in SHORT_FIELDS:
        return "a field of the launch YAML", f"Write {dotted(SHORT_FIELDS[key])} here."
    if is_top and key in LAUNCH:
        return "a key of the launch YAML", "Write it at the top level of the launch YAML."
    if is_top and key == _NAMES_A_FILE:
        return "unknown key", _NAMED_FILE
    known = list(found.wanted.get("properties", {}))
    if path[0] == "bf16" and key in deepspeed_schema()["properties"]["fp16"]["properties"]:
        return "only fp16 has it: bf16 needs no scaling of the loss", "Delete it."
    if _ELSEWHERE.get(key) in known:
        fix = f"Did you mean {_ELSEWHERE[key]}?"
    elif types := _types_with(path):
        fix = f"Delete it, or write another {path[0]}.type, that has it: {', '.join(types)}."
    elif homes := _homes(key, path[:-1]):
        fix = _belongs(homes)
    elif near := did_you_mean(key, [*known, *(_FIELDS_OF_YAML if is_top and in_yaml else ())]):
        fix = f"Did you mean {near}?"
    elif known and len(known) <= _MANY:
        fix = f"Legal here: {', '.join(known)}."
    else:
        fix = _DELETE
    return "unknown key", fix


def _types_with(path: KeyPath) -> list[str]:
    """Return the optimizers or schedulers whose parameters include the last key of `path`."""
    if path[1:2] != ("params",):
        return []
    branches = deepspeed_schema()["properties"][path[0]].get("allOf", ())
    having = [branch for branch in branches if path[-1] in branch["then"]["properties"]["params"]["properties"]]
    return [name for branch in having for name in types_of(branch)]


def _homes(key: str, section: KeyPath) -> list[KeyPath]:
    """Return the sections that have `key`: only those related to `section` if there are any, otherwise all.

    Return none if there are more than `_FEW`.
    """
    paths = [path for path, _ in walk_keys(deepspeed_schema()) if path[-1] == key]
    homes = list(dict.fromkeys(path[:-1] for path in paths if path[:-1] != section))
    related = [home for home in homes if home[: len(section)] == section or home == section[: len(home)]]
    nearest = related if section and related else homes
    return nearest if len(nearest) <= _FEW else []


def _belongs(homes: list[KeyPath]) -> str:
    *first, last = [dotted(home) for home in homes if home] or [""]
    places = [f"in {', '.join(first)} or {last}" if first else f"in {last}"] if last else []
    if () in homes:
        places.append("at the top level")
    return f"It belongs {' or '.join(places)}."


def check_document(document: Document) -> tuple[Problem, ...]:
    """Refuse a document that cannot run as written. `auto` is never a contradiction.

    Args:
        document: the document that was read.

    Returns:
        Warnings and notes, including the document's own.

    Raises:
        ConfigError: the document has errors. Holds all of them, in the order in which they are written.
    """
    problems = find_problems(document)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return tuple(problems)


_SEVERITIES: Final = ("note", "warning", "error")


def find_problems(document: Document) -> list[Problem]:
    """Return errors, warnings and notes of a document, in the order of the keys in the files."""
    problems = [
        *document.problems,
        *document.notes,
        *_launch_problems(document),
        *_training_problems(document),
        *_double_spellings(document),
        *contradictions(document),
    ]
    values = {
        (entry.origin.where, tree.typed(*path)): show(entry.value)
        for tree in (document.launch, document.deepspeed)
        for path, entry in tree.entries.items()
    }
    shown = [
        problem if problem.value else replace(problem, value=values.get((problem.where, problem.key), ""))
        for problem in _most_severe(problems)
    ]
    return sorted(shown, key=lambda problem: _reading_order(problem, document))


def _most_severe(problems: Iterable[Problem]) -> list[Problem]:
    """Return the most severe finding for each key at its place: the first error, the last warning, or the last note.

    For a wrong value, warnings about its effect and notes on how it was read are of no use.
    """
    found: dict[Any, Problem] = {}
    for problem in problems:
        name = (problem.where, problem.key) if problem.key else problem
        known = found.get(name)
        later = known is None or _SEVERITIES.index(problem.severity) > _SEVERITIES.index(known.severity)
        if later or (problem.severity != "error" and known is not None and problem.severity == known.severity):
            found[name] = problem
    return list(found.values())


def _launch_problems(document: Document) -> Iterator[Problem]:
    for found in violations(document.launch, launch_schema()):
        if found.kind == "unknown" or found.value in (None, "auto"):  # unknown keys: see below
            continue
        if refused := REFUSED_VALUES.get((found.path[0], str(found.value))):
            message = f"{show(found.value)} is not supported"
            yield Problem(document.place(found.path), dotted(found.path), message, refused)
        else:
            yield _wrong_value(found, document.launch, document.place(found.path))
    yield from refused_keys(document.launch)
    known = [*LAUNCH_KEYS, "deepspeed_config"]
    names = list(dict.fromkeys(path[0] for path in document.launch))
    fixes = {name: explain_launch_key(name, known) for name in names if name not in known}
    if len(names) > 1 and list(fixes.values()) == [_DELETE] * len(names) and not document.deepspeed:
        message = f"holds no key of a launch config or of a DeepSpeed configuration, but {', '.join(names)}"
        fix = "Give one of these: `zero-plugin config` writes a launch config, docs/configuration.md lists the keys."
        yield Problem(document.sources[0] if document.sources else document.place((names[0],)), "", message, fix)
        return
    for name, fix in fixes.items():
        near = did_you_mean(name, known, only=True)
        rename = near if near and near in fix else ""
        yield Problem(document.place((name,)), name, "unknown key", fix, rename=rename)


def _training_problems(document: Document) -> Iterator[Problem]:
    for found in violations(document.deepspeed, deepspeed_schema()):
        where = document.place(("deepspeed", *found.path))
        if found.kind == "unknown":
            message, fix = explain_training_key(found, in_yaml=bool(document.launch))
            key = found.path[-1]
            near = _ELSEWHERE.get(key) or did_you_mean(key, found.wanted.get("properties", ()), only=True)
            rename = near if fix == f"Did you mean {near}?" else ""
            yield Problem(where, _place(found, document.deepspeed), message, fix, rename=rename)
        elif found.kind == "missing":
            fix = f"Write {found.path[-1]}: {legal(found.wanted['properties'][found.path[-1]])}."
            yield Problem(where, _place(found, document.deepspeed), "is missing", fix)
        else:
            yield _wrong_value(found, document.deepspeed, where)


def _double_spellings(document: Document) -> Iterator[Problem]:
    for old, new in RENAMED_KEYS.items():
        if document.deepspeed.has_section(*old):  # reading moved it to its present name unless that was taken
            present = dotted(new[len(old) - 1 :])
            fix = f"Delete it; keep {present}."
            yield Problem(document.place(("deepspeed", *old)), dotted(old), f"{present} is written too", fix)


def _wrong_value(found: Violation, tree: Tree, where: str) -> Problem:
    key, text = _place(found, tree), str(found.value).lower()
    if found.path == ("optimizer", "type") and text in RETIRED_OPTIMIZERS:
        return Problem(where, key, f"{show(found.value)} is not supported", RETIRED_OPTIMIZERS[text])
    options = [o for branch in (found.wanted, *found.wanted.get("anyOf", ())) for o in branch.get("enum", ())]
    if example := _as_section(found):
        return Problem(where, key, f"{show(found.value)} is not legal here", f"Write {example}.")
    near = did_you_mean(found.value, options) if isinstance(found.value, str) and options else ""
    default = f" (default {show(found.wanted['default'])})" if found.wanted.get("default") not in (None, "") else ""
    message = f"{show(found.value)} is not legal here"
    fix = f"Did you mean {near}? Write" if near else "Write"
    return Problem(where, key, message, f"{fix} {legal(found.wanted)}{default}.")


def _as_section(found: Violation) -> str:
    """Return the section that a single value abbreviates, as `"fp16": {"enabled": true}`; "" if no key fits."""
    for name in ("enabled", "device", "type", "stage"):
        wanted = found.wanted.get("properties", {}).get(name)
        if wanted is not None and not isinstance(found.value, dict | list) and is_valid(found.value, wanted):
            return json.dumps({found.path[-1]: {name: found.value}})[1:-1]
    return ""


def _place(found: Violation, tree: Tree) -> str:
    """Return the key as it was typed, also inside a list: `layer_specs[0].patterns`."""
    path, key = (found.path, "") if found.kind == "value" else (found.path[:-1], f".{dotted(found.path[-1:])}")
    inside = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in found.index)
    return f"{tree.typed(*path)}{inside}{key}".lstrip(".")


def _reading_order(problem: Problem, document: Document) -> tuple[int, int, int]:
    file, line, column = problem.place
    if not line or file not in document.sources:
        return len(document.sources), 0, 0
    return document.sources.index(file), line, column
