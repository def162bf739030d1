"""Answers to two questions: which changes would make something fit, and how large the largest model is that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Final, TypeAlias

from zero_plugin.config.amounts import round_up, show_bytes
from zero_plugin.config.parallelism import SEQUENCE_KEY
from zero_plugin.errors import ConfigError
from zero_plugin.plan.costs import Footprint
from zero_plugin.plan.search import Candidate, Question, Wanted, batches, options, plan
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, Setup, Stage, Workload

# These fields keep the user's values: with another batch or precision, the result would be another model.
_KEPT: Final = ("ddp", "precision", "gradient_bytes", "global_batch", "every_batch", "margin")
_MOST_NODES: Final = 1024
_DOUBLINGS: Final = range(1, 40)  # exponents of 2 for more nodes and processes, and for shorter samples
# Bytes per token and vocabulary entry: logits in fp32 and their log-softmax, as counted by `decoder_activations`.
_LOGITS_BYTES: Final = 8
_CHUNKS: Final = 8
_SHORTEST: Final = 128  # tokens
_MOST_ELEMENTS: Final = 10**14
_PLENTY: Final = 2**60  # bytes
# A change in words, and the new values of fields for each part of a question.
Attempt: TypeAlias = tuple[str, Mapping[str, Mapping[str, Any]]]
_MEMORIES: Final = {"host_bytes": "in CPU memory", "nvme_bytes": "of NVMe disk", "device_bytes": "on each device"}


@dataclass(frozen=True, slots=True)
class Change:
    """One change that makes the model fit.

    Attributes:
        what: in words, e.g. "31.2 GiB on each device instead of 24 GiB".
        chosen: the fastest strategy after the change.
        cluster: the machines after the change.
    """

    what: str
    chosen: Candidate
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Answers to two questions.

    Attributes:
        changes: empty if something fits already. Otherwise each change alone is enough. The cheapest come first:
            settings, then CPU memory, disk, device memory, machines.
        largest_elements: parameters of the largest model of the same shape that fits; 0 if none does.
        savings: if nothing fits because of activations: what reduces them, and the bytes saved on each device.
    """

    changes: tuple[Change, ...]
    largest_elements: int
    savings: tuple[tuple[str, int], ...] = ()


def what_if(
    work: Workload, cluster: Cluster, wanted: Wanted, changed: Callable[[], Mapping[str, Activations]] = dict
) -> WhatIf:
    """Return the nearest setups that fit after one change, and the size of the largest model that fits.

    Args:
        work: the training, in the wanted precision.
        cluster: the machines.
        wanted: the fixed settings.
        changed: returns what a forward of complete samples would keep after changes of the model; the keys say what to
            write. Called only if nothing fits because of activations.

    Raises:
        ConfigError: the fixed settings contradict each other.
    """
    question = Question(work, cluster, wanted)
    if _fits(question):
        return WhatIf((), _largest(question))
    table = plan(work, cluster, wanted).table
    least = min([c for c in table if c.short] or table, key=question.excess)
    terms = least.footprint.device
    by_activations = 2 * (terms.get("activations", 0) + terms.get("transient", 0)) >= least.footprint.device_bytes
    others = changed() if by_activations else {}
    others = {what: kept.of_a_part(cluster.shared_by) for what, kept in others.items()}
    savings = tuple(_savings(question, others, least)) if by_activations else ()
    return WhatIf(tuple(_changes(question, others)), _largest(question), savings)


def scale_model(model: ModelSizes, activations: Activations, factor: float) -> tuple[ModelSizes, Activations]:
    """Return a model with `factor` times the parameters, grown evenly in width and depth as decoders are.

    Depth and width each grow by the factor's cube root, because parameters are depth × width². Activations are depth ×
    width, so they grow by the square of this root. Operations grow like the parameters.
    """
    area, width = factor ** (2 / 3), factor ** (1 / 3)

    def line(amount: Affine) -> Affine:
        return Affine(int(amount.fixed * factor), int(amount.per_sample * area))

    larger = replace(
        model,
        parameters=tuple(replace(p, elements=max(1, round(p.elements * factor))) for p in model.parameters),
        buffer_bytes=int(model.buffer_bytes * factor),
        largest_module=round(model.largest_module * factor),
        hidden_size=None if model.hidden_size is None else round(model.hidden_size * width),
    )
    return larger, activations.mapped(line, factor)


