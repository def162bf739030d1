"""A live model's sizes are read without its data."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_plugin.plan.blocks import repeated_blocks
from zero_plugin.plan.model_source import is_expert, model_sizes
from zero_plugin.plan.situation import ParameterSize


class Tied(nn.Module):
    """An embedding that is the output's weight too, a frozen layer, and two equal ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.rows = nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))
        self.output = nn.Linear(8, 100, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("table", torch.zeros(10, dtype=torch.float64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_tensor_counts_once(device: str) -> None:
    """Tied tensors are one, frozen ones are separate, and tensors of one size are one entry; on `meta` too."""
    with torch.device(device):
        found = model_sizes(Tied())
    assert found.parameters == (
        ParameterSize(800),
        ParameterSize(64, 1, trainable=False),
        ParameterSize(64, 2),
        ParameterSize(8, 2),
    )
    assert (found.elements, found.trainable, found.buffer_bytes) == (1008, 944, 80)
    assert (found.largest_module, found.hidden_size, found.layers) == (800, 8, 2)


def test_a_partitioned_parameter_counts_whole() -> None:
    """DeepSpeed's `ds_shape` is a parameter's size if only a piece of it, or none, is here."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data = torch.empty(0)
    layer.weight.ds_shape = torch.Size([4, 4])
    assert model_sizes(layer).parameters == (ParameterSize(16),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("layers.1.block_sparse_moe.experts.3.w1.weight", True),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
    ],
)
def test_experts_are_told_by_name(name: str, expected: bool) -> None:
    """Routed experts, in a list or stacked, are detected. The router and a shared expert are not."""
    assert is_expert(name) is expected


def test_sizes_of_transformers_models() -> None:
    """Hidden size, depth and vocabulary are the configuration's, and blocks are its layers; experts are separate."""
    from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

    with torch.device("meta"):
        mixture = MixtralForCausalLM(MixtralConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=96))
        both_ways = T5ForConditionalGeneration(T5Config(num_layers=2))
    found = model_sizes(mixture)
    assert (found.hidden_size, found.layers, found.vocabulary) == (64, 3, 32_000)
    assert sum(p.elements * p.count for p in found.parameters if p.expert) == 3 * 8 * 3 * 64 * 96
    assert len(repeated_blocks(both_ways)) == 4
