"""Flags of `accelerate launch` for what this package does not have, and what to do in place of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zero_plugin.config.launch_keys import ON_EVERY_MACHINE
from zero_plugin.errors import Problem

__all__ = ["refuse_flag"]

# By the flag's name or, where it ends in _, by how the name starts.
_REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("use_fsdp", "fsdp_"),
        "Give --use_deepspeed --zero_stage 3, which shards the same states as FSDP's FULL_SHARD.",
    ),
    **dict.fromkeys(
        ("use_megatron_lm", "megatron_lm_"),
        "Give --use_deepspeed; tensor and pipeline parallelism are not supported.",
    ),
    **dict.fromkeys(
        ("use_parallelism_config", "parallelism_config_"), "Leave it out: only data parallelism is supported."
    ),
    "fp8_": "Give --mixed_precision bf16: DeepSpeed ZeRO has no fp8.",
    **dict.fromkeys(("tpu_cluster", "vm"), f"Leave it out, and {ON_EVERY_MACHINE}."),
    "no_tpu_cluster": "Leave it out: this command starts what runs on this machine's devices, always.",
    "tpu_use_sudo": "Write sudo before the command.",
    "env": "Write NAME=value before the command: the workers have its environment. (It is for TPU pods.)",
    "downcast_bf16": "Give --mixed_precision bf16, which computes by autocast; weights stay fp32.",
    "aws_": "Run the command on the machines themselves; SageMaker jobs are not started from here.",
    "mpirun_": "Start the same command on every machine, with --num_machines and its own --machine_rank.",
}


def refuse_flag(typed: str) -> Problem | None:
    """The problem with a flag that is Accelerate's but not ours, or None for any other.

    Args:
        typed: the flag as it was typed, e.g. `--fsdp-version`.
    """
    name = typed.lstrip("-").replace("-", "_")
    for known, fix in _REFUSED.items():
        if name == known or (known.endswith("_") and name.startswith(known)):
            return Problem(f"--{name}", "", "is not supported", fix)
    return None
