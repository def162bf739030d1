"""Turns a document and the facts of one `prepare` into a configuration without open fields."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from zero_plugin.config.document import Document
from zero_plugin.config.registry import changed_defaults, deepspeed_schema, default_changes, installed_release
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

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

__all__ = ["resolve"]

_RANDOM_LTD = ("data_efficiency", "data_routing", "random_ltd")


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
    _write_changed_defaults(draft)
    _check_found(draft)
    return draft.finish()


def _settle_rest(draft: Draft) -> None:
    """Every other open field repeats a value that is settled, or takes DeepSpeed's default, listed as such."""
    same_elsewhere = {
        (*_RANDOM_LTD, "global_batch_size"): (draft.value("train_batch_size"), "train_batch_size"),
        (*_RANDOM_LTD, "micro_batch_size"): (draft.value("train_micro_batch_size_per_gpu"), "the micro batch"),
        ("data_parallel_size",): (draft.facts.machine.processes, "all processes of the run split the data"),
        ("sequence_parallel_size",): (1, "all processes of the run split the data"),
    }
    for path in draft.still_open():
        if path in DEEPSPEED_AUTO:
            continue
        default = deepspeed_default(path)
        value, reason = same_elsewhere.get(path, (None, ""))
        if value is not None:
            draft.put(path, value, reason)
        elif reason:
            draft.miss(path, f"value of {reason} yet", "Write a value.")
        elif default is None:
            draft.refuse(path, "auto, but there is no rule and no default for this key.", "Write a value.")
        else:
            draft.put(path, default[0], "no rule fills it", "default")


def _write_changed_defaults(draft: Draft) -> None:
    """Write out, in sections that are in use, what DeepSpeed's releases have changed the default of."""
    for path in changed_defaults() if draft.on_deepspeed else ():
        section, default = path[:-1], deepspeed_default(path)
        in_use = draft.value(*section, "enabled") or draft.value(*section, "device", default="none") != "none"
        if in_use and path not in draft.tree and default is not None:
            release, before = default_changes(path)[-1]
            draft.put(path, default[0], f"DeepSpeed {release} changed its default from {show(before)}", "default")


def _check_found(draft: Draft) -> None:
    """Hold what the rules took from the loop to the same schema as what was typed."""
    for found in violations(draft.tree, _validator(installed_release())):
        entry = draft.tree.get(*found.path)
        if entry is None or entry.origin.typed_by_user:
            continue
        if found.kind == "unknown":
            message = f"{draft.value(found.path[0], 'type')} has no such parameter: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Drop the argument; it has {', '.join(found.wanted['properties'])}.")
        else:
            message = f"{show(found.value)} is not legal here: {entry.origin.reason}."
            draft.refuse(found.path, message, f"Give {legal(found.wanted)}.")


@functools.cache
def _validator(release: str) -> Validator:
    return validator(deepspeed_schema(release))
