"""A checkpoint is loaded straight to its parts' places. Disk parts stay in their files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zero_plugin import dispatch_model, init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from zero_plugin.errors import CheckpointError
from zero_plugin.utils import find_tied_parameters, load_state_dict

PLACES = {"": "disk", "blocks.1": "cpu"}


def sharded(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write tied weights once, tensors spread over two files, and the index."""
    state = {name: tensor for name, tensor in state.items() if name != "head.weight"}
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = {files[0]: dict(list(state.items())[::2]), files[1]: dict(list(state.items())[1::2])}
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.fixture
def checkpoint(make, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    sharded(make().state_dict(), folder)
    return folder


@pytest.fixture
def empty(make):
    with init_empty_weights():
        return make()


@pytest.mark.parametrize("places", [{"": "cpu"}, {"": "disk"}, PLACES])
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_values_are_the_checkpoints(make, empty, tokens, checkpoint, tmp_path, places, offload_buffers) -> None:
    """Buffers of disk parts have values too, no file is written, and tied weights are one."""
    before = sorted(tmp_path.rglob("*"))
    model = load_checkpoint_and_dispatch(empty, checkpoint, places, offload_buffers=offload_buffers, strict=True)
    assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])
    assert find_tied_parameters(model) == [["embedding.weight", "head.weight"]]
    assert model.head.weight.is_meta == ("disk" in places.values())
    assert sorted(tmp_path.rglob("*")) == before


def test_in_two_calls(make, empty, tokens, checkpoint, tmp_path) -> None:
    """In two calls, the folder holds only references to the disk parts."""
    folder = tmp_path / "offload"
    with pytest.raises(ValueError, match="pass an offload_folder, where dispatch_model finds them again"):
        load_checkpoint_in_model(empty, checkpoint, PLACES)
    load_checkpoint_in_model(empty, str(checkpoint / "model.safetensors.index.json"), PLACES, offload_folder=folder)
    assert [file.name for file in folder.iterdir()] == ["index.json"]
    model = dispatch_model(empty, PLACES, offload_dir=str(folder))
    assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])


def test_torch_files_are_written_for_the_disk(make, empty, tokens, tmp_path) -> None:
    """torch files are rewritten for the disk and need a folder. Without disk parts they need none."""
    file = tmp_path / "pytorch_model.bin"
    torch.save(make().state_dict(), file)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not safetensors, .* pass an offload_folder"):
        load_checkpoint_and_dispatch(empty, tmp_path, PLACES)
    with init_empty_weights():
        models = [make() for _ in range(2)]
    folder = tmp_path / "offload"
    for model in (
        load_checkpoint_and_dispatch(models[0], tmp_path, PLACES, offload_folder=folder),
        load_checkpoint_and_dispatch(models[1], file, {"": "cpu"}),
    ):
        assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])
    assert (folder / "embedding.weight.dat").stat().st_size == 11 * 6 * 4
    assert not (folder / "head.weight.dat").exists()


@pytest.mark.parametrize("with_folder", [False, True])
def test_another_type(make, empty, tokens, checkpoint, tmp_path, with_folder) -> None:
    """Floating-point tensors get the dtype everywhere. With a folder, smaller ones are written once."""
    expected = make().to(torch.bfloat16)(tokens)["logits"]
    folder = tmp_path / "offload" if with_folder else None
    model = load_checkpoint_and_dispatch(empty, checkpoint, PLACES, dtype="bfloat16", offload_folder=folder)
    model.blocks[0].shift, model.blocks[1].shift = (model.blocks[i].shift.bfloat16() for i in (0, 1))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.blocks[0].norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(model(tokens)["logits"], expected)
    if folder is not None:
        assert (folder / "embedding.weight.dat").stat().st_size == 11 * 6 * 2


def test_the_models_type_by_default(make, tokens, tmp_path) -> None:
    """The model's dtype is the default in every place, so an fp32 model reads a 16-bit checkpoint as fp32."""
    half = {name: tensor.half() for name, tensor in make().state_dict().items() if tensor.is_floating_point()}
    half.pop("head.weight")
    save_file(half, tmp_path / "model.safetensors")
    expected = make()
    expected.load_state_dict(half, strict=False)
    with init_empty_weights():
        model = make()
    load_checkpoint_and_dispatch(model, tmp_path, PLACES)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model(tokens)["logits"], expected(tokens)["logits"])


def test_some_modules_in_fp32(empty, checkpoint) -> None:
    """Modules are kept in fp32 by a part of their names."""
    load_checkpoint_in_model(empty, checkpoint, dtype=torch.float16, keep_in_fp32_modules=["norm"])
    types = {name: p.dtype for name, p in empty.named_parameters()}
    assert types["blocks.0.norm.weight"] == torch.float32
    assert types["blocks.0.inner.weight"] == torch.float16


