"""PEFT's methods on a small module, and a script's training of each: the rows of the table in docs/adapters.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import peft
import torch
from torch import Tensor, nn

LAYERS = ["first", "second"]
STEPS = 5
_ADA = {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 3, "deltaT": 1, "total_step": 10, "beta1": 0.5, "beta2": 0.5}
ALLOCATED, MERGED, MERGED_WHOLE = "AdaLoRA, `update_and_allocate`", "`merge_adapter`", "`merge_adapter`, whole weights"


def _lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"target_modules": LAYERS, "r": 4, **options})


# Configurations are created on use, by the installed release.
METHODS: dict[str, Callable[[], Any]] = {
    "LoRA": _lora,
    "rsLoRA": lambda: _lora(use_rslora=True),
    "DoRA": lambda: _lora(use_dora=True),
    "PiSSA": lambda: _lora(init_lora_weights="pissa"),
    "LoRA, `modules_to_save`": lambda: _lora(modules_to_save=["head"]),
    "LoRA, biases": lambda: _lora(bias="lora_only"),
    MERGED: _lora,
    MERGED_WHOLE: _lora,
    "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=LAYERS, **_ADA),
    ALLOCATED: lambda: peft.AdaLoraConfig(target_modules=LAYERS, **_ADA),
    "VeRA": lambda: peft.VeraConfig(target_modules=LAYERS[1:], r=4),
    "RandLora": lambda: peft.RandLoraConfig(target_modules=LAYERS, r=4, randlora_alpha=8),
    "LoHa": lambda: peft.LoHaConfig(target_modules=LAYERS, r=4),
    "LoKr": lambda: peft.LoKrConfig(target_modules=LAYERS, r=4),
    "(IA)³": lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=LAYERS[1:]),
    "OFT": lambda: peft.OFTConfig(target_modules=LAYERS, oft_block_size=4),
    "BOFT": lambda: peft.BOFTConfig(target_modules=LAYERS, boft_block_size=4),
    "HRA": lambda: peft.HRAConfig(target_modules=LAYERS, r=4),
    "FourierFT": lambda: peft.FourierFTConfig(target_modules=LAYERS, n_frequency=20),
    "VB-LoRA": lambda: peft.VBLoRAConfig(target_modules=LAYERS, r=2, topk=2, num_vectors=8, vector_length=4),
    "LN tuning": lambda: peft.LNTuningConfig(target_modules=["norm"]),
    "MiSS": lambda: peft.MissConfig(target_modules=LAYERS, r=4),
    "SHiRA": lambda: peft.ShiraConfig(target_modules=LAYERS, r=2),
    "C3A": lambda: peft.C3AConfig(target_modules=LAYERS, block_size=8),
    "RoAd": lambda: peft.RoadConfig(target_modules=LAYERS, group_size=8),
    "WaveFT": lambda: peft.WaveFTConfig(target_modules=LAYERS, n_frequency=20),
    "DeLoRA": lambda: peft.DeloraConfig(target_modules=LAYERS, r=4),
    "GraLoRA": lambda: peft.GraloraConfig(target_modules=LAYERS, r=4, gralora_k=2),
    "OSF": lambda: peft.OSFConfig(target_modules=LAYERS, effective_rank=4),
}
PATHS = {"DDP": "ddp", "0": "zero0", "1": "zero1", "2": "zero2", "3": "zero3-gathered", "3, all partitioned": "zero3"}
RIGHT, REFUSED = "right", "error"


class Net(nn.Module):
    """A small module: [batch, 8] → [batch, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))
        return out


def build(method: str) -> tuple[Any, torch.optim.Optimizer]:
    """Create a module with adapters whose initial no-effect values are replaced, and an optimizer of the adapters."""
    torch.manual_seed(3)
    model = peft.get_peft_model(Net(), METHODS[method]())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p in trained:
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model, torch.optim.SGD(trained, lr=0.05)


def train(
    method: str,
    own: Any,
    model: Any,
    optimizer: Any,
    backward: Callable[[Tensor], None],
    part: Callable[[Tensor], Tensor],
    whole_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[Tensor]:
    """Train like a script, and evaluate. Return outputs with merged adapters, and at the end.

    Args:
        method: one of `METHODS`.
        own: the module with adapters.
        model: the called model: `own`, or the result of `prepare`.
        optimizer: its optimizer.
        backward: computes gradients.
        part: this process's part of a global batch.
        whole_weights: context in which it may write weights.
    """
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)
        backward((model(part(x)) - part(y)).square().mean())
        optimizer.step()
        if method == ALLOCATED:
            own.base_model.update_and_allocate(step)
        optimizer.zero_grad()
    with torch.no_grad():
        if method in (MERGED, MERGED_WHOLE):
            gathered = whole_weights if method == MERGED_WHOLE else nullcontext
            with gathered():
                own.merge_adapter()
            yield model(x)
            with gathered():
                own.unmerge_adapter()
        yield model(x)
