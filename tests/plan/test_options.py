"""The strategies and the batches that the search considers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_plugin.errors import ConfigError
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.search import Wanted, batches, options, plan
from zero_plugin.plan.situation import Activations, Affine, ModelSizes, OptimizerSizes, ParameterSize, Workload

MODEL = ModelSizes("one", (ParameterSize(1_000_000, 1000),), hidden_size=8192)
WORK = Activations(Affine(0, 10**6), flops_per_sample=1e12)
FOUR = state_cluster(gpu="A100-40GB", gpus=4, nvme=10**13)


def setups(wanted: Wanted, **changed: Any) -> list[Any]:
    given = {"optimizer": OptimizerSizes(), "cluster": FOUR, "activations": WORK} | changed
    found = options(Workload(MODEL, given["activations"], given["optimizer"]), given["cluster"], wanted)
    return [(option, setup) for option in found for setup in option.setups]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(global_batch=24), [(6, 1), (3, 2), (2, 3), (1, 6)]),
        (Wanted(global_batch=24, micro_batch=2), [(2, 3)]),
        (Wanted(global_batch=24, accumulation=2), [(3, 2)]),
        (Wanted(global_batch=24, micro_batch=6, accumulation=1), [(6, 1)]),
        (Wanted(micro_batch=5), [(5, 1)]),
        (Wanted(micro_batch=5, accumulation=3), [(5, 3)]),
    ],
)
def test_batches(wanted: Wanted, expected: list[tuple[int, int]]) -> None:
    """Every micro-batch and accumulation that make the global batch on four processes, the largest first."""
    assert batches(FOUR, wanted) == [{"micro_batch": size, "accumulation": steps} for size, steps in expected]


def test_any_batch() -> None:
    """Without a global batch: the powers of two, with the fixed accumulation."""
    found = batches(FOUR, Wanted(accumulation=2))
    assert found[0] == {"micro_batch": 4096, "accumulation": 2}
    assert found[-1] == {"micro_batch": 1, "accumulation": 2}
    assert len(found) == 13


def test_every_batch() -> None:
    """On request every number is tried, so the largest that fits is exact: one more does not fit."""
    wanted = Wanted(stage=2, offload_optimizer="none", overlap_comm=False, every_batch=True)
    choice = plan(Workload(MODEL, replace(WORK, saved=Affine(0, 10**8)), OptimizerSizes()), FOUR, wanted)
    assert choice.chosen is not None
    found = choice.chosen.setup.micro_batch
    assert found & (found - 1)
    more = replace(wanted, micro_batch=found + 1)
    work = Workload(MODEL, replace(WORK, saved=Affine(0, 10**8)), OptimizerSizes())
    assert plan(work, FOUR, more).chosen is None
    assert plan(work, FOUR, replace(wanted, micro_batch=found)).chosen is not None


@pytest.mark.parametrize(
    ("wanted", "stages"),
    [
        (Wanted(), {None, 1, 2, 3}),
        (Wanted(ddp=False, precision="no"), {0, 1, 2, 3}),
        (Wanted(ddp=False, precision="fp16"), {0, 1, 2, 3}),
        (Wanted(ddp=False, accumulation=1), {0, 1, 2, 3}),
        (Wanted(ddp=False, accumulation=2), {1, 2, 3}),
        (Wanted(ddp=False, global_batch=24), {1, 2, 3}),
    ],
)
def test_stage_0_stands_in_for_ddp(wanted: Wanted, stages: set[int | None]) -> None:
    """This holds if DeepSpeed runs for every choice, unless stage 0 sums bf16 gradients in bf16, as no other does."""
    assert {setup.stage for _, setup in setups(wanted)} == stages


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(global_batch=10), "10 is no multiple of processes 4"),
        (Wanted(global_batch=2), "2 is no multiple of processes 4"),
        (Wanted(global_batch=24, micro_batch=4), "24 is no multiple of micro-batch 4 × processes 4"),
        (
            Wanted(global_batch=24, micro_batch=2, accumulation=2),
            "24 is not micro-batch 2 × accumulation 2 × processes 4",
        ),
    ],
)
def test_batches_that_cannot_be(wanted: Wanted, told: str) -> None:
    """The error has all the numbers."""
    with pytest.raises(ConfigError, match=told):
        batches(FOUR, wanted)


@pytest.mark.parametrize(
    "fixed",
    [
        {"stage": 2, "offload_param": "cpu"},
        {"stage": "ddp", "offload_optimizer": "cpu"},
        {"stage": 1, "offload_optimizer": "nvme"},
        {"stage": 2, "ratio": 0.5},
        {"offload_optimizer": "nvme", "ratio": 0.5},
    ],
)
def test_what_excludes_itself(fixed: dict[str, Any]) -> None:
    """A stage that does not support an offload is refused, not changed."""
    with pytest.raises(ConfigError, match="no such strategy") as told:
        setups(Wanted(**fixed))
    assert "None" not in str(told.value)
    assert (
        ("ratio 0.5" in str(told.value)) == ("A ratio below 1 needs stage 3" in str(told.value)) == ("ratio" in fixed)
    )


def test_partial_offload_needs_deepspeeds_adam() -> None:
    """For another optimizer the line is listed as refused. Full offload is not refused."""
    found = setups(Wanted(stage=3, offload_optimizer="cpu"), optimizer=OptimizerSizes("lion", 1))
    assert {bool(option.refused) for option, setup in found if setup.ratio < 1} == {True}
    assert {bool(option.refused) for option, setup in found if setup.ratio == 1} == {False}


def test_partial_offload_acts() -> None:
    """A sub-group is a twentieth of a process's elements, so a tenth of them exists."""
    found = [setup for _, setup in setups(Wanted(stage=3, offload_optimizer="cpu")) if setup.ratio < 1]
    assert {setup.ratio for setup in found} == {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}
    assert {setup.sub_group_size for setup in found} == {10**9 // 4 // 20}


def test_whole_offload_before_partial_where_both_are_as_fast() -> None:
    """With the fastest possible host a ratio gains nothing."""
    cluster = replace(FOUR, devices=1, memory_bandwidth=1e30, pcie_bandwidth=1e30, adam_bandwidth=1e30)
    wanted = Wanted(stage=3, offload_optimizer="cpu", offload_param="none", micro_batch=1)
    chosen = plan(Workload(MODEL, WORK, OptimizerSizes()), cluster, wanted).chosen
    assert chosen is not None
    assert chosen.setup.ratio == 1.0


def test_recomputation_only_where_there_are_blocks() -> None:
    """It is tried if it was traced, and fixed if it is fixed."""
    assert not any(setup.activation_checkpointing for _, setup in setups(Wanted()))
    blocks = replace(WORK, checkpointed=Affine(0, 10))
    assert {s.activation_checkpointing for _, s in setups(Wanted(), activations=blocks)} == {False, True}
    fixed = setups(Wanted(activation_checkpointing=True), activations=blocks)
    assert {setup.activation_checkpointing for _, setup in fixed} == {True}


def test_sizes_are_those_that_resolution_writes() -> None:
    """Buckets follow the hidden size (8192² elements). Tensors up to ten times it stay unpartitioned.

    Fixed sizes stay.
    """
    (setup, *_) = (setup for _, setup in setups(Wanted(reduce_bucket=123)))
    assert setup.reduce_bucket == 123
    assert setup.prefetch_bucket == int(0.9 * 8192**2)
    assert setup.persistence_threshold == 81920


def test_the_largest_parameter_fits_a_swap_buffer() -> None:
    """As in resolution, it is at least DeepSpeed's 1e8 elements."""
    large = replace(MODEL, parameters=(ParameterSize(3 * 10**8),))
    for model, elements in ((MODEL, 10**8), (large, 3 * 10**8)):
        found = options(Workload(model, WORK, OptimizerSizes()), FOUR, Wanted())
        assert {setup.param_buffer for option in found for setup in option.setups} == {elements}


@pytest.mark.parametrize(("precision", "width"), [("no", 4), ("bf16", 4), ("fp16", 2)])
def test_gradients_sum_as_resolution_has_them(precision: Any, width: int) -> None:
    """In fp32 under bf16, in fp16 under fp16."""
    assert {setup.gradient_bytes for _, setup in setups(Wanted(precision=precision))} == {width}


def test_overlap() -> None:
    """It is on at stage 3 and tried at stage 2 with several processes. Below there is none."""
    found = {(setup.stage, setup.overlap_comm) for _, setup in setups(Wanted())}
    assert found == {(None, False), (1, False), (2, False), (2, True), (3, True)}
    alone = {(setup.stage, setup.overlap_comm) for _, setup in setups(Wanted(), cluster=replace(FOUR, devices=1))}
    assert alone == found - {(2, True)}
    asked = setups(Wanted(overlap_comm=True))
    assert all(setup.overlap_comm == (setup.stage in (2, 3)) for _, setup in asked)
