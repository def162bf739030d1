"""A decoder's sizes and activations by formula equal the model's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import ConfigError
from zero_plugin.plan.activations import trace_activations
from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.model_source import model_sizes
from zero_plugin.plan.situation import Activations

TOKENS = 256


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        # Llama 7B and 13B, Llama 3 8B: their papers' and model cards' numbers
        ({"hidden_size": 4096, "layers": 32}, 6_738_415_616),
        ({"hidden_size": 5120, "layers": 40, "intermediate": 13_824}, 13_015_864_320),
        (
            {
                "hidden_size": 4096,
                "layers": 32,
                "vocabulary": 128_256,
                "heads": 32,
                "kv_heads": 8,
                "intermediate": 14_336,
            },
            8_030_261_248,
        ),
    ],
)
def test_known_models(sizes: dict[str, int], elements: int) -> None:
    """Layer sizes alone give a known model's parameters, to the last one."""
    assert decoder_sizes(**sizes).elements == elements


@pytest.mark.parametrize("billions", [0.125, 0.35, 1.5, 7, 13, 30, 70, 175])
def test_parameters_are_met(billions: float) -> None:
    """With a number of parameters alone, or with hidden size and depth, the tensors match that number within 1 %."""
    parameters = int(billions * 1e9)
    alone = decoder_sizes(parameters=parameters)
    assert alone.elements == pytest.approx(parameters, rel=0.01)
    again = decoder_sizes(parameters=parameters, hidden_size=alone.hidden_size, layers=alone.layers)
    assert again.elements == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize(
    ("parameters", "tied", "elements"), [(494_000_000, 1, 494_005_120), (630_000_000, 2, 630_139_776)]
)
def test_whether_weights_are_tied_follows_from_the_parameters(parameters: int, tied: int, elements: int) -> None:
    """With all sizes given, as in Qwen2.5 0.5B, embedding and output are one tensor if that is closer to the number."""
    widths = {"hidden_size": 896, "layers": 24, "vocabulary": 151_936, "heads": 14, "kv_heads": 2, "intermediate": 4864}
    found = decoder_sizes(parameters=parameters, **widths)
    assert (found.elements, found.parameters[0].count) == (elements, tied)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "the model's size is not given"),
        ({"parameters": 1_000_000, "hidden_size": 4096, "layers": 32}, "too few for 32 layers"),
        ({"parameters": 7_000_000_000, "hidden_size": 4096, "layers": 2, "intermediate": 11_008}, "not 7,000,000,000"),
    ],
)
def test_sizes_that_make_no_model(sizes: dict[str, int], message: str) -> None:
    """Missing or contradictory numbers are errors."""
    with pytest.raises(ConfigError, match=message):
        decoder_sizes(**sizes)


@pytest.mark.parametrize(
    ("kv_heads", "vocabulary", "precision"), [(8, 512, "bf16"), (2, 32_000, "bf16"), (2, 512, "no")]
)
def test_activations_are_those_of_a_trace(kv_heads: int, vocabulary: int, precision: Precision) -> None:
    """Saved bytes are within 2 % of a traced Llama, with checkpointing and autocast too; peaks within 10 %."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": vocabulary}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    ids = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    traced = trace_activations(model, {"input_ids": ids, "labels": ids}, precision)
    formula = decoder_activations(model_sizes(model), TOKENS, precision, heads=8, kv_heads=kv_heads)
    assert formula.flops_per_sample == pytest.approx(traced.flops_per_sample, rel=0.01)
    assert formula.sample_length == traced.sample_length == TOKENS
    for one, other in ((formula, traced), (formula.under(None), traced.under(None))):
        for samples in (4, 16):
            assert _saved(one, samples) == pytest.approx(_saved(other, samples), rel=0.02)
            assert _peaks(one, samples) == pytest.approx(_peaks(other, samples), rel=0.1)
        if precision == "bf16" and vocabulary == 512 and one is not formula:
            for found in (one, other):  # all blocks' copies belong to the forward only; a small vocabulary hides none
                assert found.checkpointed_transient
                assert found.checkpointed_forward
                assert found.checkpointed_transient.at(1) < 0.8 * found.checkpointed_forward.at(1)


def _saved(found: Activations, samples: int) -> list[int]:
    assert found.checkpointed is not None
    return [found.saved.at(samples), found.checkpointed.at(samples)]


def _peaks(found: Activations, samples: int) -> list[int]:
    recomputing = (found.checkpointed_transient, found.checkpointed_forward)
    transients = (found.transient.at(samples), max(space.at(samples) for space in recomputing if space))
    return [saved + transient for saved, transient in zip(_saved(found, samples), transients, strict=True)]


def test_a_model_without_width_has_no_formula() -> None:
    """If hidden size or depth is unknown, the error says what to give."""
    model = replace(decoder_sizes(parameters=10**9), hidden_size=None)
    with pytest.raises(ConfigError, match="hidden size and layers of"):
        decoder_activations(model, TOKENS)
