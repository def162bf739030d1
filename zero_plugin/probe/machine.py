"""Reads what the processes run on: device kind, its number types, DeepSpeed's version."""

from __future__ import annotations

from typing import Literal

import torch

from zero_plugin.installed import installed_version
from zero_plugin.resolve.facts import MachineFacts

__all__ = ["accelerator_kind", "probe_machine"]

AcceleratorKind = Literal["cpu", "cuda", "xla"]


def probe_machine(accelerator: AcceleratorKind | None = None, processes: int = 1) -> MachineFacts:
    """Facts of this process's device.

    Args:
        accelerator: device kind of the run; None takes CUDA where a GPU is visible, else the CPU.
        processes: data-parallel world size.
    """
    kind: AcceleratorKind = accelerator or ("cuda" if torch.cuda.is_available() else "cpu")
    return MachineFacts(
        accelerator=kind,
        processes=processes,
        bf16=_computes_in_bf16(kind),
        fp16=kind == "cuda",
        deepspeed_version=installed_version("deepspeed") or "",
    )


def accelerator_kind(device: torch.device) -> AcceleratorKind:
    """What of a device decides how a run is resolved."""
    return "cuda" if device.type == "cuda" else "xla" if device.type == "xla" else "cpu"


def _computes_in_bf16(kind: AcceleratorKind) -> bool:
    """Whether bf16 runs in hardware; elsewhere torch emulates it slowly."""
    if kind == "cuda":
        return bool(torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        # oneDNN's own answer for this processor (AVX-512 or better on x86, BF16 instructions on ARM)
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
    return True
