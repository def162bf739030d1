"""Models that kinds of training code train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from loops import FEATURES, OUT
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    """Blocks that the backward recomputes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(FEATURES, 16), reentrant
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Recurrent(nn.Module):
    """An LSTM whose head has a weight norm, after a layer of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8))
        self.cells = nn.LSTM(4, 8, batch_first=True)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(8, OUT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.cells(x.reshape(len(x), 2, 4))[0][:, -1])


class Tied(nn.Module):
    """A language model whose head is its embedding, with a padding index."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16, padding_idx=0)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.words(words))))


class TwoHeads(nn.Module):
    """A body with two heads, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(FEATURES, 16), nn.ModuleDict({n: nn.Linear(16, OUT) for n in "ab"})

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x)) * scale
        return {name: head(x) for name, head in self.heads.items()}


class Masked(nn.Module):
    """Dropout with masks of the batch's own, and a batch norm that is kept in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, OUT)
        self.register_buffer("rotation", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.norm.eval()

    def train(self, mode: bool = True) -> Masked:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        turned = (torch.view_as_complex(torch.stack([x, x.flip(1)], -1).contiguous()) * self.rotation).real
        return self.last(turned * (x > 0))


class Doubled(torch.autograd.Function):
    """A function with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Doubled.apply(torch.tanh(self.first(x))))


class Shared(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(FEATURES, 8), nn.Linear(FEATURES, 8), nn.Linear(16, OUT)

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(left), self.right(right)], -1).relu())


class Dropping(nn.Module):
    """Dropout, in a part that the backward recomputes."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.checkpointed = nn.Linear(FEATURES, 16), checkpointed
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh())
        self.last = nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))


class Recurring(nn.Module):
    """An LSTM that takes its state and returns the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(FEATURES, 8, batch_first=True), nn.Linear(8, OUT)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        out, state = self.cells(x, state)
        return self.last(out), state


class Packed(nn.Module):
    """A GRU in both directions, over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(20, 8), nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.last = nn.Linear(16, 1)

    def forward(self, words: Tensor) -> Tensor:
        lengths = 1 + words[:, 0] % words.shape[1]
        packed = rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        out, _ = rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=words.shape[1])
        return self.last(out.sum(1))


class Attending(nn.Module):
    """A Transformer's encoder with a causal mask, as in torch."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.layers(self.words(words), mask=mask, is_causal=True))


class Skipping(nn.Module):
    """A layer that every second forward leaves out, on all processes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 16), nn.Linear(16, OUT)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.count += 1
        return self.last(torch.tanh(self.middle(x)) if self.count % 2 else x)


class Coding(nn.Module):
    """A variational autoencoder that takes its noise. Scripts call its parts directly."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(FEATURES, 2 * 3), nn.Linear(3, FEATURES)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, -1)
        return mean, spread

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x)
        return self.decoder(mean + noise * (spread / 2).exp()), mean, spread


class LowRank(nn.Module):
    """The update that a parametrization adds to a frozen weight: LoRA by hand."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(rows, 2) * 0.1), nn.Parameter(torch.randn(2, columns) * 0.1)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


class Borrowing(nn.Module):
    """A head that uses the embedding's weight through its parent."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(20, 16), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, words: Tensor) -> Tensor:
        return functional.linear(self.inner(self.words(words)).tanh(), self.words.weight, self.bias)


@dataclass
class Outputs:
    """A container class that no library knows."""

    first: Tensor
    second: Tensor


class Recording(nn.Module):
    """Outputs in a user-defined record."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16))
        self.first, self.second = nn.Linear(16, OUT), nn.Linear(16, OUT)

    def forward(self, x: Tensor) -> Outputs:
        x = self.body(x)
        return Outputs(self.first(x), self.second(x))
