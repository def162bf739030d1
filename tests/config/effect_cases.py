"""For each key of the schema, the documents that set it, and surroundings in which it could have an effect."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_plugin.config.document import RENAMED_KEYS
from zero_plugin.config.schema import deepspeed_schema, types_of, walk_keys
from zero_plugin.config.tree import KeyPath

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}


def stage(number: int, **more: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration of this stage, with further keys of `zero_optimization`."""
    return {"zero_optimization": {"stage": number, **more}, "optimizer": copy.deepcopy(OPTIMIZER)}


CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "swap"}
BF16 = {"bf16": {"enabled": True}}
STAGES = {f"zero{number}": stage(number) for number in (0, 1, 2, 3)}
SWITCHED = ("tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler", "torch_autocast")
ON = {name: {**stage(2), name: {"enabled": True}} for name in SWITCHED}

# Keys of stage 3's fetching of weights.
FETCHING = (
    "stage3_prefetch_bucket_size",
    "stage3_model_persistence_threshold",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_module_granularity_threshold",
    "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
    "memory_efficient_linear",
    "overlap_comm",
)
INFO = {"log_level": "info"}
# Keys that change what processes send one another.
OF_TWO_PROCESSES = (
    *(f"zero_optimization.{key}" for key in FETCHING),
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.reduce_scatter",
    "torch_autocast.lower_precision_safe_modules",
)

