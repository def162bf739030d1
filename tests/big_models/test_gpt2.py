"""transformers' GPT-2, which ties its weights: sharded, spread, and generating."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers  # whose models are imported on first use

from zero_plugin import dispatch_model, infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from zero_plugin.utils import compute_module_sizes, find_tied_parameters, get_state_dict_offloaded_model

SIZES = {"vocab_size": 97, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2}
PROMPT = torch.tensor([[5, 17, 3, 80]])


def make() -> transformers.GPT2LMHeadModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, bos_token_id=0, eos_token_id=0)).eval()


@pytest.fixture(scope="module")
def plain() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    return make()


@pytest.fixture(scope="module")
def checkpoint(plain: transformers.GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    plain.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def empty() -> transformers.GPT2LMHeadModel:
    with init_empty_weights():
        return make()


def test_spread_by_limits(plain: transformers.GPT2LMHeadModel, checkpoint: Path) -> None:
    """Blocks stay whole, logits and generated tokens equal the plain model's, and no file is written."""
    model = empty()
    sizes = compute_module_sizes(model)
    block = sizes["transformer.h.0"]
    limit = sizes["transformer.wte"] + sizes["transformer.wpe"] + 3 * block
    files = sorted(checkpoint.iterdir())
    load_checkpoint_and_dispatch(model, checkpoint, "auto", max_memory={"cpu": limit})
    assert find_tied_parameters(model) == [["lm_head.weight", "transformer.wte.weight"]]
    places = {name: place for name, place in model.hf_device_map.items() if name.startswith("transformer.h")}
    assert places == {f"transformer.h.{i}": "cpu" if i < 2 else "disk" for i in range(4)}
    assert model.transformer.h[3].mlp.c_fc.weight.is_meta
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, plain(PROMPT).logits)
    generated = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(generated, plain.generate(PROMPT, max_new_tokens=6, do_sample=False))
    assert sorted(checkpoint.iterdir()) == files


def test_all_on_disk_in_bf16(plain: transformers.GPT2LMHeadModel, checkpoint: Path, tmp_path: Path) -> None:
    """Both modules read the tied weight from the one file that has it."""
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"": "disk"}, dtype="bfloat16", offload_folder=tmp_path, strict=True
    )
    state = get_state_dict_offloaded_model(model)
    assert torch.equal(state["lm_head.weight"], plain.lm_head.weight.bfloat16())
    assert not (tmp_path / "lm_head.weight.dat").exists()
    expected = make()
    expected.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, expected.bfloat16()(PROMPT).logits)


def test_a_model_with_weights(plain: transformers.GPT2LMHeadModel, tmp_path: Path) -> None:
    """The disk part of a model with weights is written, each tensor once, and its memory is freed."""
    model = make()
    model.load_state_dict(plain.state_dict())
    places = infer_auto_device_map(model, {"cpu": 25_000})
    assert {"cpu", "disk"} == set(places.values())
    dispatch_model(model, places, offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, plain(PROMPT).logits)
