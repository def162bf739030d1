"""Resuming from the newest checkpoint, and stop requests."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from zero_plugin import Accelerator, ProjectConfiguration, skip_first_batches
from zero_plugin.config.run_files import CUT_VARIABLE
from zero_plugin.errors import CheckpointError, LoopError

GOES_ON = {"auto_resume": True}
BEGINS_ANEW = {"auto_resume": False}


class Training:
    """A prepared training on six shuffled batches an epoch."""

    def __init__(self, folder: Path, config: dict[str, Any] | None = None, limit: int | None = None) -> None:
        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit)
        self.accelerator = Accelerator(cpu=True, config=config, project_config=project)
        torch.manual_seed(0)
        net, x = nn.Linear(4, 4), torch.randn(48, 4)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            net, sgd, DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
        )

    def run(self, epochs: range, save_after: int = -1) -> list[float]:
        """Return the losses of all steps."""
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
    """Make trainings in one folder, without a launcher, that end with the test."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    made: list[Training] = []

    def make(config: dict[str, Any] | None = None, limit: int | None = None) -> Training:
        made.append(Training(tmp_path, config, limit))
        return made[-1]

    yield make
    for training in made:
        training.accelerator.end_training()


Launch = Callable[..., None]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Simulate an attempt of a launch with torchrun's variables. Our launcher may start more launches."""

    def launch(name: str, attempt: int, torchrun: int = 0) -> None:
        place = tmp_path / "launches" / name / f"none_{torchrun}" / f"attempt_{attempt}" / "0"
        place.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place / "error.json"))

    return launch