# Further places where a key may have an effect, besides the four plain stages: prefix of keys -> configurations.
SURROUNDINGS: Mapping[str, list[dict[str, Any]]] = {
    "zero_optimization.offload_param": [
        stage(3, offload_param={**CPU}, offload_optimizer={**CPU}),
        stage(3, offload_param={**NVME, "max_in_cpu": 0}, offload_optimizer={**CPU}),
    ],
    "zero_optimization.offload_optimizer": [
        stage(2, offload_optimizer={**CPU}),
        stage(3, offload_optimizer={**CPU}),
        stage(3, offload_optimizer={**NVME}),
        # Some of the weights in memory.
        stage(3, sub_group_size=64, offload_optimizer={**NVME}, offload_param={**NVME, "max_in_cpu": 300}),
    ],
    "zero_optimization.offload_optimizer.ratio": [stage(3, sub_group_size=64, offload_optimizer={**CPU})],
    # Weights that do not stay unpartitioned, so there is something to fetch.
    **{f"zero_optimization.{key}": [stage(3, stage3_param_persistence_threshold=0)] for key in FETCHING},
    "zero_optimization.ignore_unused_parameters": [stage(2, offload_optimizer={**CPU}, ignore_unused_parameters=True)],
    "zero_optimization.override_module_apply": [stage(3, override_module_apply=True)],
    "zero_optimization.save_muon_momentum_buffer_in_memory": [
        {
            **stage(3, reduce_scatter=False, offload_optimizer={**CPU}),
            "optimizer": {"type": "Muon", "params": {"lr": 1e-3}},
        }
    ],
    "zero_allow_untested_optimizer": [{**stage(1), "optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}}],
    "zero_optimization.round_robin_gradients": [stage(2, offload_optimizer={**CPU})],
    "bf16": [{**STAGES[name], **BF16} for name in STAGES],
    "data_types.param_dtype": [{**STAGES[name], **BF16} for name in STAGES],
    "data_types.grad_accum_dtype": [
        {**STAGES[name], **half, "gradient_accumulation_steps": 2} for half in ({}, BF16) for name in STAGES
    ],
    "data_types.keep_in_fp32_modules": [{**STAGES[name], **BF16} for name in STAGES],
    "data_types.buffer_dtype": [{**STAGES[name], **BF16, "data_types": {"buffer_dtype": "bf16"}} for name in STAGES],
    "aio": [stage(3, offload_optimizer={**NVME})],
    "activation_checkpointing": [{**stage(2), "activation_checkpointing": {"partition_activations": True}}],
    "pipeline": [{**stage(1), "pipeline": {"stages": 1}}],
    "checkpoint.writer": [{**stage(2), "checkpoint": {"writer": {"type": "PYTHON"}}}],
    "data_efficiency": [{**stage(2), "data_efficiency": {"enabled": True}}],
    "data_efficiency.data_sampling": [
        {**stage(2), "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True}}}
    ],
    "data_efficiency.data_sampling.curriculum_learning": [
        {
            **stage(2),
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {
                    "enabled": True,
                    "curriculum_learning": {"enabled": True, "curriculum_metrics": {"seqlen": {}}},
                },
            },
        }
    ],
    "data_efficiency.data_sampling.dynamic_batching": [
        {
            **stage(2),
            "data_efficiency": {
                "enabled": True,
                "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True, "max_tokens": 64}},
            },
        }
    ],
    "data_efficiency.data_routing": [
        {**stage(2), "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}}
    ],
    "weight_quantization": [{**stage(3), "weight_quantization": {"enabled": True}}],
    "tensor_parallel": [{**stage(1), "tensor_parallel": {"autotp_size": 1}}],
    "compile": [],
    "torch_autocast": [
        {**STAGES[name], "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        for name in ("zero0", "zero2", "zero3")
    ],
    "sequence_parallel_size": [],
    **{key: [{**stage(2), **INFO}] for key in ("steps_per_print", "dump_state")},
    "comms_logger.verbose": [{**stage(2), **INFO, "comms_logger": {"enabled": True}}],
    "comms_logger.prof_ops": [{**stage(2), "comms_logger": {"enabled": True, "prof_all": False}}],
    **{name: [section] for name, section in ON.items() if name not in ("torch_autocast", "wandb", "comet")},
}

# A value other than the default that requests an effect, for keys whose schema names none.
VALUES: Mapping[str, Any] = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_param.nvme_path": "elsewhere",
    "zero_optimization.offload_optimizer.nvme_path": "elsewhere",
    "zero_allow_untested_optimizer": True,
    "zero_optimization.reduce_bucket_size": 64,
    "zero_optimization.allgather_bucket_size": 64,
    "zero_optimization.sub_group_size": 64,
    "zero_optimization.stage3_prefetch_bucket_size": 300,
    "zero_optimization.leaf_module.classes": ["Linear"],
    "zero_optimization.leaf_module.names": ["layers.0"],
    "zero_optimization.leaf_module.name_suffixes": ["0"],
    "torch_autocast.dtype": "float32",
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Embedding"],
    "data_types.keep_in_fp32_modules": ["norm"],
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer.params": {"lr": 0.1},
    "optimizer.type": "SGD",
    "optimizer.params.etas": [0.6, 1.1],
    "scheduler.type": "WarmupLR",
    "scheduler.params": None,
    "steps_per_print": 1,
    "log_level": "debug",
    "comms_logger.prof_ops": ["all_reduce"],
    "tensor_parallel.partition_config.layer_specs": [{"patterns": ["q"], "partition_type": "row"}],
    "weight_quantization.quantized_initialization": {
        "num_bits": 8,
        "group_size": 16,
        "group_dim": 1,
        "symmetric": True,
    },
    "weight_quantization.post_init_quant": {"layers": {"num_bits": 8, "group_size": 16}},
    "vocabulary_size": 33,
    "pipeline.partition": "uniform",
    "activation_checkpointing.number_checkpoints": 2,
}
# Parameters of schedulers that have no default, or one without effect within five steps.
REQUIRED: Mapping[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_num_steps": 2},  # the default is longer than the whole training here
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2},
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 3]},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 8},
}
CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 1, "cycle_second_step_size": 1}
HALVES = {"cycle_first_step_size": 2, "cycle_second_step_size": 2}
# The same for single parameters, which have an effect only with others than these.
BESIDE: Mapping[tuple[str, str], dict[str, Any]] = {
    **{("SGD", name): {"lr": 1e-3, "momentum": 0.9} for name in ("dampening", "nesterov")},
    **{  # falling losses are bad ones
        ("ReduceLROnPlateau", name): {"mode": "max", "patience": 0}
        for name in ("mode", "factor", "cooldown", "patience", "min_lr", "eps")
    },
    ("OneCycle", "decay_step_size"): {**CYCLE, "decay_lr_rate": 0.1, "decay_step_size": 1},
    **{("OneCycle", f"decay_{name}_rate"): {**CYCLE, "decay_step_size": 1} for name in ("lr", "mom")},
    **{("OneCycle", f"cycle_{half}_stair_count"): {**CYCLE, **HALVES} for half in ("first", "second")},
    ("CyclicLR", "gamma"): {"base_lr": 1e-3, "max_lr": 1e-2, "mode": "exp_range"},
    **{("ReduceLROnPlateau", name): {"threshold": 1.0, "patience": 0} for name in ("threshold", "threshold_mode")},
    ("Muon", "adam_w_mode"): {"lr": 1e-3, "weight_decay": 0.1},
    **{(kind, "decoupled_weight_decay"): {"lr": 1e-3, "weight_decay": 0.1} for kind in ("NAdam", "RAdam")},
    ("OneCycleLR", "epochs"): {"max_lr": 1e-2, "epochs": 2, "steps_per_epoch": 4},
    ("OneCycleLR", "steps_per_epoch"): {"max_lr": 1e-2, "epochs": 2, "steps_per_epoch": 4},
}
# Optimizer types whose parameters no case tries.
NOT_RUN: Mapping[str, str] = {
    "Lamb": "needs a GPU",
    **dict.fromkeys(("LBFGS", "SparseAdam"), "the type is an error"),
    **dict.fromkeys(("MuAdam", "MuAdamW", "MuSGD"), "without the package mup, which is not installed, it is an error"),
}