def _changes(question: Question, others: Mapping[str, Activations]) -> Iterator[Change]:
    wanted, cluster = question.wanted, question.cluster
    for name in (known.name for known in fields(Wanted)):
        value = getattr(wanted, name)
        if name not in _KEPT and value is not None:
            yield from _first_that_fits(question, [(f"{name} free instead of {value}", {"wanted": {name: None}})])
    if not wanted.ddp and wanted.stage is None:
        yield from _first_that_fits(question, [("training without ZeRO", {"wanted": {"ddp": True}})])
    if wanted.stage == "ddp" and not wanted.gradient_views:
        views = "DistributedDataParallelKwargs(gradient_as_bucket_view=True), which avoids a copy of the gradients"
        yield from _first_that_fits(question, [(views, {"wanted": {"gradient_views": True}})])
    smaller = tuple(_smaller_activations(question, others))
    yield from smaller
    for name, where in _MEMORIES.items():
        least = _least(question, name)
        no_help = smaller and name == "device_bytes" and least is not None and least > 2 * cluster.device_bytes
        if least is not None and not no_help:
            instead = show_bytes(getattr(cluster, name)) if getattr(cluster, name) else "none"
            what = f"{show_bytes(least)} {where} instead of {instead}"
            yield from _first_that_fits(question, [(what, {"cluster": {name: least}})])
    more = [cluster.nodes * 2**n for n in _DOUBLINGS if cluster.nodes * 2**n <= _MOST_NODES]
    what = f"nodes instead of {cluster.nodes}"
    yield from _first_that_fits(question, ((f"{nodes} {what}", {"cluster": {"nodes": nodes}}) for nodes in more))


_CHUNKED: Final = f"a loss that computes its logits in {_CHUNKS} chunks, and again in the backward"


def _with_logits_in_chunks(question: Question, stage: Stage) -> Activations | None:
    """Return the activations with the loss in chunks.

    None if the activations do not contain these logits, or if it is not known how much of them `save_on_cpu` moves.
    """
    kept = question.work.activations
    if kept.moved != Affine():
        return None
    logits = _LOGITS_BYTES * (question.work.model.vocabulary or 0) * kept.sample_length
    is_there = 0 < logits <= kept.under(stage).saved.per_sample
    return kept.with_logits_in_chunks(logits, _CHUNKS) if is_there else None


