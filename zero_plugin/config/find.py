"""Finds the document of a process: what the launcher handed over, and what the script names in code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.handover import from_environment
from zero_plugin.config.overlay import overlay_code
from zero_plugin.config.read import document_from_mapping, read_document

__all__ = ["find_document"]


def find_document(config: str | Path | Mapping[str, Any] | None, environ: Mapping[str, str]) -> Document:
    """The launcher's document, with the one named in code laid over it as arguments in code are.

    Args:
        config: path of a launch YAML or a DeepSpeed JSON, a dict with either content, or None.
        environ: where a launcher leaves its document.

    Raises:
        ConfigError: the configuration named in code has problems, or says other than the launcher's.
    """
    launched = from_environment(environ)
    if config is None:
        return launched or Document()
    if isinstance(config, Mapping):
        own = document_from_mapping(config, "Accelerator(config=…)")
    else:
        own = read_document(config)
    if launched is None:
        return own
    check_document(own)  # its problems are its own, also where the launcher's document overrides nothing of it
    entries = dict(own.launch.entries) | {("deepspeed", *path): entry for path, entry in own.deepspeed.entries.items()}
    laid = overlay_code(
        launched,
        {path: entry.value for path, entry in entries.items()},
        {path: f"{entry.origin.where}, named in code" for path, entry in entries.items()},
    )
    return replace(
        laid,
        sources=(*launched.sources, *own.sources),
        notes=(*launched.notes, *own.notes),
        sections={**own.sections, **launched.sections},
    )
