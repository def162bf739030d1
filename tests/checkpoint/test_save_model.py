"""A saved model is a folder that any reader of safetensors reads, and a failed save leaves the old one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from zero_plugin.checkpoint.safetensors_file import DTYPE_NAMES, write_file
from zero_plugin.checkpoint.save_model import INDEX_NAME, SINGLE_NAME, parse_size, write_model_folder
from zero_plugin.errors import ConfigError, LoopError


def read_folder(folder: Path) -> dict[str, Tensor]:
    """What a loader sees: the single file if there is one, else what the index lists."""
    if (folder / SINGLE_NAME).exists():
        return load_file(folder / SINGLE_NAME)
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    return {name: load_file(folder / file)[name] for name, file in weight_map.items()}


def model_tensors(fill: float) -> dict[str, Tensor]:
    return {f"layer.{i}": torch.full((10, 5), fill + i) for i in range(5)}  # 200 bytes each


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_small_model_is_one_file(tmp_path: Path) -> None:
    """Below the limit there is one model.safetensors, with the metadata that transformers asks for."""
    tensors = {**model_tensors(0.0), "scalar": torch.tensor(3), "mask": torch.tensor([True, False, True])}
    assert write_model_folder(tensors.items(), tmp_path / "new") == [tmp_path / "new" / SINGLE_NAME]
    assert [path.name for path in (tmp_path / "new").iterdir()] == [SINGLE_NAME]
    assert same(load_file(tmp_path / "new" / SINGLE_NAME), tensors)
    with safe_open(tmp_path / "new" / SINGLE_NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_is_shards_with_an_index(tmp_path: Path) -> None:
    """Shards hold at most the limit, a larger tensor stands alone, and the index finds each name."""
    tensors = {**model_tensors(0.0), "large": torch.ones(300)}
    paths = write_model_folder(tensors.items(), tmp_path, max_shard_size=400)
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert [path.name for path in paths] == [*shards, INDEX_NAME]
    assert [sorted(load_file(tmp_path / shard)) for shard in shards] == [
        ["layer.0", "layer.1"],
        ["layer.2", "layer.3"],
        ["layer.4"],
        ["large"],
    ]
    assert json.loads((tmp_path / INDEX_NAME).read_text())["metadata"] == {"total_size": 5 * 200 + 1200}
    assert same(read_folder(tmp_path), tensors)


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_is_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """The library reads our bytes as the dtype and values written, beside tensors of other widths."""
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    odd = torch.tensor([1, 2, 3], dtype=torch.uint8)
    write_file(tmp_path / "f", {"a": odd, "b": values.t(), "wide": torch.ones(1).double()}, {})
    back = load_file(tmp_path / "f")
    assert back["b"].dtype == dtype
    assert torch.equal(back["b"].to(torch.complex64), values.t().to(torch.complex64))
    assert torch.equal(back["a"], odd)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    """The second name of a tensor is not stored, and the safetensors library loads the model nonetheless."""

    def build() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    source, target = build(), build()
    write_model_folder(source.state_dict().items(), tmp_path, tied={"head.weight": "embed.weight"})
    assert list(load_file(tmp_path / SINGLE_NAME)) == ["embed.weight"]
    load_model(target, tmp_path / SINGLE_NAME)
    assert torch.equal(target["head"].weight, source["head"].weight)


def test_views_of_one_buffer_are_stored_separately(tmp_path: Path) -> None:
    """ZeRO keeps parameters as slices of a flat buffer: each is written as itself."""
    buffer = torch.arange(12.0)
    write_model_folder([("a", buffer[:4]), ("b", buffer[2:8].view(2, 3))], tmp_path)
    assert same(load_file(tmp_path / SINGLE_NAME), {"a": buffer[:4], "b": buffer[2:8].view(2, 3)})


@pytest.mark.parametrize("old_limit", [400, 10_000])
@pytest.mark.parametrize("new_limit", [200, 400, 10_000])
def test_an_error_midway_leaves_the_old_model(tmp_path: Path, old_limit: int, new_limit: int) -> None:
    """An error while tensors arrive leaves the old files and no other; then a good save replaces them all."""
    (tmp_path / "config.json").write_text("{}")
    write_model_folder(model_tensors(0.0).items(), tmp_path, max_shard_size=old_limit)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield from model_tensors(100.0).items()
        raise RuntimeError("a process has gone")

    with pytest.raises(RuntimeError, match="a process has gone"):
        write_model_folder(failing(), tmp_path, max_shard_size=new_limit)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    paths = write_model_folder(model_tensors(100.0).items(), tmp_path, max_shard_size=new_limit)
    assert same(read_folder(tmp_path), model_tensors(100.0))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", *(path.name for path in paths)}


@pytest.mark.parametrize("old_limit", [200, 400, 10_000])
@pytest.mark.parametrize("new_limit", [200, 400, 10_000])
def test_no_moment_shows_a_mixture(
    tmp_path: Path, old_limit: int, new_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any rename, a reader finds the old model, the new one, or none: never some of each."""
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

    write_model_folder(model_tensors(0.0).items(), tmp_path, max_shard_size=old_limit)
    for name in ("replace", "unlink"):
        original = getattr(Path, name)

        def looking(self: Path, *args: object, original=original, **kwargs: object) -> object:
            result = original(self, *args, **kwargs)
            look()
            return result

        monkeypatch.setattr(Path, name, looking)
    write_model_folder(model_tensors(100.0).items(), tmp_path, max_shard_size=new_limit)
    assert seen[-1] == "new"
    assert ("none" in seen) == (
        old_limit == new_limit < 10_000
    )  # same shard names: no atomic way, so none for a moment


