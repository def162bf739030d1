"""The arguments of `Accelerator`: each overrides the document, is stored for the script, or is refused by name."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.config.choices import DynamoBackend, PrecisionType
from zero_plugin.config.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from zero_plugin.config.plugins import DeepSpeedPlugin
from zero_plugin.errors import ConfigError

pytestmark = pytest.mark.processes

POSITIONAL = (  # the order of Accelerate's arguments
    *("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps", "cpu"),
    *("dataloader_config", "deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "rng_types"),
    *("log_with", "project_dir", "project_config", "gradient_accumulation_plugin", "step_scheduler_with_optimizer"),
    *("kwargs_handlers", "dynamo_backend", "dynamo_plugin", "deepspeed_plugins", "parallelism_config"),
)


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Any:
    """Return a factory of Accelerators, and end them."""
    made = []

    def make(*args: Any, **kwargs: Any) -> Accelerator:
        made.append(Accelerator(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.end_training()


def test_they_come_in_accelerates_order() -> None:
    """They work by position too."""
    assert tuple(inspect.signature(Accelerator).parameters)[: len(POSITIONAL)] == POSITIONAL


def test_keys_of_an_engine_that_nobody_requests(accelerator: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Without a configured strategy, a run without DeepSpeed logs the keys that it does not read, or refuses them."""
    with caplog.at_level("INFO", logger="zero_plugin"):
        accelerator(config={"use_cpu": True, "deepspeed_config": {"flops_profiler": {"enabled": True}}})
    said = "flops_profiler: has no effect: only DeepSpeed's engine reads it, and nothing requests it: the run is single"
    assert said in caplog.text
    with pytest.raises(ConfigError, match=r"torch_autocast\.enabled: true, but only DeepSpeed's engine reads it"):
        accelerator(config={"use_cpu": True, "deepspeed_config": {"torch_autocast": {"enabled": True}}})


def test_they_can_be_read_back(accelerator: Any, tmp_path: Any) -> None:
    """They are attributes, under Accelerate's names."""
    one = accelerator(
        False,
        True,
        PrecisionType.BF16,
        4,
        True,
        rng_types=["torch", "generator"],
        project_dir=tmp_path,
        step_scheduler_with_optimizer=False,
        even_batches=False,
    )
    assert (one.device_placement, one.split_batches, one.even_batches) == (False, True, False)
    assert (one.mixed_precision, one.gradient_accumulation_steps) == ("bf16", 4)
    assert (one.project_dir, one.logging_dir, one.save_iteration) == (tmp_path, tmp_path, 0)
    assert one.rng_types == ["torch", "generator"]
    assert not one.step_scheduler_with_optimizer
    assert one.deepspeed_plugin is None
    assert one.device == torch.device("cpu")
    one.even_batches = True
    assert one.dataloader_config.even_batches


def test_defaults_contradict_no_file(accelerator: Any) -> None:
    """The configuration sets the values that code leaves out."""
    one = accelerator(config={"mixed_precision": "bf16", "deepspeed_config": {"gradient_accumulation_steps": 3}})
    assert (one.mixed_precision, one.gradient_accumulation_steps) == ("bf16", 3)
    assert one.gradient_accumulation_plugin.num_steps is None


