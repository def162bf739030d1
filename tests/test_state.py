"""States are views: any code sees, at any time, what runs."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from zero_plugin import Accelerator
from zero_plugin.config.choices import DistributedType
from zero_plugin.data.active import GradientState
from zero_plugin.errors import LoopError
from zero_plugin.loop.state import AcceleratorState, PartialState, is_initialized

ZERO = {"use_cpu": True, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_optimization": {"stage": 1}}}


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin and end each test without states, and without a process group."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    _forget()
    yield
    _forget()


def _forget() -> None:
    PartialState().destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()


def test_distributed_type_is_its_word() -> None:
    """It compares with text, and is text in JSON and pickles."""
    assert DistributedType.NO == "NO"
    assert DistributedType("DEEPSPEED") is DistributedType.DEEPSPEED
    assert json.loads(json.dumps({"type": DistributedType.MULTI_GPU})) == {"type": "MULTI_GPU"}
    assert pickle.loads(pickle.dumps(DistributedType.XLA)) is DistributedType.XLA


def test_a_partial_state_needs_no_accelerator() -> None:
    """It starts the processes. Every further one is the same, with the script's own attributes."""
    assert not PartialState._shared_state
    state = PartialState(cpu=True)
    assert state.initialized
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert (state.device, state.distributed_type, state.backend) == (torch.device("cpu"), DistributedType.NO, None)
    assert not state.use_distributed
    assert not state.debug
    assert not state.fork_launched
    assert "Num processes: 1\n" in repr(state)
    state.mine = 3
    assert PartialState().mine == 3
    assert not is_initialized()


def test_a_partial_state_follows_the_newest_accelerator() -> None:
    """A state from before the Accelerator follows it too, and shows how the run's processes work together."""
    state = PartialState(cpu=True)
    Accelerator(config=ZERO)
    assert state.distributed_type == DistributedType.DEEPSPEED
    assert not state.use_distributed
    Accelerator(cpu=True)
    assert state.distributed_type == DistributedType.NO


def test_an_accelerator_state_is_of_an_accelerator() -> None:
    """Without an Accelerator, the error says what to write. With one, it shows its precision and type."""
    with pytest.raises(LoopError, match=r"accelerator = Accelerator\(\)"):
        AcceleratorState()
    with pytest.raises(LoopError, match=r"accelerator = Accelerator\(mixed_precision='fp16'\)"):
        AcceleratorState(mixed_precision="fp16")
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState().mixed_precision == accelerator.state.mixed_precision == "bf16"
    assert AcceleratorState(mixed_precision="bf16", cpu=True).dynamo_plugin.backend == "NO"
    with pytest.raises(LoopError, match=r"AcceleratorState\(mixed_precision='fp16'\) .* configured differently"):
        AcceleratorState("fp16")
    assert not GradientState().is_xla_gradients_synced
    assert AcceleratorState().device == torch.device("cpu")
    assert AcceleratorState().deepspeed_plugin is None
    assert "Mixed precision type: bf16" in repr(accelerator.state)
    newest = Accelerator(cpu=True)
    assert accelerator.state.mixed_precision == newest.mixed_precision == "no", "the newest is shown"


def test_the_deepspeed_plugin_is_what_runs() -> None:
    """With ZeRO the state shows the configuration. An unknown name is an error with the known ones."""
    accelerator = Accelerator(config=ZERO)
    state = AcceleratorState()
    assert state.distributed_type == accelerator.distributed_type
    assert state.deepspeed_plugin.zero_stage == 1
    assert "'zero_optimization'" in repr(state)
    with pytest.raises(LoopError, match="no DeepSpeed plugin 'teacher'"):
        state.select_deepspeed_plugin("teacher")


def test_a_forgotten_state_says_so() -> None:
    """An attribute that a reset removed has its own error. Any other has Python's."""
    state = PartialState(cpu=True)
    with pytest.raises(AttributeError, match="'PartialState' object has no attribute 'other'"):
        _ = state.other
    state._reset_state()
    with pytest.raises(AttributeError, match=r"`PartialState` object.*`num_processes`.*_reset_state\(\)` was called"):
        _ = state.num_processes
    with pytest.raises(AttributeError, match=r"`device`.*_reset_state\(\)` was called"):
        _ = state.device
    state.other = "now"
    assert state.other == "now"
    assert PartialState().num_processes == 1

    accelerator = Accelerator(cpu=True)
    accelerator.state._reset_state()
    assert not is_initialized()
    with pytest.raises(AttributeError, match="`AcceleratorState` object has no attribute `mixed_precision`"):
        _ = accelerator.state.mixed_precision
    assert accelerator.mixed_precision == "no", "the run itself continues"


def test_a_gradient_state_is_the_window_s_and_the_loader_s() -> None:
    """It shows accumulation and the running loop from anywhere, nested loops too."""
    assert (GradientState().num_steps, GradientState().sync_gradients) == (1, True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = GradientState()
    assert state.num_steps == accelerator.gradient_state.num_steps == 2
    assert state.active_dataloader is None
    assert (state.end_of_dataloader, state.remainder, state.in_dataloader) == (False, -1, False)
    model = torch.nn.Linear(1, 1)
    outer, inner = (DataLoader(torch.ones(5, 1), batch_size=2) for _ in range(2))
    model, optimizer, outer, inner = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), outer, inner
    )
    seen = []
    for batch in outer:
        assert state.active_dataloader is outer
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            seen.append((state.sync_gradients, state.end_of_dataloader))
            optimizer.step()
    assert seen == [(False, False), (True, False), (True, True)]
    for _ in outer:
        for _ in inner:
            assert state.active_dataloader is inner
        assert state.active_dataloader is outer
    assert not state.in_dataloader
    accelerator.gradient_accumulation_steps = 4
    assert state.num_steps == 4
    state._set_sync_gradients(False)
    assert not accelerator.sync_gradients
    state.sync_gradients = True
    assert accelerator.sync_gradients
    assert "At end of current dataloader: False" in repr(state)