def test_at_most_one_shard_is_held(tmp_path: Path) -> None:
    """Tensors are asked for while those of earlier shards are already on disk and let go."""
    written: list[int] = []

    def arriving() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model_tensors(0.0).items():
            written.append(len(list(tmp_path.glob(".writing-*"))))
            yield name, tensor

    write_model_folder(arriving(), tmp_path, max_shard_size=400)
    assert written == [0, 0, 0, 1, 1]


def test_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    """A draft that a killed run left does not stay for ever."""
    save_file({"a": torch.ones(1)}, tmp_path / ".writing-00009.safetensors")
    write_model_folder(model_tensors(0.0).items(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_NAME]


def test_an_empty_tensor_is_refused(tmp_path: Path) -> None:
    """A stage-3 placeholder would save a model without weights; a tensor meant to be empty is named by the caller."""
    tensors = [("a", torch.ones(2)), ("b", torch.empty(0))]
    with pytest.raises(LoopError, match=r"'b' has no elements.*stage 3.*accelerator\.save_model"):
        write_model_folder(tensors, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_model_folder(tensors, tmp_path, may_be_empty={"b"})
    assert load_file(tmp_path / SINGLE_NAME)["b"].shape == (0,)


@pytest.mark.parametrize(
    ("tensors", "tied", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], {}, "'a' occurs twice"),
        ([("a", torch.ones(1))], {"b": "c"}, "'b' → 'c'"),
        ([("a", torch.ones(1, dtype=torch.complex128))], {}, "complex128"),
    ],
)
def test_a_model_that_cannot_be_stored_is_named(tmp_path: Path, tensors, tied, message: str) -> None:
    """Each error names the tensor."""
    with pytest.raises(LoopError, match=message):
        write_model_folder(tensors, tmp_path, tied=tied)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(123, 123), ("123", 123), ("200MB", 200_000_000), ("5GiB", 5 * 2**30), ("1.5 kb", 1500), ("10GB", 10**10)],
)
def test_sizes(size: int | str, expected: int) -> None:
    """MB is decimal and MiB binary."""
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "GB", "5 gallons", "-1MB", 0, "0.1B"])
def test_a_wrong_size_says_what_is_legal(size: int | str) -> None:
    """Not a size, or no byte at all, is an error with examples."""
    with pytest.raises(ConfigError, match="200MB"):
        parse_size(size)
