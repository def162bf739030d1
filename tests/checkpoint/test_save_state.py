"""save_state and load_state in one process: what is kept, found, and refused."""

from __future__ import annotations

import json
import random
import resource
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zero_plugin import Accelerator
from zero_plugin.checkpoint.tensor_files import RangeWriter
from zero_plugin.config.handlers import DataLoaderConfiguration, GradScalerKwargs, ProjectConfiguration
from zero_plugin.errors import CheckpointError


class Training:
    """A prepared training of a net with dropout and running statistics on shuffled data."""

    def __init__(self, **arguments: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **arguments)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 5))
        adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, 1e-2, total_steps=100)
        x = torch.randn(48, 7, generator=torch.Generator().manual_seed(1))
        loader: Any = DataLoader(TensorDataset(x, x[:, :5].sin()), batch_size=8, shuffle=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(net, adamw, loader, schedule)
        self.losses: list[float] = []

    def steps(self, batches: Any, count: int | None = None) -> None:
        """Train on all batches, or on the first of them."""
        for index, (x, y) in enumerate(batches, 1):
            loss = (self.model(x) - y).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if index == count:
                return


@pytest.fixture
def make_training() -> Iterator[Any]:
    """Create trainings and end them after the test."""
    made: list[Training] = []

    def make(**arguments: Any) -> Training:
        made.append(Training(**arguments))
        return made[-1]

    yield make
    for training in made:
        training.accelerator.end_training()


def numbered(tmp_path: Path, **more: Any) -> ProjectConfiguration:
    """Use automatic names below `tmp_path`."""
    return ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **more)


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize(("accumulation", "batches"), [(1, 2), (4, 4)])
def test_goes_on_bitwise_within_an_epoch(
    make_training: Any, tmp_path: Path, by_itself: bool, accumulation: int, batches: int
) -> None:
    """Losses after the load equal the uninterrupted run's: sample order, dropout, statistics, scheduler, Adam.

    With accumulation, the rest of the epoch's six batches is a shorter window in both runs.
    """
    how: dict[str, Any] = {
        "dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=by_itself),
        "gradient_accumulation_steps": accumulation,
    }
    first = make_training(**how)
    first.steps(first.loader, batches)
    first.accelerator.save_state(tmp_path / "saved")
    first.accelerator.end_training()

    whole = make_training(gradient_accumulation_steps=accumulation)
    for _ in range(2):
        whole.steps(whole.loader)
    whole.accelerator.end_training()

    later = make_training(**how)
    torch.manual_seed(7)
    report = later.accelerator.load_state(tmp_path / "saved", verify=True)
    assert (report.steps, report.batches, report.not_restored) == (batches // accumulation, [batches], [])
    later.steps(later.loader if by_itself else later.accelerator.skip_first_batches(later.loader, report.batches[0]))
    later.steps(later.loader)
    assert later.losses == whole.losses[batches:]
    assert later.optimizer.applied_steps == whole.optimizer.applied_steps == 2 * (6 if accumulation == 1 else 2)
    assert later.schedule.last_epoch == whole.schedule.last_epoch


def test_weights_are_a_model_folder(make_training: Any, tmp_path: Path) -> None:
    """The weights load by safetensors alone, also from shards. Each state has its parameter's name."""
    training = make_training()
    training.steps(training.loader, 1)
    folder = training.accelerator.save_state(tmp_path / "saved", max_shard_size=200)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: load_file(folder / file)[name] for name, file in index.items()}
    state = training.accelerator.unwrap_model(training.model).state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    moments = load_file(folder / "optimizer" / "exp_avg.safetensors")
    assert moments.keys() == dict(training.model.named_parameters()).keys()
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json", ".safetensors"}


