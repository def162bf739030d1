"""The way of training that a resolved configuration is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, Literal

from zero_plugin.config.tree import Path
from zero_plugin.plan.situation import Setup
from zero_plugin.resolve.defaults import deepspeed_default
from zero_plugin.resolve.resolved import Resolved

__all__ = ["KEYS", "Stage", "running_setup"]

Stage = Literal[0, 1, 2, 3] | None

_ZERO: Final = "zero_optimization"
_ELEMENT_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2}

# The key of a configuration that settles each field of a setup.
KEYS: Final[Mapping[str, Path]] = {
    "ratio": (_ZERO, "offload_optimizer", "ratio"),
    "sub_group_size": (_ZERO, "sub_group_size"),
    "micro_batch": ("train_micro_batch_size_per_gpu",),
    "accumulation": ("gradient_accumulation_steps",),
    "reduce_bucket": (_ZERO, "reduce_bucket_size"),
    "allgather_bucket": (_ZERO, "allgather_bucket_size"),
    "prefetch_bucket": (_ZERO, "stage3_prefetch_bucket_size"),
    "persistence_threshold": (_ZERO, "stage3_param_persistence_threshold"),
    "max_live_parameters": (_ZERO, "stage3_max_live_parameters"),
    "max_reuse_distance": (_ZERO, "stage3_max_reuse_distance"),
    "param_buffer": (_ZERO, "offload_param", "buffer_size"),
    "overlap_comm": (_ZERO, "overlap_comm"),
}


def running_setup(resolved: Resolved, stage: Stage) -> Setup:
    """What the memory of a run is computed from; activation checkpointing is the script's own, and part of the model.

    Args:
        resolved: its configuration.
        stage: that it runs; None without ZeRO, where nothing is offloaded.
    """
    tree = resolved.tree
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Setup)}
    found: dict[str, Any] = {}
    for name, path in KEYS.items():
        value = tree.value(*path)
        if not isinstance(value, bool | int | float):
            default = deepspeed_default(path)
            value = None if default is None else default[0]
        if isinstance(value, bool | int | float):
            found[name] = kinds[name](value)
    width = _ELEMENT_BYTES.get(str(tree.value("data_types", "grad_accum_dtype")))
    return Setup(
        stage=stage,
        precision=resolved.precision,
        gradient_bytes=width or (4 if resolved.precision == "no" else 2),
        offload_optimizer="none" if stage is None else resolved.offload_device("optimizer"),
        offload_param="none" if stage is None else resolved.offload_device("param"),
        pin_memory=any(tree.value(_ZERO, f"offload_{what}", "pin_memory") is True for what in ("optimizer", "param")),
        **found,
    )
