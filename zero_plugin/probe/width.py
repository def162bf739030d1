"""What a model's configuration, or else the shapes of its parameters, say of its hidden size; imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

__all__ = ["common_width", "stated_width"]

# The names under which configurations keep the width of the residual stream. `dim` before `hidden_dim`, which is the
# feed-forward width where both are there (DistilBERT).
_WIDTHS: Final = (
    *("hidden_size", "hidden_sizes", "d_model", "n_embd", "n_embed", "emb_dim", "embed_dim", "model_dim"),
    *("dim", "d_latents", "hidden_dim"),
)
# The parts that hold the language model, where a configuration nests several: the first that states a width counts.
_LANGUAGE: Final = (
    *("text_config", "llm_config", "language_config", "thinker_config", "llm_cfg", "lm_config", "language_model"),
    *("decoder", "decoder_config", "generator", "text_encoder"),
)
_DEEPEST: Final = 4


def stated_width(config: Any, path: str) -> tuple[int | None, str]:
    """The hidden size that a configuration states, itself or in a nested one, and where.

    The language part of several comes first, as in transformers' `get_text_config`; of the other parts the widest.

    Args:
        config: an object or a mapping; None states nothing.
        path: what to call it in the reason, e.g. `model.config`.
    """
    return _search(config, path, 0)


def common_width(shapes: Iterable[tuple[int, ...]]) -> tuple[int | None, str]:
    """The most common dimension of the matrices among `shapes`, the larger one of equals; None without a matrix."""
    counts = Counter(length for shape in shapes if len(shape) == 2 for length in set(shape))
    if not counts:
        return None, ""
    width = max(counts, key=lambda length: (counts[length], length))
    return width, f"the most common dimension of the model's matrices ({counts[width]} of them)"


def _search(config: Any, path: str, depth: int) -> tuple[int | None, str]:
    if config is None or depth > _DEEPEST:
        return None, ""
    for name in _WIDTHS:
        value = _member(config, name)
        if isinstance(value, list | tuple) and value and all(map(_counts, value)):
            return max(value), f"the largest of {path}.{name}"
        if _counts(value):
            return value, f"{path}.{name}"
    for name in _LANGUAGE:
        found = _search(_member(config, name), f"{path}.{name}", depth + 1)
        if found[0] is not None:
            return found
    others = [_search(part, f"{path}.{name}", depth + 1) for name, part in _parts(config)]
    return max(others, key=lambda found: found[0] or 0, default=(None, ""))


def _member(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The nested configurations: members that are mappings, or objects of some configuration class."""
    members = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    for name, part in list(members.items()):
        if isinstance(part, Mapping) or type(part).__name__.lower().endswith("config"):
            yield str(name), part


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
