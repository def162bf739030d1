"""Messages when memory runs out: the kind of memory, the call, and the fixes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zero_plugin import Accelerator
from zero_plugin.loop.out_of_memory import FailedLoop, describe_out_of_memory, is_out_of_memory
from zero_plugin.plan.run_plan import RunMemory
from zero_plugin.plan.situation import Activations, Affine, Cluster, ModelSizes, ParameterSize, Setup, Workload
from zero_plugin.strategies.base import Saving

pytestmark = pytest.mark.programs

CPU = torch.device("cpu")
LOOP = FailedLoop(
    trains=True,
    micro_batch=8,
    accumulation=2,
    cut=1,
    is_open=True,
    decides=False,
    savings=(Saving("zero_stage: 3 (it is 2)", {"stage": 3}),),
)


def failure(kind: str) -> BaseException:
    """Raise a real failure."""
    try:
        if kind == "torch":
            torch.empty(1 << 47)
        elif kind == "numpy":
            np.ones(1 << 45)
        else:
            bytearray(1 << 60)
    except (RuntimeError, MemoryError) as error:
        return error
    raise AssertionError("the machine has it")


@pytest.mark.parametrize(
    ("kind", "asked"),
    [("torch", "GiB were requested"), ("numpy", "GiB were requested"), ("python", "an allocation failed")],
)
def test_real_failures_of_the_host(kind: str, asked: str) -> None:
    """The errors of torch, NumPy and Python are recognised, with the requested bytes."""
    error = failure(kind)
    assert is_out_of_memory(error)
    report = describe_out_of_memory(error, LOOP, CPU, rank=3)
    assert report.headline.startswith("CPU memory ran out on rank 3, in the forward, at micro-batch 8: ")
    assert asked in report.headline
    assert "GiB are available" in report.headline


@pytest.mark.parametrize("maker", ["CUDA", "HIP"])
def test_the_drivers_own_error(maker: str) -> None:
    """Memory outside torch's allocator, such as a context's or pinned memory, fails with the driver's message."""
    text = (
        f"{maker} error: out of memory\n{maker} kernel errors might be asynchronously reported at some other API call"
    )
    assert is_out_of_memory(RuntimeError(text))


def test_other_errors_are_none() -> None:
    """Other RuntimeErrors are not recognised."""
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_the_ways_are_numbered_by_their_cost() -> None:
    """Fixes are ordered by cost: half the micro-batch, activation checkpointing, then the strategy's."""
    report = describe_out_of_memory(failure("torch"), LOOP, CPU, rank=0)
    first, *ways = report.advice.splitlines()
    assert first == "What needs less memory, the cheapest first:"
    assert ways[0] == "  1. batch_size=4 with gradient_accumulation_steps 4, the same global batch"
    assert ways[1].startswith("  2. activation checkpointing")
    assert ways[2] == "  3. zero_stage: 3 (it is 2)"


@pytest.mark.parametrize(
    ("change", "cut", "micro_batch"),
    [
        ({}, 2, 4),
        ({"cut": 2}, 4, 4),
        ({"micro_batch": 9}, 3, 3),
        ({"micro_batch": 1}, 0, 0),
        ({"micro_batch": None}, 0, 0),
        ({"is_open": False}, 0, 0),
        ({"decides": True}, 0, 0),
        ({"trains": False}, 0, 0),
    ],
    ids=str,
)
def test_when_a_smaller_micro_batch_is_tried(change: dict[str, Any], cut: int, micro_batch: int) -> None:
    """A smaller micro-batch is tried if the configuration allows it, the layer counts the loop, and one exists."""
    report = describe_out_of_memory(failure("torch"), replace(LOOP, **change), CPU, rank=0)
    assert (report.cut, report.micro_batch) == (cut, micro_batch)


def test_what_the_plan_says_of_each_way() -> None:
    """Each fix has the plan's bytes, corrected by the measured excess. Only the first fix that fits is marked."""
    run = RunMemory(
        Workload(
            ModelSizes("model", (ParameterSize(2**30),)),
            Activations(Affine(0, 2**30), checkpointed=Affine(0, 2**25)),
        ),
        Setup(stage=2, precision="bf16", micro_batch=8, accumulation=2),
        Cluster(device_bytes=10 * 2**30, host_bytes=2**40, devices=4),
    )
    loop = replace(LOOP, run=run, savings=(*LOOP.savings, Saving("offload", {"offload_optimizer": "cpu"})))
    report = describe_out_of_memory(failure("python"), loop, CPU, rank=0)
    _, smaller, checkpointing, *_ = report.advice.splitlines()
    assert "4, the same global batch: " in smaller
    assert checkpointing.endswith(" GiB of 10 GiB; according to the plan the cheapest that fits")
    assert report.advice.count("the cheapest that fits") == 1
    taken = replace(loop, taken=2 * run.footprint.allocated_bytes)
    corrected = describe_out_of_memory(failure("python"), taken, CPU, rank=0).advice.splitlines()[1]
    assert gib_of(corrected) == pytest.approx(2 * gib_of(smaller), rel=0.01)


def gib_of(line: str) -> float:
    """Return the GiB that a line predicts for its fix."""
    return float(line.split(": ")[-1].split(" GiB of")[0])


def test_where_a_smaller_micro_batch_does_not_help() -> None:
    """CPU memory below a GPU does not hold activations, so a smaller micro-batch is neither tried nor suggested."""
    error = failure("python")
    report = describe_out_of_memory(error, LOOP, torch.device("cuda", 0), rank=0)
    assert report.cut == 0
    assert "batch_size=4" not in report.advice
    assert "A smaller micro-batch does not help: CPU memory ran out" in report.advice


class Hungry(torch.optim.SGD):
    """An optimizer whose step needs more memory than any machine has."""

    def step(self, closure: Any = None) -> Any:
        torch.empty(1 << 47)


def test_the_call_in_which_it_was() -> None:
    """The traceback gives the call: a backward, which a smaller micro-batch helps, or a step, which it does not."""
    accelerator = Accelerator(config={"use_cpu": True})
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, Hungry(model.parameters(), lr=0.1))
    y = model(torch.ones(2, 4)).sum()
    handle = y.register_hook(lambda _: torch.empty(1 << 47))
    with pytest.raises(RuntimeError) as in_backward:
        accelerator.backward(y)
    handle.remove()
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError) as in_step:
        optimizer.step()
    accelerator.end_training()
    assert "in backward(), at" in describe_out_of_memory(in_backward.value, LOOP, CPU, rank=0).headline
    report = describe_out_of_memory(in_step.value, LOOP, CPU, rank=0)
    assert "in optimizer.step(), at" in report.headline
    assert report.cut == 0
    assert "does not help: the optimizer's states need it" in report.advice


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from zero_plugin import Accelerator

Accelerator()
accelerator = Accelerator(config={"train_micro_batch_size_per_gpu": "auto"})
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    torch.empty(1 << 47)
"""


@pytest.mark.processes
def test_a_script_without_a_launcher(tmp_path: Path) -> None:
    """Without a launcher, the newest Accelerator prints the advice, and the launcher, once after the traceback."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 1
    trace, told = done.stderr.split("CPU memory ran out on rank 0, in ")
    assert "DefaultCPUAllocator" in trace
    assert told.startswith("the forward, at micro-batch 4")
    assert "`zero-plugin launch` restarts the run" in told
