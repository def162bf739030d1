"""The three models of Accelerate's ZeRO announcement, and inputs of the shapes that it trained them with.

Each function of a model and its inputs suits `zero-plugin plan blog_models:deberta_2022`. The `_2022` functions use the
attention of that time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

__all__ = ["blenderbot", "conversations", "deberta", "gpt2_xl", "sentences", "text"]

Inputs = Callable[[int], dict[str, Any]]


def deberta(attention: str = "eager") -> torch.nn.Module:
    """Build DeBERTa-v2-xlarge with a head for two classes; transformers has no other attention for it."""
    config = transformers.DebertaV2Config(
        vocab_size=128100,
        hidden_size=1536,
        num_hidden_layers=24,
        num_attention_heads=24,
        intermediate_size=6144,
        max_position_embeddings=512,
        type_vocab_size=0,
        relative_attention=True,
        max_relative_positions=-1,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        conv_kernel_size=3,
        conv_act="gelu",
        num_labels=2,
        pooler_hidden_size=1536,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation=attention)


def blenderbot(attention: str = "sdpa") -> torch.nn.Module:
    """Build BlenderBot 400M, distilled: 2 encoder layers, 12 decoder layers."""
    config = transformers.BlenderbotConfig(
        vocab_size=8008,
        d_model=1280,
        encoder_layers=2,
        decoder_layers=12,
        encoder_attention_heads=32,
        decoder_attention_heads=32,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        max_position_embeddings=128,
        activation_function="gelu",
    )
    return transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation=attention)


def gpt2_xl(attention: str = "sdpa") -> torch.nn.Module:
    """Build GPT-2 with 1.5 billion parameters."""
    config = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _tokens(samples: int, length: int) -> torch.Tensor:
    return torch.ones(samples, length, dtype=torch.long)


def sentences(samples: int) -> dict[str, Any]:
    """Return pairs of sentences, padded to 128 tokens."""
    ids = _tokens(samples, 128)
    return {"input_ids": ids, "attention_mask": ids}  # with labels, the forward would read their values


def conversations(samples: int) -> dict[str, Any]:
    """Return 128 tokens of a conversation, and 64 of the answer."""
    source, target = _tokens(samples, 128), _tokens(samples, 64)
    return {"input_ids": source, "attention_mask": source, "labels": target}


def text(samples: int) -> dict[str, Any]:
    """Return blocks of 128 tokens."""
    return {"input_ids": _tokens(samples, 128), "labels": _tokens(samples, 128)}


def deberta_2022() -> tuple[torch.nn.Module, Inputs]:
    """Return the model and inputs of the announcement's first row."""
    return deberta(), sentences


def blenderbot_2022() -> tuple[torch.nn.Module, Inputs]:
    """Return the model and inputs of the announcement's second row."""
    return blenderbot("eager"), conversations


def gpt2_xl_2022() -> tuple[torch.nn.Module, Inputs]:
    """Return the model and inputs of the announcement's third row."""
    return gpt2_xl("eager"), text
