"""Foreign folders are read as data, or refused by a CheckpointError: no crash, no hang, little memory.

The checksums match the changed files, as an attacker would make them. These tests are not about damage.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from zero_plugin import Accelerator
from zero_plugin.checkpoint.load import read_pieces
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, checksum, read_manifest
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.checkpoint.tensor_files import RangeReader
from zero_plugin.checkpoint.verify import find_wrong_files
from zero_plugin.errors import CheckpointError, DamagedError
from zero_plugin.tensors.modules import Fragment
from zero_plugin.tensors.safetensors_files import INDEX_NAME, read_complete_file, read_model_folder

TRIES = [200, pytest.param(20_000, marks=pytest.mark.campaign)]
HOSTILE: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**400, 1e308, float("inf"), "", "x", "../x", "/etc/passwd", "a\0b", [], {}),
    *(
        [-1, 5],
        [[[[]]]],
        {"$type": "tensor", "value": "9"},
        {"$type": "x", "value": 1},
        {"$type": "torch.device", "value": "x"},
    ),
    *({"$type": "torch.dtype", "value": "ops"}, {"$type": "bytes", "value": "!"}, {"$type": "complex", "value": [1]}),
    *(
        {"$type": "set", "value": [[]]},
        [2**40, 2**40],
        "F32",
        "I64",
        "BOOL",
        "model.safetensors",
        1.5,
        "1e400",
        "\ud800",
    ),
]


def change(draw: random.Random, value: Any) -> Any:
    """Return the value with a hostile one inserted somewhere, or with one removed."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [*value[:place], change(draw, value[place]), *value[place + 1 :]]
    key = draw.choice(list(value))
    changed = {other: change(draw, item) if other == key else item for other, item in value.items()}
    if draw.random() < 0.1:
        del changed[key]
    elif draw.random() < 0.1:
        changed[draw.choice(["", "../x", "x" * 1000, "__metadata__", "$type"])] = changed.pop(key)
    return changed


def edit(draw: random.Random, content: bytes) -> bytes:
    """Change, cut out, or duplicate some of its bytes."""
    place, length = draw.randrange(len(content)), draw.choice((1, 1, 2, 8, 50))
    kind = draw.randrange(4)
    if kind == 0:
        return content[:place] + draw.randbytes(length) + content[place + length :]
    if kind == 1:
        return content[:place] + content[place + length :]
    if kind == 2:
        return content[:place] + content[place : place + length] * draw.choice((2, 3, 1000)) + content[place + length :]
    return content[:place] + draw.choice((b"[" * 5000, b"{}," * 300, b"-", b"1" * 5000, b'"')) + content[place:]


@pytest.fixture
def memory() -> Iterator[None]:
    """Assert that no attempt takes more than 64 MiB of additional memory. The files are small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # in KiB


@pytest.mark.parametrize("tries", TRIES)
def test_headers(tries: int, tmp_path: Path, memory: None, tried: Callable[..., dict[str, Any]]) -> None:
    """An accepted safetensors header describes data inside the file."""
    file, draw = tmp_path / "model.safetensors", random.Random(0)
    save_file(
        {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, file, metadata={"format": "pt", "c": "a"}
    )
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    read_complete_file(file, file.name)
    accepted, row = 0, tried("mutated headers of safetensors files", tries)
    for _ in range(tries):
        text = edit(draw, header) if draw.random() < 0.5 else json.dumps(change(draw, json.loads(header))).encode()
        said = len(text) if draw.random() < 0.9 else draw.choice((0, 1, 2**40, 2**63, len(text) - 1))
        file.write_bytes(said.to_bytes(8, "little") + text + data)
        try:
            places, _ = read_complete_file(file, file.name)
            accepted += 1
            size = file.stat().st_size
            assert all(0 <= place.start <= place.start + place.size <= size for place in places.values())
        except CheckpointError:
            pass
        row["ended in time"] += 1
        row["right message"] += 1
    assert 0 < accepted < tries / 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small checkpoint with a registered object."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    folder = accelerator.save_state(tmp_path_factory.mktemp("checkpoint") / "saved")
    accelerator.end_training()
    return folder


def with_sum(manifest: Any) -> bytes:
    """Return a manifest's text with the matching checksum."""
    rest = json.dumps({key: value for key, value in manifest.items() if key != "xxh3"})[1:].encode() + b"\n"
    return b'{"xxh3": "%016x", ' % checksum(rest) + rest


