"""Properties of every plan, for any model and machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zero_plugin.errors import ConfigError
from zero_plugin.plan.costs import footprint, step_time
from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.machines import KNOWN_DEVICES, state_cluster
from zero_plugin.plan.search import ALIKE, Candidate, Choice, Wanted, batches, options, plan
from zero_plugin.plan.situation import (
    Activations,
    Affine,
    Cluster,
    ModelSizes,
    OptimizerSizes,
    ParameterSize,
    Setup,
    Workload,
    highest,
)
from zero_plugin.plan.what_if import scale_model, what_if

GIB = 2**30
EXAMPLES = settings(max_examples=25)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelSizes, Activations]:
    """Draw a decoder's shape, from a few million parameters to a hundred billion."""
    hidden = draw(st.sampled_from([256, 512, 1024, 2048, 4096, 6144, 8192]))
    layers = draw(st.integers(2, 96))
    length = draw(st.sampled_from([128, 1024, 4096]))
    trainable = draw(st.sampled_from([True, True, False]))
    parameters = (
        ParameterSize(32_000 * hidden, trainable=trainable),
        ParameterSize(4 * hidden**2, 3 * layers, trainable=trainable),
        ParameterSize(hidden, 2 * layers),
    )
    model = ModelSizes("drawn", parameters, largest_module=4 * hidden**2, hidden_size=hidden, layers=layers)
    kept = layers * length * hidden * draw(st.integers(8, 40))
    recomputed = Affine(0, 2 * layers * length * hidden) if draw(st.booleans()) else None
    return model, Activations(
        Affine(0, kept),
        Affine(0, length * 32_000),
        recomputed,
        None if recomputed is None else Affine(0, kept // layers + length * 32_000),
        flops_per_sample=2.0 * model.elements * length,
        sample_length=length,
    )


clusters = st.builds(
    lambda gpu, gpus, nodes, host, disk: state_cluster(
        gpu=gpu, gpus=gpus, nodes=nodes, host_memory=host * GIB, nvme=disk * GIB or None
    ),
    st.sampled_from([device.name for device in KNOWN_DEVICES]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 1, 2, 8]),
    st.integers(16, 2048),
    st.sampled_from([0, 0, 500, 4000]),
)
optimizers = st.sampled_from([OptimizerSizes(), OptimizerSizes("lion", 1), OptimizerSizes("sgd", 0)])


def batch_for(cluster: Cluster, samples: int) -> Wanted:
    return Wanted(global_batch=samples * cluster.processes)


def pace(choice: Choice) -> float:
    """Return the choice's seconds per sample, infinite if nothing fits. The search takes any of equal options."""
    return float("inf") if choice.chosen is None else choice.chosen.seconds_per_sample / (1 + ALIKE)


@EXAMPLES
@given(
    models(),
    clusters,
    optimizers,
    st.sampled_from([1, 6, 16]),
    st.sampled_from(["device_bytes", "host_bytes", "nvme_bytes"]),
    st.floats(1.01, 8),
)
def test_more_memory_is_never_slower(
    drawn: tuple[ModelSizes, Activations],
    cluster: Cluster,
    optimizer: OptimizerSizes,
    samples: int,
    which: str,
    factor: float,
) -> None:
    """With more of one memory on the same machines, the plan is as fast or faster."""
    more: dict[str, Any] = {which: int(getattr(cluster, which) * factor) + GIB}
    wanted = batch_for(cluster, samples)
    before = plan(Workload(*drawn, optimizer), cluster, wanted)
    after = plan(Workload(*drawn, optimizer), replace(cluster, **more), wanted)
    assert pace(after) <= pace(before) * (1 + ALIKE) * (1 + 1e-7)


