"""Launch configs with comments: one sentence describes each key. Also updates an older config to today's keys."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document, accelerate_values, yaml_text
from zero_plugin.config.keys import CONFIG_FILE, LAUNCH, LAUNCH_FIELDS, SHORT_FIELDS, STAGE
from zero_plugin.config.launch_settings import asks_for_nothing
from zero_plugin.config.located import looks_like_json
from zero_plugin.config.read import parse_file, read_document
from zero_plugin.config.run_files import replace_text
from zero_plugin.config.schema import yaml_schema
from zero_plugin.config.tree import KeyPath
from zero_plugin.errors import MachineError

_HEAD: Final = "# Check it: zero-plugin check FILE.  Run it: zero-plugin launch --config_file FILE train.py\n"


def key_comments() -> dict[KeyPath, str]:
    """Return the comment for each key of a launch config, by path. DeepSpeed's own keys have no comment."""
    keys = yaml_schema()["properties"]
    compiling, training = keys["dynamo_config"]["properties"], keys["deepspeed_config"]["properties"]
    described: dict[KeyPath, Any] = {
        **{(name,): keys[name] for name in (*LAUNCH, "dynamo_config", "deepspeed_config")},
        **{("dynamo_config", name): key for name, key in compiling.items()},
        **{("deepspeed_config", name): training[name] for name in (*SHORT_FIELDS, *LAUNCH_FIELDS, CONFIG_FILE.name)},
    }
    comments = {path: key["description"] for path, key in described.items()}
    return {**comments, ("compute_environment",): "LOCAL_MACHINE, for Accelerate."}


def config_text(values: Mapping[str, Any], file: Path) -> str:
    """Return a launch config in Accelerate's layout as text: JSON if the file's name ends in .json, otherwise YAML."""
    if file.suffix == ".json":
        return json.dumps(values, indent=2) + "\n"
    return _HEAD + yaml_text(values, key_comments())


def write_config(values: Mapping[str, Any], file: Path) -> None:
    """Check a launch config in Accelerate's layout, then write the complete file or nothing.

    Raises:
        ConfigError: the values have problems. Nothing is written.
        MachineError: the file cannot be written.
    """
    text = config_text(values, file)
    check_document(read_document(file, content=text.encode()))
    replace_file(file, text)


def replace_file(file: Path, text: str) -> None:
    """Write a complete configuration file or nothing, and create its folder.

    Raises:
        MachineError: the file cannot be written.
    """
    try:
        Path(os.path.realpath(file)).parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise MachineError(f"{file} cannot be written: {reason}. Name another with --config_file.") from None


def update_config(file: Path) -> list[str]:
    """Rewrite a launch config or a DeepSpeed JSON with today's keys, each value where it belongs.

    Each key of a launch config gets a comment. Other comments are lost, so the old file is kept next to the new one.
    Keys that request nothing here (`fsdp_config: {}`) are removed. A launch config that names a DeepSpeed JSON still
    names it afterwards.

    Returns:
        Lines for the user.

    Raises:
        ConfigError: the file cannot be read or has problems. Nothing is written.
        MachineError: a file cannot be written.
    """
    document = read_document(file)
    found = check_document(document)
    old_text = file.read_text(encoding="utf-8-sig")
    text = _updated_text(document, file, old_text)
    if text == old_text:
        return [f"{file}: nothing to change"]
    backup = _free_name(file)
    try:
        shutil.copy2(file, backup)
    except OSError as error:
        raise MachineError(f"{backup} cannot be written: {error.strerror}. Copy {file} to where it can.") from None
    replace_file(file, text)
    return [*(problem.headline for problem in found), f"written: {file}", f"as it was, with its comments: {backup}"]


def _updated_text(document: Document, file: Path, old_text: str) -> str:
    """Return the new text of `file`: DeepSpeed keys in the file's own format, a launch config with comments."""
    root = parse_file(file, []).plain()
    if not len(document.launch) and "deepspeed_config" not in root:
        values = document.to_deepspeed()
        return json.dumps(values, indent=2) + "\n" if looks_like_json(old_text) else yaml_text(values)
    return config_text(_launch_values(document, root), file)


def _launch_values(document: Document, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document in Accelerate's layout. Values from a DeepSpeed JSON that `root` names stay in that JSON."""
    launch = document.launch.where(lambda path, _: not asks_for_nothing(document.launch, path[0]))
    named = (root.get("deepspeed_config") or {}).get(CONFIG_FILE.name) or root.get(CONFIG_FILE.name)
    if named in (None, "none", "None"):
        return accelerate_values(launch, document.deepspeed)
    typed_here = document.deepspeed.where(lambda _, entry: entry.origin.where.startswith(f"{document.sources[0]}:"))
    values = accelerate_values(launch, typed_here)
    training = {CONFIG_FILE.name: named, **values.pop("deepspeed_config", {})}
    if not typed_here.has_section(*STAGE.path):
        training.pop(STAGE.field, None)  # the JSON has the stage
    return {**values, "deepspeed_config": training}


def _free_name(file: Path) -> Path:
    """Return `FILE.bak`, with a number if that file exists already."""
    names = (file.with_name(f"{file.name}.bak{number}") for number in ("", *range(2, 1000)))
    return next(name for name in names if not name.exists())
