"""If any part of the newest checkpoint is damaged, the one before is loaded, and one warning says why."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.checkpoint.tensor_files import RangeReader
from zero_plugin.config.handlers import ProjectConfiguration
from zero_plugin.errors import CheckpointError, DamagedError


class Counter:
    """A registered object with numbers and a tensor."""

    def __init__(self) -> None:
        self.state = {"count": 3, "mean": torch.arange(5.0), "kind": torch.float32}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[Accelerator, Callable[[], dict[str, Tensor]], list[Path]]]:
    """Create an accelerator, the objects to load, and two checkpoints that differ in all parts."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)

    def loaded() -> dict[str, Tensor]:
        states = {
            f"{index}.{name}": value.clone()
            for index, state in enumerate(optimizer.state_dict()["state"].values())
            for name, value in state.items()
        }
        random_state = {"random": torch.get_rng_state(), "count": torch.tensor(counter.state["count"])}
        mean = {"mean": counter.state["mean"].clone()}
        return {**{name: p.detach().clone() for name, p in model.named_parameters()}, **states, **random_state, **mean}

    folders = []
    for _ in range(2):
        accelerator.backward(model(torch.randn(4, 30)).sum())
        optimizer.step()
        optimizer.zero_grad()
        counter.state = {**counter.state, "count": counter.state["count"] + 1, "mean": counter.state["mean"] + 1}
        folders.append(accelerator.save_state())
    yield accelerator, loaded, folders
    accelerator.end_training()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def overwrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def zeros(content: bytes) -> bytes:
    return bytes(len(content))


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def two_signs(content: bytes) -> bytes:
    """Flip the signs of two fp32 numbers, which a sum of words does not detect."""
    return content[:-5] + bytes([content[-5] ^ 128]) + content[-4:-1] + bytes([content[-1] ^ 128])


def other_format(content: bytes) -> bytes:
    return content.replace(b'"format": 2', b'"format": 0')


def replaced(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return change


def manifest_with(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / "manifest.json").read_text())
        change(content)
        (folder / "manifest.json").write_text(json.dumps(content))

    return write


def other_dtype(manifest: Any) -> None:
    manifest["models"][0]["tensors"]["weight"]["0.weight"]["dtype"] = "I32"


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "zeros": ("model.safetensors", overwrite("model.safetensors", zeros)),
    "a bit of a weight": ("model.safetensors", overwrite("model.safetensors", flip(-100))),
    "two signs": ("optimizer/exp_avg.safetensors", overwrite("optimizer/exp_avg.safetensors", two_signs)),
    "a bit of a header": ("model.safetensors", overwrite("model.safetensors", flip(20))),
    "the length of a header": ("optimizer/exp_avg.safetensors", overwrite("optimizer/exp_avg.safetensors", flip(0))),
    "truncated": ("model.safetensors", overwrite("model.safetensors", lambda content: content[:-1])),
    "longer": ("model.safetensors", overwrite("model.safetensors", lambda content: content + b"\0")),
    "missing": ("objects.json", lambda folder: (folder / "objects.json").unlink()),
    "a bit of JSON": ("training.json", overwrite("training.json", flip(30))),
    "garbage for JSON": ("training.json", overwrite("training.json", lambda content: b"{" * len(content))),
    "a bit of an object": ("objects.safetensors", overwrite("objects.safetensors", flip(-1))),
    "a bit of the random state": ("random.safetensors", overwrite("random.safetensors", flip(-1))),
    "zeros for checksums": ("checksums.safetensors", overwrite("checksums.safetensors", zeros)),
    "a bit of checksums": ("checksums.safetensors", overwrite("checksums.safetensors", flip(-1))),
    "a dtype of the manifest": ("manifest.json", manifest_with(other_dtype)),
    "a bit of the manifest": ("manifest.json", overwrite("manifest.json", flip(200))),
    "the manifest's own sum": ("manifest.json", overwrite("manifest.json", flip(12))),
    "the manifest's beginning": ("manifest.json", overwrite("manifest.json", flip(3))),
    "the manifest's format": ("manifest.json", overwrite("manifest.json", other_format)),
    "no manifest": ("manifest.json", lambda folder: (folder / "manifest.json").unlink()),
    "garbage for the manifest": ("manifest.json", overwrite("manifest.json", lambda _: b"[" * 100_000)),
    "a pipe": ("model.safetensors", replaced("model.safetensors", os.mkfifo)),
    "a folder": ("random.json", replaced("random.json", Path.mkdir)),
    "a circle": ("random.json", replaced("random.json", lambda path: path.symlink_to(path))),
    "a device": ("training.json", replaced("training.json", lambda path: path.symlink_to("/dev/zero"))),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_one_before_is_loaded(kind: str, training: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The previous checkpoint is loaded unchanged. The warning, or the error without one, names file and damage."""
    accelerator, loaded, (older, newer) = training
    file, damage = DAMAGES[kind]
    accelerator.load_state(older)
    before = loaded()
    damage(newer)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zero_plugin"):
        report = accelerator.load_state()
    assert report.folder == older
    assert same(loaded(), before)
    (record,) = caplog.records
    assert re.search(
        rf"not restored: a newer checkpoint: .*{re.escape(str(newer))}.*{re.escape(Path(file).stem)}", str(record.msg)
    )
    with pytest.raises(
        CheckpointError, match=rf"(?s){re.escape(Path(file).stem)}.*\n.*before it is {re.escape(str(older))}"
    ):
        accelerator.load_state(newer)
    damage(older)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        accelerator.load_state()


def test_a_disk_that_fails(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error of the system counts as damage."""
    accelerator, _, (older, newer) = training
    read = os.preadv

    def fail(descriptor: int, *args: Any) -> int:
        if str(newer) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(5, "Input/output error")
        return read(descriptor, *args)

    monkeypatch.setattr(os, "preadv", fail)
    assert accelerator.load_state().folder == older
    with pytest.raises(DamagedError, match=r"safetensors cannot be read \(Input/output error\)"):
        accelerator.load_state(newer)


def test_what_is_damaged_is_rotated_by_who_goes_on_from_the_one_before(training: Any, tmp_path: Path) -> None:
    """A launch that loaded an older checkpoint of a run continues that run, and rotates the damaged one."""
    accelerator, _, (older, newer) = training
    overwrite("model.safetensors", flip(-100))(newer)
    accelerator.end_training()
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    again = Accelerator(cpu=True, project_config=project)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 1))
    again.prepare(model, torch.optim.AdamW(model.parameters()))
    again.register_for_checkpointing(Counter())
    assert again.load_state().folder == older
    for _ in range(2):
        again.save_state()
    assert {path.name for path in older.parent.iterdir()} == {"checkpoint_2", "checkpoint_3"}
    again.end_training()


