"""A trace of few of a row's equal blocks gives the same result as a trace of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from zero_plugin.plan import activations
from zero_plugin.plan.activations import trace_activations
from zero_plugin.plan.model_source import build_model, example_inputs
from zero_plugin.plan.situation import Activations

WIDTH = 8


class Block(nn.Module):
    """One block of a row. `kind` changes the saved tensors of its forward, and no shape."""

    def __init__(self, place: int, kind: str = "narrow") -> None:
        super().__init__()
        self.layer_idx, self.kind = place, kind
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.inner(x))
        if self.kind == "wide":
            hidden = hidden * torch.cat([hidden, hidden], -1).sum(-1, keepdim=True).exp()
        return x + self.drop(self.outer(hidden))


class Tower(nn.Module):
    """Rows of blocks, one after the other."""

    def __init__(self, *rows: list[str], counts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.rows = [nn.ModuleList(map(Block, range(len(row)), row)) for row in rows]
        for index, row in enumerate(self.rows):
            self.add_module(f"row{index}", row)
        self.head = nn.Linear(WIDTH, 50)
        self.lengths = [len(row) for row in rows] if counts else None

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for index, row in enumerate(self.rows):
            for place in range(self.lengths[index] if self.lengths else len(row)):
                x = row[place](x)
        return {"loss": self.head(x).log_softmax(-1).mean(), "last": x}


def both(model: nn.Module, example: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Activations, Activations, set[bool]]:
    """Return the saved bytes from few blocks and from all, and whether few were enough."""
    few, known = activations.trace_few, []
    monkeypatch.setattr(activations, "trace_few", lambda *given: known.append(few(*given)) or known[-1])  # type: ignore[func-returns-value]
    quick = trace_activations(model, example)
    monkeypatch.setattr(activations, "trace_few", lambda *_: None)
    return quick, trace_activations(model, example), {found is not None for found in known}


@pytest.mark.parametrize(
    ("rows", "few"),
    [
        ([["narrow"] * 12], True),
        ([["wide", "wide"] + ["narrow"] * 12], True),  # its own head
        ([["narrow", "narrow", "wide"] * 8 + ["narrow"]], True),  # a pattern that ends early
        ([["narrow"] * 20, ["wide"] * 21], True),
        ([["narrow"] * 7], False),  # nothing to gain
        ([["narrow"] * 6 + ["wide"] * 6], False),  # no pattern
    ],
)
def test_rows(rows: list[list[str]], few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are the same, operation by operation, for any rows, and few blocks suffice where possible."""
    model = Tower(*rows)
    before = [list(row.children()) for row in model.rows]
    quick, whole, known = both(model, {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, monkeypatch)
    assert quick == whole
    assert known == {few}
    assert [list(row.children()) for row in model.rows] == before


def test_rows_whose_activations_go_to_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that `save_on_cpu` moves to CPU memory grow with the blocks, too."""

    class Moving(Tower):
        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            with save_on_cpu():
                return super().forward(input_ids)

    quick, whole, known = both(
        Moving(["narrow"] * 12), {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, monkeypatch
    )
    assert quick == whole
    assert known == {True}
    assert whole.moved.per_sample > 0


def test_a_forward_that_counts_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails with fewer blocks, so all are traced."""
    model = Tower(["narrow"] * 12, counts=True)
    quick, whole, known = both(model, {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, monkeypatch)
    assert quick == whole
    assert known == {False}


_WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 500}
_GROUPED = {**_WIDE, "num_key_value_heads": 2}
_T5 = {"d_model": 64, "num_heads": 4, "d_kv": 16, "d_ff": 128, "vocab_size": 500}
_DEBERTA = {"relative_attention": True, "pos_att_type": "p2c|c2p", "conv_kernel_size": 3}
_GEMMA = {"head_dim": 16, "sliding_window": 8}
_DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
CAMPAIGN = pytest.mark.campaign


@pytest.mark.parametrize(
    ("kind", "architecture", "keys"),
    [
        ("llama", "LlamaForCausalLM", {**_GROUPED, "num_hidden_layers": 9}),
        *(
            pytest.param(*case, marks=CAMPAIGN)
            for case in (
                ("deberta-v2", "DebertaV2ForSequenceClassification", {**_WIDE, **_DEBERTA, "num_hidden_layers": 9}),
                ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 14, "n_head": 4, "vocab_size": 500}),
                ("bert", "BertForMaskedLM", {**_WIDE, "num_hidden_layers": 14}),
                ("t5", "T5ForConditionalGeneration", {**_T5, "num_layers": 14, "num_decoder_layers": 13}),
                ("mixtral", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_hidden_layers": 9}),
                ("gemma2", "Gemma2ForCausalLM", {**_GROUPED, **_GEMMA, "num_hidden_layers": 24}),
                ("gpt_neox", "GPTNeoXForCausalLM", {**_WIDE, "num_hidden_layers": 14}),
                ("bloom", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 14, "n_head": 4, "vocab_size": 500}),
                ("vit", "ViTForImageClassification", {**_WIDE, "num_hidden_layers": 14, "image_size": 32}),
                (
                    "opt",
                    "OPTForCausalLM",
                    {**_WIDE, "ffn_dim": 128, "num_hidden_layers": 14, "word_embed_proj_dim": 64},
                ),
                (
                    "deepseek_v3",
                    "DeepseekV3ForCausalLM",
                    {**_GROUPED, **_DEEPSEEK, **_LATENT, "num_key_value_heads": 4, "num_hidden_layers": 14},
                ),
            )
        ),
    ],
)
def test_models_of_transformers(
    kind: str, architecture: str, keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks are enough, and give the same lines."""
    config = {"model_type": kind, "architectures": [architecture], **keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(tmp_path / "config.json")
    quick, whole, known = both(model, example_inputs(model, 32), monkeypatch)
    assert quick == whole
    assert known == {True}
