"""Writes what a run resolved to, every value with its reason, into a file that stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.files import cache_folder, replace_text
from zero_plugin.config.packages import installed_version
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.config.resolve.resolve import list_values

RECORD_NAME: Final = "resolved_config.json"  # beside weights and checkpoints
FOLDER_VARIABLE: Final = "ZERO_PLUGIN_RUNS"

_KEPT: Final = 20


def describe_run(document: Document, resolved: Resolved, facts: Facts) -> dict[str, Any]:
    """The record: versions, where it runs, every value with its origin, and what DeepSpeed gets (null without it)."""
    return {
        "versions": {package: installed_version(package) for package in ("zero-plugin", "deepspeed", "torch")},
        "files": list(document.sources),
        "strategy": facts.strategy,
        "accelerator": facts.machine.accelerator,
        "processes": facts.machine.processes,
        "values": [row.as_json() for row in list_values(document, resolved)],
        "deepspeed_config": resolved.deepspeed_config() if facts.strategy == "deepspeed" else None,
    }


def write_record(record: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the record of `describe_run` beside what is in `folder`, e.g. weights; the file.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(folder) / RECORD_NAME
    _write(record, file)
    return file


def keep_record(record: Mapping[str, Any], log_dir: str | None, environ: Mapping[str, str]) -> str:
    """Keep a run's record, and say in a sentence where; never fails a run.

    It goes to `log_dir` where the launch has one, else to `$ZERO_PLUGIN_RUNS`, else to the user's cache, where the
    newest twenty stay.
    """
    name = f"resolved-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(log_dir or environ.get(FOLDER_VARIABLE) or cache_folder(environ) / "zero_plugin" / "runs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = sum(1 for _ in folder.glob(f"{name}*"))  # several models prepared in one second
        file = folder / f"{name}{f'-{taken + 1}' if taken else ''}.json"
        _write(record, file)
        if not log_dir:
            for old in sorted(folder.glob("resolved-*.json"))[:-_KEPT]:
                old.unlink(missing_ok=True)
    except OSError as error:
        return f"the resolved configuration is kept nowhere: {folder} cannot be written ({error.strerror})"
    return f"every value and where it came from: {file}"


def _write(record: Mapping[str, Any], file: Path) -> None:
    replace_text(file, json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n")
