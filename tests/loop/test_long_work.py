"""Long work shows its progress, on every path of a run, with the real engine and a threshold of zero."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from zero_plugin import Accelerator, skip_first_batches
from zero_plugin.distributed import messages
from zero_plugin.plan.activations import trace_activations

pytestmark = pytest.mark.programs


class Numbers(IterableDataset):
    """A stream, so skipping reads it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((8,), float(i)) for i in range(64))


def main(store: str, rank: str, world: str, folder: str, ops: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=ops)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    messages.SILENT_S = 0.0
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    accelerator = Accelerator(config={"use_cpu": True, "deepspeed_config": {"zero_optimization": offload}})
    plain = nn.Linear(8, 4)
    trace_activations(plain, torch.zeros(2, 8), "no")
    loader = DataLoader(Numbers(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()), loader)
    for batch in skip_first_batches(loader, 3):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(Path(folder, "checkpoint"))
    accelerator.save_state(Path(folder, "behind"), asynchronous=True)
    accelerator.wait_for_save()
    accelerator.load_state(Path(folder, "checkpoint"), verify=True)
    accelerator.save_model(model, Path(folder, "model"))
    accelerator.load_weights(model, Path(folder, "model"))
    accelerator.get_state_dict(model)
    with accelerator.whole_weights(model):
        pass
    accelerator.end_training()


WORK = (
    "tracing a step of the Linear",
    "preparing the Linear",
    "compiling DeepSpeed's cpu_adam, once for this machine",
    "skipping batches",
    "saving checkpoint",
    "saving behind",
    "loading checkpoint",
    "saving model",
    "loading model",
    "gathering the weights of the Linear",
)


@pytest.mark.processes
def test_all_that_may_take_long_tells_of_itself(
    run_processes: Callable[..., list[str]], built_ops: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of work logs a final line with its time and amount, on the main process only."""
    monkeypatch.setenv("ZERO_PLUGIN_VERBOSE", "1")  # all of this takes less than ten seconds
    ops = tmp_path / "ops"
    built = Path(os.environ["TORCH_EXTENSIONS_DIR"], "cpu_adam")
    shutil.copytree(built, ops / "cpu_adam")
    (ops / "cpu_adam" / "cpu_adam.so").unlink()  # only to be linked
    main_process, other = run_processes(__file__, 2, tmp_path, ops)
    for what in WORK:
        assert re.search(rf"^zero_plugin: {re.escape(what)}: done in \d+ s", main_process, re.MULTILINE), main_process
    assert re.search(r"skipping batches: done in \d+ s, 3 of 3 batches", main_process)
    assert re.search(r"gathering the weights of the Linear: done in \d+ s, 144 bytes", main_process)
    assert "done in" not in other


def test_what_takes_no_two_seconds_is_silent(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With the users' threshold, a small run logs no progress."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(8, 4))
    began = time.monotonic()
    accelerator.save_state(tmp_path / "checkpoint")
    accelerator.load_state(tmp_path / "checkpoint")
    accelerator.get_state_dict(model)
    lasted = time.monotonic() - began
    accelerator.end_training()
    assert lasted > messages.SILENT_S or "done in" not in capfd.readouterr().err


if __name__ == "__main__":
    main(*sys.argv[1:])