def test_what_accelerates_launcher_says(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables act like flags: ZeRO, accumulation, precision, the compiler."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    one = accelerator(cpu=True)
    model = nn.Linear(4, 4)
    one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert (one.resolved.zero_stage, one.resolved.precision, one.gradient_accumulation_steps) == (1, "bf16", 2)
    assert model._compiled_call_impl is not None


def test_records_and_arguments_beside_them(accelerator: Any) -> None:
    """An argument may repeat a record's value, or fill one that the record leaves open."""
    loading = DataLoaderConfiguration(even_batches=False, non_blocking=True)
    one = accelerator(
        dataloader_config=loading,
        split_batches=True,
        project_config=ProjectConfiguration(total_limit=2),
        project_dir="runs",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
    )
    assert (one.split_batches, one.even_batches, one.non_blocking) == (True, False, True)
    assert not loading.split_batches
    assert (one.project_dir, one.project_configuration.total_limit) == ("runs", 2)
    assert one.gradient_accumulation_steps == 2
    assert one.gradient_accumulation_plugin.sync_each_batch


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fsdp_plugin": object(), "torch_tp_plugin": object()}, ["fsdp_plugin", "zero_stage=3", "torch_tp_plugin"]),
        ({"parallelism_config": object()}, ["parallelism_config", "a object is no ParallelismConfig"]),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(2), "gradient_accumulation_steps": 3},
            ["num_steps=2"],
        ),
        ({"dataloader_config": DataLoaderConfiguration(even_batches=False), "even_batches": True}, ["even_batches"]),
        ({"project_config": ProjectConfiguration("one"), "project_dir": "two"}, ["'one'", "'two'"]),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(DynamoBackend.EAGER)}, ["dynamo_plugin"]),
        (
            {"dynamo_backend": "eager", "config": {"num_processes": 1, "dynamo_config": {"backend": "inductor"}}},
            ["dynamo_backend='eager'", "inductor at"],
        ),
        ({"deepspeed_plugin": object()}, ["not a DeepSpeedPlugin"]),
        ({"rng_types": ["numpy"]}, ["'numpy'", "generator"]),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ["two AutocastKwargs"]),
        ({"kwargs_handlers": [GradientAccumulationPlugin(2)]}, ["GradientAccumulationPlugin", "GradScalerKwargs"]),
        ({"kwargs_handlers": [GradScalerKwargs(init_scale=1000.0)]}, ["power of two"]),
        ({"kwargs_handlers": [GradScalerKwargs(backoff_factor=2.0)]}, ["between 0 and 1"]),
        ({"mixed_precision": "fp8"}, ["Write bf16"]),
        ({"mixed_precision": "bf61"}, ["Did you mean bf16"]),
        ({"mixed_precision": "bf16", "config": {"mixed_precision": "fp16"}}, ['"bf16" in code, but "fp16"']),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(arguments: dict[str, Any], words: list[str]) -> None:
    """The error has the name and what to write instead."""
    with pytest.raises(ConfigError) as caught:
        Accelerator(**arguments)
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_the_process_group_is_made_as_said(accelerator: Any) -> None:
    """Backend and time limit arrive at torch. If the group already exists, that is logged."""
    handler = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=77))
    one = accelerator(cpu=True, kwargs_handlers=[handler])
    group = dist.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    assert one.init_handler is handler
    with pytest.warns(UserWarning, match="is already initialized"):
        accelerator(cpu=True, kwargs_handlers=[handler])


def test_traces_of_the_profiler(accelerator: Any, tmp_path: Any) -> None:
    """Each process writes one Chrome trace. A handler of the call overrides the one given at the start."""
    one = accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["cpu"], with_flops=True)])
    with one.profile() as profiler:
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert any(event.flops > 0 for event in profiler.key_averages())
    with one.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "traces"))):
        torch.ones(4, 4) @ torch.ones(4, 4)
    assert "aten::mm" in (tmp_path / "traces" / "profile_0.json").read_text()


def test_plugins_of_two_models(accelerator: Any) -> None:
    """`prepare` follows the selected plugin. A second Accelerator without arguments shares the plugins."""
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=1),
        "teacher": DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5),
    }
    one = accelerator(cpu=True, deepspeed_plugins=plugins)
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
    one.prepare(student, torch.optim.SGD(student.parameters(), lr=0.1))
    assert (one.resolved.zero_stage, one.resolved.clipping) == (1, None)
    assert plugins["student"].deepspeed_config["train_micro_batch_size_per_gpu"] == 1
    two = accelerator()
    assert two.deepspeed_plugin is plugins["student"]
    two.state.select_deepspeed_plugin("teacher")
    two.prepare(teacher, torch.optim.SGD(teacher.parameters(), lr=0.1))
    assert (two.resolved.zero_stage, two.resolved.clipping) == (2, 0.5)
    assert one.deepspeed_plugin is two.deepspeed_plugin is plugins["teacher"]


def test_what_a_script_writes_into_the_plugin(accelerator: Any) -> None:
    """A batch size set before prepare takes effect. The plugin then shows the resolved values."""
    one = accelerator(cpu=True, config={"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"})
    one.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 3
    model = nn.Linear(4, 4)
    one.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert one.resolved.tree.value("train_micro_batch_size_per_gpu") == 3
    assert one.deepspeed_plugin.deepspeed_config["train_batch_size"] == 3
