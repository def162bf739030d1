"""Changes that would make a model fit, with amounts worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.search import Wanted, plan
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, OptimizerSizes, ParameterSize, Workload
from zero_plugin.plan.what_if import WhatIf, scale_model, what_if

GIB = 2**30
ADAM = OptimizerSizes()
MODEL = decoder_sizes(parameters=7 * 10**9)
WORK = decoder_activations(MODEL, 2048)


def ask(cluster: Cluster, wanted: Wanted) -> WhatIf:
    return what_if(Workload(MODEL, WORK, ADAM), cluster, wanted)


def fits(cluster: Cluster, wanted: Wanted) -> bool:
    return plan(Workload(MODEL, WORK, ADAM), cluster, wanted).chosen is not None


def test_nothing_to_change_where_it_fits() -> None:
    """Only the largest model is given then."""
    answer = ask(state_cluster(gpu="A100-80GB", gpus=8, host_memory=500 * GIB), Wanted(global_batch=64))
    assert answer.changes == ()
    assert answer.largest_elements > 7 * 10**9


def test_fixed_field_is_freed() -> None:
    """Stage 2 does not fit 7B on eight 40 GB GPUs without recomputation. Another stage does, and comes first."""
    cluster = state_cluster(gpu="A100-40GB", gpus=8, host_memory=500 * GIB)
    wanted = Wanted(global_batch=64, stage=2, offload_optimizer="none", activation_checkpointing=False)
    first = ask(cluster, wanted).changes[0]
    assert first.what == "stage free instead of 2"
    assert first.chosen.setup.stage == 3
    assert first.cluster == cluster


@pytest.mark.parametrize(("flag", "where"), [("host_bytes", "in CPU memory"), ("device_bytes", "on each device")])
def test_least_memory(flag: str, where: str) -> None:
    """The stated amount suffices, and two hundredths less do not."""
    cluster = state_cluster(gpu="A100-40GB", host_memory=32 * GIB)
    wanted = Wanted(global_batch=4, pin_memory=False, ratio=1.0)
    assert not fits(cluster, wanted)
    (change,) = (change for change in ask(cluster, wanted).changes if where in change.what)
    least = getattr(change.cluster, flag)
    assert fits(change.cluster, wanted)
    assert not fits(replace(cluster, **{flag: int(0.98 * least)}), wanted)


def test_least_device_memory_holds_no_flat_copy() -> None:
    """Stage 2 with the optimizer on the host makes its flat copy there too, so a small device suffices."""
    cluster = state_cluster(gpu_memory=10 * GIB, host_memory=500 * GIB)
    wanted = Wanted(stage=2, precision="fp16", offload_optimizer="cpu", micro_batch=1, activation_checkpointing=True)
    (change,) = (c for c in ask(cluster, wanted).changes if "on each device" in c.what)
    assert fits(change.cluster, wanted)
    assert change.cluster.device_bytes < 25 * GIB  # 16-bit weights of 12.5 GiB, and activations, in 90 % of it


def test_fewest_nodes() -> None:
    """Nodes double until it fits: stage 3's 18 × 3.5 GB in cards of 24 GB (22 usable) need four."""
    model = decoder_sizes(parameters=3_500_000_000)
    cluster = state_cluster(gpu="RTX-3090", host_memory=8 * GIB)
    wanted = Wanted(micro_batch=1, offload_optimizer="none")
    changes = what_if(Workload(model, decoder_activations(model, 2048), ADAM), cluster, wanted).changes
    (nodes,) = (change for change in changes if "nodes" in change.what)
    assert nodes.what == "4 nodes instead of 1"


def test_disk() -> None:
    """If none is stated, one is offered, with its required bytes."""
    model = decoder_sizes(parameters=30 * 10**9)
    cluster = state_cluster(gpu="A100-40GB", host_memory=300 * GIB)
    changes = what_if(Workload(model, decoder_activations(model, 2048), ADAM), cluster, Wanted(global_batch=4)).changes
    (disk,) = (change for change in changes if "NVMe" in change.what)
    assert disk.what.endswith("GiB of NVMe disk instead of none")
    assert disk.chosen.setup.offload_optimizer == "nvme"
    assert disk.chosen.footprint.nvme_bytes <= disk.cluster.nvme_bytes


def test_scaling() -> None:
    """Eight times the parameters: twice hidden size and depth, four times the activations, eight times all copies."""
    checkpointed = {"checkpointed": Affine(0, 100), "checkpointed_transient": Affine(0, 20)}
    work = Activations(Affine(800, 1000), Affine(0, 10), **checkpointed, flops_per_sample=1e9, autocast=WORK)
    model, scaled = scale_model(MODEL, work, 8)
    assert model.elements == pytest.approx(8 * MODEL.elements)
    assert model.hidden_size == 2 * (MODEL.hidden_size or 0)
    assert scaled.saved.fixed == pytest.approx(6400, abs=2)
    assert scaled.saved.per_sample == pytest.approx(4000, abs=2)
    assert scaled.checkpointed is not None
    assert scaled.checkpointed.per_sample == pytest.approx(400, abs=2)
    assert scaled.flops_per_sample == pytest.approx(8e9)
    assert scaled.autocast is not None
    assert scaled.autocast.saved.per_sample == pytest.approx(4 * WORK.saved.per_sample, rel=1e-6)


def test_largest_on_one_device() -> None:
    """Plain training takes 20 bytes a parameter while it steps: of 36.4 GB (90 %, less context and 5 %) 1.8 billion."""
    cluster = state_cluster(gpu="A100-40GB", host_memory=8 * GIB)
    wanted = Wanted(stage="ddp", global_batch=1, activation_checkpointing=True)
    assert ask(cluster, wanted).largest_elements == pytest.approx(1.85e9, rel=0.05)


