"""Tiny transformers models, their training in plain torch and on a path, and the comparison of the two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from paths import assert_near, assert_numbers, weights
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY = 64
_ROUTED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


def gpt2() -> nn.Module:
    """Build a model with tied embeddings."""
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Build a model with tied embeddings and their own bias."""
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )


def t5() -> nn.Module:
    """Build an encoder and a decoder that share their embeddings."""
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=2,
            d_model=32,
            d_kv=16,
            num_heads=2,
            d_ff=64,
            vocab_size=VOCABULARY,
            dropout_rate=0,
            decoder_start_token_id=0,
        )
    )


def mixtral() -> nn.Module:
    """Build experts in one stacked tensor, stored one by one."""
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **_ROUTED))


def qwen2_moe() -> nn.Module:
    """Build routed experts next to a shared one."""
    config = Qwen2MoeConfig(
        moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4, num_experts_per_tok=2, **_ROUTED
    )
    return Qwen2MoeForCausalLM(config)


def build(make: Callable[[], Any]) -> Any:
    """Build the same weights everywhere."""
    torch.manual_seed(3)
    return make()


def stored(make: Callable[[], Any], folder: Path) -> Path:
    """Return a folder with that model, written by transformers itself on process 0."""
    if dist.get_rank() == 0:
        build(make).save_pretrained(folder)
    dist.barrier()
    return folder


def sgd(model: Any) -> torch.optim.Optimizer:
    """Build SGD with momentum, which shows a lost step. Adam would amplify gradients of pure rounding."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def global_tokens(step: int) -> dict[str, Tensor]:
    """Return token ids and labels of all processes, [4, 8]."""
    ids = torch.randint(2, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def train_plain(model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    """Return the losses of a plain torch loop on one process."""
    losses = []
    for step in range(steps):
        loss = model(**global_tokens(step)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(accelerator: Any, model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    """Return the losses of all processes together of the same loop on a path."""
    losses = []
    for step in range(steps):
        own = {name: ids.chunk(dist.get_world_size())[dist.get_rank()] for name, ids in global_tokens(step).items()}
        loss = model(**own).loss
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_losses(got: list[float], wanted: list[float]) -> None:
    """Check that losses are equal within the tolerance of fp32."""
    assert_numbers("losses", got, wanted)


def assert_trains_alike(accelerator: Any, model: Any, reference: Any) -> Any:
    """Check that three steps give the same losses and weights on the path and in plain torch.

    Return the prepared model.
    """
    wanted = train_plain(reference, sgd(reference))
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert_losses(train(accelerator, model, optimizer), wanted)
    assert_near(weights(accelerator, model), reference.state_dict())
    return model


def is_partitioned(model: nn.Module) -> bool:
    """Return whether no parameter is unpartitioned. Fail if only some are."""
    found: list[Any] = list(model.parameters())  # inside `init_model` they have their true numel()
    partitioned = {hasattr(p, "ds_id") and p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in found}
    assert len(partitioned) == 1, "some parameters are partitioned, some are not"
    return partitioned.pop()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters of a partitioned model, on every process."""
    from deepspeed import zero

    with zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