def test_names_count_and_rotate(make_training: Any, tmp_path: Path) -> None:
    """Automatic names count up, also after a load. Only the oldest checkpoints beyond the limit are removed.

    No number is reused, not even that of an unfinished save, because its run may still be alive.
    """
    training = make_training(project_config=numbered(tmp_path, total_limit=2))
    (tmp_path / "checkpoints" / "checkpoint_notes").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".checkpoint_0.0a1b2c3d.writing").mkdir()  # from a killed run
    for _ in range(3):
        training.accelerator.save_state()
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"checkpoint_2", "checkpoint_3", "checkpoint_notes"}
    training.accelerator.end_training()
    later = make_training(project_config=numbered(tmp_path))
    assert later.accelerator.load_state().folder.name == "checkpoint_3"
    assert later.accelerator.save_iteration == 4
    assert later.accelerator.save_state().name == "checkpoint_4"
    later.accelerator.project_configuration.iteration = 3
    assert later.accelerator.save_state().name == "checkpoint_5"


def test_only_complete_ones_are_chosen(make_training: Any, tmp_path: Path) -> None:
    """A missing manifest, a missing file and a short one are reported, and the newest complete checkpoint loads."""
    training = make_training(project_config=numbered(tmp_path))
    folders = [training.accelerator.save_state() for _ in range(4)]
    (folders[3] / "manifest.json").unlink()
    (folders[2] / "optimizer").exists()
    with (folders[2] / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    (folders[1] / "random.json").unlink()
    report = training.accelerator.load_state()
    assert report.folder == folders[0]
    told = "\n".join(report.not_restored)
    for words in ("checkpoint_3 has no manifest.json", "model.safetensors has 100 bytes", "random.json is missing"):
        assert words in told
    with pytest.raises(CheckpointError, match=r"100 bytes instead of .*\n.*before it is .*checkpoint_0\."):
        training.accelerator.load_state(folders[2])
    (folders[0] / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        training.accelerator.load_state()


def test_failure_leaves_the_older_one(make_training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error or a full disk during a save leaves the old checkpoint, no draft, and a training that continues."""
    training = make_training()
    training.steps(training.loader, 1)
    folder = training.accelerator.save_state(tmp_path / "saved")
    before = (folder / "manifest.json").read_bytes()
    training.accelerator.register_for_checkpointing(Holder({"f": print}))
    with pytest.raises(CheckpointError, match=r"objects\[0\]\['state'\]\['f'\] is a builtins.builtin_function"):
        training.accelerator.save_state(folder)
    training.accelerator._custom_objects.clear()
    write = RangeWriter.write

    def removed(writer: RangeWriter, fragment: Any, place: Any) -> None:
        (writer.folder / place.file).unlink(missing_ok=True)
        write(writer, fragment, place)

    with monkeypatch.context() as patch:
        patch.setattr(RangeWriter, "write", removed)
        with pytest.raises(CheckpointError, match=r"not for this process.*\n.*nothing removes a checkpoint"):
            training.accelerator.save_state(folder)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(CheckpointError, match=r"does not fit: .* has 10 bytes free"):
        training.accelerator.save_state(folder)
    assert (folder / "manifest.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"saved", ".saved.lock"}
    training.steps(training.loader)


def test_a_limit_of_file_sizes_is_named(make_training: Any, tmp_path: Path) -> None:
    """A file-size limit (`ulimit -f` or the file system) is reported with the file and the fix. No file is left."""
    training = make_training()
    training.steps(training.loader, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(CheckpointError, match=r"/model\.safetensors: File too large\. .*max_shard_size"):
            training.accelerator.save_state(tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in tmp_path.glob("*saved*") if path.suffix != ".lock"]


@pytest.mark.parametrize("elements", [62, 126])
def test_what_is_not_written_once_is_no_checkpoint(make_training: Any, tmp_path: Path, elements: int) -> None:
    """A tensor range that is written never or twice is named, and no file is left."""
    training = make_training()
    training.steps(training.loader, 1)
    session = training.optimizer.session
    first, *others = session.optimized_pieces()
    pieces = [replace(first, written=(0, 62)), *others] if elements < 63 else [first, first, *others]
    session.optimized_pieces = lambda: pieces
    times = "more than once" if elements > 63 else "by no process"
    with pytest.raises(CheckpointError, match=rf"^byte [\d,]+ of .*, of 0\.weight \(\w+\), was written {times}\."):
        training.accelerator.save_state(tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == [".saved.lock"]


def test_same_folder_again(make_training: Any, tmp_path: Path) -> None:
    """A folder is replaced as a whole and keeps the user's own files. A run killed in between loads the older one."""
    training = make_training()
    folder = tmp_path / "out"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "mine.txt").write_text("mine")
    for count in (1, 2):
        training.steps(training.loader, 1)
        training.accelerator.save_state(folder)
        assert training.accelerator.load_state(folder).steps == count
    assert (folder / "logs" / "mine.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock"}
    folder.rename(tmp_path / ".out.replaced")
    assert training.accelerator.load_state(folder).steps == 2


class Holder:
    """A registered object."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the value."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the value."""
        self.state = state


def test_registered_objects_come_back(make_training: Any, tmp_path: Path) -> None:
    """Nested containers, tensors of every dtype, arrays, odd numbers and keys load unchanged."""
    training = make_training()
    state = {
        "numbers": [1, -2.5, float("inf"), True, None, 3 + 4j],
        "tuple": (1, ("two", b"\x00\xff")),
        7: {"$type": "not a mark"},
        "half": torch.randn(3).bfloat16(),
        "scalar": torch.tensor(5),
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "number": np.int64(9),
        "set": {1, 2},
        "deque": deque([1, 2], maxlen=4),
        "counter": Counter("aab"),
        "dtype": torch.float16,
        "empty": torch.zeros(0, 3),
    }
    kept = Holder(state)
    training.accelerator.register_for_checkpointing(kept)
    folder = training.accelerator.save_state(tmp_path / "saved")
    kept.state = {}
    training.accelerator.load_state(folder)
    got = kept.state
    assert list(got) == list(state)
    for key, value in state.items():
        assert type(got[key]) is type(value)
        if isinstance(value, Tensor):
            assert got[key].dtype == value.dtype
            assert torch.equal(got[key], value)
        elif isinstance(value, np.ndarray):
            assert got[key].dtype == value.dtype
            assert np.array_equal(got[key], value)
        else:
            assert got[key] == value
    with pytest.raises(ValueError, match="Item at index 1: int"):
        training.accelerator.register_for_checkpointing(kept, 5)
    training.accelerator.register_for_checkpointing(Holder({}))
    training.steps(training.loader, 1)
    before = [p.clone() for p in training.model.parameters()]
    with pytest.raises(CheckpointError, match=r"1 registered objects \(Holder\), and 2 are registered here"):
        training.accelerator.load_state(folder)
    assert all(map(torch.equal, before, training.model.parameters())), "what does not fit is refused first"


def test_hooks(make_training: Any, tmp_path: Path) -> None:
    """Hooks get models and unpartitioned weights, write into the folder, take over weights, and can be removed."""
    training = make_training()
    inner = training.accelerator.unwrap_model(training.model)

    def save(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        assert models == [inner]
        assert weights[0].keys() == inner.state_dict().keys()
        torch.save(weights.pop(), Path(folder) / "mine.bin")

    def load(models: list[nn.Module], folder: str) -> None:
        model = models.pop()
        training.accelerator.unwrap_model(model).load_state_dict(torch.load(Path(folder) / "mine.bin"))

    handles = [
        training.accelerator.register_save_state_pre_hook(save),
        training.accelerator.register_load_state_pre_hook(load),
    ]
    training.steps(training.loader, 1)
    wanted = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    folder = training.accelerator.save_state(tmp_path / "saved")
    assert not (folder / "model.safetensors").exists()
    assert "mine.bin" in json.loads((folder / "manifest.json").read_text())["files"]
    training.steps(training.loader, 1)
    training.accelerator.load_state(folder)
    assert all(torch.equal(inner.state_dict()[name], tensor) for name, tensor in wanted.items())
    for handle in handles:
        handle.remove()
    with pytest.raises(CheckpointError, match=r"0\.weight is in the model, not in the checkpoint"):
        training.accelerator.load_state(folder)
    assert (training.accelerator.save_state(tmp_path / "saved") / "model.safetensors").exists()


def test_deepspeeds_own_arguments_are_named(make_training: Any, tmp_path: Path) -> None:
    """DeepSpeed's own arguments are refused with what to write instead."""
    accelerator = make_training().accelerator
    with pytest.raises(TypeError, match=r"save_state\(exclude_frozen_parameters=…\).*\n.*max_shard_size"):
        accelerator.save_state(tmp_path / "none", exclude_frozen_parameters=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(TypeError, match=r"load_state\(load_module_strict=…\).*\n.*strict="):
        accelerator.load_state(tmp_path, load_module_strict=False)


def test_what_does_not_fit_is_named(make_training: Any, tmp_path: Path) -> None:
    """Another model, another optimizer, no folder, a folder of pickles: each error says what to do."""
    training = make_training()
    training.steps(training.loader, 1)
    folder = training.accelerator.save_state(tmp_path / "saved")
    training.accelerator.free_memory()
    accelerator = training.accelerator
    net = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(9))
    accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \[8, 7\] here, \[9, 7\] in the checkpoint"):
        accelerator.load_state(folder)
    accelerator.free_memory()
    net = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9))
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(CheckpointError, match=r"was saved with adamw, but this run uses sgd"):
        accelerator.load_state(folder)
    with pytest.raises(CheckpointError, match=r"3\.weight is in the checkpoint, not in the model"):
        accelerator.load_state(folder, weights_only=True)
    report = accelerator.load_state(folder, weights_only=True, strict=False)
    assert torch.equal(net[0].weight, load_file(folder / "model.safetensors")["0.weight"])
    assert "3.weight is in the checkpoint, not in the model" in report.not_restored
    with pytest.raises(CheckpointError, match="does not exist"):
        accelerator.load_state(tmp_path / "nowhere")
    (tmp_path / "theirs" / "pytorch_model").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a checkpoint of the Trainer, Accelerate or DeepSpeed"):
        accelerator.load_state(tmp_path / "theirs")
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"the Trainer, .* use pickle.*\n.*load_weights\(model, folder\)"):
        accelerator.load_state(tmp_path / "trainers")
    accelerator.save_model(net, tmp_path / "weights alone")
    with pytest.raises(CheckpointError, match=r"no complete checkpoint\.\n.*load_weights\(model, folder\)"):
        accelerator.load_state(tmp_path / "weights alone")
    with pytest.raises(CheckpointError, match="needs a folder"):
        accelerator.save_state()


