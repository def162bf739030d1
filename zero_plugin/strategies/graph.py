"""Which tensors the gradient of a loss would reach."""

from __future__ import annotations

from torch import Tensor

__all__ = ["find_leaves"]


def find_leaves(loss: Tensor) -> list[Tensor]:
    """The tensors at the ends of a loss's graph, which its gradient would reach; the graph may have been used.

    It walks the whole graph, which takes milliseconds for a large model.
    """
    found: list[Tensor] = []
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return found