def test_without_a_map(make, tokens, checkpoint) -> None:
    """Parameters stay the same objects, as optimizers need. Those without values go to the CPU."""
    model = make()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    held = list(model.parameters())
    assert load_checkpoint_and_dispatch(model, checkpoint) is model
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])


@pytest.mark.parametrize("policy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_that_are_worked_out(make, empty, tokens, checkpoint, policy) -> None:
    """Under limits, a map is computed, and the rest goes to disk."""
    limits = {"cpu": 264 + 44 + 320}
    model = load_checkpoint_and_dispatch(empty, checkpoint, policy, limits, no_split_module_classes=["Block"])
    assert model.hf_device_map == {"embedding": "cpu", "head": "cpu", "blocks": "disk"}
    assert torch.equal(model(tokens)["logits"], make()(tokens)["logits"])


def test_names_that_differ(make, empty, checkpoint, tmp_path, caplog) -> None:
    """Differing names are warnings, or with `strict` an error before any change."""
    state = make().state_dict()
    del state["head.weight"], state["head.bias"]
    save_file({**state, "stranger": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"(?s)Missing in the checkpoint: \['head.bias'\].*Unexpected .*\['stranger'\]"
    ):
        load_checkpoint_in_model(empty, tmp_path, {"": "cpu"}, strict=True)
    assert all(p.is_meta for p in empty.parameters())
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(empty, tmp_path, {"": "cpu"})
    assert "were not used when loading Model: ['stranger']" in caplog.text
    assert "not in the checkpoint at" in caplog.text
    assert "['head.bias'] have no values at all" in caplog.text
    with pytest.raises(ValueError, match=r"head\.bias are on the meta device and have no values"):
        dispatch_model(empty, {"": "cpu"})


def test_other_shapes(make, empty, tmp_path) -> None:
    """All differing shapes are named before any change, on disk too."""
    state = {**make().state_dict(), "head.bias": torch.ones(3), "blocks.0.scale": torch.ones(1)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"blocks\.0\.scale \(1,\) instead of \(6,\), head\.bias \(3,\) instead of \(11,\)"
    ):
        load_checkpoint_in_model(empty, tmp_path, {"": "disk"}, offload_folder=tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_files_that_are_not_there_or_damaged(empty, checkpoint, tmp_path) -> None:
    """The message names a missing or damaged file."""
    second = checkpoint / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: "):
        load_checkpoint_in_model(empty, checkpoint)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00002\.safetensors, which are not there"):
        load_checkpoint_in_model(empty, checkpoint)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: "):
        load_checkpoint_in_model(empty, tmp_path)
    with pytest.raises(ValueError, match="there is no checkpoint nowhere"):
        load_checkpoint_in_model(empty, "nowhere")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(ValueError, match=r"nothing has no model\.safetensors and no pytorch_model\.bin, and no index"):
        load_checkpoint_in_model(empty, nothing)
    for name in ("a.index.json", "b.index.json"):
        (nothing / name).write_text("{}")
    with pytest.raises(ValueError, match=r"several indices: a\.index\.json, b\.index\.json"):
        load_checkpoint_in_model(empty, nothing)
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "tf"})
    with pytest.raises(ValueError, match="weights of the format 'tf'"):
        load_checkpoint_in_model(empty, tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_map": "autp"}, "device_map='autp'; legal are 'auto', 'balanced', 'balanced_low_0', 'sequential', or"),
        ({"device_map": {"": 0}}, "device_map sends 'the model' to 0, but this machine has no GPU 0"),
        ({"full_state_dict": False}, "every tensor is loaded unpartitioned"),
    ],
)
def test_arguments_that_cannot_be(empty, checkpoint, arguments, message) -> None:
    """Each impossible argument says what is legal, before anything is loaded."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU 0")
    with pytest.raises(ValueError, match=message):
        load_checkpoint_and_dispatch(empty, checkpoint, **arguments)
    assert all(p.is_meta for p in empty.parameters())
    with pytest.raises(ValueError, match="offload_8bit_bnb: load quantized models by transformers"):
        load_checkpoint_in_model(empty, checkpoint, offload_8bit_bnb=True)


def test_one_file_as_a_dict(make, checkpoint, tmp_path) -> None:
    """Files of both formats are read as a dict, with devices if given."""
    expected = make().state_dict()
    torch.save(expected, tmp_path / "weights.pt")
    assert load_state_dict(tmp_path / "weights.pt").keys() == expected.keys()
    part = load_state_dict(str(checkpoint / "model-00001-of-00002.safetensors"), {"": "disk", "blocks.0": "cpu"})
    assert part
    assert all(torch.equal(tensor, expected[name]) for name, tensor in part.items())
