"""Makes the plan of a configuration before any worker runs, from the model's sizes and stated or measured machines."""

from __future__ import annotations

from dataclasses import replace

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.tree import Entry, Origin
from zero_plugin.plan.fields import BY_FORMULA, TRACED, Planned, open_fields
from zero_plugin.plan.filling import fill_fields
from zero_plugin.plan.model_source import ModelSource, open_model
from zero_plugin.plan.situation import Cluster
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolve import resolve

__all__ = ["lay_plan", "plan_before_run", "waits_for_plan"]


def waits_for_plan(document: Document, facts: Facts) -> bool:
    """Whether a field is open that only a plan can fill."""
    asked = open_fields(document.deepspeed, facts)
    if not asked:
        return False
    missing = resolve(document, replace(facts, complete=False)).missing
    return any(path in missing for path in asked)


def plan_before_run(
    document: Document, facts: Facts, source: ModelSource, sequence_length: int | None, cluster: Cluster
) -> Planned:
    """What a plan chooses for the fields that wait for it, the micro-batch among them where it is open.

    Args:
        document: what was asked for, with ZeRO.
        facts: of the machine, and whatever else is known of the run, not complete; where a GPU's memory is stated, the
            workers have GPUs.
        source: the model.
        sequence_length: tokens of one sample; None: `usual_length`.
        cluster: the machines.

    Raises:
        ConfigError: there is no such model, nothing fits, or what is fixed excludes itself.
    """
    if launch_settings(document).gpu_memory is not None:
        facts = replace(facts, machine=replace(facts.machine, accelerator="cuda", fp16=True))
    resolved = resolve(document, replace(facts, complete=False))
    model, activations = open_model(source, sequence_length, resolved.precision)
    margin = TRACED if activations.source.startswith("traced") else BY_FORMULA
    return fill_fields(document, resolved, facts, model, activations, cluster, margin=margin)


def lay_plan(document: Document, planned: Planned) -> Document:
    """The document with what the plan has chosen in the place of what was open, each value with its reason."""
    chosen = {path: Entry(value, Origin("rule", "the plan", reason)) for path, (value, reason) in planned.items()}
    return replace(document, deepspeed=document.deepspeed.replace(chosen))
