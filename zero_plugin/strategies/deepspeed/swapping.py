"""What DeepSpeed reads from NVMe: each weight once at a time, and each gradient to where it belongs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["mend_swapping"]


def mend_swapping(engine: Any) -> None:
    """Make NVMe offload train as host memory does, for every order and size of the weights.

    DeepSpeed asks twice for a weight that comes twice in what it looks ahead at (near the end of a forward, when the
    backward needs it again), and then asserts that nobody does. And it reads a gradient straight to its place in the
    sub-group's buffer; the system refuses where that place is not aligned, without an error: the step takes what was
    there before.
    """
    parameters: list[Any] = list(engine.module.parameters())
    swappers = {id(swapper): swapper for p in parameters if (swapper := getattr(p, "nvme_swapper", None)) is not None}
    for swapper in swappers.values():
        swapper.swap_in = _without_repetition(swapper.swap_in)
    if (states := getattr(engine.optimizer, "optimizer_swapper", None)) is not None:
        states._adjust_for_misaligned_lengths = _with_aligned_offsets(states)


def _without_repetition(swap_in: Any) -> Any:
    def call(params: list[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        swap_in(list(dict.fromkeys(params)), *args, **kwargs)

    return call


def _with_aligned_offsets(swapper: Any) -> Any:
    """What comes before the first aligned place stays in memory, as what is behind the last aligned length does."""
    cut_lengths = swapper._adjust_for_misaligned_lengths

    def call(tensors: list[Tensor], offsets: list[int]) -> Any:
        pieces = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            head = min(-offset % swapper.numel_alignment, tensor.numel())
            if head and swapper.is_swappable_tensor(tensor=tensor):
                pieces.append((tensor[:head], offset))
                tensor, offset = tensor[head:], offset + head
            pieces.append((tensor, offset))
        return cut_lengths(tensors=[tensor for tensor, _ in pieces], offsets=[offset for _, offset in pieces])

    return call
