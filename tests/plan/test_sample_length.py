"""The assumed length of a sample if none is given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zero_plugin.plan.model_source import ModelSource, open_model, usual_length

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 256}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (None, 2048),
        ({}, 2048),
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 131_072}, 2048),
        ({"max_position_embeddings": None, "block_size": 64}, 64),
        ({"max_position_embeddings": True}, 2048),
        ({"text_config": {"max_position_embeddings": 300}, "max_position_embeddings": 77}, 300),
        (SimpleNamespace(n_positions=128), 128),
    ],
    ids=str,
)
def test_as_long_as_the_model_has_positions(config: Any, length: int) -> None:
    """2048 tokens, or the number of positions if smaller. A nested configuration's language part counts."""
    assert usual_length(config) == length


@pytest.mark.parametrize("trace", [True, False])
def test_a_config_is_planned_at_its_own_length(tmp_path: Path, trace: bool) -> None:
    """Traced or by formula, the length is config.json's if none is requested."""
    (tmp_path / "config.json").write_text(json.dumps({**GPT2, "architectures": ["GPT2LMHeadModel"]}))
    source = ModelSource(str(tmp_path), trace=trace)
    assert open_model(source)[1].sample_length == 256
    assert open_model(source, 32)[1].sample_length == 32
