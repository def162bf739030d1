"""Processes that would train differently get a prompt error before the first step, on each one, with both values."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from on_paths import in_processes, on_paths
from paths import global_batch, loss_of, make_net, own_batch, raised, running
from torch import nn

from zero_plugin import Accelerator, DummyOptim
from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, to_environment
from zero_plugin.config.installed import installed_version
from zero_plugin.config.tree import Entry, Origin, Tree
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LaunchError, LoopError
from zero_plugin.loop import same_everywhere

SOON_S = 20  # far below the process group's time-out; it takes milliseconds


def soon(kind: type[Exception], *words: str, by: Any) -> None:
    """Check that `by` raises on every process, long before a time-out."""
    began = time.monotonic()
    raised(kind, *words, by=by)
    assert time.monotonic() - began < SOON_S


@in_processes(2)
def test_another_version(folder: Path) -> None:
    """If one machine has an older torch, the error names the package, both versions, ranks and host."""
    told = [installed_version("torch")]
    dist.broadcast_object_list(told)
    if dist.get_rank() == 1:
        metadata = folder / "torch-1.2.3.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
        sys.path.insert(0, str(folder))
    installed_version.cache_clear()
    try:
        host = os.uname().nodename
        soon(LaunchError, f"torch: {told[0]} on rank 0 ({host}); 1.2.3 on rank 1 ({host})", by=Accelerator)
    finally:
        if dist.get_rank() == 1:
            sys.path.remove(str(folder))
        installed_version.cache_clear()
    Accelerator().end_training()


@in_processes(2)
def test_another_configuration() -> None:
    """The error names the key and both values. Values of one machine alone, like a folder on its disk, may differ."""
    rank = dist.get_rank()
    zero = {"stage": 2 + rank}
    config = {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": {"zero_optimization": zero}}
    told = "zero_optimization.stage: 2 on rank 0"
    soon(LaunchError, told, "3 on rank 1", "the same configuration", by=lambda: Accelerator(config=config))
    Accelerator(config={"use_cpu": True, "machine_rank": rank, "num_machines": 2, "log_dir": f"here {rank}"})


@in_processes(2)
def test_another_kind_of_device() -> None:
    """One process sees no GPU although others do, or the reverse."""
    rank = dist.get_rank()
    processes = Processes(rank, rank, 2, torch.device(("cpu", "cuda")[rank]))
    soon(
        LaunchError,
        "device: cpu on rank 0",
        "cuda on rank 1",
        by=lambda: same_everywhere.check_same_run(Document(), processes),
    )


@in_processes(2)
def test_not_as_many_as_asked() -> None:
    """The launcher was asked for three processes. Each of the two that started reports it."""
    asked = Tree({("num_processes",): Entry(3, Origin("flag", "--num_processes"))})
    os.environ[ENVIRONMENT_VARIABLE] = to_environment(Document(launch=asked))
    try:
        soon(LaunchError, "configured for 3 processes, but the process group has 2", by=Accelerator)
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]


@on_paths("ddp", "zero3")
def test_another_model(path: str) -> None:
    """Another hidden size, a frozen layer, a dtype or a missing layer: names, values, ranks. Afterwards it trains."""
    odd = dist.get_rank() == 1
    with running(path) as accelerator:

        def prepare(model: nn.Module, lr: float = 0.1) -> Any:
            return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))

        for build, told in (
            (lambda: nn.Linear(8, 4 + odd), "weight: (4, 8) float32 on rank 0"),
            (lambda: nn.Linear(8, 4).requires_grad_(not odd), "(4,) float32, frozen on rank 1"),
            (lambda: nn.Linear(8, 4, dtype=torch.float64 if odd else None), "bias: (4,) float32 on rank 0"),
            (lambda: nn.Linear(8, 4, bias=not odd), "bias: (4,) float32 on rank 0"),
        ):
            soon(LoopError, told, "on rank 1", "build the same models", by=lambda build=build: prepare(build()))
        soon(LoopError, "lr: 0.1 on rank 0", "0.2 on rank 1", by=lambda: prepare(nn.Linear(8, 4), 0.1 * (1 + odd)))
        pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
        soon(LoopError, "missing", by=lambda: accelerator.prepare(*pair[: 1 + odd]))
        model, optimizer = prepare(make_net())
        accelerator.backward(loss_of(model, own_batch(0)))
        optimizer.step()
        assert torch.isfinite(loss_of(model, global_batch(1)))


@on_paths("zero2")
def test_placeholders_differ(path: str) -> None:
    """Different arguments of a DummyOptim are reported too."""
    odd = dist.get_rank() == 1
    section = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    with running(path, deepspeed=section) as accelerator:
        net = make_net()
        optimizer = DummyOptim(net.parameters(), lr=1e-3, weight_decay=0.1 * (1 + odd))
        soon(LoopError, "weight_decay: 0.1 on rank 0", by=lambda: accelerator.prepare(net, optimizer))
