"""What would have to change for a model to fit, and how large a model would fit as things are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from zero_plugin.errors import ConfigError
from zero_plugin.plan.amounts import round_up, show_gib
from zero_plugin.plan.options import Wanted
from zero_plugin.plan.search import Candidate, Situation, leanest, search
from zero_plugin.plan.situation import Activations, Affine, Cluster, Highest, ModelSizes, OptimizerSizes

__all__ = ["Change", "WhatIf", "scale_model", "what_if"]

# What stays as the user has it: another batch or number type trains another model.
_KEPT: Final = ("ddp", "precision", "gradient_bytes", "global_batch", "margin")
_MOST_NODES: Final = 1024
_MOST_ELEMENTS: Final = 10**14
_PLENTY: Final = 2**60  # bytes
_MEMORIES: Final = {"host_bytes": "in host memory", "nvme_bytes": "of NVMe disk", "device_bytes": "on each device"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change by which the model fits.

    Attributes:
        what: in words, e.g. "31.2 GiB on each device instead of 24 GiB".
        chosen: the fastest way of training then.
        cluster: the machines then.
    """

    what: str
    chosen: Candidate
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Answers to two questions.

    Attributes:
        changes: where nothing fits: each suffices alone, the cheapest first: settings, then host memory, disk, device
            memory, machines. Empty where something fits.
        largest_elements: parameters of the largest model of the same shape that fits; 0 where none does.
    """

    changes: tuple[Change, ...]
    largest_elements: int


def what_if(
    model: ModelSizes, activations: Activations, optimizer: OptimizerSizes, cluster: Cluster, wanted: Wanted
) -> WhatIf:
    """The nearest configurations that fit, each with one thing changed, and the largest model that fits.

    Args:
        model: its sizes.
        activations: in the wanted precision.
        optimizer: what it keeps.
        cluster: the machines.
        wanted: what is fixed.

    Raises:
        ConfigError: what is fixed excludes itself.
    """
    situation = Situation(model, activations, optimizer, cluster, wanted.margin)
    changes = () if _fits(situation, wanted) else tuple(_changes(situation, wanted))
    return WhatIf(changes, _largest(situation, wanted))


def scale_model(model: ModelSizes, activations: Activations, factor: float) -> tuple[ModelSizes, Activations]:
    """A model with `factor` times the parameters, grown evenly in width and depth as decoders are.

    Depth and width both grow by the factor's cube root (parameters are depth × width²), so activations, which are
    depth × width, grow by its square; operations grow as the parameters do.
    """
    area, width = factor ** (2 / 3), factor ** (1 / 3)

    def line(amount: Affine) -> Affine:
        return Affine(int(amount.fixed * factor), int(amount.per_sample * area))

    def grown(amount: Affine | Highest | None) -> Affine | Highest | None:
        return Highest(tuple(map(line, amount.lines))) if isinstance(amount, Highest) else amount and line(amount)

    def scaled(of: Activations) -> Activations:
        return replace(
            of,
            saved=line(of.saved),
            transient=grown(of.transient) or Affine(),
            checkpointed=of.checkpointed and line(of.checkpointed),
            checkpointed_transient=grown(of.checkpointed_transient),
            checkpointed_forward=grown(of.checkpointed_forward),
            flops_per_sample=of.flops_per_sample * factor,
            autocast=None if of.autocast is None else scaled(of.autocast),
        )

    larger = replace(
        model,
        parameters=tuple(replace(p, elements=max(1, round(p.elements * factor))) for p in model.parameters),
        buffer_bytes=int(model.buffer_bytes * factor),
        largest_module=round(model.largest_module * factor),
        hidden_size=None if model.hidden_size is None else round(model.hidden_size * width),
    )
    return larger, scaled(activations)


def _changes(situation: Situation, wanted: Wanted) -> Iterator[Change]:
    for field in fields(Wanted):
        value = getattr(wanted, field.name)
        if field.name not in _KEPT and value is not None:
            freed: dict[str, Any] = {field.name: None}
            yield from _tried(situation, replace(wanted, **freed), f"{field.name} free instead of {value}")
    if not wanted.ddp and wanted.stage is None:
        yield from _tried(situation, replace(wanted, ddp=True), "training without ZeRO")
    if wanted.stage == "ddp" and not wanted.gradient_views:
        views = "DistributedDataParallelKwargs(gradient_as_bucket_view=True), for gradients without a copy"
        yield from _tried(situation, replace(wanted, gradient_views=True), views)
    cluster = situation.cluster
    for name, where in _MEMORIES.items():
        least = _least(situation, wanted, name)
        if least is not None:
            instead = show_gib(getattr(cluster, name)) if getattr(cluster, name) else "none"
            there = _with_memory(situation, name, least)
            yield from _tried(there, wanted, f"{show_gib(least)} {where} instead of {instead}")
    nodes = 2 * cluster.nodes
    while nodes <= _MOST_NODES:
        more = replace(situation, cluster=replace(cluster, nodes=nodes))
        found = tuple(_tried(more, wanted, f"{nodes} nodes instead of {cluster.nodes}"))
        if found:
            yield from found
            return
        nodes *= 2


def _tried(situation: Situation, wanted: Wanted, what: str) -> Iterator[Change]:
    """The change, if something fits by it."""
    try:
        if not _fits(situation, wanted):
            return
        plan = search(situation.model, situation.activations, situation.optimizer, situation.cluster, wanted)
    except ConfigError:  # the batch cannot be divided so
        return
    if plan.chosen is not None:
        yield Change(what, plan.chosen, situation.cluster)


def _least(situation: Situation, wanted: Wanted, name: str) -> int | None:
    """The least of one kind of memory by which something fits, as it is shown; None where no amount of it suffices."""
    roomy = _with_memory(situation, name, _PLENTY)
    # On a device without room DeepSpeed makes its flat copy in host memory.
    needed = leanest(_with_memory(situation, name, 1) if name == "device_bytes" else roomy, wanted)
    fitting = (found for found in needed if not roomy.shortage(found))
    least = min((int(getattr(found, name) / (1 - wanted.margin)) + 1 for found in fitting), default=None)
    return least and round_up(least)


def _with_memory(situation: Situation, name: str, size: int) -> Situation:
    changed: dict[str, Any] = {name: size}
    return replace(situation, cluster=replace(situation.cluster, **changed))


def _fits(situation: Situation, wanted: Wanted) -> bool:
    return any(not situation.shortage(found) for found in leanest(situation, wanted))


def _largest(situation: Situation, wanted: Wanted) -> int:
    """By halving the interval in which the factor lies, to a thousandth."""

    def fits(factor: float) -> bool:
        model, activations = scale_model(situation.model, situation.activations, factor)
        return _fits(replace(situation, model=model, activations=activations), wanted)

    if not situation.model.elements:
        return 0
    low, high = 1 / situation.model.elements, _MOST_ELEMENTS / situation.model.elements
    if not fits(low):
        return 0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return int(low * situation.model.elements)
