"""The records that a script passes: the arguments that they pass on, and their refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from zero_plugin.config.choices import DDPCommunicationHookType, DynamoBackend, LoggerType, PrecisionType, RNGType
from zero_plugin.config.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)


@dataclass
class Numbers(KwargsHandler):
    """A script's own record."""

    a: int = 0
    b: bool = False
    c: float = 3.0


def test_a_record_passes_on_what_differs() -> None:
    """torch sets the defaults, also for a record that a script defines itself."""
    assert Numbers().to_kwargs() == {}
    assert Numbers(a=2, c=2.25).to_kwargs() == {"a": 2, "c": 2.25}
    assert Numbers(a=2).to_dict() == {"a": 2, "b": False, "c": 3.0}
    assert GradScalerKwargs(init_scale=1024.0).to_kwargs() == {"init_scale": 1024.0}
    assert AutocastKwargs(cache_enabled=False).to_kwargs() == {"cache_enabled": False}
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {"backend": "gloo"}


def test_the_hook_is_no_argument_of_ddp() -> None:
    """The reduction hook's arguments do not reach DDP's constructor."""
    given = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType.FP16)
    assert given.to_kwargs() == {"bucket_cap_mb": 3}
    with pytest.raises(ValueError, match="power_sgd"):
        DistributedDataParallelKwargs(comm_hook="fp61").register_comm_hook(None)  # type: ignore[arg-type]


def test_choices_ask_by_value() -> None:
    """`in` takes a value, `str` gives it, `list` gives all."""
    assert "bf16" in PrecisionType
    assert "bf61" not in PrecisionType
    assert (str(PrecisionType.BF16), f"{PrecisionType.BF16}") == ("bf16", "bf16")
    assert PrecisionType.BF16 == "bf16"
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert "tensorboard" in LoggerType.list()
    assert LoggerType("comet_ml") is LoggerType.COMETML
    assert "generator" in RNGType
    assert "INDUCTOR" in DynamoBackend


def test_the_compiler_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's launcher sets variables for absent arguments. An unknown compiler is refused with the list."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO_")]:
        monkeypatch.delenv(name)
    assert TorchDynamoPlugin().backend is DynamoBackend.NO
    assert TorchDynamoPlugin().to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "aot_eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "True")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    plugin = TorchDynamoPlugin()
    assert plugin.use_regional_compilation is True
    assert plugin.to_kwargs() == {
        "backend": "aot_eager",
        "mode": "reduce-overhead",
        "fullgraph": True,
        "dynamic": False,
    }
    assert TorchDynamoPlugin(backend="inductor").backend is DynamoBackend.INDUCTOR  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inductor"):
        TorchDynamoPlugin(backend="inducter")  # type: ignore[arg-type]


def test_project_folders() -> None:
    """The trackers' folder defaults to the run's."""
    assert ProjectConfiguration().logging_dir is None
    project = ProjectConfiguration(project_dir="runs/1")
    assert project.logging_dir == "runs/1"
    project.set_directories("runs/2")
    assert (project.project_dir, project.logging_dir) == ("runs/2", "runs/1")


def test_the_profiler_is_torchs(tmp_path: Path) -> None:
    """Every argument arrives, a schedule's cycles call the handler, and an unknown activity is refused."""
    cycles = []
    kwargs = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: cycles.append(profiler.step_num),
        record_shapes=True,
    )
    import torch

    with kwargs.build() as profiler:
        for _ in range(6):
            torch.ones(2) + 1
            profiler.step()
    assert len(cycles) == 2
    assert profiler.record_shapes
    assert profiler.activities == {torch.profiler.ProfilerActivity.CPU}
    with pytest.raises(ValueError, match="cuda"):
        ProfileKwargs(activities=["gpu"]).build()


def test_records_need_no_torch() -> None:
    """A launcher or a questionnaire may read them without loading torch."""
    code = "import sys, zero_plugin.config.handlers, zero_plugin.config.plugins; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
