"""Traced activations of small models of transformers' families are those that a real run keeps for its backward."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_plugin.plan import live_bytes
from zero_plugin.plan.activations import trace_activations

pytestmark = pytest.mark.campaign

_spec = importlib.util.spec_from_file_location("activations", Path(__file__).with_name("test_activations.py"))
assert _spec is not None
assert _spec.loader is not None
activations: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(activations)

DECODER = {**activations.DECODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
# The differences from `DECODER` in its configuration.
DECODERS: dict[str, dict[str, Any]] = {
    "Cohere": {},
    "DeepseekV3": {**LATENT, **ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "Falcon": {},
    "GPTNeoX": NO_DROPOUT,
    "Gemma": HEAD,
    "Gemma2": HEAD,
    "GptOss": {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Granite": {},
    "Mistral": {},
    "Olmo2": {},
    "Phi": {"num_key_value_heads": 4, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "Phi3": {},
    "Qwen2": {},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 64},
    "Qwen3": HEAD,
    "StableLm": {},
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
}
# Families whose models build a mask of ones themselves. Fake tensors cannot show that this mask hides nothing.
MASKED = {"d_model": 64, "vocab_size": 512, "dropout": 0.0, "use_cache": False}
for part in ("encoder", "decoder"):
    MASKED |= {f"{part}_layers": 3, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 256}


def _ratios(family: str, kind: str, sizes: dict[str, Any]) -> list[float]:
    """Return traced bytes over a real run's, in each compute mode, checkpointed and not."""
    import transformers

    def build() -> Any:
        config = getattr(transformers, f"{family}Config")(**sizes)
        model, inputs = activations._language(getattr(transformers, f"{family}For{kind}"), config)
        return model, {**inputs, "decoder_input_ids": inputs["input_ids"]} if kind != "CausalLM" else inputs

    narrow, wide = (trace_activations(*build(), precision) for precision in ("bf16", "no"))
    found = []
    for regime, traced in {"fp32": wide, "bf16": narrow, "autocast": narrow.autocast}.items():
        assert traced is not None
        assert traced.checkpointed is not None
        for checkpointed, line in ((False, traced.saved), (True, traced.checkpointed)):
            found.append(line.at(activations.BATCH) / activations._saved_bytes(*build(), regime, checkpointed)[0])
    return found


@pytest.fixture(autouse=True)
def _cpu_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_bytes, "_WIDE", frozenset())
    torch.manual_seed(0)


@pytest.mark.parametrize("family", DECODERS)
def test_decoders(family: str) -> None:
    """They agree within 1 %."""
    assert _ratios(family, "CausalLM", {**DECODER, **DECODERS[family]}) == [pytest.approx(1.0, abs=0.01)] * 6


@pytest.mark.parametrize("family", ["Bart", "MBart"])
def test_masks_of_ones_are_counted(family: str) -> None:
    """They are more than the run keeps, by a mask in each layer, and never less."""
    assert all(0.99 < ratio < 1.3 for ratio in _ratios(family, "ConditionalGeneration", MASKED))
