"""How many elements DeepSpeed reduces, gathers and keeps whole at a time, by the model's width."""

from __future__ import annotations

from typing import Final

from zero_plugin.resolve.facts import ModelFacts

__all__ = ["choose_bucket", "choose_persistence_threshold"]

# A reduction of fewer elements than the floor is bound by latency, not bandwidth (h² is one million at h = 1024). Above
# the ceiling, DeepSpeed's own default, nothing gets faster and the buffer only takes memory.
_BUCKET_FLOOR: Final = 25_000_000
_BUCKET_CEILING: Final = 500_000_000
# Gathering a tensor below the floor costs a collective and saves nothing; each one below the threshold stays whole on
# every device, so the ceiling bounds that.
_PERSISTENT_FLOOR: Final = 10_000
_PERSISTENT_CEILING: Final = 1_000_000


def choose_bucket(model: ModelFacts, share: float = 1.0) -> tuple[int, str] | None:
    """`share` × hidden² elements (transformers' rule), or the largest parameter; clamped, at most the whole model.

    Returns:
        Elements and the reason; None where the model tells nothing.
    """
    if model.hidden_size:
        wanted = int(share * model.hidden_size**2)
        source = f"{share:g} × {model.hidden_size}², {model.hidden_size_reason}"
    elif model.largest_parameter:
        wanted, source = int(share * model.largest_parameter), f"{share:g} × the largest parameter"
    else:
        return None
    size = min(max(wanted, _BUCKET_FLOOR), _BUCKET_CEILING)
    if size != wanted:
        source += f", kept within {_BUCKET_FLOOR:,} to {_BUCKET_CEILING:,} elements"
    if model.parameters and size > model.parameters:
        size, source = model.parameters, "all parameters of the model"
    return size + size % 2, source  # DeepSpeed asserts that the all-gather's is even


def choose_persistence_threshold(model: ModelFacts) -> tuple[int, str] | None:
    """10 × hidden elements: norms and biases stay whole (transformers' rule); None where the width is unknown."""
    if not model.hidden_size:
        return None
    wanted = 10 * model.hidden_size
    size = min(max(wanted, _PERSISTENT_FLOOR), _PERSISTENT_CEILING)
    clamped = "" if size == wanted else f", kept within {_PERSISTENT_FLOOR:,} to {_PERSISTENT_CEILING:,}"
    return size, f"10 × {model.hidden_size}, {model.hidden_size_reason}{clamped}"
