"""A model to plan for is found by configuration, weights, function or numbers, without its weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from zero_plugin.errors import ConfigError
from zero_plugin.plan.model_source import ModelSource, open_model

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_configuration_is_traced_or_computed(llama: Path) -> None:
    """A folder and its file are equivalent. By formula the sizes are equal, and the bytes within 2 % of the trace."""
    traced_sizes, traced = open_model(ModelSource(str(llama)), 128)
    assert open_model(ModelSource(str(llama / "config.json")), 128) == (traced_sizes, traced)
    sizes, computed = open_model(ModelSource(str(llama), trace=False), 128)
    assert sizes.elements == traced_sizes.elements
    assert (sizes.name, sizes.hidden_size, sizes.layers, sizes.vocabulary) == ("LlamaForCausalLM", 512, 4, 32_000)
    assert (traced.source, traced_sizes.source) == ("traced at micro-batches 2 and 3", str(llama / "config.json"))
    assert computed.saved.at(8) == pytest.approx(traced.saved.at(8), rel=0.02)
    assert computed.sample_length == traced.sample_length == 128


def test_heads_that_do_not_share_out_the_width(tmp_path: Path) -> None:
    """`head_dim` counts if it is not hidden size / heads, as in Qwen3 and Mistral Nemo."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "head_dim": 256}))
    traced_sizes, traced = open_model(ModelSource(str(tmp_path)), 128)
    sizes, computed = open_model(ModelSource(str(tmp_path), trace=False), 128)
    assert sizes.elements == traced_sizes.elements
    assert computed.saved.at(8) == pytest.approx(traced.saved.at(8), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "keys", "inputs"),
    [
        ("bert", {"architectures": ["BertForSequenceClassification"], "num_hidden_layers": 1}, "input_ids"),
        ("bert", {"architectures": ["BertForQuestionAnswering"], "num_hidden_layers": 1}, "input_ids"),
        ("deberta-v2", {"architectures": ["DebertaV2ForSequenceClassification"], "num_hidden_layers": 1}, "input_ids"),
        ("t5", {"architectures": ["T5ForConditionalGeneration"], "num_layers": 1}, "input_ids"),
        ("vit", {"architectures": ["ViTForImageClassification"], "num_hidden_layers": 1}, "pixel_values"),
        ("gpt2", {"n_layer": 1}, "input_ids"),  # without a class it is a causal model
    ],
)
def test_models_of_other_kinds(tmp_path: Path, kind: str, keys: dict[str, object], inputs: str) -> None:
    """Classifiers, encoder-decoders and image models get the inputs and labels that they take."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **keys}))
    sizes, activations = open_model(ModelSource(str(tmp_path)), 64)
    assert sizes.elements > 0
    assert activations.saved.per_sample > 0
    assert activations.sample_length == (64 if inputs == "input_ids" else 1)


def test_gpt2_by_formula_has_its_own_parameters(tmp_path: Path) -> None:
    """An MLP without a gate has as many parameters as the formula's with one. GPT-2 has 124 million."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "vocab_size": 50_257,
                "activation_function": "gelu_new",
            }
        )
    )
    sizes, _ = open_model(ModelSource(str(tmp_path), trace=False), 1024)
    assert sizes.elements == pytest.approx(124_439_808, rel=0.02)


def test_a_folder_of_weights(tmp_path: Path) -> None:
    """Headers give every tensor, hidden size, depth and vocabulary. Missing facts may be given separately."""
    tensors = {"model.embed_tokens.weight": (100, 16), "lm_head.weight": (100, 16), "model.norm.weight": (16,)}
    for layer in range(3):
        tensors |= {f"model.layers.{layer}.self_attn.{name}_proj.weight": (16, 16) for name in "qkvo"}
        tensors |= {f"model.layers.{layer}.mlp.{name}_proj.weight": (40, 16) for name in ("gate", "up")}
        tensors |= {f"model.layers.{layer}.mlp.down_proj.weight": (16, 40)}
    save_file({name: np.zeros(shape, np.float16) for name, shape in tensors.items()}, tmp_path / "model.safetensors")
    sizes, activations = open_model(ModelSource(str(tmp_path), heads=2), 32)
    assert sizes.elements == sum(int(np.prod(shape)) for shape in tensors.values())
    assert (sizes.hidden_size, sizes.layers, sizes.vocabulary) == (16, 3, 100)
    assert activations.source == "closed formula of a decoder"
    with pytest.raises(ConfigError, match="--params is given in addition to"):
        open_model(ModelSource(str(tmp_path), parameters=7 * 10**9), 32)


