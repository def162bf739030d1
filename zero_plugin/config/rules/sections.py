"""Sections that are off, keys that nothing reads, and what one section needs of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from zero_plugin.config.rules.asked import Asked
from zero_plugin.errors import Problem

__all__ = ["check_sections"]

# Sections that do nothing without `enabled: true`, which is not their default.
_SWITCHED: Final = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "flops_profiler",
    "torch_autocast",
    "hybrid_engine",
    "expert_parallel",
    "autotuning",
)
_NESTED: Final = (
    ("data_efficiency.data_sampling.enabled", "data_efficiency.enabled"),
    ("data_efficiency.data_routing.enabled", "data_efficiency.enabled"),
    ("data_efficiency.data_sampling.curriculum_learning.enabled", "data_efficiency.data_sampling.enabled"),
    ("data_efficiency.data_sampling.dynamic_batching.enabled", "data_efficiency.data_sampling.enabled"),
    ("data_efficiency.data_routing.random_ltd.enabled", "data_efficiency.data_routing.enabled"),
)
_UNREAD: Final = {
    "dataloader_drop_last": "the loop's own loader says what it drops",
    "disable_allgather": "DeepSpeed parses it and never reads it",
}


def check_sections(asked: Asked) -> Iterator[Problem]:
    """Switches that were forgotten, activation checkpointing, compilation, monitors, unread keys."""
    yield from _forgotten_switches(asked)
    yield from _activation_checkpointing(asked)
    yield from _engine(asked)
    for key, why in _UNREAD.items():
        if asked.says_something(key):
            yield asked.no_effect(key, why)


def _forgotten_switches(asked: Asked) -> Iterator[Problem]:
    for section in _SWITCHED:
        paths = [f"{section}.{'.'.join(path)}" for path in asked.document.deepspeed.section(section)]
        first = next((path for path in paths if asked.says_something(path)), None)
        if first and asked.entry(f"{section}.enabled") is None:
            yield asked.no_effect(first, f"{section}.enabled is not written, and is false then", "Write enabled: true.")
    for inner, outer in _NESTED:
        if asked.is_on(inner) and asked.value(outer, default=False) is False:
            yield asked.no_effect(inner, f"{outer} is not true", f"Write {outer}: true.")
    batching = "data_efficiency.data_sampling.dynamic_batching"
    if asked.is_on(f"{batching}.enabled") and asked.value(f"{batching}.max_tokens") is None:
        yield asked.error(f"{batching}.enabled", "true without max_tokens", "Write max_tokens beside it.")
    for section in ("tensorboard", "csv_monitor"):
        if asked.is_on(f"{section}.enabled") and not asked.value(f"{section}.output_path"):
            yield asked.note(f"{section}.enabled", "without output_path it writes below the working directory")
    breakdown = "wall_clock_breakdown"
    if asked.is_on("flops_profiler.enabled") and asked.value(breakdown) is False:
        why = f"flops_profiler is on at {asked.written('flops_profiler.enabled')} and turns it on"
        yield asked.no_effect(breakdown, why)


def _activation_checkpointing(asked: Asked) -> Iterator[Problem]:
    section = "activation_checkpointing"
    key = f"{section}.contiguous_memory_optimization"
    if not asked.is_on(key):
        return
    if asked.value(f"{section}.partition_activations", default=False) is False:
        why = "true needs partition_activations: true, unless the script configures it"
        yield asked.warning(key, why, "Write that beside it, or delete it.")
    if asked.value(f"{section}.number_checkpoints") is None:
        why = "true needs number_checkpoints, the number of checkpointed layers, unless the script configures it"
        yield asked.warning(key, why, "Write that beside it, or delete it.")


def _engine(asked: Asked) -> Iterator[Problem]:
    if asked.is_on("autotuning.enabled"):
        message = "true, with which DeepSpeed's engine leaves the process after a few profiled steps"
        yield asked.error("autotuning.enabled", message, "Delete it: only `deepspeed --autotuning` starts a search.")
    key = "managed_gradient_accumulation"
    if asked.is_on(key):
        message = "true, but then DeepSpeed decides inside backward() when parameters change"
        yield asked.error(key, message, "Delete it or write false: optimizer.step() is the one place here.")
    if asked.is_on("compile.deepcompile"):
        message = "true, but DeepCompile decides inside backward() when parameters change"
        fix = "Delete it: optimizer.step() is the one place here. Call torch.compile in the script."
        yield asked.error("compile.deepcompile", message, fix)
        return
    for name in ("offload_activation", "offload_opt_states", "offload_parameters", "free_activation", "passes"):
        if asked.says_something(f"compile.{name}"):
            yield asked.no_effect(f"compile.{name}", "only compile.deepcompile: true reads it")
