"""DeepSpeed 0.19.8's own defaults, for fields that say `auto` and have no better rule."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from zero_plugin.config.tree import Path

__all__ = ["DEEPSPEED_AUTO", "OPTIMIZER_DEFAULTS", "SCHEDULER_DEFAULTS", "deepspeed_default"]

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

# By type, as DeepSpeed writes it. A schedule's required parameters have no default and are not listed.
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

_DEFAULTS: Final[Mapping[str, Any]] = {
    "optimizer": {"legacy_fusion": False},
    "steps_per_print": None,
    "dump_state": False,
    "disable_python_gc": False,
    "disable_allgather": False,
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "log_level": None,
    "dataloader_drop_last": False,
    "use_data_before_expert_parallelism": False,
    "vocabulary_size": None,
    "zero_optimization": {
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_model_persistence_threshold": sys.maxsize,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False,
        "ignore_unused_parameters": True,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
        "offload_param": {
            "nvme_path": None,
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 100_000_000,
            "max_in_cpu": 1_000_000_000,
        },
        "offload_optimizer": {
            "nvme_path": None,
            "pin_memory": True,
            "buffer_count": 4,
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": 1.0,
            "super_offload": False,
            "cpuadam_cores_perc": 0.8,
        },
        "zenflow": {
            "topk_ratio": 0.1,
            "overlap_step": False,
            "offload": False,
            "auto_ratio": 0.99,
            "full_warm_up_rounds": 0,
            "pt_reserved_cores_perc": 0.5,
        },
    },
    "fp16": {
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    },
    "bf16": {
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    },
    "torch_autocast": {"enabled": False},
    "data_types": {"param_dtype": None, "buffer_dtype": None},
    "activation_checkpointing": {
        "partition_activations": False,
        "number_checkpoints": None,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
        "cpu_checkpointing": False,
    },
    "aio": {
        "block_size": 1_048_576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    },
    "checkpoint": {
        "tag_validation": "Warn",
        "load_universal": False,
        "use_node_local_storage": False,
        "checkpoint_serialization": True,
        "parallel_write": {"pipeline_stage": False},
    },
    "comms_logger": {"enabled": False, "prof_all": True, "prof_ops": (), "verbose": False, "debug": False},
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "csv_monitor": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "wandb": {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
    "comet": {"enabled": False, "samples_log_interval": 100, "project": None, "workspace": None, "mode": None},
    "flops_profiler": {
        "enabled": False,
        "recompute_fwd_factor": 0.0,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    },
    "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": False},
    "compile": {"deepcompile": False},
}

# Inside zero_optimization DeepSpeed also takes these keys without their prefix.
_SHORT_STAGE3: Final = "stage3_"


def deepspeed_default(path: Path) -> tuple[Any] | None:
    """The default at `path` in a one-element tuple (a default may be None), or None where none is known."""
    node: Any = _DEFAULTS
    for part in path:
        if not isinstance(node, Mapping):
            return None
        name = part if part in node else _SHORT_STAGE3 + part
        if name not in node:
            return None
        node = node[name]
    return None if isinstance(node, Mapping) else (node,)