@EXAMPLES
@given(models(), clusters, optimizers, st.floats(1.02, 3))
def test_larger_models_are_shared_as_much_or_more(
    drawn: tuple[ModelSizes, Activations], cluster: Cluster, optimizer: OptimizerSizes, factor: float
) -> None:
    """With fixed batch and offload, a larger model of the same shape never gets a lower stage.

    CPU memory is ample. If it runs out, stage 2 needs less of it than stage 3 does.
    """
    cluster = replace(cluster, host_bytes=2**60)
    model, activations = drawn
    larger, scaled = scale_model(model, activations, factor)
    kept = replace(activations, flops_per_sample=scaled.flops_per_sample)
    for offload in ("none", "cpu"):
        wanted = Wanted(
            micro_batch=1,
            accumulation=4,
            offload_optimizer=offload,
            offload_param="none",
            ratio=1.0,
            activation_checkpointing=False,
        )
        small = plan(Workload(model, activations, optimizer), cluster, wanted).chosen
        large = plan(Workload(larger, kept, optimizer), cluster, wanted).chosen
        if large is not None:
            assert small is not None
            assert (large.setup.stage or 0) >= (small.setup.stage or 0)


@EXAMPLES
@given(models(), clusters, optimizers, st.sampled_from([1, 6, 16, None]), st.sampled_from([0.0, 0.1, 0.35]))
def test_what_fits_fits(
    drawn: tuple[ModelSizes, Activations],
    cluster: Cluster,
    optimizer: OptimizerSizes,
    samples: int | None,
    margin: float,
) -> None:
    """Each candidate's memory and time are its setup's. It fits if and only if the setup has room."""
    total = None if samples is None else samples * cluster.processes
    choice = plan(Workload(*drawn, optimizer), cluster, Wanted(global_batch=total, margin=margin))
    usable = replace(cluster, device_bytes=int((1 - margin) * cluster.device_bytes))
    for candidate in choice.table:
        setup = candidate.setup
        needed = footprint(Workload(*drawn, optimizer), setup, usable)
        assert candidate.footprint == needed
        assert candidate.time == step_time(Workload(*drawn, optimizer), setup, cluster)
        if total is not None:
            assert setup.micro_batch * setup.accumulation * cluster.processes == total
        room = (
            needed.device_bytes <= (1 - margin) * cluster.device_bytes
            and needed.host_bytes <= (1 - margin) * cluster.host_bytes
            and needed.nvme_bytes <= (1 - margin) * cluster.nvme_bytes
        )
        if not candidate.rejected:
            assert room
        elif "no NVMe disk" not in candidate.rejected and "own Adam" not in candidate.rejected:
            assert not room
    fitting = [candidate for candidate in choice.table if not candidate.rejected]
    assert (choice.chosen is None) == (not fitting)
    if choice.chosen is not None:
        assert choice.chosen in fitting
        assert pace(choice) <= min(candidate.seconds_per_sample for candidate in fitting) * (1 + 1e-8)


def every_setup(cluster: Cluster, work: Workload, wanted: Wanted) -> Iterator[Setup]:
    """Yield every setup that the search may choose, one by one."""
    bases = [setup for option in options(work, cluster, wanted) if not option.refused for setup in option.setups]
    for setup in bases:
        pins = (True, False) if setup.offload_optimizer != "none" and wanted.pin_memory is None else (setup.pin_memory,)
        for pin in pins:
            for batch in batches(cluster, wanted):
                yield replace(setup, pin_memory=pin, **batch)


anything = given(
    models(),
    clusters,
    optimizers,
    st.sampled_from([1, 6, 16, None]),
    st.sampled_from(["no", "bf16", "fp16"]),
    st.booleans(),
    st.booleans(),
)


def compare_with_trying_everything(
    drawn: tuple[ModelSizes, Activations],
    cluster: Cluster,
    optimizer: OptimizerSizes,
    samples: int | None,
    precision: Any,
    overlap: bool,
    ddp: bool,
) -> None:
    """Check that no fitting setup, with any batch, pinned or not, is faster than the choice by more than `ALIKE`."""
    work = Workload(*drawn, optimizer)
    total = None if samples is None else samples * cluster.processes
    wanted = Wanted(global_batch=total, precision=precision, overlap_comm=overlap or None, ddp=ddp)
    budgets = {name: int(0.9 * getattr(cluster, name)) for name in ("device_bytes", "host_bytes", "nvme_bytes")}
    usable = replace(cluster, device_bytes=budgets["device_bytes"])
    best = float("inf")
    for setup in every_setup(cluster, work, wanted):
        needed = footprint(work, setup, usable)
        if all(getattr(needed, name) <= budgets[name] for name in budgets):
            seconds = step_time(work, setup, cluster).seconds / (setup.micro_batch * setup.accumulation)
            best = min(best, seconds)
    chosen = plan(work, cluster, wanted).chosen
    assert (chosen is None) == (best == float("inf"))
    if chosen is not None:
        assert chosen.seconds_per_sample <= best * (1 + ALIKE + 1e-8)


