"""A run that has run out of memory goes on with smaller micro-batches, and with as many more of them in each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zero_plugin.collectives import gather_object
from zero_plugin.config.attempt import micro_batch_cut
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Entry, Origin, Path
from zero_plugin.fewer_processes import share_out_steps

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


def accumulate_more(document: Document, cut: int, intended: int = 1, found: int = 1) -> Document:
    """The document with so much more than the accumulation that a user wrote that the global batch stays.

    Where `train_batch_size` is written and the accumulation is open, it follows from that one by itself.

    Args:
        document: as it was asked for.
        cut: into how many micro-batches each of the loaders' batches comes.
        intended, found: processes that the global batch is meant for, and those that there are.

    Raises:
        LaunchError: the micro-batches cannot be shared out among the processes.
    """
    entry = document.deepspeed.get(*_ACCUMULATION)
    is_open = entry is None or entry.value in (AUTO, None)
    if (cut == 1 and intended == found) or (entry is not None and not is_open and not entry.origin.typed_by_user):
        return document
    if is_open and document.deepspeed.value(*_GLOBAL) not in (AUTO, None):
        return document
    asked = 1 if entry is None or is_open else entry.value
    where = "to keep the global batch" if entry is None else entry.origin.where
    reasons = [f"{asked}"]
    if cut > 1:
        reasons.append(f"× {cut}: memory ran out before, so each of the loader's batches comes as {cut} micro-batches")
    if intended != found:
        reasons.append(f"× {intended} ÷ {found}: so many of the processes are left")
    more = Entry(share_out_steps(asked * cut, intended, found), Origin("rule", where, " ".join(reasons)))
    return replace(document, deepspeed=document.deepspeed.replace({_ACCUMULATION: more}))
