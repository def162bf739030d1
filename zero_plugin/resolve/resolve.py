"""Turns a document and the facts of one `prepare` into a configuration without open fields."""

from __future__ import annotations

from zero_plugin.config.document import Document
from zero_plugin.config.registry import deepspeed_schema
from zero_plugin.config.validation import legal, show, validator, violations
from zero_plugin.resolve.batch import settle_batch, settle_clipping
from zero_plugin.resolve.defaults import DEEPSPEED_AUTO, deepspeed_default
from zero_plugin.resolve.draft import Draft
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.optimizer import settle_optimizer
from zero_plugin.resolve.precision import settle_precision
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.resolve.scheduler import settle_scheduler
from zero_plugin.resolve.zero import settle_engine, settle_zero

__all__ = ["resolve"]


def resolve(document: Document, facts: Facts) -> Resolved:
    """Fill every open field of `document` from `facts`; the document stays as it is.

    What a user typed keeps its origin. Everything else carries the reason of the rule that found it. Before a run, when
    the facts are not `complete`, the fields that it may still fill stay open, in the result's `missing`.

    Raises:
        ConfigError: listing every field that cannot be filled, and every value that contradicts the loop, the machine
            or another value.
    """
    draft = Draft(document, facts)
    settle_precision(draft)  # each topic may look at the ones before it
    settle_zero(draft)
    settle_engine(draft)
    settle_batch(draft)
    settle_clipping(draft)
    settle_optimizer(draft)
    settle_scheduler(draft)
    _settle_rest(draft)
    _check_found(draft)
    return draft.finish()


def _settle_rest(draft: Draft) -> None:
    """Every other open field takes DeepSpeed's default, listed as such."""
    for path in draft.still_open():
        if path in DEEPSPEED_AUTO:
            continue
        default = deepspeed_default(path)
        if default is None:
            draft.refuse(path, "auto, but there is no rule and no default for this key.", "Write a value.")
        else:
            draft.put(path, default[0], "no rule fills it", "default")


def _check_found(draft: Draft) -> None:
    """Hold what the rules took from the loop to the same schema as what was typed."""
    for found in violations(draft.tree, validator(deepspeed_schema())):
        entry = draft.tree.get(*found.path)
        if entry is None or entry.origin.typed_by_user:
            continue
        if found.kind == "unknown":
            message = f"{draft.value(found.path[0], 'type')} has no such parameter: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Drop the argument; it has {', '.join(found.wanted['properties'])}.")
        else:
            message = f"{show(found.value)} is not legal here: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Give {legal(found.wanted)}.")
