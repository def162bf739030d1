"""A split model has the losses, logits and gradients of the complete model, for each family of transformers models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_paths import in_processes

from zero_plugin.distributed.tensor_group import TensorGroup
from zero_plugin.tensor_parallel.gradients import sum_over_copies, total_norm
from zero_plugin.tensor_parallel.split import split_model
from zero_plugin.tensors.cuts import Cut

_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GPT2 = {"vocab_size": 67, "n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NEOX = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SIZES),
    "llama-biases": ("LlamaConfig", {**_SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-key-head": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 8}),
    "mistral": ("MistralConfig", _SIZES),
    "gemma": ("GemmaConfig", {**_SIZES, "head_dim": 8, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", _SIZES),
    "gpt_neox": ("GPTNeoXConfig", _NEOX),
    "gpt2": ("GPT2Config", {**_GPT2, **_NO_DROPOUT}),
}


@in_processes(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_model_computes_as_the_complete_one(family: str) -> None:
    """Loss, logits, norm and each gradient agree to fp32's rounding; padded words count for nothing."""
    import transformers

    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
    part = copy.deepcopy(whole)
    split = split_model(part, TensorGroup(2))
    tokens = torch.randint(1, 67, (3, 17), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(17) < 4, -100)
    wanted, found = whole(input_ids=tokens, labels=labels).loss, part(input_ids=tokens, labels=labels).loss
    wanted.backward()
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0)
    sum_over_copies(split, lambda p: p.grad)
    for (name, complete), own in zip(whole.named_parameters(), part.parameters(), strict=True):
        assert complete.grad is not None
        cut = split.cuts.get(id(own))
        gradient = complete.grad if cut is None else cut.take(complete.grad)
        assert own.grad is not None
        apart = float((own.grad - gradient).abs().max() / complete.grad.abs().max())
        assert apart < 5e-6, f"{name}: {apart:.1e}"
    norm = total_norm(split, list(part.parameters()), lambda p: p.grad, 2.0)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))
    with torch.no_grad():
        torch.testing.assert_close(part(input_ids=tokens).logits, whole(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    dist.barrier()


def test_runs_map_a_part_to_the_complete_tensor() -> None:
    """The runs of any range of the part name the elements that `take` copies, without the filler."""
    whole = torch.arange(3 * 10 * 2).view(3, 10, 2)
    cut = Cut((3, 10, 2), 1, ((1, 2), (6, 3)), filler=1)
    part = cut.take(whole).flatten()
    assert cut.part_shape == (3, 6, 2)
    for start in range(len(part)):
        for count in range(len(part) - start + 1):
            runs = list(cut.runs(start, count))
            for at, own, length in runs:
                assert torch.equal(whole.flatten()[at : at + length], part[own : own + length])
            named = {own + i for _, own, length in runs for i in range(length)}
            assert named == {i for i in range(start, start + count) if i % 12 < 10}
    back = torch.full_like(whole, -1)
    cut.put(cut.take(whole), back)
    assert torch.equal(back[:, [1, 2, 6, 7, 8]], whole[:, [1, 2, 6, 7, 8]])
    assert (back[:, [0, 3, 4, 5, 9]] == -1).all()
