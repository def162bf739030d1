"""The time of a step, compared with amounts worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_plugin.plan.costs import StepTime, step_time
from zero_plugin.plan.situation import (
    Activations,
    Affine,
    Cluster,
    ModelSizes,
    OptimizerSizes,
    ParameterSize,
    Setup,
    Workload,
)

# One billion parameters in ten tensors, with numbers that make each term distinguishable.
MODEL = ModelSizes("one", (ParameterSize(100_000_000, 10),))
WORK = Activations(Affine(0, 1000), flops_per_sample=1e12)
ADAM = OptimizerSizes()
CLUSTER = Cluster(
    device_bytes=80 * 2**30,
    host_bytes=2**40,
    devices=4,
    nodes=1,
    nvme_bytes=2**40,
    flops={"no": 1e12, "bf16": 1e13, "fp16": 1e13},
    memory_bandwidth=1e12,
    link_bandwidth=1e11,
    network_bandwidth=1e10,
    pcie_bandwidth=1e10,
    adam_bandwidth=4e10,
    nvme_read=4e9,
    nvme_write=2e9,
)
ONE = replace(CLUSTER, devices=1)


def terms(setup: Setup, cluster: Cluster = CLUSTER, **changed: Any) -> dict[str, float]:
    return dict(time(setup, cluster, **changed).terms)


def time(setup: Setup, cluster: Cluster = CLUSTER, **changed: Any) -> StepTime:
    given = {"model": MODEL, "activations": WORK, "optimizer": ADAM} | changed
    return step_time(Workload(given["model"], given["activations"], given["optimizer"]), setup, cluster)


def test_one_device() -> None:
    """8 samples of 1e12 operations forward and 2e12 backward at 1e13. AdamW moves 28 bytes of each of 1e9 elements."""
    found = terms(Setup(stage=None, micro_batch=4, accumulation=2), ONE)
    assert found == pytest.approx({"compute": 8 * 3e12 / 1e13, "optimizer": 28e9 / 1e12})


def test_precision() -> None:
    """fp32 computes at its own speed."""
    assert terms(Setup(stage=None, precision="no"), ONE)["compute"] == pytest.approx(3.0)


def test_checkpointing_repeats_the_forward() -> None:
    """Four parts of work instead of three."""
    assert terms(Setup(stage=None, activation_checkpointing=True), ONE)["compute"] == pytest.approx(0.4)


def test_frozen_weights_have_no_gradients() -> None:
    """Without trainable weights the backward is as long as the forward. No weight is updated, no gradient reduced."""
    frozen = ModelSizes("frozen", (ParameterSize(100_000_000, 10, trainable=False),))
    assert terms(Setup(stage=None), model=frozen) == pytest.approx({"compute": 0.2})


def test_tiny_batches_wait_for_weights() -> None:
    """With negligible work, a forward reads 2 bytes per weight; a backward reads them and writes the gradients'."""
    idle = replace(WORK, flops_per_sample=1.0)
    assert terms(Setup(stage=1), ONE, activations=idle)["compute"] == pytest.approx(3 * 2e9 / 1e12)
    assert terms(Setup(stage=None), ONE, activations=idle)["compute"] == pytest.approx(3 * 8e9 / 1e12)


def test_work_that_nobody_told() -> None:
    """Two operations per parameter and token forward, four backward."""
    unknown = Activations(Affine(0, 1000), sample_length=50)
    assert terms(Setup(stage=1), ONE, activations=unknown)["compute"] == pytest.approx(6 * 1e9 * 50 / 1e13)


# A ring of four sends 3/4 of the bytes over each link of 1e11: 15 ms for 2 GB, 30 ms for 4.
@pytest.mark.parametrize(
    ("setup", "gradients", "weights"),
    [
        (Setup(stage=0, accumulation=4), 2 * 0.015, 0.0),
        (Setup(stage=1, accumulation=4), 2 * 0.015, 0.015),
        (Setup(stage=2, accumulation=4), 4 * 2 * 0.015, 0.015),
        (Setup(stage=3, accumulation=4), 4 * 0.015, 4 * 2 * 0.015),
        (Setup(stage=2, accumulation=4, precision="no"), 4 * 2 * 0.03, 0.03),
    ],
)
def test_collectives(setup: Setup, gradients: float, weights: float) -> None:
    """An all-reduce is two rings. Stage 2 reduces after every backward, stage 1 once; stage 3 gathers for each pass."""
    found = terms(setup)
    assert found["gradients between devices"] == pytest.approx(gradients)
    assert found.get("weights between devices", 0.0) == pytest.approx(weights)


