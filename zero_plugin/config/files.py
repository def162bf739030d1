"""A configuration file as located values, whichever of the two languages it is written in."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from zero_plugin.config.json_reader import looks_like_json, parse_json
from zero_plugin.config.located import Located, syntax_error
from zero_plugin.config.yaml_reader import parse_yaml
from zero_plugin.errors import ConfigError, Problem

__all__ = ["STANDARD_INPUT", "nearest_file", "parse_file"]

STANDARD_INPUT: Final = "<standard input>"  # its name in messages, in place of a file's

_MAX_BYTES: Final = 1 << 20  # a real configuration has a few kilobytes; this is a data file given by mistake
_NEAR: Final = 0.75  # likeness of two names, from 0 to 1; two swapped letters of four are 0.75


def parse_file(path: Path, problems: list[Problem], content: bytes | None = None) -> Located:
    """Read a YAML or JSON file whose top level holds keys; content tells the language, not the extension.

    Args:
        path: the file.
        problems: duplicate keys are added here.
        content: what the file holds, where that is known; `path` is then only its name.

    Raises:
        ConfigError: the file is missing, is not text, is broken, or holds something else than keys.
    """
    text = _text(path, _bytes(path) if content is None else content)
    found: list[Problem] = []
    try:
        root = _parse(text, path, found)
    except ConfigError as error:
        errors = [problem for problem in found if problem.severity == "error"]
        raise ConfigError([*errors, *error.problems]) from None
    problems += found
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        holds = "the file is empty" if root.value is None else f"holds {kind}, not keys"
        raise syntax_error(root.where, holds, "Write a launch YAML (num_processes: 2, …) or a DeepSpeed JSON.")
    return root


def nearest_file(path: Path) -> str:
    """What to write where `path` was written and is no file."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file in it."
        names = [child.name for child in path.parent.iterdir() if child.is_file()]
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return f"The folder {path.parent} does not exist or cannot be read; check the path."
    # Without the extension, which would make any two YAML files near; of equal stems the one with the same extension.
    by_stem = {Path(name).stem: name for name in sorted(names, key=lambda name: Path(name).suffix == path.suffix)}
    near = difflib.get_close_matches(path.stem, by_stem, n=1, cutoff=_NEAR)
    if near:
        return f"Did you mean {path.parent / by_stem[near[0]]}?"
    folder = "the working directory" if path.parent == Path() else path.parent
    return f"Check the path: {folder} holds no such name."


def _parse(text: str, path: Path, problems: list[Problem]) -> Located:
    if not looks_like_json(text):
        return parse_yaml(text, str(path), problems)
    if path.suffix not in (".yaml", ".yml"):
        return parse_json(text, str(path), problems)
    found: list[Problem] = []
    try:
        root = parse_json(text, str(path), found)  # as a rule such a file is JSON, with its tabs and comments
    except ConfigError:
        return parse_yaml(text, str(path), problems)
    return parse_yaml(text, str(path), problems) if found else root


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise syntax_error(str(path), "no such file", nearest_file(path)) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise syntax_error(str(path), f"cannot be read: {reason}", "Give a readable YAML or JSON file.") from None


def _text(path: Path, data: bytes) -> str:
    if len(data) > _MAX_BYTES:
        raise syntax_error(str(path), f"is larger than {_MAX_BYTES} bytes", "This is no configuration; check the path.")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig", "replace")
        where = f"{path}:{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
        message = f"is not UTF-8 text: byte {data[error.start]:#04x}"
        raise syntax_error(where, message, "Give a text file, saved as UTF-8.") from None