def test_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns a module and inputs, or a transformers model. It runs without memory for weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "def huge(): return nn.Linear(10**6, 10**6), torch.zeros(2, 10**6)\n"
        "def looks(): return nn.Linear(int(torch.ones(3).sum().item()), 4), torch.zeros(2, 3)\n"
        "def gpt2(): return GPT2LMHeadModel(GPT2Config(n_layer=1))\n"
        "def bare(): return nn.Linear(2, 2)\n"
        "def broken(): raise OSError('no file')\n"
    )
    sizes, activations = open_model(ModelSource("my_models:huge"), 128)
    assert (sizes.elements, sizes.source, activations.sample_length) == (10**12 + 10**6, "my_models:huge", 1)
    assert open_model(ModelSource("my_models:looks"), 128)[0].elements == 16
    assert open_model(ModelSource("my_models:gpt2"), 128)[1].sample_length == 128
    with pytest.raises(ConfigError, match="returned Linear, so the inputs of the forward are not known"):
        open_model(ModelSource("my_models:bare"), 128)
    with pytest.raises(ConfigError, match="OSError: no file"):
        open_model(ModelSource("my_models:broken"), 128)
    with pytest.raises(ConfigError, match="has no attribute 'absent'"):
        open_model(ModelSource("my_models:absent"), 128)


@pytest.mark.parametrize(
    ("content", "source", "message"),
    [
        (None, {"model": "nowhere/at/all"}, "is neither a file, nor a folder, nor module:function"),
        (None, {"model": ".", "hidden_size": 64, "layers": 2}, "holds neither config.json nor"),
        ("{", {"model": ".", "trace": False}, "cannot be read"),
        ("[]", {"model": ".", "trace": False}, "holds no keys\n *Give a transformers model's config.json"),
        (
            '{"hidden_size": 64, "num_hidden_layers": 2}',
            {"model": ".", "trace": False},
            "because of having no vocabulary",
        ),
        (
            '{"hidden_size": 64, "vocab_size": 9, "n_head": 2, "text_config": null}',
            {"model": ".", "trace": False},
            "does not state the hidden size or the number of layers",
        ),
        (
            json.dumps({**LLAMA, "num_local_experts": 8}),
            {"model": ".", "trace": False},
            "because of its num_local_experts",
        ),
        (
            '{"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 9}',
            {"model": ".", "trace": False},
            "because of having no heads",
        ),
        (json.dumps(LLAMA), {"model": ".", "layers": 4}, "--layers is given in addition to"),
        (json.dumps(LLAMA), {"model": ".", "parameters": 7}, "--params is given in addition to"),
        ('{"model_type": "no-such-model"}', {"model": "."}, "transformers builds no model"),
    ],
)
def test_what_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, source: dict[str, Any], message: str
) -> None:
    """Missing or broken input, and a model outside the formula, are errors."""
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_model(ModelSource(**source), 128)


def test_no_torch_without_a_trace(llama: Path) -> None:
    """A process that never loads torch reads numbers, and a configuration by formula."""
    code = (
        "import sys; from zero_plugin.plan.model_source import ModelSource, open_model; "
        "open_model(ModelSource(parameters=7 * 10**9), 2048); open_model(ModelSource(sys.argv[1], trace=False), 2048); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(llama)], check=False, timeout=60).returncode == 0
