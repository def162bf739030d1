"""`zero-plugin check --fix`: apply the fixes of a configuration's problems that need no decision.

Keys are renamed and removed at their places, and an FSDP configuration becomes a ZeRO configuration. Values are never
guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import deletes_key, find_problems
from zero_plugin.config.document import yaml_text
from zero_plugin.config.edits import Edit, apply_edits
from zero_plugin.config.fsdp import UnknownShardingError, ZeroConfig, convert_fsdp
from zero_plugin.config.located import Located, looks_like_json, parse_text
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError, Problem

_MOST_PASSES: Final = 20  # several, because a removed key may be the subject of another problem
_BOM: Final = "\ufeff"


@dataclass(frozen=True)
class Fixed:
    """A configuration file, before and after its fixes.

    Attributes:
        file: the file's name.
        before: the original text.
        after: the text with the fixes.
        notes: sentences about fixes that a user should check.
    """

    file: str
    before: str
    after: str
    notes: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        """The unified diff from `before` to `after`; "" if there are no fixes."""
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.file, f"{self.file} (fixed)")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def fix_file(file: str) -> Fixed:
    """Find the fixes of a launch YAML or a DeepSpeed JSON. The file stays as it is.

    Raises:
        ConfigError: the file cannot be read.
    """
    data = _read(file)
    text = before = data.decode("utf-8-sig")
    try:
        text, notes = _convert(file, text)
    except UnknownShardingError as error:
        after = data.decode()
        return Fixed(file, after, after, (str(error),))
    for _ in range(_MOST_PASSES):
        places = _top_places(file, text)
        edits = {edit: problem for problem in _problems(file, text) for edit in _edits(file, problem, places)}
        fixed = apply_edits(text, edits)
        removed = [p for edit, p in edits.items() if not edit.key and p.severity == "error"]
        notes += tuple(f"{problem.key} is removed with its value: {problem.message}." for problem in removed)
        if fixed == text:
            break
        text = fixed
    mark = _BOM if data.startswith(_BOM.encode()) else ""
    return Fixed(file, mark + before, mark + text, tuple(dict.fromkeys(notes)))


def _read(file: str) -> bytes:
    read_document(file)  # an unreadable file raises here, with the message of `check`
    return Path(file).read_bytes()


def _problems(file: str, text: str) -> list[Problem]:
    try:
        return find_problems(read_document(file, text.encode()))
    except ConfigError as error:
        return list(error.problems)


def _top_places(file: str, text: str) -> Mapping[str, tuple[int, int]]:
    """Return the places of the top-level keys. A problem of a section is located at the first key inside instead."""
    try:
        root = parse_text(text, file, [])
    except ConfigError:
        return {}
    return {key: _place(node) for key, node in root.value.items()} if isinstance(root.value, dict) else {}


def _edits(file: str, problem: Problem, places: Mapping[str, tuple[int, int]]) -> Iterator[Edit]:
    name, line, column = problem.place
    if name != file or not line:  # the problem is in another file that this file names, or in no single line
        return
    line, column = places.get(problem.key, (line, column))
    if problem.rename:
        yield Edit(line, column, problem.rename)
    elif problem.key and deletes_key(problem):
        yield Edit(line, column)


def _convert(file: str, text: str) -> tuple[str, tuple[str, ...]]:
    """Return the text with ZeRO's keys instead of FSDP's, and notes on what differs."""
    root = parse_text(text, file, [])
    if looks_like_json(text) or not isinstance(root.value, dict):
        return text, ()
    zero = convert_fsdp(root.plain())
    return (text, ()) if zero is None else (apply_edits(text, _conversion(root.value, zero)), zero.notes)


def _conversion(keys: Mapping[str, Located], zero: ZeroConfig) -> Iterator[Edit]:
    written: dict[str, Any] = {"distributed_type": zero.distributed_type}
    if zero.mixed_precision and "mixed_precision" in keys:
        yield Edit(*_place(keys["mixed_precision"]), text=_yaml(mixed_precision=zero.mixed_precision))
    elif zero.mixed_precision:
        written["mixed_precision"] = zero.mixed_precision
    old = [name for name in ("fsdp_config", "deepspeed_config") if name in keys]
    training = {"deepspeed_config": zero.training} if zero.training else {}
    for name in old[:1]:  # the new section takes the place of the first old one, and the other one is removed
        yield Edit(*_place(keys[name]), text=_yaml(**training) if training else None)
    for name in old[1:]:
        yield Edit(*_place(keys[name]))
    yield Edit(*_place(keys["distributed_type"]), text=_yaml(**written, **({} if old else training)))


def _yaml(**values: Any) -> str:
    return yaml_text(values).rstrip("\n")


def _place(node: Located) -> tuple[int, int]:
    _, line, column = node.where.rsplit(":", 2)
    return int(line), int(column)