def test_model_without_parameters() -> None:
    """It has nothing to scale."""
    empty = ModelSizes("none", ())
    assert what_if(Workload(empty, WORK, ADAM), state_cluster(gpu="T4"), Wanted(global_batch=1)).largest_elements == 0


def test_long_samples() -> None:
    """Logits of 65,536 tokens and 128,256 words take 63 GiB, and their gradients as much. In eight chunks all fits.

    If one change suffices, a device of more than twice the memory is not advised.
    """
    model = decoder_sizes(parameters=8 * 10**9, hidden_size=4096, layers=32, vocabulary=128_256)
    work = Workload(model, decoder_activations(model, 65_536), ADAM)
    cluster = state_cluster(gpu="A100-80GB", gpus=8, host_memory=2000 * GIB)
    answer = what_if(work, cluster, Wanted())
    assert [change.what for change in answer.changes] == [
        "a loss that computes its logits in 8 chunks, and again in the backward",
        "sequence_parallel_size: 4, which gives each process a part of every sample",
        "samples of 16,384 tokens instead of 65,536",
    ]
    of_a_part = what_if(
        replace(work, activations=work.activations.of_a_part(4)), replace(cluster, shared_by=4), Wanted()
    )
    assert not of_a_part.changes
    (chunks, less), *_ = answer.savings
    assert any(what.startswith("sequence_parallel_size: 2") for what, _ in answer.savings)
    assert chunks == answer.changes[0].what
    logits = 8 * 128_256 * 65_536
    assert less == pytest.approx(2 * logits * 7 / 8, rel=0.05)
    plain = what_if(work, cluster, Wanted(activation_checkpointing=False))
    assert {"activation checkpointing", "samples of 32,768 tokens"} < {what for what, _ in plain.savings}
    assert any(change.what.startswith("activation_checkpointing free") for change in plain.changes) is False
    halved = what_if(work, cluster, Wanted(micro_batch=4))
    assert "micro-batch 2" in {what for what, _ in halved.savings}


def test_logits_in_chunks_are_what_a_smaller_vocabulary_would_be() -> None:
    """They equal the decoder's formula within 5 %, except for the chunks' own memory."""
    whole, small = (decoder_sizes(hidden_size=2048, layers=16, vocabulary=words) for words in (128_000, 16_000))
    chunked = decoder_activations(whole, 4096).with_logits_in_chunks(8 * 128_000 * 4096, 8)
    expected = decoder_activations(small, 4096)
    assert chunked.saved.at(2) == pytest.approx(expected.saved.at(2), rel=0.05)
    assert chunked.transient.at(2) == pytest.approx(expected.transient.at(2), rel=0.25)


def test_what_nvme_cannot_hold() -> None:
    """The published ZeRO-Infinity fits 1T on a node of 16 V100 and 1.5 TB.

    This DeepSpeed keeps all gradients in CPU memory, and the plan says so.
    """
    model = decoder_sizes(parameters=10**12, hidden_size=25_600, layers=128)
    cluster = state_cluster(gpu="V100-32GB", gpus=16, host_memory=1500 * 10**9, nvme=28 * 10**12)
    choice = plan(Workload(model, decoder_activations(model, 1024), ADAM), cluster, Wanted(precision="fp16"))
    assert choice.chosen is None
    told = [c.rejected for c in choice.table if c.setup.offload_param == "nvme"]
    assert any("mostly gradients" in why and "DeepSpeed 0.19.8 keeps there and never on NVMe" in why for why in told)


ONE = ModelSizes("one", (ParameterSize(1000),))
CHANGED = {
    "chunk_layer": Activations(Affine(0, 10 * GIB)),
    "save_on_cpu": Activations(Affine(0, 5 * GIB), moved=Affine(0, 35 * GIB)),
}


@pytest.mark.parametrize(("host", "processes"), [(100, 1), (30, 1), (30, 2)])
def test_changes_of_the_model(host: int, processes: int) -> None:
    """40 GiB of activations on 24: each change alone is enough if CPU memory holds the second's activations.

    If two processes share a sample, each has a half, and their machine has both halves.
    """
    cluster = state_cluster(gpu_memory=24 * GIB, host_memory=host * GIB, gpus=processes)
    cluster = replace(cluster, shared_by=processes)
    whole = Activations(Affine(0, 40 * GIB * processes))
    work = Workload(ONE, whole.of_a_part(processes), ADAM)
    wanted = Wanted(stage="ddp", micro_batch=1, precision="no")
    answer = what_if(work, cluster, wanted, lambda: CHANGED)
    enough = [change.what for change in answer.changes if change.what in CHANGED]
    assert enough == (["chunk_layer", "save_on_cpu"] if host == 100 else ["chunk_layer"])
    savings = dict(answer.savings)
    assert savings["chunk_layer"] == pytest.approx((40 - 10 / processes) * GIB, rel=0.06)
    assert savings["save_on_cpu, with 35 GiB more in CPU memory"] == pytest.approx((40 - 5 / processes) * GIB, rel=0.06)
    if host == 100:
        (moving,) = (change for change in answer.changes if change.what == "save_on_cpu")
        assert moving.chosen.setup.activation_checkpointing
        assert moving.chosen.footprint.host["activations"] == 35 * GIB


def test_the_model_is_not_changed_where_activations_are_not_why() -> None:
    """A new trace would gain nothing."""

    def never() -> dict[str, Activations]:
        raise AssertionError("called")

    cluster = state_cluster(gpu="A100-40GB", host_memory=8 * GIB)
    large = decoder_sizes(parameters=30 * 10**9)
    assert what_if(Workload(large, Activations(Affine(0, GIB)), ADAM), cluster, Wanted(micro_batch=1), never).changes
