"""Rewrites an existing configuration in today's keys; what it says of a run stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import find_problems
from zero_plugin.config.commented import config_text, replace_file
from zero_plugin.config.compiler_keys import COMPILER_KEYS
from zero_plugin.config.document import Document
from zero_plugin.config.files import parse_file
from zero_plugin.config.json_reader import looks_like_json
from zero_plugin.config.launch_keys import REFUSED_KEYS, SAYS_NOTHING, WITHOUT_MEANING
from zero_plugin.config.read import read_document
from zero_plugin.config.tree import Tree
from zero_plugin.config.write import accelerate_values, yaml_text
from zero_plugin.errors import ConfigError, MachineError

__all__ = ["update_config"]

_FILE: Final = "deepspeed_config_file"


def update_config(file: Path) -> list[str]:
    """Rewrite a launch config or a DeepSpeed JSON under the keys of today, each value where it belongs.

    A launch config gets a sentence beside each key; other comments are lost, so the old file is kept beside it. Keys
    that ask for nothing here (`fsdp_config: {}`) go. A DeepSpeed JSON that is named stays named.

    Returns:
        What to tell the user.

    Raises:
        ConfigError: the file cannot be read or has problems; nothing is written.
        MachineError: a file cannot be written.
    """
    document = read_document(file)
    found = find_problems(document)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    old = file.read_text(encoding="utf-8-sig")
    text = _text(document, file, old)
    if text == old:
        return [f"{file}: nothing to change"]
    backup = _free_name(file)
    try:
        shutil.copy2(file, backup)
    except OSError as error:
        raise MachineError(f"{backup} cannot be written: {error.strerror}. Copy {file} to where it can.") from None
    replace_file(file, text)
    return [*(problem.headline for problem in found), f"written: {file}", f"as it was, with its comments: {backup}"]


def _text(document: Document, file: Path, old: str) -> str:
    root = parse_file(file, []).plain()
    if not len(document.launch) and "deepspeed_config" not in root:
        values = document.to_deepspeed()
        return json.dumps(values, indent=2) + "\n" if looks_like_json(old) else yaml_text(values)
    return config_text(_launch_values(document, root), file)


def _launch_values(document: Document, root: Mapping[str, Any]) -> dict[str, Any]:
    """The document in Accelerate's layout; what comes from the DeepSpeed JSON that `root` names stays there."""
    launch = document.launch.where(lambda path, _: not _asks_for_nothing(document.launch, path[0]))
    named = (root.get("deepspeed_config") or {}).get(_FILE) or root.get(_FILE)
    if named in (None, "none", "None"):
        return accelerate_values(launch, document.deepspeed)
    typed_here = document.deepspeed.where(lambda _, entry: entry.origin.where.startswith(f"{document.sources[0]}:"))
    values = accelerate_values(launch, typed_here)
    training = {_FILE: named, **values.pop("deepspeed_config", {})}
    if not typed_here.has_section("zero_optimization", "stage"):
        training.pop("zero_stage", None)  # the JSON says it
    return {**values, "deepspeed_config": training}


def _asks_for_nothing(launch: Tree, name: str) -> bool:
    if name in REFUSED_KEYS:
        return name != "compute_environment"  # the check would have refused it, had it an effect
    leaves = [entry.value for path, entry in launch.entries.items() if path[0] == name]
    return name in {*WITHOUT_MEANING, *COMPILER_KEYS} and all(value in SAYS_NOTHING for value in leaves)


def _free_name(file: Path) -> Path:
    """`FILE.bak`, or with a number where that is an older one."""
    names = (file.with_name(f"{file.name}.bak{number}") for number in ("", *range(2, 1000)))
    return next(name for name in names if not name.exists())
