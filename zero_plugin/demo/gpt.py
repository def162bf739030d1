"""A byte-level GPT in plain PyTorch: rotary positions, pre-norm blocks, no knowledge of how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

__all__ = ["GPT", "GPTConfig", "generate", "next_byte_loss"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model: `hidden_size` is the width of the residual stream, `block` the longest input in bytes."""

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    block: int = 128
    vocabulary: int = 256

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} does not split into {self.heads} heads of even width; "
                f"write a multiple of {2 * self.heads}"
            )


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width, bias=False)
        self.feed_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Map the stream `[batch, length, width]` to the same shape."""
        batch, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, head, length, head width]
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class GPT(nn.Module):
    """Predicts each byte from those before it: `[batch, length]` byte values to `[batch, length, 256]` logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Each block adds two branches to the stream; so shrunk, their sum keeps its size (GPT-2, §2.3).
                shrink = (2 * config.layers) ** -0.5 if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * shrink)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the byte after each position."""
        x = self.embedding(ids)
        rotation = _rotation(ids.shape[1], self.config.hidden_size // self.config.heads, x)
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _rotation(length: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[length, head width / 2]` of the rotary embedding (arXiv 2104.09864, eq. 15)."""
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / head_width, device=like.device)
    # Angles in fp32: bf16 could not tell one position from the next beyond 256.
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each block, `[batch]`, in nats per byte and fp32.

    Args:
        logits: `[batch, length, 256]`.
        targets: the bytes that came, `[batch, length]`.
    """
    nats = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return nats.view(targets.shape).mean(1)


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Tensor,
    count: int,
    *,
    block: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Tensor:
    """Continue `[batch, length]` bytes by `count` sampled ones; returns prompt and continuation together.

    `forward` is what `prepare` returned: ZeRO-3 gathers weights inside it, so every process must call `generate`, with
    the same `count`. With the same `seed` all of them draw the same bytes.
    """
    draw = torch.Generator().manual_seed(seed)  # on the CPU, so that every kind of device draws alike
    for _ in range(count):
        logits = forward(prompt[:, -block:])[:, -1].float().cpu()
        best, candidates = logits.topk(top_k)
        picked = torch.multinomial((best / temperature).softmax(-1), 1, generator=draw)
        prompt = torch.cat((prompt, candidates.gather(1, picked).to(prompt.device)), dim=1)
    return prompt