def read_all(folder: Path) -> None:
    """Read everything that a load reads."""
    manifest = read_manifest(folder)
    if find_wrong_files(folder, manifest):
        return
    pieces = read_pieces(folder, manifest)
    for stem in ("training", "random", "objects"):
        read_nested(folder / stem, lambda file: manifest.read(folder, file.name))
    with RangeReader(folder, pieces=pieces) as reader:
        for model in manifest.models:
            for (kind, name), place in model.places.items():
                values = torch.empty(place.shape, dtype=place.dtype)
                reader.read(place, Fragment(kind, name, place.shape, 0, values, (0, 0)))


@pytest.mark.parametrize("tries", TRIES)
def test_checkpoints(tries: int, checkpoint: Path, memory: None, tried: Callable[..., dict[str, Any]]) -> None:
    """Every content of the manifest or a JSON file is read or refused."""
    draw = random.Random(1)
    original = (checkpoint / MANIFEST_NAME).read_bytes()
    names = [
        "training.json",
        "random.json",
        "objects.json",
        "checksums.json",
        "random.safetensors",
        "checksums.safetensors",
    ]
    refused, row = 0, tried("mutated checkpoints", tries)
    read_all(checkpoint)
    for _ in range(tries):
        manifest, file = json.loads(original), checkpoint / draw.choice(names)
        before = file.read_bytes()
        if draw.random() < 0.5:
            manifest = change(draw, manifest)
        else:
            is_json = file.suffix == ".json" and draw.random() < 0.7
            text = json.dumps(change(draw, json.loads(before))).encode() if is_json else edit(draw, before)
            file.write_bytes(text)
            manifest["files"][file.name] = {"size": len(text), "xxh3": checksum(text)}
        written = with_sum(manifest) if isinstance(manifest, dict) else json.dumps(manifest).encode()
        (checkpoint / MANIFEST_NAME).write_bytes(written if draw.random() < 0.8 else edit(draw, written))
        try:
            read_all(checkpoint)
        except CheckpointError:
            refused += 1
        finally:
            file.write_bytes(before)
            (checkpoint / MANIFEST_NAME).write_bytes(original)
        row["ended in time"] += 1
        row["right message"] += 1
    assert refused > tries / 3
    read_all(checkpoint)


