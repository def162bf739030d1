"""The self-test's checks find defects: each check runs in one process on something broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero_plugin import Accelerator
from zero_plugin.cli import selftest_worker
from zero_plugin.cli.selftest import STEPS, CheckError, LeftOut, Outcome
from zero_plugin.cli.selftest_worker import Run, check_all_reduce, check_barrier, check_data_loader
from zero_plugin.loop.optimizer import AcceleratedOptimizer


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Create a run of one process on the CPU."""
    accelerator = Accelerator(cpu=True)
    yield Run(accelerator, tmp_path / "checkpoint")
    accelerator.end_training()


def test_one_process_passes(run: Run) -> None:
    """One process runs step, checkpoint and loader. Checks that need more processes or a GPU give a reason."""
    assert "as in one process" in selftest_worker.check_optimizer_step(run)
    assert "values equal" in selftest_worker.check_checkpoint(run)
    assert "each once" in check_data_loader(run)
    for check in (check_barrier, check_all_reduce, selftest_worker.check_host_and_device, selftest_worker.check_nvme):
        with pytest.raises(LeftOut, match=r"process|CPU|NVMe"):
            check(run)


def test_a_gradient_that_is_twice_as_large_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A doubled gradient is found, although Adam's first step hardly depends on the gradient's size."""
    backward = run.accelerator.backward
    monkeypatch.setattr(run.accelerator, "backward", lambda loss: backward(2 * loss))
    with pytest.raises(CheckError, match="differs by"):
        selftest_worker.check_optimizer_step(run)


def test_an_optimizer_whose_states_are_not_restored_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizer states that are not restored are found. Restored weights alone are not enough."""
    selftest_worker.check_optimizer_step(run)
    load = run.accelerator.load_state
    monkeypatch.setattr(run.accelerator, "load_state", lambda folder: load(folder, weights_only=True))
    with pytest.raises(CheckError, match="after load_state differs"):
        selftest_worker.check_checkpoint(run)


def test_weights_that_are_not_restored_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not restored are found and named."""
    selftest_worker.check_optimizer_step(run)
    monkeypatch.setattr(run.accelerator, "load_state", lambda folder: None)
    with pytest.raises(CheckError, match=r"weights differ after load_state: 0\.weight"):
        selftest_worker.check_checkpoint(run)


def test_a_sample_that_comes_twice_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that comes twice, and one that is missing instead, are found."""
    monkeypatch.setattr(run.accelerator, "gather_for_metrics", lambda batch: torch.cat([batch[:1], batch[:-1]]))
    with pytest.raises(CheckError, match=r"missing and .* more than once"):
        check_data_loader(run)


def test_an_endless_overflow_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 that overflows at every loss scale is reported, not retried forever."""
    monkeypatch.setattr(type(run.accelerator), "optimizer_step_was_skipped", True)
    monkeypatch.setattr(AcceleratedOptimizer, "step", lambda self: None)
    with pytest.raises(CheckError, match="overflowed"):
        selftest_worker.check_optimizer_step(run)


def test_a_wrong_sum_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sum is reported with place and values."""

    def spoil(tensor: torch.Tensor) -> Any:
        tensor[12345] += 1

    monkeypatch.setattr(Run, "processes", 2)
    monkeypatch.setattr(dist, "all_reduce", spoil)
    with pytest.raises(CheckError, match="values are wrong, the first at"):
        check_all_reduce(run)


def test_the_checkpoint_needs_the_step_and_a_folder(run: Run) -> None:
    """Without the step or a folder, the checkpoint is left out, with the reason."""
    with pytest.raises(LeftOut, match="optimizer step"):
        selftest_worker.check_checkpoint(run)
    selftest_worker.check_optimizer_step(run)
    run.folder = None
    with pytest.raises(LeftOut, match="--folder"):
        selftest_worker.check_checkpoint(run)


def gathered(monkeypatch: pytest.MonkeyPatch, *others: Outcome) -> None:
    """Simulate further ranks with these outcomes."""
    monkeypatch.setattr(Run, "processes", 1 + len(others))
    monkeypatch.setattr(selftest_worker, "gather_values", lambda own: [own, *map(asdict, others)])


def test_a_step_that_failed_on_one_rank_counts_on_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that failed on one rank counts as failed on all, so all skip the checkpoint and no collective hangs."""
    selftest_worker.check_optimizer_step(run)
    gathered(monkeypatch, Outcome("optimizer step", "wrong", "out of memory"))
    outcome = selftest_worker._run("optimizer step", lambda run: "as in one process", run)
    assert (outcome.level, outcome.found) == ("wrong", "on rank 1: out of memory")
    with pytest.raises(LeftOut, match="optimizer step, which failed"):
        selftest_worker.check_checkpoint(run)


def test_a_check_is_ok_if_it_is_on_every_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check is ok if it is ok on every rank. Otherwise the line says why another rank left it out."""
    gathered(monkeypatch, Outcome("NVMe", "left out", "nothing is offloaded"))
    outcome = selftest_worker._run("NVMe", lambda run: "writes and reads", run)
    assert (outcome.level, outcome.found) == ("left out", "nothing is offloaded")
    gathered(monkeypatch, Outcome("NVMe", "ok", "also"))
    outcome = selftest_worker._run("NVMe", lambda run: "writes and reads", run)
    assert (outcome.level, outcome.found) == ("ok", "writes and reads")


def test_only_what_is_wrong_has_a_way_out(run: Run) -> None:
    """A failed check has its own fix, unless the error says what to do."""

    def fail(_: Run) -> str:
        raise CheckError("another value")

    def leave_out(_: Run) -> str:
        raise LeftOut("nothing is offloaded")

    assert selftest_worker._run("NVMe", fail, run).fix == STEPS["NVMe"]
    assert selftest_worker._run("NVMe", leave_out, run).fix == ""
    assert selftest_worker._run("NVMe", lambda run: "writes and reads", run).fix == ""


def test_ranks_that_fail_differently(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error message is shown for the ranks that raised it. Other failed ranks are named."""
    said = ["disk full", "no such folder", "disk full", "no such folder"]
    gathered(monkeypatch, *(Outcome("NVMe", "wrong", each) for each in said))
    outcome = selftest_worker._run("NVMe", lambda run: "writes and reads", run)
    assert outcome.found == "on rank 1, 3: disk full; rank 2, 4 failed with other messages"
