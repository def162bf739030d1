"""Which stored tensor belongs to which tensor of a model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_plugin.checkpoint.load_weights import find_weights, match_weights
from zero_plugin.errors import CheckpointError


class Pair(nn.Module):
    """A model with two layers, which may share their weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.two.weight = self.one.weight


def written(tmp_path: Path, metadata: dict[str, str] | None = None, **tensors: Tensor) -> Path:
    """Write a file with these tensors. Two underscores stand for a dot."""
    save_file({n.replace("__", "."): t for n, t in tensors.items()}, tmp_path / "model.safetensors", metadata)
    return tmp_path


@pytest.mark.parametrize("name", ["one__weight", "two__weight"])
def test_a_tied_weight_is_found_under_any_of_its_names(name: str, tmp_path: Path) -> None:
    """A tied weight is found under either of its names."""
    stored = find_weights(written(tmp_path, **{name: torch.ones(3, 3)}))
    places, report = match_weights(Pair(tied=True), stored, strict=True)
    assert list(places) == report.loaded == ["one.weight"]


def test_a_file_with_both_names_of_a_tied_weight_fits(tmp_path: Path) -> None:
    """A file with both names of a tied weight, like a converted pickle, fits."""
    stored = find_weights(written(tmp_path, one__weight=torch.ones(3, 3), two__weight=torch.ones(3, 3)))
    assert match_weights(Pair(tied=True), stored, strict=True)[1].is_complete


def test_a_weight_that_only_the_file_ties_goes_to_both(tmp_path: Path) -> None:
    """A weight that only the file's metadata ties is loaded into both tensors."""
    stored = find_weights(written(tmp_path, {"two.weight": "one.weight"}, one__weight=torch.ones(3, 3)))
    places, _ = match_weights(Pair(tied=False), stored, strict=True)
    assert places["one.weight"] == places["two.weight"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
def test_types_that_mean_something_else_are_not_converted(dtype: torch.dtype, tmp_path: Path) -> None:
    """Integers, and 8-bit floats without their scale, are refused as weights of a float layer."""
    stored = find_weights(written(tmp_path, one__weight=torch.ones(3, 3).to(dtype)))
    with pytest.raises(CheckpointError, match=f"one.weight \\(torch.float32 here, {dtype} in the file"):
        match_weights(Pair(tied=True), stored, strict=True)


def test_the_error_lists_everything_that_does_not_fit(tmp_path: Path) -> None:
    """Missing, unexpected and misshapen tensors are listed together, with names and shapes."""
    stored = find_weights(written(tmp_path, one__weight=torch.ones(3, 2), three=torch.ones(1)))
    with pytest.raises(CheckpointError) as caught:
        match_weights(Pair(tied=False), stored, strict=True)
    for words in ("two.weight", "not in the model: three", "one.weight ([3, 3] here, [3, 2] in the file)"):
        assert words in str(caught.value)
    places, report = match_weights(Pair(tied=False), stored, strict=False)
    assert (places, report.missing, report.unexpected) == ({}, ["two.weight"], ["three"])


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """A truncated file, whose header declares more bytes than exist, is named."""
    file = written(tmp_path, one__weight=torch.ones(3, 3)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        find_weights(file)


@pytest.mark.parametrize("content", ["null", "{}", '{"format": "pt", "two.weight": "one.weight"}'])
@pytest.mark.parametrize("place", [".", "model.safetensors"])
def test_the_metadata_of_a_file_and_of_its_folder_tell_the_same(content: str, place: str, tmp_path: Path) -> None:
    """The metadata list only names of tensors that are tied in the file. They may be null."""
    header = f'{{"__metadata__": {content}, "one.weight": {{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"0")
    stored = find_weights(tmp_path / place)
    assert (list(stored.places), dict(stored.tied)) == (
        ["one.weight"],
        {"two.weight": "one.weight"} if "two" in content else {},
    )


@pytest.mark.parametrize("content", ["[1]", "1", '"pt"'])
def test_metadata_that_are_no_texts_by_name_are_an_error(content: str, tmp_path: Path) -> None:
    """Metadata that are not a map of texts raise an error that names the file."""
    header = f'{{"__metadata__": {content}}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a readable safetensors file"):
        find_weights(tmp_path)


@pytest.mark.parametrize("saves", ["base", "headed"])
def test_parts_that_are_compiled_fit_a_checkpoint_of_the_other_kind(saves: str, tmp_path: Path) -> None:
    """Compiled models and base models without a head load each other's checkpoints, with or without the prefixes."""
    sizes = {"n_layer": 1, "n_embd": 4, "n_head": 1, "n_positions": 4, "vocab_size": 8}
    headed = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    base = copy.deepcopy(headed.transformer)
    saved, model, layers = (base, headed, headed.transformer.h) if saves == "base" else (headed, base, base.h)
    saved.save_pretrained(tmp_path)
    layers[0] = torch.compile(layers[0])
    places, report = match_weights(model, find_weights(tmp_path), strict=True)
    assert report.is_complete
    assert any("_orig_mod." in name for name in places)
