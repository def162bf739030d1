"""The choice of the strategy, and the messages about settings that it drops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_plugin.config.choices import DDPCommunicationHookType
from zero_plugin.config.handlers import DistributedDataParallelKwargs, Handlers, TorchDynamoPlugin
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.read import document_from_mapping
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, StrategyError
from zero_plugin.strategies.select import Selection, select_strategy

ZERO2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def select(world: int, device: str = "cpu", **launch: Any) -> Selection:
    document = document_from_mapping(launch, "config.yaml")
    processes = Processes(0, 0, world, torch.device(device))
    return select_strategy(document, launch_settings(document), processes)


@pytest.mark.parametrize(
    ("launch", "world", "name"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"deepspeed_config": ZERO2}, 1, "deepspeed"),
        ({"deepspeed_config": ZERO2}, 2, "deepspeed"),
        ({"distributed_type": "DEEPSPEED"}, 2, "deepspeed"),
        ({"distributed_type": "MULTI_CPU", "deepspeed_config": ZERO2}, 2, "ddp"),
        ({"distributed_type": "NO", "deepspeed_config": ZERO2}, 1, "single"),
        ({"deepspeed_config": {"gradient_clipping": 1.0}}, 2, "ddp"),
    ],
    ids=str,
)
def test_the_strategy_of_a_configuration(launch: dict[str, Any], world: int, name: str) -> None:
    """ZeRO if requested, or if described and nothing contradicts; DDP or one device if not."""
    selection = select(world, **launch)
    assert selection.strategy.name == name
    assert f"{world} × cpu" in selection.reason


def test_deepspeed_is_imported_for_the_runs_device() -> None:
    """DeepSpeed logs nothing about a device that it detects automatically and that may not be the run's."""
    script = (
        "from zero_plugin import Accelerator; Accelerator(cpu=True, config={'zero_optimization': {'stage': 1}})\n"
        "import deepspeed; print(deepspeed.accelerator.get_accelerator().device_name())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert ran.stdout == "cpu\n", ran.stderr
    assert "Setting accelerator" not in ran.stderr


def test_a_fallback_lists_what_it_drops() -> None:
    """One line has the stage, the offload, and the source of the request."""
    reason = select(2, distributed_type="MULTI_CPU", deepspeed_config=ZERO2).reason
    assert "ZeRO stage 2 and optimizer offload to cpu dropped" in reason
    assert "config.yaml" in reason
    assert "dropped" not in select(2).reason


@pytest.mark.parametrize("launch", [{"distributed_type": "TPU"}, {"distributed_type": "XLA"}, {}], ids=str)
def test_an_xla_device(launch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own strategy trains on it, also with a ZeRO section, which is dropped with a log line."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    selection = select(2, device="xla", **launch, deepspeed_config=ZERO2)
    assert selection.strategy.name == "xla"
    assert "ZeRO stage 2 and optimizer offload to cpu dropped" in selection.reason
    assert "each TPU device holds the complete model" in selection.reason
    assert selection.reason.startswith("XLA on 2 × xla, PJRT_DEVICE is TPU; ")


@pytest.mark.parametrize(
    ("handlers", "told"),
    [
        ({"compiler": TorchDynamoPlugin(backend="inductor")}, "torch_xla itself compiles each step as one graph"),
        ({"ddp": DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)}, "there is no DDP on XLA"),
    ],
    ids=["compiler", "hook"],
)
def test_what_an_xla_device_cannot_honour(handlers: dict[str, Any], told: str) -> None:
    """torch compilers and compressed gradients are refused."""
    with pytest.raises(ConfigError, match=told):
        select(1, device="xla").strategy.accept(Handlers(**handlers))


def test_what_has_no_effect_on_an_xla_device() -> None:
    """Arguments of DDP's buckets are named. Arguments with a meaning here are not."""
    given = DistributedDataParallelKwargs(gradient_as_bucket_view=True, find_unused_parameters=True)
    (line,) = select(1, device="xla").strategy.accept(Handlers(ddp=given))
    assert line.startswith("DistributedDataParallelKwargs(gradient_as_bucket_view): has no effect on XLA")


def test_stage_0_is_nothing_to_drop() -> None:
    """Stage 0 means DDP, so nothing is lost and nothing is logged."""
    stage_0 = {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}}
    assert select(2, distributed_type="MULTI_CPU", deepspeed_config=stage_0).reason == "ddp on 2 × cpu"


def test_a_file_for_gpus_without_a_gpu_runs_on_the_cpu() -> None:
    """One line names the source of the request for GPUs, so no reader takes the run for a GPU run."""
    reason = select(2, distributed_type="MULTI_GPU").reason
    assert reason == "ddp on 2 × cpu; config.yaml requests GPUs, but none is available"


def test_a_device_that_deepspeed_lacks() -> None:
    """The error says so. No other device replaces it."""
    with pytest.raises(StrategyError, match="DeepSpeed does not run on xla"):
        select(1, device="xla", distributed_type="DEEPSPEED")


SCRIPT = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    if name == "deepspeed":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
sys.modules["deepspeed"] = None  # importing it raises ImportError
import torch
from zero_plugin import Accelerator
accelerator = Accelerator(config=sys.argv[1])
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
print("trained")
"""


@pytest.mark.processes
def test_without_deepspeed(tmp_path: Path, lines_of: Callable[..., Iterator[str]]) -> None:
    """With ZeRO requested, the error has the pip line.

    On one device, torch alone trains and logs dropped settings once.
    """
    runs = {}
    for kind in ("DEEPSPEED", "NO"):
        config = tmp_path / f"{kind}.yaml"
        config.write_text(f"distributed_type: {kind}\nuse_cpu: true\ndeepspeed_config:\n  zero_stage: 2\n")
        runs[kind] = subprocess.run(
            [sys.executable, "-c", SCRIPT, config],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    assert runs["DEEPSPEED"].returncode == 1
    assert "StrategyError" in runs["DEEPSPEED"].stderr
    assert "pip install deepspeed" in runs["DEEPSPEED"].stderr
    assert list(lines_of(runs["NO"].stdout.splitlines())) == ["trained"], runs["NO"].stderr
    assert runs["NO"].stderr.count("ZeRO stage 2 dropped") == 1
