"""Finds the document of a process: what the launcher handed over, and what the script names in code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_plugin.config.accelerate_environment import document_from_accelerate
from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.handover import from_environment
from zero_plugin.config.overlay import overlay_code
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.tree import Tree

__all__ = ["find_document", "lay_document"]


def find_document(config: str | Path | Mapping[str, Any] | None, environ: Mapping[str, str]) -> Document:
    """The launcher's document, with the one named in code laid over it as arguments in code are.

    Args:
        config: path of a launch YAML or a DeepSpeed JSON, a dict with either content, or None.
        environ: where a launcher leaves its document; without one of this package's, Accelerate's variables count.

    Raises:
        ConfigError: the configuration named in code has problems, or says other than the launcher's.
    """
    launched = from_environment(environ) or document_from_accelerate(environ)
    if config is None:
        return launched or Document()
    if isinstance(config, Mapping):
        own = document_from_mapping(config, "Accelerator(config=…)")
    else:
        own = read_document(config)
    return lay_document(launched or Document(), own)


def lay_document(under: Document, own: Document) -> Document:
    """`own`, a whole document named in code, laid over `under` as arguments in code are; its defaults fill only gaps.

    Raises:
        ConfigError: `own` has problems, or says other than `under`.
    """
    if not under.launch and not under.deepspeed:
        return own
    check_document(own)  # its problems are its own, also where `under` overrides nothing of it
    entries = dict(own.launch.entries) | {("deepspeed", *path): entry for path, entry in own.deepspeed.entries.items()}
    written = {path: entry for path, entry in entries.items() if entry.origin.typed_by_user}
    laid = overlay_code(
        under,
        {path: entry.value for path, entry in written.items()},
        {path: _place(entry.origin.where, own) for path, entry in written.items()},
    )
    return replace(
        laid,
        launch=_with_defaults(laid.launch, own.launch),
        deepspeed=_with_defaults(laid.deepspeed, own.deepspeed),
        sources=(*under.sources, *own.sources),
        notes=(*laid.notes, *own.notes),
        sections={**own.sections, **under.sections},
    )


def _place(where: str, own: Document) -> str:
    """A place in a file that code has named, or the call itself."""
    return f"{where}, named in code" if where.startswith(tuple(f"{source}:" for source in own.sources)) else where


def _with_defaults(laid: Tree, own: Tree) -> Tree:
    defaults = own.where(lambda path, entry: not entry.origin.typed_by_user and not laid.has_section(*path))
    return laid.replace(defaults.entries)
