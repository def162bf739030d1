"""Keys and values that DeepSpeed 0.19.8 ignores, renamed or refuses, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_plugin.config.tree import Path

__all__ = ["RETIRED_KEYS", "RETIRED_OPTIMIZERS"]

_NO_SUCCESSOR = "Delete it; nothing replaces it."
_ACTS = "DeepSpeed's `compile` section no longer has it"

# path -> (what became of it, what to write)
RETIRED_KEYS: Final[Mapping[Path, tuple[str, str]]] = {
    ("nebula",): ("removed in DeepSpeed 0.19.7, even when disabled", _NO_SUCCESSOR),
    ("compression_training",): ("removed in DeepSpeed 0.19.7, even when disabled", _NO_SUCCESSOR),
    ("quantize_training",): ("removed in DeepSpeed 0.19.7, even when disabled", _NO_SUCCESSOR),
    ("sparse_attention",): ("removed in DeepSpeed 0.19.7, even when disabled", _NO_SUCCESSOR),
    ("amp",): ("removed in DeepSpeed 0.19.8, even when disabled", 'Delete it; write "bf16": {"enabled": true}.'),
    ("sparse_gradients",): ("removed in DeepSpeed 0.19.8, even when false", _NO_SUCCESSOR),
    ("eigenvalue",): ("removed in DeepSpeed 0.19.8, even when disabled", _NO_SUCCESSOR),
    ("elasticity",): ("removed in DeepSpeed 0.19.8, even when disabled", "Delete it; write the batch sizes out."),
    ("graph_harvesting",): ("removed in DeepSpeed 0.19.8, even when false", _NO_SUCCESSOR),
    ("curriculum_learning",): (
        "removed in DeepSpeed 0.19.8, even when disabled",
        "Delete it, or write data_efficiency.data_sampling.curriculum_learning.",
    ),
    ("progressive_layer_drop",): ("removed in DeepSpeed 0.19.8, even when disabled", _NO_SUCCESSOR),
    ("zero_optimization", "mics_shard_size"): (
        "removed in DeepSpeed 0.19.7",
        "Delete it; zero_hpz_partition_size keeps a copy of the weights on each node.",
    ),
    ("zero_optimization", "mics_hierarchical_params_gather"): ("removed in DeepSpeed 0.19.7", _NO_SUCCESSOR),
    ("zero_optimization", "zeropp_loco_param"): ("removed in DeepSpeed 0.19.8, even when null", _NO_SUCCESSOR),
    ("zero_optimization", "grad_hooks"): ("not a key of DeepSpeed 0.19.8, although its pages show it", _NO_SUCCESSOR),
    ("zero_optimization", "cpu_offload_use_pin_memory"): (
        "DeepSpeed 0.19.8 drops its value",
        "Write pin_memory inside offload_optimizer or offload_param.",
    ),
    ("zero_optimization", "cpu_offload"): ("stands beside offload_optimizer", "Delete it; keep offload_optimizer."),
    ("zero_optimization", "cpu_offload_param"): ("stands beside offload_param", "Delete it; keep offload_param."),
    ("aio", "thread_count"): ("ignored since DeepSpeed 0.16", "Write intra_op_parallelism."),
    ("activation_checkpointing", "partitioned_activations"): ("DeepSpeed ignores it", "Write partition_activations."),
    ("optimizer", "params", "max_grad_norm"): ("DeepSpeed refuses it here", "Delete it; write gradient_clipping."),
    ("allgather_size",): ("read only beside the retired zero_optimization: true", "Write allgather_bucket_size."),
    **{
        ("compile", key): (_ACTS, "Delete it; write deepcompile: true, or call torch.compile in the script.")
        for key in ("enabled", "disable", "backend", "kwargs")
    },
}

_REMOVED_OPTIMIZER = "DeepSpeed removed it by 0.19.7. Write AdamW (or Lamb)."
RETIRED_OPTIMIZERS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("onebitadam", "onebitlamb", "zerooneadam"), _REMOVED_OPTIMIZER),
    "fusedadam": "Write AdamW: DeepSpeed uses its fused kernel by itself.",
    "deepspeedcpuadam": "Write AdamW: DeepSpeed uses its CPU kernel by itself under offload.",
}
