"""Going on from the newest checkpoint, and being asked to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator, ProjectConfiguration
from zero_plugin.config.attempt import CUT_VARIABLE, LAUNCHED_VARIABLE
from zero_plugin.errors import CheckpointError, LoopError

GOES_ON = {"auto_resume": True}


class Training:
    """A prepared training on six shuffled batches an epoch."""

    def __init__(self, folder: Path, config: dict[str, Any] | None = None) -> None:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        self.accelerator = Accelerator(cpu=True, config=config, project_config=project)
        torch.manual_seed(0)
        net, x = nn.Linear(4, 4), torch.randn(48, 4)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            net, sgd, DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
        )

    def run(self, epochs: range, save_after: int = -1) -> list[float]:
        """The losses of all steps."""
        losses: list[float] = []
        for _ in epochs:
            for (x,) in self.loader:
                loss = (self.model(x) - x.sin()).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) == save_after:
                    self.accelerator.save_state()
        return losses


Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Trainings in one folder that are ended in the end; no launcher has restarted them."""
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    made: list[Training] = []

    def make(config: dict[str, Any] | None = None) -> Training:
        made.append(Training(tmp_path, config))
        return made[-1]

    yield make
    for training in made:
        training.accelerator.end_training()


@pytest.mark.parametrize("restarted", [False, True], ids=["auto_resume", "restarted"])
def test_a_run_that_goes_on(restarted: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, or restarted by the launcher: inside the epoch, in its order, the same losses as without a stop."""
    losses = make().run(range(3), save_after=8)
    if restarted:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    training = make(None if restarted else GOES_ON)
    report = training.accelerator.resume()
    assert report is not None
    assert (report.steps, report.epochs, report.batches) == (8, [1], [2])
    assert training.run(range(report.epochs[0], 3)) == losses[8:]


def test_what_a_launch_before_has_saved(
    make: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A restarted run that had begun anew does so again: only what its own launch has saved is gone on from."""
    make().run(range(1), save_after=3)
    monkeypatch.setenv(CUT_VARIABLE, "2")
    monkeypatch.setenv(LAUNCHED_VARIABLE, str(time.time() + 1))
    assert make().accelerator.resume() is None
    assert "begins anew, since it is of a launch before" in capfd.readouterr().err
    monkeypatch.setenv(LAUNCHED_VARIABLE, str(time.time() - 60))
    report = make().accelerator.resume()
    assert report is not None
    assert (report.steps, report.batches) == (3, [6])  # in each of the loader's three, two of half the size


def test_a_stop_between_two_epochs(make: Make) -> None:
    """Saved between two epochs, the next one is the first to come."""
    losses = make().run(range(2), save_after=6)
    training = make(GOES_ON)
    report = training.accelerator.resume()
    assert report is not None
    assert (report.epochs, report.batches) == ([1], [0])
    assert training.run(range(1, 2)) == losses[6:]


def test_a_run_that_begins_anew(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint, also where it is asked for; with one that nobody asked for, which is said, and kept."""
    for config in (None, GOES_ON):
        assert make(config).accelerator.resume() is None
        assert "the run begins anew" in capfd.readouterr().err
    losses = make().run(range(1), save_after=3)
    training = make()
    assert training.accelerator.resume() is None
    assert "checkpoint_0 is not loaded" in capfd.readouterr().err
    assert training.run(range(1)) == losses
    with pytest.raises(CheckpointError, match="exists already"):
        training.accelerator.save_state()


def test_what_is_never_begun_anew(make: Make, tmp_path: Path) -> None:
    """A script that was to go on and does not ask for a checkpoint, and damaged checkpoints only, are errors."""
    make().run(range(1), save_after=3)
    training = make(GOES_ON)
    with pytest.raises(LoopError, match=r"Call accelerator\.resume\(\) after prepare"):
        training.run(range(1))
    training.accelerator.load_state()
    training.run(range(1))
    (tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        make(GOES_ON).accelerator.resume()


def test_a_save_that_never_ended_is_no_checkpoint(make: Make, tmp_path: Path) -> None:
    """A run that was killed in its first save begins anew."""
    (tmp_path / "checkpoints" / ".checkpoint_0.01234567.writing").mkdir(parents=True)
    assert make(GOES_ON).accelerator.resume() is None


def test_being_asked_to_stop(make: Make) -> None:
    """SIGTERM is noted from the first question on, until the training ends; the script's own handler is called too."""
    heard: list[int] = []
    own = lambda number, _: heard.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        accelerator = make().accelerator
        assert signal.getsignal(signal.SIGTERM) is own
        assert not accelerator.stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert [accelerator.stop_requested() for _ in range(2)] == [True, True]
        assert heard == [signal.SIGTERM]
        accelerator.end_training()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_reach_the_main_thread_only(make: Make) -> None:
    """Asking first elsewhere is an error that says so."""
    accelerator, errors = make().accelerator, []

    def ask() -> None:
        with pytest.raises(LoopError, match="main thread") as caught:
            accelerator.stop_requested()
        errors.append(caught)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(errors) == 1
