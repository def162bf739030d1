"""Trackers get the script's logged values, on the main process only. Accelerate's names work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zero_plugin import Accelerator
from zero_plugin.errors import ConfigError, LoopError
from zero_plugin.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    TensorBoardTracker,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from zero_plugin.utils import LoggerType, ProjectConfiguration

HYPER = {"lr": 0.1, "layers": 3, "name": "run", "fast": True, "nothing": None}
ONE_STEP = {"config": {"distributed_type": "NO", "use_cpu": True}}


class Kept(GeneralTracker):
    """A script's own tracker."""

    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((step, values, kwargs))

    @on_main_process
    def finish(self) -> None:
        self.calls.append("finished")


def run(log_with: Any, folder: Path, **init: Any) -> Accelerator:
    accelerator = Accelerator(log_with=log_with, project_dir=folder, **ONE_STEP)
    accelerator.init_trackers("a-run", HYPER, init_kwargs=init)
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1), "phase": "train"}, step=step)
    return accelerator


def test_jsonl(tmp_path: Path) -> None:
    """Each call of log immediately writes a line. Tensors and arrays become numbers, and nan is legal JSON."""
    accelerator = run("jsonl", tmp_path)
    accelerator.log({"a": torch.tensor(2.5), "b": np.float32(0.5), "c": torch.arange(2), "d": float("nan")}, step=3)
    accelerator.log({"e": [np.float32(0.5), {"f": torch.tensor(1.5)}]}, step=4)
    lines = [json.loads(line) for line in (tmp_path / "a-run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[4]["e"] == [0.5, {"f": 1.5}]
    assert lines[1]["loss"] == 0.5
    assert lines[1]["phase"] == "train"
    assert {key: lines[3][key] for key in "abcd"} == {"a": 2.5, "b": 0.5, "c": [0, 1], "d": "nan"}
    assert json.loads((tmp_path / "a-run" / "config.json").read_text()) == HYPER
    stream = accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.end_training()
    assert stream.closed
    run("jsonl", tmp_path).end_training()
    assert len((tmp_path / "a-run" / "metrics.jsonl").read_text().splitlines()) == 8


def test_tensorboard(tmp_path: Path) -> None:
    """Numbers become scalars, strings text, dicts several curves in one plot."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = run(LoggerType.TENSORBOARD, tmp_path)
    accelerator.log({"both": {"one": 1.0, "two": 2.0}, "none": None, "many": [1, 2]}, step=0)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "a-run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, pytest.approx(1 / 3)),
    ]
    assert "phase/text_summary" in events.Tags()["tensors"]
    folders = {file.parent.name for file in tmp_path.glob("a-run/*/events.out.tfevents.*")}
    assert folders == {"both_one", "both_two", "hparams"}


def test_wandb_offline(tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A run without network leaves its file, with the hyper-parameters and every value in it."""
    home = dict.fromkeys(("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"), str(tmp_path / "home"))
    # In its own process: it starts a service, threads included.
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings; warnings.simplefilter('ignore')\n"
        "from zero_plugin import Accelerator\n"
        f"accelerator = Accelerator(log_with='wandb', **{ONE_STEP!r})\n"
        f"accelerator.init_trackers('a-run', {HYPER!r}, "
        f"init_kwargs={{'wandb': {{'mode': 'offline', 'dir': {str(tmp_path)!r}}}}})\n"
        "for step in range(3): accelerator.log({'loss': 1 / (step + 1)}, step=step)\n"
        "assert accelerator.get_tracker('wandb', unwrap=True).project == 'a-run'\n"
        "accelerator.end_training()\n"
    )
    done = run_python(script, **home)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"layers" in content
    assert content.count(b"loss") >= 3


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers become metrics, strings tags, and the hyper-parameters parameters, cut if too long."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(log_with="mlflow", **ONE_STEP)
    options = {"tracking_uri": (tmp_path / "runs").as_uri(), "run_name": "first"}
    accelerator.init_trackers("a-run", {**HYPER, "long": "x" * 900}, {"mlflow": options})
    for step in range(3):
        accelerator.log({"loss": 1.0 / (step + 1), "phase": "train", "inner": {"a": step}, "none": None}, step=step)
    run_id = accelerator.get_tracker("mlflow", unwrap=True).info.run_id
    accelerator.end_training()
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient((tmp_path / "runs").as_uri())
    found = client.get_run(run_id)
    assert found.data.params["layers"] == "3"
    assert found.data.params["long"] == "x" * 499 + "…"
    assert found.data.tags["phase"] == "train"
    assert [point.value for point in client.get_metric_history(run_id, "loss")] == [1.0, 0.5, 1 / 3]
    assert [point.value for point in client.get_metric_history(run_id, "inner/a")] == [0, 1, 2]
    assert client.get_experiment(found.info.experiment_id).name == "a-run"


def test_a_scripts_own_tracker() -> None:
    """It is started, gets all calls with their arguments, and is finished at the end of training."""
    kept = Kept()
    accelerator = Accelerator(log_with=[kept], **ONE_STEP)
    accelerator.init_trackers("a-run", HYPER)
    accelerator.log({"loss": 1.0}, step=1, log_kwargs={"kept": {"color": "red"}, "other": {"x": 1}})
    assert accelerator.get_tracker("kept") is kept
    assert accelerator.get_tracker("kept", unwrap=True) is kept.calls
    accelerator.end_training()
    assert kept.calls == [HYPER, (1, {"loss": 1.0}, {"color": "red"}), "finished"]

    class Bare(GeneralTracker):
        name = "bare"

    with pytest.raises(NotImplementedError, match="Bare lacks requires_logging_directory, tracker"):
        Bare()


@pytest.fixture
def known() -> Iterator[dict[str, Any]]:
    """Return the trackers by name, and restore them afterwards."""
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield LOGGER_TYPE_TO_CLASS
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def test_a_registered_tracker_is_known_by_name(
    tmp_path: Path, known: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its class gets the project's name, the logging folder if it needs one, and its own arguments."""

    class Named(Kept):
        name = "named"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.calls.append((args, kwargs))

    class Folder(Named):
        name = "folder"
        requires_logging_directory = True

    register_tracker_class(Named)
    known["folder"] = Folder  # as scripts did before a function for it existed
    accelerator = run(["named", "folder"], tmp_path, named={"color": "red"})
    calls = [accelerator.get_tracker(name, unwrap=True)[:2] for name in ("named", "folder")]
    assert calls == [[(("a-run",), {"color": "red"}), HYPER], [(("a-run", tmp_path), {}), HYPER]]
    accelerator.end_training()
    with pytest.raises(ConfigError, match=r"log_with='folder'.*no folder is given"):
        Accelerator(log_with="folder", **ONE_STEP)
    with pytest.raises(ConfigError, match=r"Write jsonl, .*, trackio, named, folder, all, or pass"):
        Accelerator(log_with="nmaed", **ONE_STEP)
    assert "named" not in get_available_trackers()
    capsys.readouterr()
    register_tracker_class(Named)
    assert "tracker 'named' is registered again: Named replaces it" in capsys.readouterr().err


def test_what_cannot_be_registered(known: dict[str, Any]) -> None:
    """Errors name the fault: no class, no tracker, no name, no word about folders."""
    for wrong, what in (
        (Kept(), "is no subclass"),
        (dict, "is no subclass"),
        (type("Bare", (GeneralTracker,), {}), "lacks name and requires_logging_directory"),
        (type("Empty", (Kept,), {"name": ""}), "lacks a name"),
    ):
        with pytest.raises(ValueError, match=f"register_tracker_class: .* {what}"):
            register_tracker_class(wrong)  # type: ignore[arg-type]
    assert "kept" not in known


def test_all_takes_those_that_can_run(tmp_path: Path) -> None:
    """`all` is every installed one, or without a folder those that write no files. A duplicate starts once."""
    names = [str(name) for name in get_available_trackers()]
    assert names == ["jsonl", "tensorboard", "wandb", "mlflow"]
    with_folder = Accelerator(log_with="all", project_dir=tmp_path, **ONE_STEP)
    assert [tracker.name for tracker in with_folder.log_with] == names
    with_folder.end_training()
    without = Accelerator(log_with="all", **ONE_STEP)
    assert [tracker.name for tracker in without.log_with] == ["wandb", "mlflow"]
    without.end_training()
    kept = Kept()
    twice = Accelerator(log_with=["jsonl", LoggerType.JSONL, kept, kept], project_dir=tmp_path, **ONE_STEP)
    assert [tracker.name for tracker in twice.log_with] == ["jsonl", "kept"]
    twice.end_training()


def test_what_cannot_be_logged_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every faulty tracker is named before anything starts: unknown, not installed, without a folder."""
    monkeypatch.setattr(TensorBoardTracker, "needs", ("no_such_package",))
    with pytest.raises(ConfigError) as caught:
        Accelerator(log_with=["tensorbord", "tensorboard", "jsonl"], **ONE_STEP)
    message = str(caught.value)
    assert "log_with='tensorbord'" in message
    assert (
        "Write jsonl, tensorboard, wandb, mlflow, aim, clearml, comet_ml, dvclive, swanlab, trackio, all, or pass"
        in message
    )
    assert "pip install no_such_package" in message
    assert "project_dir" in message
    project = ProjectConfiguration(project_dir=None, logging_dir=tmp_path)
    accelerator = Accelerator(log_with="jsonl", project_config=project, **ONE_STEP)
    accelerator.get_tracker("wandb").log({"nothing": "happens"})
    accelerator.init_trackers("a-run", init_kwargs={"wandb": {}})
    assert "is for wandb, which log_with does not name" in capsys.readouterr().err
    assert (tmp_path / "a-run" / "metrics.jsonl").exists()
    with pytest.raises(LoopError, match=r"no tracker 'wandb' is started \(started: jsonl\)"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


OTHERS_PACKAGE = """
runs = []

class Run:
    def __init__(self, **kwargs):
        self.calls = [kwargs]
        runs.append(self)

    def log(self, values, step=None, **kwargs):
        self.calls.append((step, values, kwargs))

    def finish(self):
        self.calls.append("finished")

class Config(dict):
    def update(self, values, **_):
        super().update(values)

init, config = Run, Config()
"""


def test_accelerates_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run without an Accelerator of Accelerate's. A package that replaces trackio keeps its class's calls."""
    with pytest.raises(ConfigError, match=r"trackio is not installed\n.*pip install trackio"):
        Accelerator(log_with="trackio", **ONE_STEP)
    (tmp_path / "trackio.py").write_text(OTHERS_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    accelerator = run("trackio", tmp_path, trackio={"space_id": "mine"})
    import trackio  # type: ignore[import-not-found]

    (started,) = trackio.runs
    assert accelerator.get_tracker("trackio", unwrap=True) is started
    accelerator.log({"loss": torch.tensor(0.25)}, step=3, log_kwargs={"trackio": {"color": "red"}})
    accelerator.end_training()
    assert trackio.config == HYPER
    assert started.calls[0] == {"project": "a-run", "space_id": "mine"}
    assert started.calls[1] == (0, {"loss": 1.0, "phase": "train"}, {})
    assert started.calls[-2:] == [(3, {"loss": 0.25}, {"color": "red"}), "finished"]
    sys.modules.pop("trackio")


@pytest.mark.parametrize("zero", [None, 2])
def test_metrics(zero: int | None, built_ops: None) -> None:
    """Learning rate, norm before clipping, throughput and free memory are logged. The norm is the step's own."""
    config: dict[str, Any] = {"use_cpu": True, "distributed_type": "DEEPSPEED" if zero else "NO"}
    config["deepspeed_config"] = {"gradient_clipping": 0.01, **({"zero_optimization": {"stage": zero}} if zero else {})}
    accelerator = Accelerator(config=config)
    model = torch.nn.Linear(4, 1)
    inputs = torch.ones(2, 4)
    wanted = torch.autograd.grad((model(inputs) ** 2).mean(), list(model.parameters()))
    norm = torch.stack([part.norm() for part in wanted]).norm().item()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    assert set(accelerator.metrics()) == {"lr", "memory_available_gb"}
    accelerator.backward((model(inputs) ** 2).mean())
    optimizer.step()
    found = accelerator.metrics(units=64)
    assert found["lr"] == 0.25
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found["tokens_per_second"] > 0
    assert 0 < found["memory_available_gb"] < 1e5
    assert "loss_scale" not in found
    accelerator.end_training()


def test_metrics_of_fp16() -> None:
    """The loss scale, and the number of skipped steps in a row, are logged."""
    accelerator = Accelerator(mixed_precision="fp16", **ONE_STEP)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)).sum() * float("inf"))
    optimizer.step()
    found = accelerator.metrics()
    assert (found["loss_scale"], found["skipped_steps"]) == (2.0**16, 1)
    accelerator.end_training()


