"""The parity cases: the features of one training run, shared by the worker and the reference."""

from __future__ import annotations

import itertools
import random
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
        style: how the loop marks its micro-batches: `accumulate`, or by hand with a step after each (`every`) or after
            each window (`window`).
        batches: global micro-batches per epoch (of 8 samples over all processes).
        data: `map`, `stream` (an iterable dataset without a length), or `sampler` (a batch sampler of the user's own).
        clip: `clip_grad_norm_` with this number in the loop.
        config_clip: `gradient_clipping` in the configuration.
        drop: whether zero_grad drops the first backward of every third window, which runs again.
        optimizer: type and arguments.
        schedule: type and arguments of a config section; None for a LambdaLR in code (only with real optimizers).
        placeholders: DummyOptim and DummyScheduler instead of real objects; the sections are in the configuration.
        groups: whether there are two parameter groups, the second with half the learning rate and no weight decay.
        branch: whether a layer takes part in every second micro-batch only.
        precision: the compute dtype.
        fp16: the section's keys.
        poison: whether the loss of every fourth window, from the third, is infinite, to skip its step.
    """

    accumulation: int = 1
    style: str = "accumulate"
    batches: int = 6
    data: str = "map"
    clip: float | None = None
    config_clip: float | None = None
    drop: bool = False
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-2, "weight_decay": 0.1})
    schedule: tuple[str, dict[str, Any]] | None = None
    placeholders: bool = False
    groups: bool = False
    branch: bool = False
    precision: str = "no"
    fp16: tuple[tuple[str, int], ...] = (("initial_scale_power", 10), ("loss_scale_window", 4))
    poison: bool = False

    def poisons(self, window: int) -> bool:
        """Return whether the `window`-th window of the run, counted from 0, is to be skipped."""
        return self.poison and window % 4 == 2


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}

CASES: dict[str, Case] = {
    "plain": Case(),
    "accumulate": Case(accumulation=4, batches=8),
    "accumulate-short-window": Case(accumulation=4, batches=10, clip=0.5),
    "accumulate-stream-short-window": Case(accumulation=4, batches=6, data="stream", clip=0.5),
    "by-hand-every": Case(accumulation=3, style="every", batches=7),
    "by-hand-window": Case(accumulation=3, style="window", batches=6, clip=0.3),
    "clip": Case(clip=0.05),
    "config-clip": Case(config_clip=0.05),
    "both-clips": Case(clip=0.05, config_clip=0.05, accumulation=2),
    "dropped": Case(drop=True, batches=9),
    "bf16-dropped": Case(precision="bf16", drop=True, batches=9),
    "dropped-clip": Case(drop=True, batches=9, style="every", clip=0.2),
    "dropped-accumulating-by-hand": Case(drop=True, batches=8, accumulation=3, style="every", clip=0.2),
    "branch": Case(branch=True, accumulation=2, batches=7),
    "branch-single-steps": Case(branch=True, batches=7, clip=0.5, optimizer=("SGD", {"lr": 0.05})),
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
    "skipped": Case(poison=True, batches=9, clip=0.5),
    "skipped-bf16": Case(poison=True, batches=9, precision="bf16", config_clip=0.5),
    "fp16": Case(precision="fp16", batches=10),
    "fp16-skipped": Case(precision="fp16", accumulation=4, batches=18, clip=0.5, poison=True),
    "bf16-accumulate-stream": Case(precision="bf16", accumulation=4, batches=6, data="stream", clip=0.5),
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

# Each path's configuration: processes, and the training configuration in addition to the case's own.
_ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
_NVME_OPTIMIZER = {
    **_ZERO3,
    "sub_group_size": 700_000,
    "offload_optimizer": {"device": "nvme", "nvme_path": "NVME"},
}
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
    "zero3-cpu-optimizer": (2, {"zero_optimization": {**_ZERO3, "offload_optimizer": {"device": "cpu"}}}),
    "zero3-nvme-optimizer": (2, {"zero_optimization": _NVME_OPTIMIZER}),
    "zero3-cpu-nvme-optimizer": (2, {"zero_optimization": {**_NVME_OPTIMIZER, "offload_param": {"device": "cpu"}}}),
    "zero3-nvme": (
        2,
        {
            "zero_optimization": {
                **_NVME_OPTIMIZER,
                "offload_param": {"device": "nvme", "nvme_path": "NVME", "max_in_cpu": 0, "buffer_size": 2_000_000},
            }
        },
    ),
    "zero2-one-process": (1, {"zero_optimization": {"stage": 2}}),
}


# The cases that each path runs daily; `make campaign` runs the rest. Stage 2 runs all cases except optimizers and
# schedules. Each of these runs on another stage. Other paths run the cases that reach their own code. Optimizers and
# schedules are built once for plain torch and once for the engine. Windows, clipping, dropped and skipped steps belong
# to each stage. A case that was drawn for a path always runs on it.
DAILY: dict[str, tuple[str, ...]] = {
    "single": (
        *("accumulate-short-window", "groups", "config-clip", "fp16", "fp16-skipped"),
        *("warmup-lr", "warmup-decay", "warmup-cosine", "one-cycle", "lr-range-test"),
        *(f"placeholder-{name}" for name in _OPTIMIZERS),
    ),
    "ddp": (
        *("accumulate", "accumulate-short-window", "accumulate-stream-short-window", "by-hand-every", "by-hand-window"),
        *("clip", "both-clips", "dropped-clip", "dropped-accumulating-by-hand", "skipped", "fp16", "fp16-skipped"),
        *("bf16-accumulate-clip", "warmup-cosine", "real-Lion"),
    ),
    "zero2": tuple(
        name for name, case in CASES.items() if case.schedule is None and not name.startswith(("real-", "placeholder-"))
    ),
    "zero3": (
        *("accumulate-short-window", "accumulate-stream-short-window", "by-hand-window", "both-clips", "dropped"),
        *("bf16-dropped", "dropped-accumulating-by-hand", "branch", "branch-single-steps", "groups", "skipped"),
        *("skipped-bf16", "bf16-accumulate-stream", "bf16-accumulate-clip", "warmup-decay"),
        *("real-AdamW", "placeholder-SGD"),
    ),
    "zero0": (
        *("accumulate-short-window", "accumulate-stream-short-window", "dropped-accumulating-by-hand"),
        *("branch-single-steps", "lr-range-test", "bf16", "bf16-accumulate-stream"),
        *("placeholder-Adam", "real-Adagrad"),
    ),
    "zero1": (
        *("accumulate-stream-short-window", "by-hand-window", "clip", "both-clips", "bf16-dropped", "branch"),
        *("bf16", "skipped", "bf16-accumulate-stream", "bf16-accumulate-clip"),
        *("real-RMSprop", "placeholder-RMSprop"),
    ),
    "zero2-cpu": (
        *("accumulate-stream-short-window", "by-hand-every", "branch-single-steps", "groups", "warmup-decay"),
    ),
    "zero3-cpu": (
        *("accumulate-stream-short-window", "config-clip", "dropped-clip", "warmup-cosine", "one-cycle"),
        *("real-AdamW", "placeholder-AdamW", "real-Lion"),
    ),
    "zero3-cpu-optimizer": ("real-Adam", "real-SGD", "placeholder-SGD", "placeholder-Lion"),
    "zero3-nvme": ("placeholder-Adagrad", "plain", "dropped"),
    "zero2-one-process": ("accumulate", "warmup-lr", "skipped-bf16"),
}


WITHOUT_CHECKS = ".off"  # after the name of a case that runs with `checks: off`
WITHOUT_CHECKS_DAILY = "bf16-accumulate-clip"  # the case that runs daily so, on these paths; others in `make campaign`
WITHOUT_CHECKS_DAILY_PATHS = ("ddp", "zero3")


def is_daily(path: str, name: str) -> bool:
    """Return whether a case runs daily on a path of `DAILY`."""
    return name in DAILY[path] or name in PAIRWISE


def width_for(path: str) -> int:
    """Return the hidden size: tensors below 1 MiB per process never go to NVMe, so its path needs a wide layer."""
    return 1024 if "nvme" in path else 24


def case_for(path: str, name: str) -> Case:
    """Return the case for a path. The wide layer wants small learning rates; otherwise training is chaotic."""
    case = PAIRWISE[name][1] if name in PAIRWISE else CASES[name]
    if "nvme" not in path:
        return case

    def scaled(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            k: v / 50 if k in ("lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr") else v
            for k, v in arguments.items()
        }

    schedule = None if case.schedule is None else (case.schedule[0], scaled(case.schedule[1]))
    return replace(case, optimizer=(case.optimizer[0], scaled(case.optimizer[1])), schedule=schedule)


def cases_for(path: str, device: str) -> list[str]:
    """List the cases that run on a path."""
    optimizers = [name for name in CASES if name.startswith(("real-", "placeholder-"))]
    if path == "zero3-nvme":
        return [
            *optimizers,
            "plain",
            "accumulate-short-window",
            "accumulate-stream-short-window",
            "by-hand-every",
            "by-hand-window",
            "dropped",
            "dropped-accumulating-by-hand",
            "clip",
            "config-clip",
            "branch",
            "warmup-decay",
            "lr-range-test",
            "one-cycle",
            "groups",
            "skipped",
            "bf16",
        ]
    if path == "zero3-cpu-optimizer":  # next to zero3-cpu
        return [*optimizers, "accumulate-short-window", "dropped-accumulating-by-hand", "skipped", "bf16"]
    if path.endswith("nvme-optimizer"):  # next to zero3-nvme
        return ["real-Adam", "placeholder-AdamW", "accumulate-short-window", "skipped", "bf16"]
    names = [*CASES, *(name for name, (where, _) in PAIRWISE.items() if where == path)]
    if path == "ddp":
        names = [name for name in names if not case_for(path, name).branch]  # DDP wants every parameter in every window
    return [name for name in names if runs_on(path, device, case_for(path, name).precision)]


def runs_on(path: str, device: str, precision: str) -> bool:
    """Return whether the path can run the case. DeepSpeed has no fp16 on CPUs."""
    return not (precision == "fp16" and device == "cpu" and path.startswith("zero"))


# ---- every pair of choices -------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "path": ("single", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu"),
    "precision": ("no", "bf16", "fp16"),
    "accumulation": ((1, "accumulate"), (4, "accumulate"), (3, "every"), (4, "window")),
    "clip": ("none", "code", "config"),
    "schedule": ("lambda", "WarmupDecayLR", "WarmupCosineLR"),
    "data": ("map", "stream", "sampler"),
    "poison": (False, True),
}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupDecayLR": {**_WARMUP, "warmup_type": "linear", "total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
}
Row = tuple[Any, ...]


def pairs_of(row: Row) -> set[tuple[int, Any, int, Any]]:
    """Return the pairs of choices that a row makes."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def every_pair() -> set[tuple[int, Any, int, Any]]:
    """Return all pairs that can run on a CPU."""
    levels = list(FACTORS.values())
    pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(levels)), 2)
        for a, b in itertools.product(levels[i], levels[j])
    }
    return {pair for pair in pairs if not (pair[0] == 0 and pair[2] == 1 and not runs_on(pair[1], "cpu", pair[3]))}


