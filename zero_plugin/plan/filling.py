"""Has a plan choose what a configuration leaves open, before a run and in one."""

from __future__ import annotations

from zero_plugin.config.document import Document
from zero_plugin.plan.fields import Planned, fits_nowhere, fixed_fields, open_fields, planned_values
from zero_plugin.plan.optimizers import asked_optimizer
from zero_plugin.plan.search import search
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes
from zero_plugin.plan.what_if import what_if
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolved import Resolved

__all__ = ["fill_fields"]


def fill_fields(
    document: Document,
    resolved: Resolved,
    facts: Facts,
    model: ModelSizes,
    activations: Activations,
    cluster: Cluster,
    *,
    margin: float,
) -> Planned:
    """The values of the fields that only a plan can fill, with their reasons.

    Args:
        document: what was asked for, with ZeRO and a field open.
        resolved: the same, resolved as far as it can be without a plan.
        facts: of the loop and the machine; complete in a run.
        model: its sizes.
        activations: in the resolved precision.
        cluster: the machines.
        margin: see `Wanted`.

    Raises:
        ConfigError: nothing fits, or what is fixed excludes itself.
    """
    on_gpu = facts.machine.accelerator == "cuda"
    optimizer = asked_optimizer(resolved.optimizer, facts.optimizer, on_gpu=on_gpu)
    sized = activations.saved.per_sample > 0
    wanted = fixed_fields(document, resolved, facts, sized=sized, margin=margin)
    plan = search(model, activations, optimizer, cluster, wanted)
    if plan.chosen is None:
        changes = what_if(model, activations, optimizer, cluster, wanted).changes
        first = open_fields(document.deepspeed, facts)[0]
        raise fits_nowhere(plan, changes, cluster, activations, document.deepspeed.entries[first].origin.where)
    return planned_values(plan, wanted, cluster, document.deepspeed, activations)
