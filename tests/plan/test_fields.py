"""The values that a configuration fixes for a plan, and the plan's values for the configuration, with reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_plugin.config.document import Document
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import (
    Facts,
    LoopFacts,
    MachineFacts,
    ModelFacts,
    OptimizerFacts,
    OptimizerSection,
)
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.run_plan import fits_nowhere, fixed_fields, open_fields, planned_values
from zero_plugin.plan.search import Wanted, plan
from zero_plugin.plan.situation import OptimizerSizes, Workload, asked_optimizer, optimizer_sizes
from zero_plugin.plan.what_if import Change, WhatIf, what_if

MACHINE = MachineFacts("cuda", 8, fp16=True)
STAGE, DEVICE = ("zero_optimization", "stage"), ("zero_optimization", "offload_optimizer", "device")
OPEN: dict[str, Any] = {"stage": "auto", "offload_optimizer": {"device": "auto"}}
MODEL = decoder_sizes(parameters=7_000_000_000, hidden_size=4096, layers=32)
ACTIVATIONS = decoder_activations(MODEL, 2048)
FIXED = Wanted(
    ddp=False,
    offload_optimizer="none",
    offload_param="none",
    ratio=1.0,
    micro_batch=1,
    accumulation=1,
    activation_checkpointing=False,
)


def asked(zero: dict[str, Any], **keys: Any) -> Document:
    return document_from_mapping({"bf16": {"enabled": True}, "zero_optimization": zero, **keys}, "ds.json")


def fixed(document: Document, facts: Facts) -> Wanted:
    return fixed_fields(document, resolve(document, replace(facts, complete=False)), facts, ACTIVATIONS)


def test_what_is_open_is_free_and_all_else_is_fixed() -> None:
    """auto is free. Typed, absent or loop values are fixed, an absent device to none. A typed 0 stays 0."""
    document = asked({**OPEN, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000})
    assert open_fields(document.deepspeed, Facts()) == (STAGE, DEVICE)
    wanted = fixed(document, Facts(LoopFacts(4, "the loader's"), MACHINE, ModelFacts(4096, "", 1, 10**9)))
    assert (wanted.stage, wanted.offload_optimizer, wanted.ratio) == (None, None, 1.0)
    assert (wanted.offload_param, wanted.micro_batch, wanted.accumulation) == ("none", 4, 1)
    assert (wanted.persistence_threshold, wanted.reduce_bucket, wanted.precision) == (0, 1000, "bf16")
    assert wanted.max_reuse_distance == 1_000_000_000
    assert not wanted.ddp


@pytest.mark.parametrize(("written", "expected"), [({}, None), ({"buffer_size": 7000}, 7000)])
def test_the_swap_buffer_is_the_models(written: dict[str, int], expected: int | None) -> None:
    """Before a run DeepSpeed's default does not replace the largest parameter's size. A typed size does."""
    nvme = {"device": "nvme", "nvme_path": "/nvme", **written}
    document = asked({"stage": 3, "offload_param": nvme, "offload_optimizer": {"device": "auto"}})
    assert fixed(document, Facts(machine=MACHINE, complete=False)).param_buffer == expected


@pytest.mark.parametrize(
    ("keys", "complete", "expected"),
    [
        ({}, True, (1, 1, None)),
        ({"train_batch_size": 64}, True, (8, None, 64)),
        ({"train_batch_size": 64}, False, (None, None, 64)),
        ({}, False, (None, 1, None)),
        ({"gradient_accumulation_steps": 4}, False, (None, 4, None)),
    ],
)
def test_the_batch(keys: dict[str, int], complete: bool, expected: tuple[int | None, ...]) -> None:
    """In a run without a loader it is as resolved. Before a run the plan may choose it."""
    wanted = fixed(asked(OPEN, **keys), Facts(machine=MACHINE, complete=complete))
    assert (wanted.micro_batch, wanted.accumulation, wanted.global_batch) == expected


def test_overlap_is_planned_with_an_open_stage() -> None:
    """A typed value stays. With a typed stage, overlap is DeepSpeed's default. Otherwise the plan may enable it."""
    overlap = ("zero_optimization", "overlap_comm")
    facts = Facts(LoopFacts(1, "the loader's"), MACHINE)
    assert fixed(asked({**OPEN, "overlap_comm": False}), facts).overlap_comm is False
    placed = {"stage": 2, "offload_optimizer": {"device": "none"}}
    assert fixed(asked(placed, train_micro_batch_size_per_gpu="auto"), facts).overlap_comm is False
    assert fixed(asked({**placed, "stage": 3}, train_micro_batch_size_per_gpu="auto"), facts).overlap_comm is True
    assert fixed(asked(OPEN), facts).overlap_comm is None
    cluster = state_cluster(gpu="A100-80GB", gpus=8, host_memory=2**40)
    wanted = replace(FIXED, accumulation=4)  # stage 2 gathers once for four micro-batches
    choice = plan(Workload(MODEL, ACTIVATIONS, OptimizerSizes()), cluster, wanted)
    assert choice.chosen is not None
    assert (choice.chosen.setup.stage, choice.chosen.setup.overlap_comm) == (2, True)
    planned = planned_values(choice, wanted, asked(OPEN).deepspeed)
    assert planned[overlap] == (True, "by the plan: gradients are reduced during the backward")
    resolved = resolve(asked(OPEN), Facts(LoopFacts(1, "the loader's"), MACHINE, planned=planned))
    assert resolved.tree.value(*overlap) is True


