"""A saved model is a folder that any safetensors reader can load, and a failed save leaves the old folder."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from zero_plugin import Accelerator
from zero_plugin.checkpoint.locks import let_go
from zero_plugin.checkpoint.objects import write_tensors
from zero_plugin.checkpoint.publish import open_draft
from zero_plugin.checkpoint.save_model import parse_dtype, weights_of_module, write_model
from zero_plugin.errors import CheckpointError, ConfigError, LoopError
from zero_plugin.tensors.safetensors_files import INDEX_NAME, SINGLE_NAME, TYPES


def write(
    tensors: Callable[[], Iterable[tuple[str, Tensor]]],
    folder: Path,
    limit: int = 10_000,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Write named tensors as a model, in this process."""
    weights = weights_of_module(nn.Module(), tensors, None)
    write_model(
        weights,
        folder,
        max_shard_bytes=limit,
        tied=tied or {},
        notes={},
        write_more=lambda draft: None,
    )


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Read a folder as a loader does: the single file if present, otherwise the files of the index."""
    if (folder / SINGLE_NAME).exists():
        return load_file(folder / SINGLE_NAME)
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def model_tensors(fill: float) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((10, 5), fill + i) for i in range(5)}  # 200 bytes each


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    """Below the limit, one model.safetensors is written with the metadata that transformers expects."""
    tensors = {**model_tensors(0.0), "scalar": torch.tensor(3), "mask": torch.tensor([True, False, True])}
    write(tensors.items, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [SINGLE_NAME]
    assert same(load_file(tmp_path / "new" / SINGLE_NAME), tensors)
    with safe_open(tmp_path / "new" / SINGLE_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_is_shards_with_an_index(tmp_path: Path) -> None:
    """Shards hold at most the limit, a larger tensor has its own shard, and the index lists each name."""
    tensors = {**model_tensors(0.0), "large": torch.ones(300)}
    write(tensors.items, tmp_path, 400)
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*shards, INDEX_NAME]
    assert [sorted(load_file(tmp_path / shard)) for shard in shards] == [
        ["layer.0", "layer.1"],
        ["layer.2", "layer.3"],
        ["layer.4"],
        ["large"],
    ]
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"] == {"total_size": 5 * 200 + 1200}
    assert same(read_folder(tmp_path), tensors)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name, _ in TYPES.values()], ids=str)
def test_every_dtype_is_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library reads our bytes with the dtype and values written, next to tensors of other dtypes."""
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    odd = torch.tensor([1, 2, 3], dtype=torch.uint8)
    write_tensors(tmp_path / "f", {"a": odd, "b": values.t(), "wide": torch.ones(1).double()})
    back = load_file(tmp_path / "f")
    assert back["b"].dtype == dtype
    assert torch.equal(back["b"].to(torch.complex64), values.t().to(torch.complex64))
    assert torch.equal(back["a"], odd)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    """The second name of a tied tensor is not stored, and the safetensors library loads the model nonetheless."""

    def build() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    source, target = build(), build()
    write(source.named_parameters, tmp_path, tied={"head.weight": "embed.weight"})
    assert list(load_file(tmp_path / SINGLE_NAME)) == ["embed.weight"]
    load_model(target, tmp_path / SINGLE_NAME)
    assert torch.equal(target["head"].weight, source["head"].weight)


def test_views_of_one_buffer_are_stored_separately(tmp_path: Path) -> None:
    """Parameters that ZeRO keeps as slices of a flat buffer are each written separately."""
    buffer = torch.arange(12.0)
    write(lambda: [("a", buffer[:4]), ("b", buffer[2:8].view(2, 3))], tmp_path)
    assert same(load_file(tmp_path / SINGLE_NAME), {"a": buffer[:4], "b": buffer[2:8].view(2, 3)})


