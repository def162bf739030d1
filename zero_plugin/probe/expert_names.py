"""Tells a mixture's expert parameters by their names; imports no torch."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_expert"]

_EXPERT: Final = re.compile(r"(^|[._])experts([._]|$)")


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to a routed expert, e.g. `layers.0.mlp.experts.3.weight`."""
    return _EXPERT.search(name) is not None