def test_ddp_reduces_beside_the_last_backward() -> None:
    """fp32 gradients take 60 ms. A backward of 200 ms hides them, one of 20 ms hides 20."""
    hidden = time(Setup(stage=None))
    assert "gradients between devices" not in hidden.terms
    assert hidden.hidden["gradients between devices"] == pytest.approx(0.06)
    short = time(Setup(stage=None, accumulation=4), activations=replace(WORK, flops_per_sample=1e11))
    assert short.terms["gradients between devices"] == pytest.approx(0.06 - 0.02)


def test_overlap_comm() -> None:
    """At stage 2 it hides reductions behind the backwards."""
    assert "gradients between devices" not in terms(Setup(stage=2, overlap_comm=True))


def test_stage_3_gathers_and_reduces_beside_its_passes() -> None:
    """Two gathers of 15 ms and a reduction of 15 ms are hidden by 100 ms forward and 200 ms backward.

    Passes of 1 ms and 2 ms hide only that much. If PCIe takes longer than the communication, only PCIe counts.
    """
    setup = Setup(stage=3, overlap_comm=True)
    assert not {"gradients between devices", "weights between devices"} & terms(setup).keys()
    assert time(setup).hidden["weights between devices"] == pytest.approx(0.03)
    few = replace(WORK, flops_per_sample=1e9)
    idle = replace(CLUSTER, memory_bandwidth=1e30)
    found = terms(setup, idle, activations=few)
    forward, backward = 1e-4, 2e-4
    assert found["weights between devices"] == pytest.approx(0.03 - forward - backward)
    assert found["gradients between devices"] == pytest.approx(0.015)
    assert sum(found.values()) < sum(terms(replace(setup, overlap_comm=False), idle, activations=few).values())
    offloaded = terms(replace(setup, offload_param="cpu"), replace(idle, pcie_bandwidth=1e9), activations=few)
    assert "weights between devices" not in offloaded
    assert offloaded["PCIe"] > 0.9


@pytest.mark.parametrize(
    ("nodes", "shared_by", "seconds_of_a_pass"),
    [
        (1, 2, 4 * (1000 / 2) * 64 * 2 / 2 / 1e11),  # a half of its heads goes to the other one
        (1, 4, 4 * (1000 / 4) * 64 * 2 * 3 / 4 / 1e11),
        (2, 4, 4 * (1000 / 4) * 64 * 2 * 3 / 4 / 1e11),  # a group is a node
        (2, 8, 4 * 4 * (1000 / 8) * 64 * 2 * 4 / 8 / 1e10),  # half of the heads of a node's four goes to the other node
    ],
)
def test_processes_that_share_samples_exchange_heads(nodes: int, shared_by: int, seconds_of_a_pass: float) -> None:
    """Queries, keys, values and the result of 1000 tokens × 64 × 2 bytes, in both passes of each of three layers.

    With checkpoints they move once more. They are in the computation's own stream, so nothing hides them.
    """
    model = replace(MODEL, hidden_size=64, layers=3)
    work = replace(WORK, sample_length=1000)
    cluster = replace(CLUSTER, nodes=nodes, shared_by=shared_by)
    for setup, passes in (
        (Setup(stage=1, micro_batch=5, accumulation=2), 2),
        (Setup(stage=3, activation_checkpointing=True, overlap_comm=True, micro_batch=5, accumulation=2), 3),
    ):
        found = terms(setup, cluster, model=model, activations=work)
        assert found["heads between devices"] == pytest.approx(10 * 3 * passes * seconds_of_a_pass)
        assert "heads between devices" not in terms(setup, replace(cluster, shared_by=1), model=model, activations=work)
    wide = terms(Setup(stage=1, precision="no"), cluster, model=model, activations=work)
    assert wide["heads between devices"] == pytest.approx(3 * 2 * 2 * seconds_of_a_pass)


def test_operations_that_are_not_known() -> None:
    """Two for each element and token of a sample. Each process that shares the sample computes its part."""
    work = Activations(Affine(0, 1000), sample_length=1000)
    for shared_by in (1, 4):
        found = terms(Setup(stage=1, precision="bf16"), replace(CLUSTER, shared_by=shared_by), activations=work)
        assert found["compute"] == pytest.approx(3 * 2 * 1e9 * 1000 / shared_by / 1e13)


def test_nodes() -> None:
    """Between nodes the ring is as slow as the network: 15/16 of 2 GB at 1e10."""
    found = terms(Setup(stage=1), replace(CLUSTER, nodes=4))
    assert found["weights between devices"] == pytest.approx(2e9 * 15 / 16 / 1e10)


def test_host_optimizer() -> None:
    """30 bytes of each element at 4e10 on the node, 4 down and 2 up over each of four devices' PCIe."""
    found = terms(Setup(stage=2, offload_optimizer="cpu"))
    assert found["optimizer on the CPU"] == pytest.approx(30e9 / 4e10)
    assert found["PCIe"] == pytest.approx((4e9 + 2e9) / 4 / 1e10)
    assert "optimizer" not in found
    unpinned = terms(Setup(stage=2, offload_optimizer="cpu", pin_memory=False))
    assert unpinned["PCIe"] == pytest.approx(2 * found["PCIe"])