def test_reasons_name_what_is_short() -> None:
    """The stage's reason has the bytes. The device's names the option without it that would exceed the memory."""
    cluster = state_cluster(gpu_memory=24 * 2**30, host_memory=512 * 2**30, gpus=8)
    wanted = replace(FIXED, offload_optimizer=None)
    choice = plan(Workload(MODEL, ACTIVATIONS, OptimizerSizes()), cluster, wanted)
    found = planned_values(choice, wanted, asked(OPEN).deepspeed)
    assert found[DEVICE][0] == "cpu"
    assert "by the plan, since stage 3" in found[DEVICE][1]
    assert "GiB on the device, budget 21.6 GiB" in found[DEVICE][1]
    assert "of 24 GiB on each device" in found[STAGE][1]
    assert "in CPU memory" in found[STAGE][1]
    assert found[STAGE][1].endswith("(activations: closed formula of a decoder, 2,048 tokens a sample)")
    assert ("train_micro_batch_size_per_gpu",) not in found  # it was fixed


def test_nothing_fits() -> None:
    """The error is at auto's place. It names the closest option and sufficient single changes, as keys to write."""
    cluster = state_cluster(gpu_memory=24 * 2**30, host_memory=512 * 2**30, gpus=8)
    wanted = FIXED
    choice = plan(Workload(MODEL, ACTIVATIONS, OptimizerSizes()), cluster, wanted)
    assert choice.chosen is None
    answers = what_if(Workload(MODEL, ACTIVATIONS, OptimizerSizes()), cluster, wanted)
    error = fits_nowhere(choice, answers, "ds.json:3:5")
    text = str(error)
    assert "ds.json:3:5: zero_optimization: auto, but nothing fits: stage 3" in text
    assert "zero_optimization.offload_optimizer.device: auto instead of none" in text


@pytest.mark.parametrize(
    ("field", "key"),
    [
        ("reduce_bucket", "zero_optimization.reduce_bucket_size"),
        ("accumulation", "gradient_accumulation_steps"),
        ("micro_batch", "train_micro_batch_size_per_gpu"),
        ("pin_memory", "zero_optimization.offload_param.pin_memory"),
    ],
)
def test_changes_are_keys_to_write(field: str, key: str) -> None:
    """The changes have the configuration's names, not the plan's."""
    cluster = state_cluster(gpu_memory=24 * 2**30, host_memory=512 * 2**30, gpus=8)
    choice = plan(Workload(MODEL, ACTIVATIONS, OptimizerSizes()), cluster, FIXED)
    change = Change(f"{field} free instead of 7", choice.table[0], cluster)
    assert f"{key}: auto instead of 7" in str(fits_nowhere(choice, WhatIf((change,), 0), "ds.json"))


@pytest.mark.parametrize(
    ("name", "arguments", "states"),
    [
        ("AdamW", {}, 2),
        ("adam", {"amsgrad": True}, 3),
        ("Lion", {}, 1),
        ("Adagrad", {}, 1),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
        ("RMSprop", {"centered": True}, 2),
        ("Unheard", {}, 2),
    ],
)
def test_states_of_optimizers(name: str, arguments: dict[str, Any], states: int) -> None:
    """They follow from name and arguments. An unknown optimizer is assumed to keep as much as Adam."""
    assert optimizer_sizes(name, arguments).states == states


def test_whose_optimizer_counts() -> None:
    """The loop's real one counts, then the section's, then AdamW. DeepSpeed's own need no working copy on a GPU."""
    section = OptimizerSection("Lion", {})
    real = OptimizerFacts("sgd", {"momentum": 0.0})
    assert asked_optimizer(section, real, on_gpu=True).states == 0
    assert asked_optimizer(section, OptimizerFacts(placeholder=True), on_gpu=True) == OptimizerSizes("lion", 1, 0)
    assert asked_optimizer(None, None, on_gpu=False) == OptimizerSizes("adamw", 2, 1)
    torch_adam = OptimizerSection("AdamW", {"torch_adam": True})
    assert asked_optimizer(torch_adam, None, on_gpu=True).step_copies == 1
