"""Conversion of Accelerate's FSDP configuration to ZeRO's. `zero-plugin check --fix` writes the result.

The mapping follows the two libraries' documentation of FSDP's sharding strategies and ZeRO's stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zero_plugin.config.tree import as_switch

_FULL, _GRADIENTS, _NONE, _HYBRID, _HYBRID_GRADIENTS = range(1, 6)  # Accelerate's numbers for the strategies
_STRATEGIES: Final = {
    "FULL_SHARD": _FULL,
    "SHARD_GRAD_OP": _GRADIENTS,
    "NO_SHARD": _NONE,
    "HYBRID_SHARD": _HYBRID,
    "HYBRID_SHARD_ZERO2": _HYBRID_GRADIENTS,
    "_HYBRID_SHARD_ZERO2": _HYBRID_GRADIENTS,
}
# Keys that `convert_fsdp` reads, and keys without a counterpart, because ZeRO partitions each parameter automatically.
_KNOWN: Final = frozenset(
    f"fsdp_{name}"
    for name in (
        *("version", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "backward_prefetch"),
        *("backward_prefetch_policy", "forward_prefetch", "use_orig_params", "sync_module_states", "state_dict_type"),
        *("sharding_strategy", "reshard_after_forward", "offload_params", "cpu_ram_efficient_loading"),
        *("activation_checkpointing", "mixed_precision_policy", "limit_all_gathers"),
    )
)


class UnknownShardingError(Exception):
    """An FSDP configuration has a sharding strategy that this module does not know. The text is for users."""


@dataclass(frozen=True)
class ZeroConfig:
    """The settings that replace an FSDP configuration.

    Attributes:
        distributed_type: DEEPSPEED, or MULTI_GPU for a strategy that shards nothing.
        training: the keys of `deepspeed_config`.
        mixed_precision: for the launch key of that name; None keeps the file's value.
        notes: one sentence for each key that has no counterpart or another meaning.
    """

    distributed_type: str
    training: dict[str, Any] = field(default_factory=dict)
    mixed_precision: str | None = None
    notes: tuple[str, ...] = ()


def convert_fsdp(keys: Mapping[str, Any]) -> ZeroConfig | None:
    """Return the settings that replace an FSDP configuration; None for a file without one.

    Args:
        keys: the launch YAML, as plain values.

    Raises:
        UnknownShardingError: the sharding strategy is unknown.
    """
    fsdp = keys.get("fsdp_config")
    if str(keys.get("distributed_type")).upper() != "FSDP":
        return None
    fsdp = {str(key): value for key, value in fsdp.items()} if isinstance(fsdp, Mapping) else {}
    notes = []
    strategy = _strategy_of(fsdp)
    mixed = _mixed_precision(keys, fsdp)
    if _is_on(fsdp, "fsdp_activation_checkpointing"):
        notes.append(
            "fsdp_activation_checkpointing has no counterpart in a ZeRO configuration. Call "
            "model.gradient_checkpointing_enable() in the script."
        )
    notes += [f"{key} has no counterpart." for key in fsdp if key not in _KNOWN]
    if strategy == _NONE:
        notes.append("NO_SHARD keeps everything on each device, so this is plain DDP: no ZeRO stage does that.")
        return ZeroConfig("MULTI_GPU", {}, mixed, tuple(notes))
    stage = 2 if strategy in (_GRADIENTS, _HYBRID_GRADIENTS) else 3
    training: dict[str, Any] = {"zero_stage": stage}
    if _is_on(fsdp, "fsdp_offload_params"):
        training["offload_optimizer_device"] = "cpu"
        if stage == 3:
            training["offload_param_device"] = "cpu"
        else:
            notes.append("fsdp_offload_params: ZeRO stage 2 offloads the optimizer alone; stage 3 offloads parameters.")
    if stage == 3:
        training["zero3_init_flag"] = _is_on(fsdp, "fsdp_cpu_ram_efficient_loading")
        training["zero3_save_16bit_model"] = str(fsdp.get("fsdp_state_dict_type", "")).upper() == "FULL_STATE_DICT"
    notes += _describe_hybrid(strategy, keys, training)
    return ZeroConfig("DEEPSPEED", training, mixed, tuple(notes))


def _strategy_of(fsdp: Mapping[str, Any]) -> int:
    """Return the number of the sharding strategy. FSDP 2 only has whether parameters are sharded after the forward."""
    found = fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    if "fsdp_sharding_strategy" not in fsdp and (after_forward := as_switch(found)) is not None:
        return _FULL if after_forward else _GRADIENTS
    word = str(found).rpartition(".")[2].upper()  # ShardingStrategy.FULL_SHARD
    if word in ("1", "2", "3", "4", "5"):
        return int(word)
    if word not in _STRATEGIES:
        raise UnknownShardingError(f"the sharding strategy {found} is unknown. The file is left as it is.")
    return _STRATEGIES[word]


def _describe_hybrid(strategy: int, keys: Mapping[str, Any], training: dict[str, Any]) -> list[str]:
    """Configure hierarchical partitioning of stage 3 within each machine, and return notes on the differences."""
    if strategy == _HYBRID_GRADIENTS:
        return ["HYBRID_SHARD_ZERO2 becomes stage 2 over all processes: ZeRO has no copies for each machine there."]
    if strategy != _HYBRID:
        return []
    machines, processes = keys.get("num_machines") or 1, keys.get("num_processes")
    if machines == 1:
        return []  # the same as FULL_SHARD
    if not isinstance(processes, int) or not isinstance(machines, int) or processes % machines:
        return ["HYBRID_SHARD: write zero_optimization.zero_hpz_partition_size, the number of GPUs of a machine."]
    training["zero_optimization"] = {"zero_hpz_partition_size": processes // machines}
    note = (
        "HYBRID_SHARD becomes stage 3 with zero_hpz_partition_size: each machine keeps a second copy of the weights "
        "for the backward. Gradients and optimizer states are partitioned over all processes, and not copied."
    )
    return [note]


def _mixed_precision(keys: Mapping[str, Any], fsdp: Mapping[str, Any]) -> str | None:
    """Return the precision of FSDP's policy, if the launch key does not give one."""
    if keys.get("mixed_precision") not in (None, "no", False):
        return None
    policy = fsdp.get("fsdp_mixed_precision_policy")
    words = str(policy.get("param_dtype") if isinstance(policy, Mapping) else policy)
    named = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16"}
    return named.get(words.rpartition(".")[2].lower())


def _is_on(fsdp: Mapping[str, Any], key: str) -> bool:
    return as_switch(fsdp.get(key)) is True
