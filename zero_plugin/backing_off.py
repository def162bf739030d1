"""A run that has run out of memory goes on with smaller micro-batches, and with as many more of them in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zero_plugin.collectives import gather_object
from zero_plugin.config.attempt import micro_batch_cut
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Entry, Origin, Path

__all__ = ["accumulate_more", "agree_on_cut"]

_ACCUMULATION: Path = ("gradient_accumulation_steps",)
_GLOBAL: Path = ("train_batch_size",)


def agree_on_cut(processes: int, environ: Mapping[str, str]) -> int:
    """Into how many micro-batches each of the loaders' batches comes, the same on every process; collective.

    Args:
        processes: of the run. Only the launcher of the machine on which memory ran out knows of it.
        environ: of this process.
    """
    own = micro_batch_cut(environ)
    here = environ.get("LOCAL_WORLD_SIZE", str(processes))
    return own if here == str(processes) else max(gather_object([own]))


def accumulate_more(document: Document, cut: int) -> Document:
    """The document with `cut` times the accumulation that a user wrote, so that the global batch stays.

    Where `train_batch_size` is written and the accumulation is open, it follows from that one by itself.
    """
    entry = document.deepspeed.get(*_ACCUMULATION)
    is_open = entry is None or entry.value in (AUTO, None)
    if cut == 1 or (entry is not None and not is_open and not entry.origin.typed_by_user):
        return document
    if is_open and document.deepspeed.value(*_GLOBAL) not in (AUTO, None):
        return document
    asked = 1 if entry is None or is_open else entry.value
    where = "memory ran out with larger micro-batches" if entry is None else entry.origin.where
    reason = f"{asked} × {cut}: memory ran out before, so each of the loader's batches comes as {cut} micro-batches"
    more = Entry(asked * cut, Origin("rule", where, reason))
    return replace(document, deepspeed=document.deepspeed.replace({_ACCUMULATION: more}))