def _smaller_activations(question: Question, others: Mapping[str, Activations]) -> Iterator[Change]:
    """Yield changes that fit: a loss in chunks, other changes of the model, and the longest possible samples.

    The samples are halved until something fits.
    """
    kept, chunked = question.work.activations, _with_logits_in_chunks(question, 3)
    if chunked is not None:
        yield from _first_that_fits(question, [(_CHUNKED, {"work": {"activations": chunked}})])
    for what, other in others.items():
        recomputes = {"activation_checkpointing": True} if other.moved != Affine() else {}
        yield from _first_that_fits(question, [(what, {"work": {"activations": other}, "wanted": recomputes})])
    yield from _first_that_fits(question, _sharing(question))
    shorter = [kept.sample_length // 2**n for n in _DOUBLINGS if kept.sample_length // 2**n >= _SHORTEST]
    what = f"tokens instead of {kept.sample_length:,}"
    yield from _first_that_fits(
        question, ((f"samples of {n:,} {what}", {"work": {"activations": kept.of_length(n)}}) for n in shorter)
    )


def _sharing(question: Question) -> Iterator[Attempt]:
    """Yield attempts in which more and more processes share each sample.

    Yields nothing if a sample is not a sequence or if processes share samples already.
    """
    kept, cluster = question.work.activations, question.cluster
    if kept.sample_length > 1 and cluster.shared_by == 1:
        for processes in (2**n for n in _DOUBLINGS if cluster.processes % 2**n == 0):
            what = f"{SEQUENCE_KEY}: {processes}, which gives each process a part of every sample"
            part, machines = {"activations": kept.of_a_part(processes)}, {"shared_by": processes}
            yield what, {"work": part, "cluster": machines}


def _savings(question: Question, others: Mapping[str, Activations], least: Candidate) -> Iterator[tuple[str, int]]:
    """Yield what takes less on each device than the setup closest to fitting, and the bytes saved."""
    kept, setup = question.work.activations, least.setup
    tried: dict[str, tuple[Setup, Activations]] = {}
    chunked = _with_logits_in_chunks(question, setup.stage)
    if chunked is not None:
        tried[_CHUNKED] = (setup, chunked)
    if kept.checkpointed is not None and not setup.activation_checkpointing:
        tried["activation checkpointing"] = (replace(setup, activation_checkpointing=True), kept)
    for what, changed in others.items():
        recomputes = setup.activation_checkpointing or changed.moved != Affine()
        tried[what] = (replace(setup, activation_checkpointing=recomputes), changed)
    for what, changes in islice(_sharing(question), 1):
        tried[what] = (setup, changes["work"]["activations"])
    if kept.sample_length >= 2 * _SHORTEST:
        half = kept.sample_length // 2
        tried[f"samples of {half:,} tokens"] = (setup, kept.of_length(half))
    if setup.micro_batch > 1:
        tried[f"micro-batch {setup.micro_batch // 2}"] = (replace(setup, micro_batch=setup.micro_batch // 2), kept)
    for what, (other, activations) in tried.items():
        needed = _changed(question, {"work": {"activations": activations}}).measure(other)
        more = needed.host_bytes - least.footprint.host_bytes
        if needed.device_bytes < least.footprint.device_bytes:
            extra = f", with {show_bytes(more)} more in CPU memory" if more > 0 else ""
            yield f"{what}{extra}", least.footprint.device_bytes - needed.device_bytes


def _changed(question: Question, changes: Mapping[str, Mapping[str, Any]]) -> Question:
    """Return the question with other fields in its parts."""
    parts = {name: replace(getattr(question, name), **fields) for name, fields in changes.items()}
    return replace(question, **parts)


def _first_that_fits(question: Question, attempts: Iterable[Attempt]) -> Iterator[Change]:
    """Yield the first attempt that makes something fit; nothing if none does."""
    for what, changes in attempts:
        changed, chosen = _changed(question, changes), None
        with suppress(ConfigError):  # the batch cannot be divided among these processes
            chosen = plan(changed.work, changed.cluster, changed.wanted).chosen if _fits(changed) else None
        if chosen is not None:
            yield Change(what, chosen, changed.cluster)
            return


def _least(question: Question, name: str) -> int | None:
    """Return the smallest displayable amount of one kind of memory that suffices; None if no amount does."""
    roomy = _changed(question, {"cluster": {name: _PLENTY}})
    # DeepSpeed makes its flat copy in CPU memory if the device has no room. A device of 1 byte shows the least that way
    # needs.
    needed = _leanest(_changed(question, {"cluster": {name: 1}}) if name == "device_bytes" else roomy)
    fitting = (found for found in needed if not roomy.missing_memory(found))
    least = min((int(getattr(found, name) / (1 - question.wanted.margin)) + 1 for found in fitting), default=None)
    return least and round_up(least)


def _fits(question: Question) -> bool:
    return any(not question.missing_memory(found) for found in _leanest(question))


def _leanest(question: Question) -> Iterator[Footprint]:
    """Yield the memory of every setup that could run, with its smallest micro-batch.

    If none of these fits, nothing does.

    Raises:
        ConfigError: the fixed settings contradict each other.
    """
    work, cluster, wanted = question.work, question.cluster, question.wanted
    smallest = batches(cluster, wanted)[-1]
    pins = (True, False) if wanted.pin_memory is None else (wanted.pin_memory,)
    possible = (option for option in options(work, cluster, wanted) if not option.refused)
    for setup in (setup for option in possible for setup in option.setups):
        for pin in pins if setup.offload_optimizer != "none" else pins[:1]:
            yield question.measure(replace(setup, **smallest, pin_memory=pin))


def _largest(question: Question) -> int:
    """Return the elements of the largest model that fits, by bisecting the factor to a thousandth."""
    work = question.work

    def fits(factor: float) -> bool:
        model, activations = scale_model(work.model, work.activations, factor)
        return _fits(replace(question, work=replace(work, model=model, activations=activations)))

    if not work.model.elements:
        return 0
    low, high = 1 / work.model.elements, _MOST_ELEMENTS / work.model.elements
    if not fits(low):
        return 0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return int(low * work.model.elements)
