"""Compute losses and layers in chunks of tokens, and again in the backward, to hold fewer activations at a time.

A language model's logits are one number for each token and word of the vocabulary. With 32,768 tokens and 128,256 words
they take 16.8 GB in fp32, and their gradients as much. In chunks, only one chunk's logits exist at a time. The result
is the same sum.
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
    """A stand-in for a model's head during the forward. The loss applies the head later, to chunks.

    Attributes:
        given: the input of the head.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, so torch does not register the head as a submodule
        self.given: Tensor | None = None

    @property
    def head(self) -> nn.Module:
        """The model's head."""
        return self._head[0]

    def __getattr__(self, name: str) -> Any:
        """Refuse a model that reads attributes of its head, e.g. the weights, instead of only calling the head.

        Raises:
            LoopError: the head has an attribute of this name.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "given" or not hasattr(self.head, name):
                raise
        raise LoopError(f"chunk_loss(): the model reads the {name} of its head directly, which is not supported.")

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states unchanged."""
        self.given = hidden
        return hidden


def loss_in_chunks(
    head: nn.Module, hidden: Tensor, following: Tensor, tokens: Tensor | int, chunks: int, ignored: int
) -> Tensor:
    """Sum the cross entropy of each token's next token, and divide by a number of tokens.

    Args:
        head: computes logits from hidden states.
        hidden: of shape (batch, sequence, size).
        following: of shape (batch, sequence): the next token of each token.
        tokens: the divisor of the sum.
        chunks: the number of chunks.
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
    """Make a layer compute chunks of tokens one after the other in training, and again in the backward.

    For layers that compute each token independently, such as the MLP of a transformer. The layer then holds the
    intermediate results of only one chunk. The results are the same except for rounding. A second call changes the
    number of chunks.

    Args:
        layer: the first argument of its forward is the hidden states, of shape (batch, sequence, size). The forward
            returns one tensor with the same number of tokens.
        chunks: the number of chunks of a sequence; 1 switches chunks off.

    Raises:
        LoopError: `chunks` is below 1, other code has replaced the layer's forward, or a part of the layer attends,
            convolves or is recurrent.
    """
    if chunks < 1:
        raise LoopError(f"chunk_layer(): chunks={chunks}; give 1 or more.")
    if (mixing := next((part for part in layer.modules() if _mixes_tokens(part)), None)) is not None:
        found = "it" if mixing is layer else f"a {type(mixing).__name__} in it"
        raise LoopError(
            f"chunk_layer(): a {type(layer).__name__} does not compute each token independently: {found} uses other "
            "tokens.\nPass a layer that does, such as a block's MLP: chunk_layer(block.mlp, 4)."
        )
    if "forward" in vars(layer) and not hasattr(layer, _CHUNKS):
        raise LoopError(f"chunk_layer(): the forward of this {type(layer).__name__} has been replaced already.")
    setattr(layer, _CHUNKS, chunks)
    layer.forward = MethodType(forward, layer)  # a method, so a deep copy of the layer gets its own


def _mixes_tokens(part: nn.Module) -> bool:
    """Return whether a module is known to mix tokens; transformers' attentions have an attribute `is_causal`."""
    convolves = isinstance(part, nn.Conv1d) and part.kernel_size != (1,)
    return convolves or isinstance(part, nn.MultiheadAttention | nn.RNNBase) or hasattr(part, "is_causal")


_CHUNKS = "_zero_plugin_chunks"  # attribute of a layer


def forward(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a layer in chunks. The name must be `forward`: pickle looks up a bound method by name."""
    complete: Any = MethodType(type(layer).forward, layer)
    chunks = getattr(layer, _CHUNKS)
    # A checkpoint of the older kind (use_reentrant=True) runs its first forward without gradients. Use chunks there
    # too: otherwise dropout would draw other random numbers than in the second forward.
    if chunks == 1 or not (layer.training or torch.is_grad_enabled()):
        return complete(hidden, *args, **kwargs)  # type: ignore[no-any-return]

    def compute(part: Tensor) -> Any:
        return complete(part.contiguous(), *args, **kwargs)  # expert layers call `view`; autograd keeps no copy

    parts = [checkpoint(compute, part, use_reentrant=False) for part in hidden.chunk(chunks, 1)]
    if any(not isinstance(part, Tensor) for part in parts) or sum(p.shape[1] for p in parts) != hidden.shape[1]:
        raise LoopError(
            f"chunk_layer(): the forward of a {type(layer).__name__} does not return one tensor with the same number "
            "of tokens."
        )
    return torch.cat(parts, 1)
