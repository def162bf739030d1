"""A run's arithmetic as a script reads it: before, between and after its models."""

from __future__ import annotations

import pytest
import torch

from zero_plugin.accelerator import Accelerator
from zero_plugin.data.active import GradientState
from zero_plugin.errors import LoopError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.state import AcceleratorState


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch, ends_processes: None) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def _product_type(accelerator: Accelerator) -> torch.dtype:
    with accelerator.autocast():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_precision_is_known_before_prepare_and_after_free_memory() -> None:
    """A section of a DeepSpeed JSON sets the precision like `mixed_precision`, for `autocast` too."""
    accelerator = Accelerator(
        config={"distributed_type": "NO", "use_cpu": True, "deepspeed_config": {"bf16": {"enabled": True}}}
    )
    for _ in range(2):
        assert accelerator.mixed_precision == accelerator.state.mixed_precision == "bf16"
        accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.free_memory()
    assert accelerator.native_amp
    assert accelerator.scaler is None


def test_autocast_before_prepare() -> None:
    """`auto` is resolved to a dtype before autocast, and autocast never sees the word."""
    assert _product_type(Accelerator(cpu=True, mixed_precision="bf16")) is torch.bfloat16
    accelerator = Accelerator(cpu=True, mixed_precision="auto")
    expected = {"bf16": torch.bfloat16, "no": torch.float32}[accelerator.mixed_precision]
    assert _product_type(accelerator) is expected
    assert accelerator.prepare(torch.nn.Linear(1, 1)) is not None
    assert {"bf16": torch.bfloat16, "no": torch.float32}[accelerator.mixed_precision] is expected


def test_the_scaler_is_the_sessions_loss_scale() -> None:
    """Only fp16 has a scaler. The scaler shows and sets the loss scale of the prepared model."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    assert accelerator.scaler is not None
    with pytest.raises(LoopError, match=r"prepare\(model, optimizer\)"):
        accelerator.scaler.get_scale()
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = accelerator.scaler
    assert scaler.is_enabled()
    assert scaler.get_scale() == optimizer.loss_scale == 2.0**16
    scaler.load_state_dict({**scaler.state_dict(), "value": 8.0})
    assert scaler.get_scale() == optimizer.loss_scale == 8.0
    accelerator.backward(model(torch.ones(1, 1)).sum())
    scaler.unscale_(optimizer)
    assert model.weight.grad.tolist() == [[1.0]]


def test_what_libraries_ask_for() -> None:
    """Attributes of features that do not exist here answer, and an optimizer shows its states."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is accelerator.torch_device_mesh is accelerator.fp8_backend is None
    assert accelerator.is_fsdp2 is accelerator.is_composable_parallelism_enabled is False
    assert accelerator.has_lomo_optimizer is False
    assert accelerator.should_save_model
    assert accelerator.deepspeed_config is None
    assert not accelerator.native_amp
    with accelerator.maybe_context_parallel(buffers=[], buffer_seq_dims=[]):
        pass
    optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert (optimizer.device_placement, optimizer.scaler) == (True, None)
    assert type(optimizer.accelerator_state) is AcceleratorState
    assert type(optimizer.gradient_state) is GradientState
    zero = {"use_cpu": True, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_optimization": {"stage": 1}}}
    accelerator.end_training()
    accelerator = Accelerator(config=zero)
    assert accelerator.deepspeed_plugin is not None
    assert accelerator.deepspeed_config is accelerator.deepspeed_plugin.deepspeed_config
