"""The parity cases: what one training run is asked to do, shared by the worker and the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

SAMPLES = 160
FEATURES, OUTPUTS = 16, 4
EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        accumulation: micro-batches per step.
        style: how the loop tells its micro-batches: `accumulate`, or by hand with a step after each (`every`) or after
            each window (`window`).
        batches: global micro-batches per epoch (of 8 samples over all processes).
        stream: the data set is iterable, without a length.
        clip: `clip_grad_norm_` with this number in the loop.
        config_clip: `gradient_clipping` in the configuration.
        drop: the first backward of every third step is thrown away with zero_grad and computed again.
        optimizer: type and arguments.
        schedule: type and arguments of a config section; None for a LambdaLR in code (only with real optimizers).
        placeholders: DummyOptim and DummyScheduler instead of real objects; the sections are in the configuration.
        groups: two parameter groups, the second with half the learning rate and no weight decay.
        branch: a layer that takes part in every second micro-batch only.
        precision: of computation.
    """

    accumulation: int = 1
    style: str = "accumulate"
    batches: int = 6
    stream: bool = False
    clip: float | None = None
    config_clip: float | None = None
    drop: bool = False
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
    schedule: tuple[str, dict[str, Any]] | None = None
    placeholders: bool = False
    groups: bool = False
    branch: bool = False
    precision: str = "no"


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}

CASES: dict[str, Case] = {
    "plain": Case(),
    "accumulate": Case(accumulation=4, batches=8),
    "accumulate-short-window": Case(accumulation=4, batches=10, clip=0.5),
    "accumulate-stream-short-window": Case(accumulation=4, batches=6, stream=True, clip=0.5),
    "by-hand-every": Case(accumulation=3, style="every", batches=7),
    "by-hand-window": Case(accumulation=3, style="window", batches=6, clip=0.3),
    "clip": Case(clip=0.05),
    "config-clip": Case(config_clip=0.05),
    "both-clips": Case(clip=0.05, config_clip=0.05, accumulation=2),
    "dropped": Case(drop=True, batches=9),
    "dropped-accumulating-by-hand": Case(drop=True, batches=9, accumulation=1, style="every", clip=0.2),
    "branch": Case(branch=True, accumulation=2, batches=7),
    "branch-single-steps": Case(branch=True, batches=7, optimizer=("SGD", {"lr": 0.05})),
    "groups": Case(groups=True),
    "warmup-lr": Case(placeholders=True, schedule=("WarmupLR", {**_WARMUP, "warmup_type": "linear"})),
    "warmup-decay": Case(
        placeholders=True, schedule=("WarmupDecayLR", {**_WARMUP, "warmup_type": "log", "total_num_steps": 10})
    ),
    "warmup-cosine": Case(
        placeholders=True,
        schedule=("WarmupCosineLR", {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}),
        groups=True,
    ),
    "one-cycle": Case(
        placeholders=True,
        schedule=(
            "OneCycle",
            {
                "cycle_min_lr": 1e-3,
                "cycle_max_lr": 2e-2,
                "cycle_first_step_size": 5,
                "decay_lr_rate": 0.1,
                "decay_step_size": 2,
                "cycle_momentum": False,
            },
        ),
    ),
    "lr-range-test": Case(
        placeholders=True,
        schedule=("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 3}),
    ),
    "bf16": Case(precision="bf16", batches=10),
    "bf16-accumulate-clip": Case(precision="bf16", accumulation=4, batches=10, clip=0.5),
}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-7},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-7},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "RMSprop": {"lr": 1e-3, "alpha": 0.9, "momentum": 0.5},
    "Adagrad": {"lr": 0.05, "weight_decay": 0.01, "eps": 1e-8},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.98)},
}
for _name, _arguments in _OPTIMIZERS.items():
    _short = Case(optimizer=(_name, _arguments), batches=5, groups=True)
    CASES[f"real-{_name}"] = _short
    CASES[f"placeholder-{_name}"] = Case(
        optimizer=(_name, _arguments),
        batches=5,
        groups=True,
        placeholders=True,
        schedule=("WarmupLR", {**_WARMUP, "warmup_max_lr": _arguments["lr"], "warmup_type": "linear"}),
    )

# How each path is configured: processes, and the training configuration beside the case's own.
_ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
PATHS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (2, {}),
    "zero0": (2, {"zero_optimization": {"stage": 0}}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "zero3": (2, {"zero_optimization": _ZERO3}),
    "zero1-cpu": (2, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    "zero2-cpu": (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "zero3-cpu": (
        2,
        {"zero_optimization": {**_ZERO3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    ),
    "zero3-nvme": (
        2,
        {
            "zero_optimization": {
                **_ZERO3,
                "sub_group_size": 700_000,
                "offload_optimizer": {"device": "nvme", "nvme_path": "NVME"},
                "offload_param": {"device": "nvme", "nvme_path": "NVME", "max_in_cpu": 0, "buffer_size": 2_000_000},
            }
        },
    ),
    "zero2-one-process": (1, {"zero_optimization": {"stage": 2}}),
}


def width_for(path: str) -> int:
    """Hidden width: tensors below 1 MiB per process never go to NVMe, so that path needs a wide layer."""
    return 1024 if path == "zero3-nvme" else 24


def case_for(path: str, name: str) -> Case:
    """The case as it runs on a path: the wide layer wants small learning rates, or training is chaotic."""
    case = CASES[name]
    if path != "zero3-nvme":
        return case

    def scaled(arguments: dict[str, Any]) -> dict[str, Any]:
        return {k: v / 50 if k in ("lr", "warmup_max_lr") else v for k, v in arguments.items()}

    schedule = None if case.schedule is None else (case.schedule[0], scaled(case.schedule[1]))
    return replace(case, optimizer=(case.optimizer[0], scaled(case.optimizer[1])), schedule=schedule)


def cases_for(path: str) -> list[str]:
    """The cases that run on a path."""
    if path == "zero3-nvme":
        optimizers = [name for name in CASES if name.startswith(("real-", "placeholder-"))]
        return [
            *optimizers,
            "plain",
            "accumulate-short-window",
            "dropped",
            "clip",
            "branch",
            "warmup-decay",
            "groups",
            "bf16",
        ]
    if path == "ddp":
        return [name for name, case in CASES.items() if not case.branch]  # DDP wants every parameter in every window
    return list(CASES)