def test_loading_while_another_job_saves(training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is replaced or removed during the load is searched for again."""
    accelerator, loaded, (older, newer) = training
    accelerator.load_state(older)
    expected = loaded()
    fill, looks = RangeReader.read, 0

    def replace(reader: RangeReader, *args: Any) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            shutil.rmtree(newer)
        fill(reader, *args)

    monkeypatch.setattr(RangeReader, "read", replace)
    accelerator.load_state()
    assert same(loaded(), expected)


def test_unverified_where_asked(training: Any) -> None:
    """`verify=False` loads files without checking them."""
    accelerator, _, (_, newer) = training
    overwrite("model.safetensors", flip(-100))(newer)
    assert accelerator.load_state(newer, verify=False).folder == newer


def test_files_of_hooks_are_verified(training: Any) -> None:
    """Files that a hook wrote are verified before a hook reads them."""
    accelerator, _, (older, _) = training
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: Path(folder, "own.bin").write_bytes(b"own")
    )
    newest = accelerator.save_state()
    read: list[str] = []
    accelerator.register_load_state_pre_hook(lambda models, folder: read.append(folder))
    accelerator.load_state(newest)
    overwrite("own.bin", zeros)(newest)
    with pytest.raises(DamagedError, match=r"own\.bin differs from its checksum"):
        accelerator.load_state(newest)
    assert read == [str(newest)]
    assert older.exists()


@pytest.mark.parametrize("flips", [40, pytest.param(2000, marks=pytest.mark.campaign)])
def test_no_flipped_bit_is_loaded_silently(flips: int, training: Any, tried: Callable[..., dict[str, Any]]) -> None:
    """A flipped bit makes the load fall back to the previous checkpoint, unless no reader needs that bit."""
    accelerator, loaded, folders = training
    expected = {}
    for folder in folders:
        accelerator.load_state(folder)
        expected[folder] = loaded()
    draw, row = random.Random(0), tried("flipped bits of a checkpoint", flips)
    files = sorted(path for path in folders[1].rglob("*") if path.is_file())
    for _ in range(flips):
        file = draw.choice(files)
        content = file.read_bytes()
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        report = accelerator.load_state()
        is_same = same(loaded(), expected[report.folder])
        row["ended in time"] += 1
        row["right message"] += is_same
        row["lost"] += not is_same
        assert is_same, f"bit {bit} of byte {place} of {file}"
        file.write_bytes(content)
    assert accelerator.load_state().folder == folders[1]
    assert load_file(folders[1] / "model.safetensors")
