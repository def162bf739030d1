"""Which parameters the gradient of a loss would reach."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

__all__ = ["reached_parameters"]


def reached_parameters(loss: Tensor, parameters: Collection[Tensor]) -> list[Tensor]:
    """Those of `parameters` that `loss` depends on; its graph may have been used.

    It walks the whole graph, which takes milliseconds for a large model.
    """
    ids = {id(p) for p in parameters}
    found: list[Tensor] = []
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in ids:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return found