test_the_search_finds_what_trying_everything_finds = settings(max_examples=40)(anything(compare_with_trying_everything))
test_two_hundred_times = pytest.mark.campaign(settings(max_examples=200)(anything(compare_with_trying_everything)))


FIXED: dict[str, st.SearchStrategy[Any]] = {
    "stage": st.sampled_from(["ddp", 0, 1, 2, 3]),
    "precision": st.sampled_from(["no", "bf16", "fp16"]),
    "offload_optimizer": st.sampled_from(["none", "cpu", "nvme"]),
    "offload_param": st.sampled_from(["none", "cpu", "nvme"]),
    "ratio": st.sampled_from([0.3, 1.0]),
    "sub_group_size": st.just(12_345_678),
    "micro_batch": st.sampled_from([1, 2, 3]),
    "accumulation": st.sampled_from([1, 2, 4]),
    "activation_checkpointing": st.booleans(),
    "reduce_bucket": st.just(30_000_000),
    "persistence_threshold": st.just(500),
    "overlap_comm": st.just(False),
    "pin_memory": st.booleans(),
}


@settings(max_examples=80)
@given(
    models(),
    clusters,
    st.lists(st.sampled_from(sorted(FIXED)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: FIXED[name] for name in names})
    ),
)
def test_what_is_fixed_is_kept(drawn: tuple[ModelSizes, Activations], cluster: Cluster, fixed: dict[str, Any]) -> None:
    """Every candidate has every fixed value, or the question is refused because the values exclude each other."""
    try:
        choice = plan(Workload(*drawn, OptimizerSizes()), cluster, Wanted(global_batch=12 * cluster.processes, **fixed))
    except ConfigError as error:
        assert "no such strategy" in str(error) or "train_batch_size" in str(error)  # noqa: PT017
        return
    assert choice.table
    for candidate in choice.table:
        for name, value in fixed.items():
            got = getattr(candidate.setup, name)
            if name == "ratio" and candidate.setup.offload_optimizer == "none":
                continue  # of nothing
            if name == "sub_group_size" and candidate.setup.stage != 3:
                continue  # read at stage 3 only
            assert got == (None if value == "ddp" else value), name


@EXAMPLES
@given(models(), clusters, optimizers)
def test_same_question_same_answer(
    drawn: tuple[ModelSizes, Activations], cluster: Cluster, optimizer: OptimizerSizes
) -> None:
    """Searching twice gives equal plans, line by line."""
    wanted = batch_for(cluster, 6)
    assert plan(Workload(*drawn, optimizer), cluster, wanted) == plan(Workload(*drawn, optimizer), cluster, wanted)


@settings(max_examples=8)
@given(models(), clusters)
def test_what_if(drawn: tuple[ModelSizes, Activations], cluster: Cluster) -> None:
    """Each change makes the model fit. A model of the largest size fits, and one a hundredth larger does not.

    With page-locked tensors, rounded up to powers of two, or with complete sub-groups on one side, a slightly larger
    model can take less.
    """
    wanted = replace(batch_for(cluster, 6), pin_memory=False, ratio=1.0)
    choice = plan(Workload(*drawn, OptimizerSizes()), cluster, wanted)
    answer = what_if(Workload(*drawn, OptimizerSizes()), cluster, wanted)
    assert bool(answer.changes) <= (choice.chosen is None)
    for change in answer.changes:
        assert not change.chosen.rejected
        if change.what.startswith(("a loss", "samples of")):
            continue  # of other activations
        assert footprint(Workload(*drawn, OptimizerSizes()), change.chosen.setup, change.cluster).device_bytes <= (
            change.cluster.device_bytes
        )
    assume(answer.largest_elements > 10**7)  # below, rounding of small tensors counts
    for share, fits in ((0.99, True), (1.01, False)):
        resized = scale_model(*drawn, share * answer.largest_elements / drawn[0].elements)
        assert (plan(Workload(*resized, OptimizerSizes()), cluster, wanted).chosen is not None) == fits