def test_random_numbers_go_on(make_training: Any, tmp_path: Path) -> None:
    """Python, NumPy and torch draw after the load what they drew after the save."""
    training = make_training()
    folder = training.accelerator.save_state(tmp_path / "saved")

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)]

    drawn = draw()
    training.accelerator.load_state(folder)
    assert draw() == drawn


def test_the_loss_scale_goes_on(make_training: Any, tmp_path: Path) -> None:
    """fp16's loss scale, patience and count of good steps are restored, so the next halving comes at the same step."""
    scaler = GradScalerKwargs(init_scale=1024.0, growth_interval=4)
    training = make_training(mixed_precision="fp16", kwargs_handlers=[scaler])

    def train(overflows: str) -> list[float]:
        scales = []
        for letter in overflows:
            x = torch.full((8, 7), torch.inf) if letter == "x" else torch.ones(8, 7)
            training.accelerator.backward(training.model(x).square().mean())
            training.optimizer.step()
            training.optimizer.zero_grad()
            scales.append(training.optimizer.loss_scale)
        return scales

    train("..x.")
    folder = training.accelerator.save_state(tmp_path / "saved")
    scales = train("...xx.")
    assert len(set(scales)) > 1
    training.accelerator.load_state(folder)
    assert train("...xx.") == scales
