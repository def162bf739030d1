"""A loop in nanoGPT's style: `torch.compile`, gradient accumulation, clipping, and a hand-set learning rate."""

import json
import math
import os

import torch
from torch import nn
from torch.nn import functional

from zero_plugin import Accelerator

CONTEXT, VOCABULARY, ACCUMULATION = 16, 32, 2
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.to_qkv(self.norm_1(x)).chunk(3, 2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def rate(step: int) -> float:
    """Return the rate: warm-up, then half a cosine."""
    return 1e-2 * (step + 1) / 3 if step < 3 else 1e-3 + 4.5e-3 * (1 + math.cos(math.pi * (step - 3) / 5))


def main() -> None:
    """Take eight steps of two micro-batches of eight sequences, divided among the processes."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, dynamo_backend="aot_eager")
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(8):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        total = 0.0
        for micro in range(ACCUMULATION):
            rows = torch.arange(8)[:, None] * (micro + 1) + torch.arange(CONTEXT + 1)
            own = (rows % VOCABULARY).chunk(WORLD)[accelerator.process_index]
            with accelerator.accumulate(model):
                loss = model(own[:, :-1], own[:, 1:])
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            total += accelerator.reduce(loss.detach(), "mean").item() / ACCUMULATION
        losses.append(total)
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