def names(folder: Path) -> set[str]:
    """Return the names of the checkpoints."""
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.mark.parametrize("how", ["another launch", "auto_resume", "restarted"])
def test_a_run_that_goes_on(how: str, make: Make, launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    """A new launch, or a restart, resumes inside the epoch with the losses of a run without a stop.

    A new launch logs once whose checkpoint it resumes, and how to start from scratch.
    """
    launch("first", 0)
    losses = make().run(range(3), save_after=8)
    launch(*(("first", 1) if how == "restarted" else ("second", 0)))
    training = make(GOES_ON if how == "auto_resume" else None)
    capfd.readouterr()
    report = training.accelerator.resume()
    assert report is not None
    errors = capfd.readouterr().err
    for part in ("this run resumes from", "checkpoint_0, which an earlier launch saved (run ", "auto_resume: false"):
        assert errors.count(part) == (how != "restarted")
    assert (report.steps, report.epochs, report.batches) == (8, [1], [2])
    assert training.run(range(report.epochs[0], 3)) == losses[8:]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_loaders_own_generators_go_on(tmp_path: Path) -> None:
    """The generators of worker seeds, and one shared with another loader that drew since, are restored."""
    orders = []
    for seed in (3, 4):
        accelerator = Accelerator(cpu=True)
        data, alone, shared = TensorDataset(torch.arange(6.0)), seeded(seed), seeded(seed)
        loaders = accelerator.prepare(
            DataLoader(data, sampler=SequentialSampler(data), generator=alone),
            DataLoader(data, shuffle=True, generator=shared),
            DataLoader(data, shuffle=True, generator=shared),
        )
        if seed == 3:
            for number, _ in enumerate(loaders[1]):
                _ = list(loaders[0]), list(loaders[2])
                if number == 2:
                    accelerator.save_state(tmp_path / "saved")
                    states = [alone.get_state(), shared.get_state()]
        else:
            accelerator.load_state(tmp_path / "saved")
            assert all(map(torch.equal, states, [alone.get_state(), shared.get_state()]))
            _ = list(skip_first_batches(loaders[1], 3)), list(loaders[0]), list(loaders[2])
            _ = list(loaders[0]), list(loaders[2]), list(loaders[0]), list(loaders[2])
        orders.append([x.item() for loader in loaders for (x,) in loader])
        accelerator.end_training()
    assert orders[0] == orders[1]


@pytest.mark.parametrize("saved", ["in the training", "after its epoch"])
def test_an_evaluation_that_is_left_begins_anew(saved: str, make: Make, tmp_path: Path) -> None:
    """An evaluation that is left starts with its first batches. Its shuffle continues, and so does the training."""

    def run(training: Training, evaluated: DataLoader[Any], epochs: range, *, saves: bool) -> list[float]:
        found = []
        for epoch in epochs:
            for number, (x,) in enumerate(training.loader):
                loss = (training.model(x) - x.sin()).square().mean()
                training.accelerator.backward(loss)
                training.optimizer.step()
                training.optimizer.zero_grad()
                found.append(loss.item() + torch.rand(()).item())
                if saves and (epoch, number, saved) == (1, 2, "in the training"):
                    training.accelerator.save_state()
                    found.clear()
            for _, (x,) in zip(range(2), evaluated, strict=False):
                found += x.flatten().tolist()
            if saves and (epoch, saved) == (1, "after its epoch"):
                training.accelerator.save_state()
                found.clear()
        return found

    def build(config: dict[str, Any] | None = None) -> tuple[Training, Any]:
        training = make(config)
        return training, training.accelerator.prepare(DataLoader(TensorDataset(torch.arange(8.0)), 2, shuffle=True))

    losses = run(*build(), range(3), saves=True)
    training, evaluated = build(GOES_ON)
    report = training.accelerator.resume()
    assert run(training, evaluated, range(report.epochs[0], 3), saves=False) == losses


@pytest.mark.parametrize("sets_epoch", [False, True])
def test_a_training_loop_that_is_left(sets_epoch: bool, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """A training loop that is left continues its epoch, as the save logs, unless the script sets another epoch."""

    def run(training: Training, epochs: range, save: int) -> list[float]:
        losses: list[float] = []
        for epoch in epochs:
            for number, (x,) in enumerate(training.loader):
                if number == 4:
                    break
                training.accelerator.backward(loss := (training.model(x) - x.sin()).square().mean())
                training.optimizer.step()
                training.optimizer.zero_grad()
                losses.append(loss.item())
            if epoch == save:
                if sets_epoch:
                    training.loader.set_epoch(epoch + 1)
                training.accelerator.save_state()
        return losses

    losses = run(make(), range(3), 0)
    assert ("save_state after a break out of the loop" in capfd.readouterr().err) != sets_epoch
    training = make(GOES_ON)
    report = training.accelerator.resume()
    assert (report.epochs, report.batches) == (([1], [0]) if sets_epoch else ([0], [5]))
    if sets_epoch:
        assert run(training, range(1, 3), -1) == losses[4:]
    else:
        assert len(list(training.loader)) == 1


def test_a_window_is_said_to_be_lost_though_it_has_no_gradients(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A window without gradients is logged as lost: the script skipped its micro-batches, and its end would move."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 1)))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            if number:
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
        said = "save_state before the optimizer.step()"
        capfd.readouterr()
        accelerator.save_state(tmp_path / "saved")
        assert (said in capfd.readouterr().err) == (number % 2 == 0)
    accelerator.end_training()


def test_what_a_launch_before_has_saved(
    make: Make, launch: Launch, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A restart loads only what its own launch has saved, so a run that started from scratch does so again."""
    launch("first", 0)
    monkeypatch.setenv(CUT_VARIABLE, "1")  # our launcher, which restarts torchrun after running out of memory
    make().run(range(1), save_after=3)
    launch("second", 0)
    assert make(BEGINS_ANEW).accelerator.resume() is None
    assert "training starts from the beginning: an earlier launch" in capfd.readouterr().err
    launch("second", 1)
    assert make(BEGINS_ANEW).accelerator.resume() is None
    assert "no checkpoint of this run" in capfd.readouterr().err
    launch("first", 0, torchrun=1)
    monkeypatch.setenv(CUT_VARIABLE, "2")
    report = make().accelerator.resume()
    assert report is not None
    assert (report.steps, report.batches) == (3, [6])  # in each of the loader's three batches, two of half the size


def test_no_clock_decides(make: Make, launch: Launch, tmp_path: Path) -> None:
    """A restarted run resumes from its own save, even if a file server's clock is an hour behind."""
    launch("only", 0)
    make().run(range(1), save_after=3)
    os.utime(tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json", (0, 0))
    launch("only", 1)
    report = make().accelerator.resume()
    assert report is not None
    assert report.steps == 3


def test_a_second_run_in_a_folder(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A second run continues the numbering, so the newest has the largest number, and rotates only its own."""
    for written in ({"checkpoint_2", "checkpoint_3"}, {"checkpoint_2", "checkpoint_3", "checkpoint_5", "checkpoint_6"}):
        accelerator = make(limit=2).accelerator
        for _ in range(4 if "checkpoint_5" not in written else 3):
            last = accelerator.save_state()
        assert names(tmp_path) == written
        assert make(GOES_ON).accelerator.load_state().folder == last
    assert capfd.readouterr().err.count("this run continues with 4") == 1
    accelerator.project_configuration.iteration = 10  # a script may skip numbers
    assert accelerator.save_state().name == "checkpoint_10"


def test_a_number_that_another_run_takes_meanwhile(make: Make, tmp_path: Path) -> None:
    """A number being written counts as taken. Of two runs that end at one number, the later one gets an error."""
    accelerator = make().accelerator
    (tmp_path / "checkpoints" / ".checkpoint_3.01234567.writing").mkdir(parents=True)
    assert accelerator.save_state().name == "checkpoint_4"
    rival = tmp_path / "checkpoints" / "checkpoint_5" / "mine"
    accelerator.register_save_state_pre_hook(lambda *_: rival.parent.mkdir() or rival.touch())
    with pytest.raises(CheckpointError, match="checkpoint_5 was saved by another run meanwhile"):
        accelerator.save_state()
    assert rival.exists()


def test_a_requeued_run(make: Make, launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A requeued launch joins the run: it continues the numbering and rotates its checkpoints, as do later restarts."""
    launch("monday", 0)
    accelerator = make(limit=2).accelerator
    for _ in range(2):
        accelerator.save_state()
    launch("tuesday", 0)
    accelerator = make(GOES_ON, limit=2).accelerator
    assert accelerator.resume() is not None
    assert "this run resumes from" in capfd.readouterr().err
    accelerator.save_state()
    assert names(tmp_path) == {"checkpoint_1", "checkpoint_2"}
    launch("tuesday", 1)
    accelerator = make(GOES_ON, limit=2).accelerator
    assert accelerator.resume().folder.name == "checkpoint_2"
    accelerator.save_state()
    assert names(tmp_path) == {"checkpoint_2", "checkpoint_3"}


def test_two_runs_in_a_folder(make: Make, launch: Launch) -> None:
    """A restart before the first save repeats its launch's start: the same checkpoint, or from scratch."""
    launch("one", 0)
    make().accelerator.save_state()
    launch("requeued", 0)
    assert make(GOES_ON).accelerator.resume().folder.name == "checkpoint_0"
    launch("other", 0)
    other = make(BEGINS_ANEW).accelerator
    assert other.resume() is None
    assert other.save_state().name == "checkpoint_1"
    launch("requeued", 1)
    requeued = make(GOES_ON).accelerator
    assert requeued.resume().folder.name == "checkpoint_0"
    assert requeued.load_state().folder.name == "checkpoint_0"
    assert requeued.save_state().name == "checkpoint_2"
    launch("other", 1)
    assert make().accelerator.resume().folder.name == "checkpoint_1"
    launch("third", 0)
    assert make(BEGINS_ANEW).accelerator.resume() is None
    launch("third", 1)
    assert make(GOES_ON).accelerator.resume() is None
    launch("fourth", 0)
    assert make(GOES_ON).accelerator.resume().folder.name == "checkpoint_2"


def test_a_restart_where_the_folder_was_empty(make: Make, launch: Launch) -> None:
    """A checkpoint that another run has saved meanwhile in the empty folder is not this run's."""
    launch("one", 0)
    assert make(GOES_ON).accelerator.resume() is None
    launch("other", 0)
    make().accelerator.save_state()
    launch("one", 1)
    assert make(GOES_ON).accelerator.resume() is None


def test_going_back(make: Make, tmp_path: Path) -> None:
    """Resuming from an older checkpoint starts another run, so the newer ones are not rotated away."""
    accelerator = make().accelerator
    for _ in range(3):
        accelerator.save_state()
    accelerator = make(limit=1).accelerator
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_1")
    for _ in range(2):
        accelerator.save_state()
    assert names(tmp_path) == {"checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_4"}
    accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_2")
    accelerator.save_state()
    assert names(tmp_path) == {"checkpoint_4", "checkpoint_5"}


def test_a_checkpoint_by_name(make: Make, launch: Launch, tmp_path: Path) -> None:
    """A run that resumes from a named checkpoint does so at each start, unless it must start from scratch."""
    launch("first", 0)
    accelerator = make().accelerator
    for _ in range(2):
        accelerator.save_state()
    named = tmp_path / "checkpoints" / "checkpoint_0"
    for attempt in range(2):
        launch("second", attempt)
        accelerator = make(GOES_ON).accelerator
        assert accelerator.resume(named).folder == named
        accelerator.save_state()
    for attempt in range(2):
        launch("third", attempt)
        assert make(BEGINS_ANEW).accelerator.resume(named) is None
    launch("fourth", 0)
    assert make().accelerator.resume(named).folder == named


def test_numbers_that_begin_again(make: Make, tmp_path: Path) -> None:
    """If a script's step numbers restart, the manifests give the order of saving."""
    out = tmp_path / "out"
    make().accelerator.project_configuration.automatic_checkpoint_naming = False
    for numbers in ((500, 1000), (100, 200)):
        accelerator = make(GOES_ON).accelerator
        accelerator.project_configuration.automatic_checkpoint_naming = False
        for number in numbers:
            accelerator.save_state(out / f"checkpoint_{number}", total_limit=1)
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"checkpoint_1000", "checkpoint_200"}
    assert make(GOES_ON).accelerator.resume(out).folder.name == "checkpoint_200"


def test_checkpoints_of_before(make: Make, launch: Launch, tmp_path: Path) -> None:
    """Checkpoints whose manifest names no run can be resumed from, even before a first save, and are never removed."""
    accelerator = make().accelerator
    for _ in range(2):
        file = accelerator.save_state() / "manifest.json"
        manifest = json.loads(file.read_text())
        older = {**manifest, "format": 1}
        file.write_text(json.dumps({key: older[key] for key in older if key not in ("run", "order", "xxh3")}))
    for attempt in range(2):
        launch("now", attempt)
        accelerator = make(GOES_ON, limit=1).accelerator
        assert accelerator.resume().folder.name == "checkpoint_1"
    for _ in range(2):
        accelerator.save_state()
    assert names(tmp_path) == {"checkpoint_0", "checkpoint_1", "checkpoint_3"}
    launch("now", 2)
    assert make(GOES_ON).accelerator.resume().folder.name == "checkpoint_3"


@pytest.mark.parametrize("is_left", [False, True], ids=["at the last batch", "after the loop"])
def test_a_stop_between_two_epochs(is_left: bool, make: Make) -> None:
    """After an epoch's loop the next epoch comes first. At its last batch, the code after the loop comes first."""
    training = make()
    losses = training.run(range(1), save_after=-1 if is_left else 6)
    if is_left:
        training.accelerator.save_state()
    losses += training.run(range(1, 2))
    training = make(GOES_ON)
    report = training.accelerator.resume()
    assert report is not None
    assert (report.epochs, report.batches) == (([1], [0]) if is_left else ([0], [6]))
    assert training.run(range(report.epochs[0], 2)) == losses[6:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_script_that_counts_epochs_itself(workers: int, tmp_path: Path) -> None:
    """A checkpoint at an epoch's last batch resumes with the next epoch, in its original order.

    At an epoch's end, torch's sampler draws once more from the loader's own generator.
    """
    orders: list[list[float]] = []
    for resumes in (False, True):
        accelerator = Accelerator(cpu=True)
        data = TensorDataset(torch.arange(6.0))
        loader = accelerator.prepare(
            DataLoader(data, batch_size=2, shuffle=True, generator=seeded(3), num_workers=workers)
        )
        if resumes:
            accelerator.load_state(tmp_path / "saved")
        for epoch in range(1 if resumes else 0, 3):
            order = []
            for number, (x,) in enumerate(loader):
                order += x.tolist()
                if epoch == 0 and number == 2:
                    accelerator.save_state(tmp_path / "saved")
            orders.append(order)
        accelerator.end_training()
    assert orders[3:] == orders[1:3]


def test_a_run_that_begins_anew(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    """A run starts from scratch without a checkpoint, or if told to. An ignored checkpoint is logged and kept."""
    for config in (None, GOES_ON):
        assert make(config).accelerator.resume() is None
        assert "training starts from the beginning" in capfd.readouterr().err
    losses = make().run(range(1), save_after=3)
    training = make(BEGINS_ANEW)
    assert training.accelerator.resume() is None
    assert "checkpoint_0 is not loaded" in capfd.readouterr().err
    assert training.run(range(1)) == losses
    assert training.accelerator.save_state().name == "checkpoint_1"


def test_what_is_never_begun_anew(make: Make, tmp_path: Path) -> None:
    """A script that must resume and requests no checkpoint, or has only damaged ones, gets an error."""
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
    """A run that was killed in its first save starts from scratch."""
    (tmp_path / "checkpoints" / ".checkpoint_0.01234567.writing").mkdir(parents=True)
    assert make(GOES_ON).accelerator.resume() is None


def test_being_asked_to_stop(make: Make) -> None:
    """SIGTERM is recorded from the first query to the end of training. The script's own handler runs too."""
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
    """A first query outside the main thread is an error that says so."""
    accelerator, errors = make().accelerator, []

    def ask() -> None:
        with pytest.raises(LoopError, match="main thread") as caught:
            accelerator.stop_requested()
        errors.append(caught)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize("kind", ["lambda", "cosine", "one cycle", "warm-up", "steps", "the script's own"])
@pytest.mark.parametrize("same_global_batch", [True, False])
def test_schedules_on_other_numbers_of_processes(kind: str, same_global_batch: bool, tmp_path: Path) -> None:
    """A scheduler that advanced twice per step, and here once, has one process's state at that sample."""

    def make_schedule(optimizer: torch.optim.Optimizer, total: int) -> Any:
        lrs = torch.optim.lr_scheduler
        if kind == "lambda":
            return lrs.LambdaLR(optimizer, lambda count: 1 - count / total)
        if kind == "cosine":
            return lrs.CosineAnnealingLR(optimizer, total)
        if kind == "one cycle":
            return lrs.OneCycleLR(optimizer, 0.1, total_steps=total)
        if kind == "steps":
            return lrs.StepLR(optimizer, total // 3, 0.5)
        if kind == "warm-up":
            warm = total // 4
            parts = [lrs.LinearLR(optimizer, 0.1, 1.0, warm), lrs.CosineAnnealingLR(optimizer, total - warm)]
            return lrs.SequentialLR(optimizer, parts, [warm])

        class Own(lrs.LRScheduler):
            def get_lr(self) -> list[float]:
                return [rate * 0.9**self.last_epoch for rate in self.base_lrs]

        return Own(optimizer)

    def train(times: int, batch: int, steps: int, total: int, load: Path | None = None) -> tuple[Any, Any, list[float]]:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 1)
        # A rate that is a tensor, for a capturable optimizer, belongs to the optimizer alone.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if kind != "cosine" else torch.tensor(0.1), momentum=0.9)
        data = TensorDataset(torch.ones(64, 4))
        held_out, loader = DataLoader(data, batch_size=5), DataLoader(data, batch_size=batch, shuffle=True)
        schedule = make_schedule(optimizer, total)
        _, model, optimizer, loader, schedule = accelerator.prepare(held_out, model, optimizer, loader, schedule)
        schedule.times = times
        report = None if load is None else [accelerator.load_state(load) for _ in range(2)][-1]
        rates = []
        for _ in range(steps):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return accelerator, report, rates

    # 24 counts of two processes are 12 steps. Here they are 12 counts of equally large steps, or 24 steps of half the
    # size.
    first, _, _ = train(2, 8, 6, 24)
    folder = first.save_state(tmp_path / "saved")
    first.end_training()
    batch, left, total = (8, 6, 12) if same_global_batch else (4, 12, 24)
    second, report, rates = train(1, batch, left, total, folder)
    second.end_training()
    whole, _, expected = train(1, batch, 2 * left, total)
    whole.end_training()
    told = "\n".join(report.not_restored)
    if kind == "the script's own" and same_global_batch:
        assert "the position of Own, which continues at its count: it advanced 2 times per optimizer step" in told
        return
    assert told == ""
    assert rates == pytest.approx(expected[left:], abs=1e-9)


def _train_with_schedule(
    make: Callable[[Any], Any], steps: int, load: Path | None = None, save: Path | None = None
) -> tuple[Any, list[float]]:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, make(optimizer))
    rates = []
    try:
        report = None if load is None else accelerator.load_state(load)
        for _ in range(steps):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        if save is not None:
            accelerator.save_state(save)
    finally:
        accelerator.end_training()
    return report, rates


@pytest.mark.parametrize("kind", ["CosineAnnealingLR", "LambdaLR", "MultiStepLR"])
def test_another_scheduler_goes_on_at_the_saved_count_with_its_own_rates(tmp_path: Path, kind: str) -> None:
    """Another scheduler resumes at the saved count with its own rates. Torch alone mixes both or raises KeyError."""
    lrs = torch.optim.lr_scheduler

    def another(optimizer: Any) -> Any:
        if kind == "CosineAnnealingLR":
            return lrs.CosineAnnealingLR(optimizer, 20)
        if kind == "LambdaLR":
            return lrs.LambdaLR(optimizer, lambda count: 1 / (count + 1))
        return lrs.MultiStepLR(optimizer, [5, 7, 9], 0.3)

    _train_with_schedule(lambda optimizer: lrs.StepLR(optimizer, 3, 0.5), 6, save=tmp_path)
    report, rates = _train_with_schedule(another, 4, load=tmp_path)
    _, expected = _train_with_schedule(another, 10)
    assert rates == pytest.approx(expected[6:], abs=1e-9)
    assert f"the state of StepLR: {kind} replaces it here" in "\n".join(report.not_restored)


@pytest.mark.parametrize("kind", ["another class", "fewer parts"])
def test_a_scheduler_that_cannot_take_the_saved_state_is_an_error(tmp_path: Path, kind: str) -> None:
    """A plateau scheduler or a shorter sequence raises an error that names both classes and the fix."""
    lrs = torch.optim.lr_scheduler

    names = ("StepLR", "ReduceLROnPlateau") if kind == "another class" else ("SequentialLR", "SequentialLR")

    def saved(optimizer: Any) -> Any:
        if kind == "another class":
            return lrs.StepLR(optimizer, 3, 0.5)
        return lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer, 0.5, 2) for _ in range(3)], [2, 4])

    def loaded(optimizer: Any) -> Any:
        if kind == "another class":
            return lrs.ReduceLROnPlateau(optimizer)
        return lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer, 0.5, 2) for _ in range(2)], [2])

    _train_with_schedule(saved, 3, save=tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"state of a {names[0]}, but the {names[1]} .*does not accept"
    ) as caught:
        _train_with_schedule(loaded, 0, load=tmp_path)
    assert "weights_only=True" in str(caught.value)
