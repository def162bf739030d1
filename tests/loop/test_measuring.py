"""Predicted against measured memory: the log after a real run's first steps, and the warning on a wrong plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.loop.memory_check import Prediction, compare_memory, measure_states
from zero_plugin.plan.costs import Footprint
from zero_plugin.plan.run_plan import RunMemory

GIB = 2**30
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Run(RunMemory):
    """A run with a known footprint."""

    def __init__(self, footprint: Footprint) -> None:
        self.__dict__["footprint"] = footprint


DEVICE = {"parameters": 2 * GIB, "master weights": 4 * GIB, "optimizer states": 8 * GIB, "activations": 6 * GIB}
PLAN = Footprint(
    DEVICE,
    "forward",
    host={"processes": 2 * GIB, "master weights": 8 * GIB},
    phases={"forward": {**DEVICE, "context": GIB}, "step": {"parameters": GIB}},
)


def test_states_of_a_prediction() -> None:
    """A GPU's states are those on the device. On a CPU, offloaded states count too, each process's part of them."""
    assert Prediction(Run(PLAN), 2, GPU, 0).states == {"weights": 6 * GIB, "optimizer states": 8 * GIB}
    assert Prediction(Run(PLAN), 2, CPU, None).states == {"weights": 10 * GIB, "optimizer states": 8 * GIB}


@pytest.mark.parametrize(
    ("weights", "states", "peak", "told"),
    [
        (6, 8, 21, ["peak memory of the device: predicted 20 GiB, measured 21 GiB (+5%)"]),
        (6, 8, 26, ["measured 26 GiB (+30%)", "off most in activations, gradients and working space: predicted 6 GiB"]),
        (6, 16, 28, ["measured 28 GiB (+40%)", "off most in optimizer states: predicted 8 GiB, measured 16 GiB"]),
        (2, 8, 16, ["measured 16 GiB (-20%)", "off most in weights: predicted 6 GiB, measured 2 GiB"]),
        (6, 8, None, ["memory of weights and optimizer states: predicted 14 GiB, measured 14 GiB (+0%)"]),
        (6, 12, None, ["measured 18 GiB (+29%)", "off most in optimizer states"]),
    ],
    ids=str,
)
def test_the_term_that_is_off_is_named(weights: int, states: int, peak: int | None, told: list[str]) -> None:
    """Within a tenth one line is logged. Beyond it a warning names the term with the largest miss, and the fix."""
    measured = {"weights": weights * GIB, "optimizer states": states * GIB}
    found = compare_memory(Prediction(Run(PLAN), 2, GPU, 0), measured, None if peak is None else peak * GIB)
    assert len(found) == len(told)
    for line, part in zip(found, told, strict=True):
        assert part in line
    if len(found) > 1:
        assert found[1].startswith("warning: ")
        assert ("may not fit" in found[1]) == (peak is None or peak > 20)


def test_what_is_too_small_to_tell() -> None:
    """Below 64 MiB the allocator's rounding dominates, so nothing is logged, and nothing without a measurement."""
    small = Footprint({}, "forward", phases={"forward": {"parameters": 1000, "activations": 1000}})
    assert len(compare_memory(Prediction(Run(small), 1, GPU, 0), {"weights": 1000, "optimizer states": 0}, 2**20)) == 1
    assert compare_memory(Prediction(Run(small), 1, CPU, None), {}, None) == []


def test_a_run_tells_it_after_its_second_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The log comes after the second step, with and without ZeRO: fp32 weights and two Adam states."""
    config = {
        "use_cpu": True,
        "distributed_type": "NO",
        "gpu_memory": "1GiB",
        "deepspeed_config": {"zero_optimization": {"stage": 2}},
    }
    accelerator = Accelerator(config=config)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        accelerator.backward(model(torch.ones(2, 512)).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert capsys.readouterr().err.count("memory of weights") == (step == 1)
    (training,) = accelerator._prepared.trainings
    assert measure_states(training.session, CPU) == {"weights": 1_050_624 * 4, "optimizer states": 1_050_624 * 8}
    accelerator.end_training()
