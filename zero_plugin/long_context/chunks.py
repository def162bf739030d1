"""Computation in chunks of tokens, and anew in the backward, so that less is kept at once: losses, and layers.

A language model's logits are one number for each token and word: of 32,768 tokens and 128,256 words 16.8 GB in fp32,
and as much for their gradients. In chunks only those of one are there at a time. The result is the same sum.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from zero_plugin.errors import LoopError


class Deferred(nn.Module):
    """In place of a model's head while the model runs: the head is applied later, to chunks.

    Attributes:
        given: what it was to be applied to.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = (head,)  # so that it is no part of this module
        self.given: Tensor | None = None

    @property
    def head(self) -> nn.Module:
        """The model's head, which this stands in for."""
        return self._head[0]

    def __getattr__(self, name: str) -> Any:
        """A model that uses its head's weights by itself does not call it alone.

        Raises:
            LoopError: the head has such an attribute.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "given" or not hasattr(self.head, name):
                raise
        raise LoopError(f"chunk_loss(): the model uses the {name} of its head by itself, which is not supported.")

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states, as they are."""
        self.given = hidden
        return hidden


def loss_in_chunks(
    head: nn.Module, hidden: Tensor, following: Tensor, tokens: Tensor | int, chunks: int, ignored: int
) -> Tensor:
    """The cross entropy of each token's next one, summed and divided by a number of tokens.

    Args:
        head: makes logits of hidden states.
        hidden: of shape (batch, sequence, size).
        following: of shape (batch, sequence), each token's next one.
        tokens: what the sum is divided by.
        chunks: how many.
        ignored: the label of tokens that do not count.

    Returns:
        A scalar in fp32.
    """
    summed = torch.zeros((), device=hidden.device)
    for part, labels in zip(hidden.flatten(0, 1).chunk(chunks), following.flatten().chunk(chunks), strict=True):
        summed = summed + checkpoint(_summed_loss, head, part, labels, ignored, use_reentrant=False)
    return summed / tokens


def _summed_loss(head: nn.Module, hidden: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return cross_entropy(head(hidden).float(), labels, ignore_index=ignored, reduction="sum")


def chunk_layer(layer: nn.Module, chunks: int) -> None:
    """Have a layer compute chunks of tokens one after the other, in training, and anew in the backward.

    For layers that compute each token by itself, as the MLP of a transformer: what they keep between is then that of
    one chunk. The numbers stay the same but for rounding. A second call changes the number.

    Args:
        layer: its forward takes hidden states of shape (batch, sequence, size) first, and returns a tensor of as many
            tokens.
        chunks: into how many parts the sequence is cut; 1 for the layer as it was.

    Raises:
        LoopError: `chunks` is below 1, something else has replaced the layer's forward, or a part of the layer attends,
            convolves or is recurrent.
    """
    if chunks < 1:
        raise LoopError(f"chunk_layer(): chunks={chunks}; give 1 or more.")
    if (mixing := next((part for part in layer.modules() if _mixes_tokens(part)), None)) is not None:
        found = "it" if mixing is layer else f"a {type(mixing).__name__} in it"
        raise LoopError(
            f"chunk_layer(): a {type(layer).__name__} does not compute each token by itself: {found} takes others into "
            "account.\nGive a layer that does, as a block's MLP: chunk_layer(block.mlp, 4)."
        )
    if "forward" in vars(layer) and not hasattr(layer, _CHUNKS):
        raise LoopError(f"chunk_layer(): the forward of this {type(layer).__name__} has been replaced already.")
    setattr(layer, _CHUNKS, chunks)
    layer.forward = MethodType(forward, layer)  # a deep copy of the layer gets one of its own


def _mixes_tokens(part: nn.Module) -> bool:
    """Whether a module is known to compute a token from others; transformers' attention says whether it is causal."""
    convolves = isinstance(part, nn.Conv1d) and part.kernel_size != (1,)
    return convolves or isinstance(part, nn.MultiheadAttention | nn.RNNBase) or hasattr(part, "is_causal")


_CHUNKS = "_zero_plugin_chunks"  # attribute of a layer


def forward(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """In place of a layer's forward; it has that name, by which pickle finds the layer's own."""
    complete: Any = MethodType(type(layer).forward, layer)
    chunks = getattr(layer, _CHUNKS)
    # A checkpoint of the older kind (use_reentrant=True) runs its first forward without gradients: were that one
    # complete, dropout would draw others than in the second.
    if chunks == 1 or not (layer.training or torch.is_grad_enabled()):
        return complete(hidden, *args, **kwargs)  # type: ignore[no-any-return]

    def compute(part: Tensor) -> Any:
        return complete(part.contiguous(), *args, **kwargs)  # layers of experts view it; a copy here is not kept

    parts = [checkpoint(compute, part, use_reentrant=False) for part in hidden.chunk(chunks, 1)]
    if any(not isinstance(part, Tensor) for part in parts) or sum(p.shape[1] for p in parts) != hidden.shape[1]:
        raise LoopError(
            f"chunk_layer(): the forward of a {type(layer).__name__} does not return one tensor of as many tokens."
        )
    return torch.cat(parts, 1)