@dataclass(frozen=True)
class Case:
    """One key in one surrounding.

    Attributes:
        name: the key, for parameters with the type.
        key: its path.
        before, after: complete configurations, without the key and with it.
        world: number of training processes.
    """

    name: str
    key: KeyPath
    before: dict[str, Any]
    after: dict[str, Any]
    world: int = 1


def other_value(path: KeyPath, schema: Mapping[str, Any]) -> Any:
    """Return a legal value that is not the default, or None."""
    if ".".join(path) in VALUES:
        return VALUES[".".join(path)]
    default = schema.get("default")
    for branch in schema.get("anyOf", [schema]):
        for option in branch.get("enum", []):
            if option not in (default, None, "none"):
                return option
        kinds = branch.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            found = _of_kind(kind, default, branch)
            if found is not None:
                return found
    return None


def _of_kind(kind: str, default: Any, branch: Mapping[str, Any]) -> Any:
    least, most = branch.get("minimum", branch.get("exclusiveMinimum", 0)), branch.get("maximum", 10**9)
    if kind == "boolean":
        return not default
    if kind == "integer":
        return next((n for n in (3, 2, 1, 5) if n != default and least <= n <= most), None)
    if kind == "number":
        return next(
            (n for n in (0.5, 0.25, 3.0) if n != default and least < n < branch.get("exclusiveMaximum", most)), None
        )
    if kind == "string":
        return "other"
    if kind == "array":
        items, count = branch.get("items", {}), branch.get("minItems", 1)
        if "enum" in items:
            return items["enum"][:1]
        if "integer" in str(items):
            return [1, 2]
        return [0.5, 0.75][:count] if "number" in str(items) else ["other"] * count
    return {} if kind == "object" and default is not None else None


def put(config: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """Return a copy of `config` with `value` at `path`."""
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    section = changed
    for part in path[:-1]:
        section[part] = section.get(part) or {}
        section = section[part]
    section[path[-1]] = value
    return changed


def _whole(deepspeed: Mapping[str, Any]) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "use_cpu": True, "deepspeed_config": copy.deepcopy(dict(deepspeed))}


