"""The plan's choices in situations whose answer follows from sizes alone.

Bytes per parameter on a device with AdamW in bf16, on N devices: without ZeRO 20 (fp32 weights, gradients, two states,
and one more of that size during the step). Stage 1 takes 10 + 12/N (weights, fp32 sums, the last gradients and the
reduced copy are unpartitioned), stage 2 2 + 20/N, stage 3 18/N.

With offload, stage 2 keeps 2 + 4/N, stage 3 2/N, or almost nothing with its parameters offloaded too. CPU memory then
takes 18 to 22. 90 % of a device counts, less 1 GiB of context: 37 GB of an A100-40GB, 76 of an A100-80GB, 22 of a 24 GB
card, 29 of a V100-32GB.

By default decoders have a sequence of 2,048, and 16 samples per device and step. At 7 billion parameters a sample keeps
13 GB without checkpointing, and 1 GB with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.search import Choice, Wanted, plan
from zero_plugin.plan.situation import Activations, Affine, ModelSizes, OptimizerSizes, ParameterSize, Workload

GIB = 2**30
B = 1_000_000_000
OFFLOAD: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "none"}
NONE: dict[str, Any] = {"offload_optimizer": "none", "offload_param": "none"}
ALL: dict[str, Any] = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@dataclass(frozen=True)
class Case:
    """A decoder of `parameters` on `gpus`, the fixed values, and the certain part of the choice; None: nothing fits."""

    name: str
    parameters: float
    machine: dict[str, Any]
    expected: dict[str, Any] | None
    wanted: dict[str, Any] = field(default_factory=dict)
    sequence: int = 2048
    optimizer: OptimizerSizes = field(default_factory=OptimizerSizes)


def machine(gpu: str, gpus: int = 1, host_gib: int = 256, **more: Any) -> dict[str, Any]:
    return {"gpu": gpu, "gpus": gpus, "host_memory": host_gib * GIB, **more}


CASES = (
    # 20 × 0.125 = 2.5 GB: unpartitioned, nothing recomputed.
    Case(
        "125M on one A100", 0.125 * B, machine("A100-40GB"), {"stage": None, **NONE, "activation_checkpointing": False}
    ),
    # 26 GB of 37, and 4 GB for one sample.
    Case("1.3B on one A100", 1.3 * B, machine("A100-40GB"), {"stage": None, **NONE}),
    # 54 GB of 37, and one process has no other to partition with: states must go. Weights (5 GB) and sums (11) stay.
    Case("2.7B on one A100", 2.7 * B, machine("A100-40GB"), OFFLOAD),
    # 16-bit weights take 14 GB; stage 2's fp32 sums would take 28 more, stage 3 has them in CPU memory.
    Case("7B on one A100-40GB", 7 * B, machine("A100-40GB"), {"stage": 3, "offload_optimizer": "cpu"}),
    # 14 + 28 GB and activations fit 76, so the weights stay.
    Case("7B on one A100-80GB", 7 * B, machine("A100-80GB", host_gib=500), OFFLOAD),
    # 14 GB of weights leave 8: a sample's 13 only with recomputation, a third more work. Fetching weights twice for
    # each micro-batch is 28 GB, 1.1 s of PCIe in parallel with 3 s of computation: free.
    Case(
        "7B on one RTX 3090",
        7 * B,
        machine("RTX-3090"),
        {"stage": 3, **ALL, "activation_checkpointing": False},
    ),
    # ZeRO-Offload's headline: 13B on one V100. Weights alone are 26 of 29 GB.
    Case(
        "13B on one V100-32GB",
        13 * B,
        machine("V100-32GB", host_gib=768),
        {"offload_optimizer": "cpu"},
        {"precision": "fp16"},
        sequence=1024,
    ),
    # ZeRO-3 Offload's: 40B on one V100 and 1.5 TB. 80 GB of weights must live in CPU memory.
    Case(
        "40B on one V100-32GB",
        40 * B,
        machine("V100-32GB", host_gib=1500),
        {"stage": 3, **ALL},
        {"precision": "fp16"},
        sequence=1024,
    ),
    # 26 GB, and 8 for two samples in 37: no partitioning needed, and reductions overlap with the backward.
    Case("1.3B on eight A100-40GB", 1.3 * B, machine("A100-40GB", 8), {"stage": None, **NONE}),
    # 54 of 37 GB unpartitioned; stage 1 takes 11.5 × 2.7 = 31, and its reduction once a step is 1 % of the step.
    Case("2.7B on eight A100-40GB", 2.7 * B, machine("A100-40GB", 8), {"stage": 1, **NONE}),
    # 2.5B: 50 of 76 GB, and 10 for the gradients that accumulate outside DDP's buckets: unpartitioned. 3B: 60 and 12,
    # and 8 for two samples.
    Case("2.5B on eight A100-80GB", 2.5 * B, machine("A100-80GB", 8), {"stage": None, **NONE}),
    Case("3B on eight A100-80GB", 3 * B, machine("A100-80GB", 8), {"stage": 1, **NONE}),
    # 120 of 76 GB unpartitioned; stage 1: 69.
    Case("6B on eight A100-80GB", 6 * B, machine("A100-80GB", 8, 1000), {"stage": 1, **NONE}),
    # Stage 1: 80 of 76. Stage 2: 32 and 13 for a sample. With overlap both hide their communication, and the lower
    # stage is the simpler one.
    Case("7B on eight A100-80GB", 7 * B, machine("A100-80GB", 8, 1000), {"stage": 2, **NONE}, {"micro_batch": 1}),
    # Stage 1's 80 GB are too many for 37. Stage 2 (32) has room only with recomputation: 33 % more work. Stage 3 (16)
    # has room without, and hides 3 × 14 GB at 300 GB/s, 0.14 s, behind the 0.69 s of a micro-batch.
    Case(
        "7B on eight A100-40GB",
        7 * B,
        machine("A100-40GB", 8, 1000),
        {"stage": 3, **NONE, "activation_checkpointing": False},
    ),
    # With recomputation fixed, stage 2 (32 GB) fits, and is simpler.
    Case(
        "7B on eight A100-40GB, recomputing",
        7 * B,
        machine("A100-40GB", 8, 1000),
        {"stage": 2, **NONE},
        {"activation_checkpointing": True, "micro_batch": 1},
    ),
    # Stage 1 150 GB, stage 2 58 and 6 for four samples, of 76.
    Case(
        "13B on eight A100-80GB, recomputing",
        13 * B,
        machine("A100-80GB", 8, 1000),
        {"stage": 2, **NONE},
        {"activation_checkpointing": True, "micro_batch": 4},
    ),
    # Stage 2's 50 GB are too many for 37, stage 3's 25 are not. With half of the states in CPU memory there is room for
    # a sample without recomputation. Recomputation, a third of the work, takes longer than the update there.
    Case(
        "11B on eight A100-40GB",
        11 * B,
        machine("A100-40GB", 8, 1000),
        {"stage": 3, **OFFLOAD, "ratio": "part", "activation_checkpointing": False},
    ),
    # Stage 2: 40 + 50 of 76. Stage 3: 45.
    Case("20B on eight A100-80GB", 20 * B, machine("A100-80GB", 8, 1000), {"stage": 3, **NONE}),
    # Stage 3: 68 of 37. Without the states: 7.5.
    Case("30B on eight A100-40GB", 30 * B, machine("A100-40GB", 8, 1000), {"stage": 3, "offload_optimizer": "cpu"}),
    # Stage 3: 158 of 76; host 20 × 70 = 1,400 GB of 2,000.
    Case("70B on eight H100", 70 * B, machine("H100-80GB", 8, 2000), {"stage": 3, "offload_optimizer": "cpu"}),
    # On 64 devices stage 3 takes 20 GB, and 8 for one sample, recomputed.
    Case(
        "70B on eight nodes of H100",
        70 * B,
        machine("H100-80GB", 8, 2000, nodes=8),
        {"stage": 3, **NONE},
        {"global_batch": 64},
    ),
    # 30 of 22 GB unpartitioned; 27 GB of CPU memory for the offloaded states.
    Case("GPT-2 XL on one RTX 3090", 1.5 * B, machine("RTX-3090", host_gib=64), OFFLOAD, {"precision": "fp16"}, 1024),
    # All states need 30 GB of CPU memory, and 15 may be used: about a third of them, which the device's 22 GB allow.
    Case(
        "1.5B on one RTX 3090 with little CPU memory",
        1.5 * B,
        machine("RTX-3090", host_gib=18),
        {"stage": 3, **OFFLOAD, "ratio": "part"},
    ),
    # 7B needs 126 GB somewhere; there are 22 and 29.
    Case("7B on one RTX 3090 with little CPU memory", 7 * B, machine("RTX-3090", host_gib=32), None),
    # 20 × 30 = 600 GB of 230 in CPU memory; 360 of them are masters and states that a disk takes.
    Case(
        "30B on one A100 with a disk",
        30 * B,
        machine("A100-40GB", host_gib=256, nvme=2000 * GIB),
        {"stage": 3, "offload_optimizer": "nvme"},
    ),
    # A disk exists, but is a hundred times slower than CPU memory, which has room for everything.
    Case(
        "7B with a disk that is not needed", 7 * B, machine("A100-40GB", nvme=2000 * GIB), {"offload_optimizer": "cpu"}
    ),
    # AdamW's 20 × 2 = 40 GB are too many for 37; Lion keeps one state less: 16 × 2 = 32.
    Case("2B with Adam on one A100", 2 * B, machine("A100-40GB"), OFFLOAD),
    Case(
        "1.8B with Lion on one A100",
        2 * B,
        machine("A100-40GB"),
        {"stage": None, **NONE},
        optimizer=OptimizerSizes("lion", 1),
    ),
    # SGD without momentum: 12 × 2.5 = 30 GB.
    Case(
        "2.5B with SGD on one A100",
        2.5 * B,
        machine("A100-40GB"),
        {"stage": None, **NONE},
        optimizer=OptimizerSizes("sgd", 0),
    ),
    # fp32: 20 × 1.3 = 26 GB; of the activations twice as many, 8 GB, but they are gone when the step begins.
    Case("1.3B in fp32 on one A100", 1.3 * B, machine("A100-40GB"), {"stage": None, **NONE}, {"precision": "no"}),
    # 26 of 22 GB unpartitioned; stage 1: 15. Between these cards bytes cross PCIe twice, so once a step beats once a
    # backward.
    Case("1.3B on eight RTX 4090", 1.3 * B, machine("RTX-4090", 8), {"stage": 1, **NONE}),
    # Between nodes 26 GB of gradients take a second, four times what a micro-batch computes: the fewest micro-batches
    # win, and only recomputation leaves memory for one of eight samples.
    Case(
        "13B on two nodes of H100",
        13 * B,
        machine("H100-80GB", 8, 2000, nodes=2),
        {**NONE, "activation_checkpointing": True, "micro_batch": 8, "accumulation": 1},
        {"global_batch": 128},
    ),
    # 32,768 tokens keep 16 × 13 GB without recomputation.
    Case(
        "7B on eight H100, long sequences",
        7 * B,
        machine("H100-80GB", 8, 2000),
        {**NONE, "activation_checkpointing": True},
        {"global_batch": 64},
        sequence=32_768,
    ),
    # Fixed values are kept, even if others would be faster. The smallest offload is a tenth, and at stage 3 only.
    Case("stage 2 fixed", 0.35 * B, machine("A100-40GB", 8), {"stage": 2, **NONE}, {"stage": 2}),
    Case("offload fixed", 0.35 * B, machine("A100-40GB", 8), {"stage": 3, **OFFLOAD}, {"offload_optimizer": "cpu"}),
    Case("stage 2 fixed for too large a model", 70 * B, machine("H100-80GB", 8, 2000), None, {"stage": 2}),
    # Under DeepSpeed alone, stage 1 is the nearest to plain training.
    Case("125M without DDP", 0.125 * B, machine("A100-40GB", 8), {"stage": 1, **NONE}, {"ddp": False}),
    # Without a global batch the largest micro-batch (a power of two) is the fastest.
    Case("125M, any batch", 0.125 * B, machine("T4"), {"stage": None, "accumulation": 1}, {"global_batch": None}, 128),
)


def decide(case: Case) -> Choice:
    precision = case.wanted.get("precision", "bf16")
    model = decoder_sizes(parameters=int(case.parameters))
    activations = decoder_activations(model, case.sequence, precision)
    cluster = state_cluster(**case.machine)
    wanted = Wanted(**{"global_batch": 16 * cluster.processes, **case.wanted})
    return plan(Workload(model, activations, case.optimizer), cluster, wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decision(case: Case) -> None:
    """The choice is the one that the sizes above make certain."""
    chosen = decide(case).chosen
    if case.expected is None:
        assert chosen is None
        return
    assert chosen is not None
    expected = dict(case.expected)
    if expected.pop("ratio", None) == "part":
        assert 0 < chosen.setup.ratio < 1
    assert {name: getattr(chosen.setup, name) for name in expected} == expected


def test_frozen_weights_stay_in_16_bits() -> None:
    """LoRA on 7B: ZeRO keeps frozen weights in 16 bits (14 GB of 37), DDP in fp32 with 16-bit copies (42): stage 1."""
    whole = decoder_sizes(parameters=7 * B)
    frozen = tuple(replace(p, trainable=False) for p in whole.parameters)
    model = replace(whole, parameters=(*frozen, ParameterSize(4096 * 8, 512)))
    activations = decoder_activations(whole, 512)
    chosen = plan(Workload(model, activations), state_cluster(gpu="A100-40GB"), Wanted(global_batch=8)).chosen
    assert chosen is not None
    assert (chosen.setup.stage, chosen.setup.offload_optimizer) == (1, "none")


def test_micro_batch_of_a_convolutional_net() -> None:
    """25 million parameters, 150 MB a sample, 13.1 GB usable: 64 samples are 9.6 GB, 128 are 19.2."""
    model = ModelSizes("CNN", (ParameterSize(250_000, 100),))
    activations = Activations(Affine(0, 150 * 10**6), flops_per_sample=8e9)
    chosen = plan(
        Workload(model, activations, OptimizerSizes("sgd", 1)),
        state_cluster(gpu="T4"),
        Wanted(precision="fp16", global_batch=256),
    ).chosen
    assert chosen is not None
    assert (chosen.setup.stage, chosen.setup.micro_batch, chosen.setup.accumulation) == (None, 64, 4)


def test_locked_memory_forbids_the_disk() -> None:
    """The NVMe disk's buffers are page-locked.

    With 64 KiB allowed, a plan that fits only with the disk does not fit.
    """
    case = next(case for case in CASES if case.name == "30B on one A100 with a disk")
    model = decoder_sizes(parameters=30 * B)
    cluster = replace(state_cluster(**case.machine), memlock_bytes=64 * 1024)
    found = plan(Workload(model, decoder_activations(model, 2048), OptimizerSizes()), cluster, Wanted(global_batch=16))
    assert found.chosen is None
    assert any("ulimit -l" in candidate.rejected for candidate in found.table)


def test_every_rejected_line_says_why() -> None:
    """Each candidate has a verdict. One that does not fit names the shortage, with both numbers."""
    found = decide(next(case for case in CASES if case.name == "7B on one RTX 3090"))
    reasons = [c.rejected for c in found.table if c.rejected]
    assert found.chosen in found.table
    assert any("no NVMe disk" in reason for reason in reasons)
    assert any("GiB on the device, budget 21.6 GiB; mostly" in reason for reason in reasons)