def cover_pairs() -> list[Row]:
    """Find few rows that hold every pair: repeatedly take the best of 300 drawn rows by new pairs."""
    draw, missing, rows = random.Random(0), every_pair(), []
    while missing:
        drawn = [tuple(draw.choice(levels) for levels in FACTORS.values()) for _ in range(300)]
        best = max(
            (row for row in drawn if runs_on(row[0], "cpu", row[1])), key=lambda row: len(pairs_of(row) & missing)
        )
        if pairs_of(best) & missing:
            rows.append(best)
            missing -= pairs_of(best)
    return rows


def _case_of(row: Row) -> Case:
    _, precision, (accumulation, style), clip, schedule, data, poison = row
    return Case(
        accumulation=accumulation,
        style=style,
        batches=10,
        data=data,
        # With a large eps Adam's step depends on the gradients' size, so 16-bit noise cannot flip its sign.
        optimizer=("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}),
        clip=0.3 if clip == "code" else None,
        config_clip=0.3 if clip == "config" else None,
        schedule=None if schedule == "lambda" else (schedule, _SCHEDULES[schedule]),
        placeholders=schedule != "lambda",
        precision=precision,
        poison=poison,
    )


def _name_of(row: Row) -> str:
    _, precision, (accumulation, style), clip, schedule, data, poison = row
    words = ["pair", precision, f"{style}{accumulation}", clip, schedule, data, "poison" if poison else "clean"]
    return "-".join(words)


PAIRWISE: dict[str, tuple[str, Case]] = {f"{_name_of(row)}@{row[0]}": (row[0], _case_of(row)) for row in cover_pairs()}
