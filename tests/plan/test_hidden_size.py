"""The hidden size that real configurations state, nested as in their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from zero_plugin.plan.model_source import common_width, stated_width


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        ({"model_type": "distilbert", "hidden_dim": 3072, "dim": 768}, 768, "c.dim"),
        ({"model_type": "xlm", "emb_dim": 2048}, 2048, "c.emb_dim"),
        ({"model_type": "segformer", "hidden_sizes": [32, 64, 160, 256]}, 256, "the largest of c.hidden_sizes"),
        ({"embed_dim": [64, 192, 384]}, 384, "the largest of c.embed_dim"),
        (
            {"model_type": "clip", "text_config": {"hidden_size": 512}, "vision_config": {"hidden_size": 768}},
            512,
            "c.text_config.hidden_size",
        ),
        (
            {"vision_config": {"hidden_size": 1024}, "llm_config": {"hidden_size": 4096}},
            4096,
            "c.llm_config.hidden_size",
        ),
        (
            {
                "model_type": "qwen2_5_omni",
                "thinker_config": {
                    "audio_config": {"d_model": 1280},
                    "text_config": {"hidden_size": 3584},
                    "vision_config": {"hidden_size": 1281},
                },
                "talker_config": {"hidden_size": 896},
            },
            3584,
            "c.thinker_config.text_config.hidden_size",
        ),
        (
            {"model_type": "encoder-decoder", "encoder": {"hidden_size": 768}, "decoder": {"n_embd": 1024}},
            1024,
            "c.decoder.n_embd",
        ),
        (
            {"model_type": "bark", "fine_config": {"hidden_size": 768}, "semantic_config": {"hidden_size": 1024}},
            1024,
            "c.semantic_config.hidden_size",
        ),
        ({"text_config": {"hidden_sizes": [8, 16]}}, 16, "the largest of c.text_config.hidden_sizes"),
        ({"hidden_size": "auto", "hidden_sizes": [], "d_model": True, "rope": {"hidden_act": "silu"}}, None, ""),
    ],
)
def test_the_stated_width(config: dict[str, Any], size: int | None, reason: str) -> None:
    """The model's own comes first, then the language part's, then the widest part's. A non-size is ignored."""
    assert stated_width(config, "c") == (size, reason)


def test_a_configuration_that_holds_itself_ends() -> None:
    """A cycle of configuration objects states no size."""

    class OwnConfig:
        pass

    config = OwnConfig()
    config.text_config = config  # type: ignore[attr-defined]
    assert stated_width(config, "c") == (None, "")


def test_the_common_width_is_the_larger_of_equals() -> None:
    """Matrices vote with each of their dimensions; vectors and convolutions do not."""
    assert common_width([(4, 8), (3,), (3, 3, 3)])[0] == 8
    assert common_width([(4, 8), (4, 4), (9, 9, 9)])[0] == 4
    assert common_width([(4,)]) == (None, "")