def test_nodes_share_the_host_optimizer() -> None:
    """Each of two nodes updates a half."""
    found = terms(Setup(stage=2, offload_optimizer="cpu"), replace(CLUSTER, nodes=2))
    assert found["optimizer on the CPU"] == pytest.approx(30e9 / 2 / 4e10)


def test_optimizer_without_a_kernel_of_deepspeeds() -> None:
    """SGD runs torch's loop on the host: 14 bytes an element, ten times as slow."""
    found = terms(Setup(stage=2, offload_optimizer="cpu"), optimizer=OptimizerSizes("sgd", 0))
    assert found["optimizer on the CPU"] == pytest.approx(10 * 14e9 / 4e10)


def test_ratio() -> None:
    """With a half offloaded the host updates that half.

    Each device updates the other half of its quarter, with its gradients brought back.
    """
    setup = Setup(stage=3, offload_optimizer="cpu", ratio=0.5, sub_group_size=25_000_000)
    found = terms(setup)
    assert found["optimizer"] == pytest.approx(30 * 125e6 / 1e12)
    assert found["optimizer on the CPU"] == pytest.approx((30 * 125e6 + 8 * 250e6) * 4 / 4e10)
    assert found["PCIe"] == pytest.approx((4 * 125e6 + 2 * 125e6) / 1e10)


def test_sums_in_host_memory_come_back() -> None:
    """Stage 3 sums gradients there: 8 backwards make 15 copies of 4 bytes during 16 s or 16 ms of computation."""
    setup = Setup(stage=3, offload_optimizer="cpu", accumulation=8)
    copies = 15 * 4e9 / 4 / 1e10
    step = 2e9 / 4 / 1e10
    assert terms(setup)["PCIe"] == pytest.approx(step)
    assert time(setup).hidden["PCIe"] == pytest.approx(copies)
    idle = time(setup, activations=replace(WORK, flops_per_sample=1.0))
    assert idle.terms["PCIe"] == pytest.approx(copies - idle.terms["compute"] + step)


def test_offloaded_weights_come_twice_a_micro_batch() -> None:
    """They come for the forward and for the backward, in parallel with the computation."""
    setup = Setup(stage=3, offload_optimizer="cpu", offload_param="cpu", accumulation=2)
    both = 2 * 2 * 2e9 + 3 * 4e9  # and gradients
    assert time(setup).hidden["PCIe"] == pytest.approx(both / 4 / 1e10)


def test_activations_in_cpu_memory_go_and_come() -> None:
    """`save_on_cpu` copies in the computation's own stream: ten samples' 1e9 bytes out and back, not hidden."""
    moving = replace(WORK, moved=Affine(0, 10**9))
    found = terms(Setup(stage=1, micro_batch=5, accumulation=2), activations=moving)
    assert found["PCIe"] == pytest.approx(2 * 10 * 1e9 / 1e10)


def test_disk() -> None:
    """Masters, two states and gradients, 16 bytes an element, are read and written. Nothing hides this."""
    found = terms(Setup(stage=3, offload_optimizer="nvme"))
    assert found["NVMe"] == pytest.approx(16e9 / 4e9 + 16e9 / 2e9)


def test_hooks_are_ahead_of_the_device() -> None:
    """80 µs for each of 10 tensors and two passes are hidden by 300 ms of computation, and waited for without."""
    busy = time(Setup(stage=3), ONE)
    assert busy.hidden["hooks"] == pytest.approx(20 * 80e-6)
    many = ModelSizes("many", (ParameterSize(10, 1000),))
    idle = time(Setup(stage=3), ONE, model=many, activations=replace(WORK, flops_per_sample=1.0))
    assert idle.terms["hooks"] == pytest.approx(2000 * 80e-6, rel=1e-3)


def test_total() -> None:
    """The step is the sum of its terms. Hidden time does not count."""
    found = time(Setup(stage=3, offload_optimizer="cpu", accumulation=8))
    assert found.seconds == pytest.approx(sum(found.terms.values()))
    assert all(seconds > 0 for seconds in (*found.terms.values(), *found.hidden.values()))


def test_speed_that_is_not_known() -> None:
    """A setup that needs it names the missing speed. A setup that does not is counted."""
    slow = replace(CLUSTER, adam_bandwidth=0.0)
    with pytest.raises(ValueError, match="adam_bandwidth is not known"):
        time(Setup(stage=2, offload_optimizer="cpu"), slow)
    assert time(Setup(stage=2), slow).seconds > 0