def surroundings(key: str) -> dict[str, dict[str, Any]]:
    """Return the configurations in which a key is tried, by name."""
    special = [
        config for prefix, configs in SURROUNDINGS.items() if f"{key}.".startswith(f"{prefix}.") for config in configs
    ]
    if key == "zero_allow_untested_optimizer":  # elsewhere this key allows nothing
        return {f"own{n}": config for n, config in enumerate(special)}
    staged = key.partition(".")[0] in ("zero_optimization", "bf16", "fp16", "data_types") or "." not in key
    plain = STAGES if staged else {"zero2": STAGES["zero2"]}
    return {**plain, **{f"own{n}": config for n, config in enumerate(special)}}


def cases() -> Iterator[Case]:
    """Yield every key of DeepSpeed's part in each of its surroundings."""
    for path, schema in walk_keys(deepspeed_schema()):
        key = ".".join(path)
        parameter = path[0] in ("optimizer", "scheduler") and len(path) > 2
        if path[:3] == ("tensor_parallel", "partition_config", "layer_specs") and len(path) > 3:
            continue  # in the items of a list, which are tried together
        if "curriculum_metrics" in path[:-1]:  # it holds metrics under the user's names
            path = (*path[:4], "seqlen", *path[4:])
        if "properties" in schema or path in RENAMED_KEYS or parameter or path[:-1] == ("tensor_parallel", "tp_group"):
            continue
        value = other_value(path, schema)
        if value is None:
            continue
        for name, config in surroundings(key).items():
            # Offloaded on a CPU, memory is pinned only on request; elsewhere true is DeepSpeed's default.
            here = name.startswith("own") if path[0] == "zero_optimization" and path[-1] == "pin_memory" else value
            if key == "zero_optimization.overlap_comm" and config["zero_optimization"]["stage"] == 3:
                here = False  # there null means true
            if put(config, path, here) != config:
                world = 2 if key in OF_TWO_PROCESSES else 1
                yield Case(f"{key} [{name}]", path, _whole(config), _whole(put(config, path, here)), world)
    yield from _parameters()


def _parameters() -> Iterator[Case]:
    for section in ("optimizer", "scheduler"):
        for branch in deepspeed_schema()["properties"][section]["allOf"]:
            kind = types_of(branch)[-1]
            if kind in NOT_RUN:
                continue
            for name, schema in branch["then"]["properties"]["params"]["properties"].items():
                path = (section, "params", name)
                needed = {"lr": 1e-3} if section == "optimizer" else REQUIRED.get(kind, {})
                needed = BESIDE.get((kind, name), needed)
                own = {"type": kind, "params": dict(needed)}
                value = other_value(path, {**schema, "default": needed.get(name, schema.get("default"))})
                if value is None:
                    continue
                for around, config in _around(section, kind).items():
                    before = {**config, section: own}
                    yield Case(
                        f"{section}.params.{name} of {kind} [{around}]",
                        path,
                        _whole(before),
                        _whole(put(before, path, value)),
                    )


def _around(section: str, kind: str) -> dict[str, dict[str, Any]]:
    if section == "scheduler":
        # DeepSpeed's OneCycle moves betas, and torch's schedules move a momentum too.
        adam = {"type": "AdamW", "params": {"lr": 1e-2}}
        sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
        return {"zero2": {**STAGES["zero2"], "optimizer": adam if kind == "OneCycle" else sgd}}
    if kind == "Adafactor":
        return {"zero0": STAGES["zero0"]}
    offloaded = {"zero2-cpu": stage(2, offload_optimizer={**CPU}), "zero3-cpu": stage(3, offload_optimizer={**CPU})}
    if kind == "Muon":  # with a kernel that is built anyway
        return {"zero2-cpu": offloaded["zero2-cpu"]}
    return {"zero2": STAGES["zero2"], **(offloaded if kind in ("AdamW", "Adagrad", "Lion") else {})}
