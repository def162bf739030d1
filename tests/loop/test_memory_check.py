"""A run that does not fit its machine's memory is refused with both numbers before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_plugin.loop.memory_check
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.resolve.facts import Facts, LoopFacts, MachineFacts, ModelFacts, OptimizerFacts, Resolved
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import MachineError, StrategyError
from zero_plugin.loop.memory_check import (
    AvailableMemory,
    check_memory,
    check_memory_to_load,
    check_memory_without_zero,
    find_available_memory,
    insufficient_memory,
)
from zero_plugin.plan.costs import Footprint

GIB = 2**30
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
NEEDS = Footprint(
    device={},
    device_phase="step",
    host={"processes": 4 * GIB, "master weights": 40 * GIB, "optimizer states": 80 * GIB},
    locked=3 * GIB,
    nvme={"parameters": 100 * GIB},
)


@pytest.mark.parametrize(
    ("available", "told"),
    [
        (AvailableMemory(200 * GIB, None, {}), []),
        (
            AvailableMemory(125 * GIB, None, {}),
            [(False, "4 processes keep 120 GiB in CPU memory (optimizer states 80 GiB")],
        ),
        (AvailableMemory(119 * GIB, None, {}), [(True, "and only 119 GiB are available")]),
        (AvailableMemory(200 * GIB, 4 * GIB, {}), []),
        (
            AvailableMemory(200 * GIB, 2 * GIB, {}),
            [(True, "locks 3 GiB for the buffers of NVMe offload, and only 2 GiB may be locked")],
        ),
        (AvailableMemory(200 * GIB, None, {"/nvme": 200 * GIB}), []),
        (
            AvailableMemory(200 * GIB, None, {"/nvme": 105 * GIB}),
            [(False, "100 GiB in /nvme, and little more, 105 GiB are free")],
        ),
        (AvailableMemory(50 * GIB, 1, {"/nvme": 9}), [(True, "CPU memory"), (True, "locks"), (True, "/nvme")]),
    ],
    ids=str,
)
def test_both_numbers_and_what_helps(available: AvailableMemory, told: list[tuple[bool, str]]) -> None:
    """Impossible and unlikely fits get different messages. Memory that the processes already use does not count."""
    found = list(insufficient_memory(NEEDS, available, 4))
    assert [is_short for is_short, _ in found] == [is_short for is_short, _ in told]
    for (_, line), (_, part) in zip(found, told, strict=True):
        assert part in line
        assert "What helps: " in line


def resolved_for(section: Mapping[str, Any], strategy: Any = "deepspeed", **launch: Any) -> tuple[Any, Resolved, Facts]:
    document = document_from_mapping({"use_cpu": True, **launch, "deepspeed_config": section}, "code")
    facts = Facts(
        LoopFacts(4, "the loader"),
        MachineFacts(),
        ModelFacts(hidden_size=1000, parameters=2_002_000),
        OptimizerFacts("adamw", {"lr": 0.1}),
        strategy=strategy,
    )
    return document, resolve(document, facts), facts


def model() -> nn.Module:
    """Create a model of 8 MB of fp32 weights."""
    return nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))


def test_offload_is_refused_where_cpu_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The model's own copy counts as allocated. Adam's states, masters and gradients of 2,002,000 do not fit."""
    _, resolved, facts = resolved_for({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    caplog.set_level("INFO", "zero_plugin")
    check_memory(model(), resolved, 2, facts, ALONE)
    assert not caplog.messages
    monkeypatch.setattr(zero_plugin.loop.memory_check, "available_cpu_memory", lambda: 10_000_000)
    with pytest.raises(MachineError, match=r"nothing was allocated:\n1 processes keep .* MiB in CPU memory") as caught:
        check_memory(model(), resolved, 2, facts, ALONE)
    assert "and only 17.2 MiB are available" in str(caught.value)  # 10,000,000 and the model's 8,008,000 bytes


def test_nothing_is_looked_at_without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without offload the machine is not checked, and no collective call is made."""
    monkeypatch.setattr(zero_plugin.loop.memory_check, "available_cpu_memory", lambda: 0)
    _, resolved, facts = resolved_for({"zero_optimization": {"stage": 2}})
    check_memory(model(), resolved, 2, facts, ALONE)
    check_memory(model(), resolved, None, facts, ALONE)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """The nearest existing parent of a folder gives the disk and its free bytes."""
    folder = tmp_path / "runs" / "nvme"
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
    _, resolved, _ = resolved_for({"zero_optimization": zero})
    room = find_available_memory(resolved, held=5)
    assert room.nvme[str(folder)] > 0
    assert not folder.exists()


@pytest.mark.parametrize("stated", ["60MiB", "20MiB"])
def test_without_the_zero_that_is_asked_for(stated: str) -> None:
    """Without the configured ZeRO, a device of 60 MiB holds weights, gradients and Adam's states. 20 MiB is refused."""
    zero = {"zero_optimization": {"stage": 2}}
    document, resolved, facts = resolved_for(zero, "single", distributed_type="NO", gpu_memory=stated)
    batch = torch.zeros(4, 1000)
    if stated == "60MiB":
        check_memory_without_zero(document, model(), resolved, facts, lambda: batch, ALONE)
        return
    with pytest.raises(StrategyError, match="ZeRO stage 2 dropped") as caught:
        check_memory_without_zero(document, model(), resolved, facts, lambda: batch, ALONE)
    assert "training takes 38.2 MiB of each device, which has 20 MiB.\n" in str(caught.value)
    with pytest.raises(
        StrategyError, match="which has 20 MiB; the activations, whose size is unknown, are not included"
    ):
        check_memory_without_zero(document, model(), resolved, facts, lambda: None, ALONE)


def test_nobody_who_asked_for_none_is_refused() -> None:
    """Without a ZeRO section nothing was dropped, so nothing is refused."""
    document, resolved, facts = resolved_for({}, "single", distributed_type="NO", gpu_memory="1MiB")
    check_memory_without_zero(document, model(), resolved, facts, lambda: None, ALONE)


def test_a_copy_for_each_process() -> None:
    """Eight processes load eight copies."""
    check_memory_to_load(GIB, 8, 8 * GIB, "the model", "do this")
    with pytest.raises(MachineError, match=r"1 GiB of CPU memory in each of 8 processes, 8 GiB together, and 7 GiB"):
        check_memory_to_load(GIB, 8, 7 * GIB, "the model", "do this")