@pytest.mark.parametrize(
    ("change_it", "said"),
    [
        (lambda m: m.update(processes=float("nan")), "nan instead of a number"),
        (lambda m: m.update(processes=-1), "-1 instead of a number"),
        (lambda m: m.update(processes=0), "processes is 0"),
        (lambda m: m.update(processes=10**9), "processes is 1000000000"),
        (lambda m: m.update(processes=True), "True instead of a number"),
        (lambda m: m.update(order=2**60), f"order is {2**60}"),
        (lambda m: m.update(order=1.5), "1.5 instead of a number"),
        (lambda m: m["files"]["training.json"].update(xxh3=2**64), f"the checksum of training.json is {2**64}"),
        (lambda m: m["files"]["training.json"].update(xxh3="1"), "'1' instead of a number"),
        (lambda m: m.update(models=[m["models"][0] | {"tensors": {}}] * 20_000), "20000 models"),
        (lambda m: _first(m).update(shape=[0, 10**30]), "10000.*… instead of a number"),
        (lambda m: [entry.update(start=0) for entry in _tensors(m)], "share bytes"),
        (lambda m: _first(m).update(start=_first(m)["start"] + 1), "share bytes|is not inside"),
        (lambda m: _named(m, "bias").update(start=0), "leave out bytes"),  # in the header, and so is the next one
        (lambda m: _named(m, "bias").update(start=1), "leave out bytes"),
        (lambda m: _named(m, "bias").update(shape=[1]), "leave out bytes"),
        (lambda m: _named(m, "bias").update(shape=[10**4000] * 1000), "10000.*… instead of a number from 0 to"),
        (lambda m: _named(m, "bias").update(shape=[0, *[2**62] * 100_000]), r"a tensor of the shape \(0, 461.*…\)"),
        (lambda m: _named(m, "bias").update(start=10**4000), "10000.*… instead of a number"),
        (lambda m: _named(m, "bias").update(dtype=10**4000), r"a tensor of type 10000.*…\)"),
        (lambda m: m["models"][0].update(folder=10**4000), "10000.*… is no path"),
        (lambda m: m["files"]["training.json"].update(size=10**4000), "10000.*… instead of a number"),
        (lambda m: m["files"]["training.json"].update(xxh3=10**4000), "10000.*… instead of a number"),
        (lambda m: m.update(order=10**4000), "10000.*… instead of a number"),
        (lambda m: m.update(format=0), "format is 0"),
        (lambda m: m.update(format=10**4000), "10000.*… instead of a number"),
    ],
)
@pytest.mark.timeout(60)
def test_numbers_that_no_run_writes_are_damage(
    change_it: Callable[[dict[str, Any]], Any], said: str, checkpoint: Path
) -> None:
    """A manifest with a matching checksum and an impossible number is damaged, and the number is named immediately."""
    original = (checkpoint / MANIFEST_NAME).read_bytes()
    manifest = json.loads(original)
    change_it(manifest)
    (checkpoint / MANIFEST_NAME).write_bytes(with_sum(manifest))
    try:
        with pytest.raises(DamagedError, match=said) as damaged:
            read_manifest(checkpoint)
        assert re.search(r"\d{31}", str(damaged.value)) is None
    finally:
        (checkpoint / MANIFEST_NAME).write_bytes(original)
    read_all(checkpoint)


def _tensors(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for named in manifest["models"][0]["tensors"].values() for entry in named.values()]


def _named(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    weight: dict[str, Any] = manifest["models"][0]["tensors"]["weight"][name]
    return weight


def _first(manifest: dict[str, Any]) -> dict[str, Any]:
    return _tensors(manifest)[0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [[10**4000] * 1000, [2**62] * 200_000])
def test_a_header_with_a_shape_of_no_tensor_is_refused_at_once(shape: list[int], tmp_path: Path) -> None:
    """An impossible shape in a header is refused before its number of elements is computed."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"instead of a number|a tensor of the shape") as refused:
        read_complete_file(file, file.name)
    assert re.search(r"\d{31}", str(refused.value)) is None


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "a\0b", ["model.safetensors"], None, 3, "pipe"])
def test_an_index_names_files_of_its_folder(name: Any, tmp_path: Path) -> None:
    """An index may name only regular files of its folder. Any other entry is one error that names it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(3)}, tmp_path / "out.safetensors")
    os.mkfifo(folder / "pipe")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="pipe is not a readable" if name == "pipe" else "is no path inside"):
        read_model_folder(folder)


@pytest.mark.parametrize("place", ["files", "models"])
def test_a_manifest_names_files_of_its_folder(place: str, checkpoint: Path) -> None:
    """A manifest may name only files of its folder. Any other entry is one error that names it."""
    original = (checkpoint / MANIFEST_NAME).read_bytes()
    for name in ("../out", "/etc/passwd", "a\0b"):
        manifest = json.loads(original)
        if place == "files":
            manifest["files"][name] = {"size": 0, "xxh3": 0}
        else:
            manifest["models"][0]["tensors"]["weight"]["weight"]["file"] = name
        (checkpoint / MANIFEST_NAME).write_bytes(with_sum(manifest))
        try:
            with pytest.raises(CheckpointError, match="is no path inside" if place == "files" else "is not inside"):
                read_manifest(checkpoint)
        finally:
            (checkpoint / MANIFEST_NAME).write_bytes(original)