@pytest.mark.parametrize("old_limit", [400, 10_000])
@pytest.mark.parametrize("new_limit", [200, 400, 10_000])
def test_an_error_midway_leaves_the_old_model(tmp_path: Path, old_limit: int, new_limit: int) -> None:
    """An error while tensors arrive leaves only the old files. The next save replaces all of them."""
    (tmp_path / "config.json").write_text("{}")
    write(model_tensors(0.0).items, tmp_path, old_limit)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    passes: list[int] = []

    def failing() -> Iterator[tuple[str, Tensor]]:
        passes.append(1)
        yield from model_tensors(100.0).items()
        if len(passes) == 2:  # the first pass asks for the shapes only
            raise RuntimeError("a process has gone")

    with pytest.raises(RuntimeError, match="a process has gone"):
        write(failing, tmp_path, new_limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    write(model_tensors(100.0).items, tmp_path, new_limit)
    assert same(read_folder(tmp_path), model_tensors(100.0))
    shards = {200: 5, 400: 3, 10_000: 1}[new_limit]
    assert len(list(tmp_path.iterdir())) == (2 if shards == 1 else shards + 2)
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize("old_limit", [200, 400, 10_000])
@pytest.mark.parametrize("new_limit", [200, 400, 10_000])
def test_no_moment_shows_a_mixture(
    tmp_path: Path, old_limit: int, new_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save killed after any rename leaves the old model, the new one, or none, never a mixture."""
    seen: list[str] = []

    def look() -> None:
        try:
            now = read_folder(tmp_path)
        except FileNotFoundError:
            seen.append("none")
            return
        old, new = same(now, model_tensors(0.0)), same(now, model_tensors(100.0))
        assert old or new
        seen.append("old" if old else "new")

    write(model_tensors(0.0).items, tmp_path, old_limit)
    for name in ("replace", "unlink"):
        original = getattr(Path, name)

        def looking(self: Path, *args: object, original=original, **kwargs: object) -> object:
            result = original(self, *args, **kwargs)
            look()
            return result

        monkeypatch.setattr(Path, name, looking)
    write(model_tensors(100.0).items, tmp_path, new_limit)
    assert seen[-1] == "new"
    assert ("none" in seen) == (
        old_limit == new_limit < 10_000
    )  # equal shard names cannot be swapped atomically, so the model is missing for a moment


def test_one_tensor_is_held(tmp_path: Path) -> None:
    """A written tensor is released before the next one is requested, however large a file may be."""
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for number in range(4):
            alive.append(sum(earlier() is not None for earlier in made))
            tensor = torch.full((10, 5), float(number))
            made.append(weakref.ref(tensor))
            yield f"layer.{number}", tensor
            del tensor

    write(arriving, tmp_path)
    assert max(alive) <= 1  # the previous tensor, which this generator's caller still names


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    """The next save removes a killed save's leftovers."""
    left = open_draft(tmp_path / "weights", 0)
    (left / SINGLE_NAME).write_bytes(b"half")
    let_go(left)
    write(model_tensors(0.0).items, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_NAME]


def test_a_tensor_without_elements_keeps_its_shape(tmp_path: Path) -> None:
    """An empty tensor keeps its shape in one file and in shards, and a model of only empty tensors is saved."""
    tensors = {"a": torch.ones(2), "b": torch.empty(0, 3), "c": torch.empty(2, 0)}
    write(tensors.items, tmp_path / "one")
    write(tensors.items, tmp_path / "shards", 8)
    write({"b": tensors["b"]}.items, tmp_path / "empty")
    assert same(read_folder(tmp_path / "one"), tensors)
    assert same(read_folder(tmp_path / "shards"), tensors)
    assert same(read_folder(tmp_path / "empty"), {"b": tensors["b"]})


def test_a_type_without_a_place_in_the_format_is_refused(tmp_path: Path) -> None:
    """A dtype that the format does not support is refused, with the tensor's name."""
    with pytest.raises(CheckpointError, match=r"a \(weight\) is torch.complex128"):
        write(lambda: [("a", torch.ones(1, dtype=torch.complex128))], tmp_path)


@pytest.mark.usefixtures("ends_processes")
def test_a_model_that_is_not_prepared(tmp_path: Path) -> None:
    """An unprepared model is converted and deduplicated like a prepared one. Only floating-point parameters change."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    model[0].bias.requires_grad_(True)
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(model, tmp_path / "halved", dtype="bf16")
    saved = load_file(tmp_path / "halved" / SINGLE_NAME)
    assert torch.equal(saved["0.weight"], model[0].weight.bfloat16())
    assert saved["1.running_var"].dtype == torch.float32
    assert saved["1.num_batches_tracked"].dtype == torch.int64
    accelerator.save_model(model, tmp_path / "part", trainable_only=True)
    assert same(load_file(tmp_path / "part" / SINGLE_NAME), {"0.bias": model[0].bias.detach()})
    model[0].bias.requires_grad_(False)
    with pytest.raises(LoopError, match="no parameter that is trained"):
        accelerator.save_model(model, tmp_path / "part", trainable_only=True)
    with pytest.raises(ConfigError, match='"fp32", "bf16", "fp16"'):
        accelerator.save_model(model, tmp_path / "part", dtype="int8")


@pytest.mark.parametrize("name", ["fp32", "float32", torch.float32])
def test_types_have_several_names(name: str | torch.dtype) -> None:
    """Dtypes can be given by the configuration's names, torch's names, or torch's objects."""
    assert parse_dtype(name) == torch.float32
    assert parse_dtype(None) is None
