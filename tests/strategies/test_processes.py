"""The process group of a run: its lifetime, and the next group."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore

from zero_plugin import Accelerator
from zero_plugin.config.handlers import InitProcessGroupKwargs
from zero_plugin.distributed.processes import Processes, refuse_shared_gpu
from zero_plugin.errors import LaunchError, LoopError
from zero_plugin.loop.state import PartialState

pytestmark = pytest.mark.programs

ZERO = {"use_cpu": True, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_optimization": {"stage": 2}}}


def make(init_method: str, **kwargs: object) -> Accelerator:
    """Create an Accelerator whose processes meet in a file, so no port is taken."""
    return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(init_method=init_method)], **kwargs)  # type: ignore[arg-type]


def train(accelerator: Accelerator) -> None:
    """Run one step and operations that need a working group."""
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    world = accelerator.num_processes
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == list(range(world))


@in_processes(1, 2)
def test_trainings_one_after_another(store: str) -> None:
    """Three trainings run in one process, with and without ZeRO. Each ends its group."""
    for config in (None, ZERO, None):
        accelerator = make(store, config=config, cpu=None if config else True)
        assert accelerator.num_processes == PartialState().num_processes == int(os.environ["WORLD_SIZE"])
        train(accelerator)
        accelerator.end_training()
        assert not dist.is_initialized()
        assert not accelerator._run.processes.backend
        with pytest.raises(LoopError, match="has ended") if accelerator.num_processes > 1 else nullcontext():
            accelerator.wait_for_everyone()


@in_processes(1, 2)
def test_two_trainings_at_once(store: str) -> None:
    """The group lasts until both have ended, whichever is first."""
    for first in (0, 1):
        both = [make(store, cpu=True), Accelerator(config=ZERO)]
        both.pop(first).end_training()
        train(both[0])
        both[0].end_training()
        assert not dist.is_initialized()


@in_processes(1, 2)
def test_forgotten_states_keep_the_processes(store: str) -> None:
    """Forgetting the states keeps the processes. The next Accelerator uses the same group, and works."""
    for _ in range(2):
        accelerator = make(store, cpu=True)
        accelerator.state._reset_state(reset_partial_state=True)
        accelerator.gradient_state._reset_state()
        assert not accelerator.state.initialized
    train(accelerator)
    with pytest.warns(UserWarning, match="has no effect"):
        train(make(store, cpu=True))


@in_processes(1, 2)
def test_a_script_without_an_accelerator(store: str) -> None:
    """A script that only reads its rank ends cleanly, and may end its group earlier."""
    state = PartialState(cpu=True, init_method=store)
    state.wait_for_everyone()
    assert state.backend == (None if state.num_processes == 1 else "gloo")
    state.destroy_process_group()
    assert not dist.is_initialized()
    PartialState._reset_state()
    PartialState(cpu=True, init_method=store).wait_for_everyone()


@in_processes(1, 2)
def test_a_group_that_torch_ends_is_followed_by_another(store: str) -> None:
    """Many scripts end the group by torch's own call. The next Accelerator creates another group."""
    for _ in range(2):
        accelerator = make(store, cpu=True)
        train(accelerator)
        accelerator.free_memory()
        dist.destroy_process_group()


def test_two_ranks_on_one_gpu_are_named() -> None:
    """The error comes before NCCL starts. A later group, or a restart, checks again from scratch."""
    store = HashStore()
    refuse_shared_gpu(PrefixStore("0.1", store), 0, "GPU-a")
    refuse_shared_gpu(PrefixStore("0.1", store), 1, "GPU-b")
    with pytest.raises(LaunchError, match=r"rank 1 on .* and rank 2 on .* have the same GPU \(GPU-b\)"):
        refuse_shared_gpu(PrefixStore("0.1", store), 2, "GPU-b")
    refuse_shared_gpu(PrefixStore("1.1", store), 2, "GPU-b")


def test_deepspeed_is_told_the_number_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes LOCAL_RANK for the GPU's number.

    On other devices it stays the rank among this machine's processes.
    """
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")  # DeepSpeed compares the two
    for device, seen in (("cuda:0", "0"), ("cuda:3", "3"), ("cpu", "3")):
        with Processes(3, 3, 4, torch.device(device)).counted_by_gpu():
            assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == seen
        assert os.environ["LOCAL_RANK"] == "3"
    monkeypatch.delenv("LOCAL_RANK")  # the script made the group, without a launcher
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")  # mpirun started this process's parent
    with Processes(3, 3, 4, torch.device("cpu")).counted_by_gpu():
        assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "3"
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"