def test_what_is_logged_after_the_end_is_an_error(tmp_path: Path) -> None:
    """It names the closed trackers. Without any tracker, log does nothing before the end or after."""
    accelerator = run("jsonl", tmp_path)
    accelerator.end_training()
    said = r"was called after end_training\(\), which has closed the trackers \(jsonl\). Nothing was written.\nCall"
    with pytest.raises(LoopError, match=rf"log\(\) {said} log\(\) before"):
        accelerator.log({"after": 1}, step=999)
    accelerator.end_training()
    with pytest.raises(LoopError, match=rf"get_tracker\(\) {said} get_tracker\(\) before"):
        accelerator.get_tracker("jsonl")
    assert len((tmp_path / "a-run" / "metrics.jsonl").read_text().splitlines()) == 3
    without = Accelerator(**ONE_STEP)
    without.end_training()
    without.log({"after": 1})
    assert without.trackers == []


WORKER = """
import sys
from zero_plugin import Accelerator
from zero_plugin.utils import tqdm
import os, torch.distributed as dist
store, rank, world, folder = sys.argv[1:5]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
accelerator = Accelerator(log_with="jsonl", project_dir=folder, cpu=True)
accelerator.init_trackers("a-run", {"world": int(world)})
for step in tqdm(range(3)):
    accelerator.log({"rank": accelerator.process_index}, step=step)
accelerator.get_tracker("jsonl").log({"by": "hand"})
print("trackers", len(accelerator.trackers))
for _ in tqdm(range(2), main_process_only=False, desc="everywhere"):
    pass
accelerator.end_training()
"""


@pytest.mark.processes
def test_only_the_main_process_writes(tmp_path: Path, run_processes: Callable[..., list[str]]) -> None:
    """All processes make the same calls. The first one writes, and shows the bar."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    outputs = run_processes(script, 2, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "a-run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("rank") for line in lines] == [0, 0, 0, None]
    assert "trackers 1" in outputs[0]
    assert "trackers 0" in outputs[1]
    assert "3/3" in outputs[0]
    assert "3/3" not in outputs[1]
    assert all("everywhere" in output for output in outputs)