@EXAMPLES
@given(models(), clusters, optimizers, st.sampled_from([1, 2, 3]))
def test_larger_micro_batches_are_never_slower(
    drawn: tuple[ModelSizes, Activations], cluster: Cluster, optimizer: OptimizerSizes, stage: Any
) -> None:
    """This is why the search takes the largest that fits: the same samples in fewer micro-batches."""
    setups = [Setup(stage=stage, micro_batch=m, accumulation=16 // m) for m in (1, 2, 4, 8, 16)]
    seconds = [step_time(Workload(*drawn, optimizer), setup, cluster).seconds for setup in setups]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(seconds))


def test_simplest_of_equally_fast_ones() -> None:
    """If all weights fit and only computation takes time, plain training wins over every stage.

    The lines list every option.
    """
    model = ModelSizes("one", (ParameterSize(1000, 1000),))
    cluster = replace(state_cluster(gpu="A100-80GB", nvme=GIB * 1000), memory_bandwidth=1e30, pcie_bandwidth=1e30)
    cluster = replace(cluster, adam_bandwidth=1e30, nvme_read=1e30, nvme_write=1e30)
    activations = Activations(Affine(0, 1000), checkpointed=Affine(0, 10), flops_per_sample=1e12)
    choice = plan(Workload(model, activations, OptimizerSizes()), cluster, Wanted(global_batch=4))
    assert choice.chosen is not None
    assert choice.chosen.setup.stage is None
    assert not choice.chosen.setup.activation_checkpointing
    kinds = {(c.setup.stage, c.setup.offload_optimizer, c.setup.offload_param) for c in choice.table}
    devices = [("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "cpu"), ("nvme", "nvme")]
    assert kinds == {
        *((stage, "none", "none") for stage in (None, 1, 2, 3)),
        *((stage, "cpu", "none") for stage in (1, 2)),
        *((3, *pair) for pair in devices),
    }
    assert any(c.setup.ratio < 1 for c in choice.table)
    assert all(isinstance(c, Candidate) for c in choice.table)
    assert {f.name for f in fields(Setup)} <= {f.name for f in fields(Wanted)} | {"sub_group_size"}


@given(
    st.lists(st.tuples(st.integers(-(10**12), 10**12), st.integers(-(10**9), 10**9)), min_size=1), st.integers(1, 4096)
)
@EXAMPLES
def test_highest_line(drawn: list[tuple[int, int]], samples: int) -> None:
    """The few lines kept of many give their maximum at every micro-batch, far beyond 16 too."""
    lines = [Affine(*pair) for pair in drawn]
    found = highest(lines)
    most = max(line.at(samples) for line in lines)
    assert abs(found.at(samples) - most) <= 1e-9 * abs(most)
    assert len(found.lines) <= len(set(lines))


@given(
    st.sampled_from([10**8, 10**9, 7 * 10**9, 3 * 10**10]),
    st.sampled_from([128, 2048]),
    st.sampled_from([1, 7, 64]),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from([1, 8]),
    st.sampled_from([1, 4]),
)
@EXAMPLES
def test_checkpointing_never_costs_more(
    size: int, length: int, samples: int, stage: Any, processes: int, accumulation: int
) -> None:
    """A decoder's device memory with activation checkpointing is at most its memory without."""
    model = decoder_sizes(parameters=size)
    cluster = state_cluster(gpu_memory=1000 * GIB, host_memory=1000 * GIB, gpus=processes)
    plain = Setup(stage=stage, micro_batch=samples, accumulation=accumulation)
    least, most = (
        footprint(Workload(model, decoder_activations(model, length), OptimizerSizes()), setup, cluster).device_bytes
        for setup in (replace(plain, activation_checkpointing=True), plain)
    )
    assert least <= most
