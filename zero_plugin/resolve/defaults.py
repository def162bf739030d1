"""DeepSpeed's own defaults, for fields that are written out or say `auto` and have no better rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.registry import key_schema
from zero_plugin.config.tree import Path

__all__ = ["DEEPSPEED_AUTO", "OPTIMIZER_DEFAULTS", "SCHEDULER_DEFAULTS", "SCHEDULER_REQUIRED", "deepspeed_default"]

# Fields in which DeepSpeed itself understands the word "auto": it must reach DeepSpeed as it is.
DEEPSPEED_AUTO: Final = frozenset(
    [
        ("data_types", "keep_in_fp32_modules"),
        ("zero_optimization", "zenflow", "select_strategy"),
        ("zero_optimization", "zenflow", "select_interval"),
        ("zero_optimization", "zenflow", "update_interval"),
        ("pipeline", "stages"),
        ("expert_parallel", "score_apply"),
        ("expert_parallel", "combine_impl"),
        ("expert_parallel", "row_weighting_impl"),
        ("expert_parallel", "score_func"),
        ("expert_parallel", "top_k"),
        ("expert_parallel", "routed_scaling_factor"),
    ]
)

_ADAM: Final = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}

# By type in lower case. Adam's and Lion's are those of DeepSpeed's kernels: there an absent weight_decay is 0, where
# torch.optim.AdamW has 0.01, and Lion's second beta is 0.999, where its paper has 0.99.
OPTIMIZER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "adam": {**_ADAM, "adam_w_mode": True},
    "adamw": _ADAM,
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    "lamb": {**_ADAM, "bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "rmsprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
}

_WARMUP: Final = {"warmup_num_steps": 1000, "warmup_type": "log"}

# By type, as DeepSpeed writes it; what has no default is in the table below.
SCHEDULER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "WarmupLR": {**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": None},
    "WarmupDecayLR": {**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4},
    "OneCycle": {
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}

SCHEDULER_REQUIRED: Final[Mapping[str, frozenset[str]]] = {
    "WarmupLR": frozenset(),
    "WarmupDecayLR": frozenset(["total_num_steps"]),
    "WarmupCosineLR": frozenset(["total_num_steps"]),
    "OneCycle": frozenset(["cycle_min_lr", "cycle_max_lr"]),
    "LRRangeTest": frozenset(),
}


def deepspeed_default(path: Path, kind: str | None = None) -> tuple[Any] | None:
    """The default at `path` in a one-element tuple (a default may be None), or None where none is known.

    Args:
        path: a key of the configuration.
        kind: for a key below `optimizer.params` or `scheduler.params`, the section's type.
    """
    node = key_schema(path, kind) or {}
    return (node["default"],) if "default" in node else None
