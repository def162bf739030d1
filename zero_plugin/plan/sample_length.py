"""How many tokens a sample has, where nobody says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["DEFAULT_LENGTH", "usual_length"]

DEFAULT_LENGTH: Final = 2048
# How configurations call the number of positions that a model has.
_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "block_size")


def usual_length(config: Any = None) -> int:
    """2048 tokens, or all of a model's positions where it has fewer.

    Args:
        config: of the model, an object or a mapping; the language part of a nested one counts.
    """
    if isinstance(config, Mapping):
        text: Any = config.get("text_config") or config
    else:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated = (text.get(name) if isinstance(text, Mapping) else getattr(text, name, None) for name in _POSITIONS)
    found = (n for n in stated if isinstance(n, int) and not isinstance(n, bool) and n > 0)
    return min(DEFAULT_LENGTH, next(found, DEFAULT_LENGTH))
