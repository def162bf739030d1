"""Keys and types that no known DeepSpeed release follows, or that none has any more, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_plugin.config.tree import Path

__all__ = ["RETIRED_KEYS", "RETIRED_OPTIMIZERS"]

_NO_SUCCESSOR = "Delete it; nothing replaces it."
_ACTS = "DeepSpeed's `compile` section no longer has it"

# path -> (what became of it, what to write)
RETIRED_KEYS: Final[Mapping[Path, tuple[str, str]]] = {
    ("zero_optimization", "grad_hooks"): ("no key of DeepSpeed, although its pages show it", _NO_SUCCESSOR),
    ("zero_optimization", "cpu_offload_use_pin_memory"): (
        "DeepSpeed drops its value",
        "Write pin_memory inside offload_optimizer or offload_param.",
    ),
    ("activation_checkpointing", "partitioned_activations"): ("DeepSpeed ignores it", "Write partition_activations."),
    ("optimizer", "params", "max_grad_norm"): ("DeepSpeed refuses it here", "Delete it; write gradient_clipping."),
    ("allgather_size",): ("read only beside the retired zero_optimization: true", "Write allgather_bucket_size."),
    **{
        ("compile", key): (_ACTS, "Delete it; call torch.compile in the script.")
        for key in ("enabled", "disable", "backend", "kwargs")
    },
}

_REMOVED_OPTIMIZER = "DeepSpeed removed it by 0.19.7. Write AdamW (or Lamb)."
RETIRED_OPTIMIZERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _REMOVED_OPTIMIZER),
    "fusedadam": "Write AdamW: DeepSpeed uses its fused kernel by itself.",
    "deepspeedcpuadam": "Write AdamW: DeepSpeed uses its CPU kernel by itself under offload.",
}
