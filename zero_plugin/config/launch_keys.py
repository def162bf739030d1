"""Accelerate's launch keys that this package refuses, follows later, or has no use for, with what to tell of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from zero_plugin.config.tree import AUTO, Tree
from zero_plugin.config.validation import show
from zero_plugin.errors import Problem

__all__ = ["ON_EVERY_MACHINE", "REFUSED_KEYS", "REFUSED_VALUES", "SAYS_NOTHING", "WITHOUT_MEANING", "ignored_keys"]

# Accelerate's keys that say nothing about a run on these paths; they are accepted, so that a config moves over.
WITHOUT_MEANING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm"), "the cloud's command line names the machines of a TPU"),
    **dict.fromkeys(("command_file", "commands"), "the cloud's command line sends commands to them"),
    "tpu_env": "the workers have the environment of this command",
    "tpu_use_sudo": "the workers are their starter's",
    "downcast_bf16": "torch_xla is giving up its switches that cast everything",
    "fsdp_config": "FSDP only",
    "fp8_config": "fp8 only",
    "megatron_lm_config": "Megatron-LM only",
    "deepspeed_fields_from_accelerate_config": "Accelerate writes it for itself",
}

# On one machine of a pod alone, the TPU's runtime would wait for the others.
ON_EVERY_MACHINE: Final = (
    "start the same command on every machine of the TPU: gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all "
    "--command='zero-plugin launch --tpu …'"
)
# What to do about some of these keys; the others may simply be deleted.
_INSTEAD: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm"), f"Delete the key, and {ON_EVERY_MACHINE}."),
    **dict.fromkeys(
        ("command_file", "commands"),
        "Delete the key, and send them: gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='…'",
    ),
    "tpu_env": "Delete the key, and write NAME=value before the command.",
    "tpu_use_sudo": "Delete the key, and write sudo before the command.",
    "downcast_bf16": "Delete the key, and write mixed_precision: bf16, which computes by autocast; weights stay fp32.",
}

# What any of these keys may hold without asking for anything.
SAYS_NOTHING: Final[tuple[Any, ...]] = (None, False, "", "no", (), {}, AUTO)

# Accelerate's keys whose effect this package does not have: which leaf and value ask for the effect, and what to do.
REFUSED_KEYS: Final[Mapping[str, tuple[Callable[[str, Any], bool], str]]] = {
    "tpu_use_cluster": (lambda *_: True, f"Delete the key, and {ON_EVERY_MACHINE}."),
    "compute_environment": (
        lambda _, value: value != "LOCAL_MACHINE",
        "Only LOCAL_MACHINE is supported; delete the key.",
    ),
    "parallelism_config": (
        lambda leaf, value: leaf.endswith("_size") and "_dp_" not in leaf and value not in (1, "1"),
        "Only data parallelism is supported: write 1, or delete it.",
    ),
    "ipex_config": (lambda leaf, _: leaf == "ipex", "Delete the key; torch itself has the CPU kernels."),
    "mpirun_config": (
        lambda leaf, _: leaf.endswith("hostfile"),
        "Delete the key, and start the same command on every machine with its own machine_rank.",
    ),
}

_SHARDS_LIKE_FSDP = "Write DEEPSPEED with zero_stage: 3, which shards the same states as FSDP's FULL_SHARD."
_NO_DEVICE = "Write NO, MULTI_CPU, MULTI_GPU, DEEPSPEED, TPU or XLA; this device is not supported."
REFUSED_VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("distributed_type", "FSDP"): _SHARDS_LIKE_FSDP,
    ("distributed_type", "MEGATRON_LM"): "Write DEEPSPEED; tensor and pipeline parallelism are not supported.",
    **{
        ("distributed_type", f"MULTI_{device}"): _NO_DEVICE
        for device in ("NPU", "XPU", "MLU", "SDAA", "MUSA", "HPU", "NEURON")
    },
    ("mixed_precision", "fp8"): "Write bf16: DeepSpeed ZeRO has no fp8.",
    ("mixed_precision", "bfloat16"): "Write bf16.",
    **{("mixed_precision", half): "Write fp16." for half in ("float16", "half")},
    **{("mixed_precision", full): "Write no." for full in ("fp32", "float32")},
}


def ignored_keys(launch: Tree) -> list[Problem]:
    """A warning for each key that says something and is not followed."""
    notes = {name: f"has no meaning here ({why})" for name, why in WITHOUT_MEANING.items()}
    told: dict[str, Problem] = {}
    for path, entry in launch.entries.items():
        if path[0] in notes and entry.value not in SAYS_NOTHING:
            value = show(entry.value) if len(path) == 1 else ""
            fix = _INSTEAD.get(path[0], "Delete the key.")
            warning = Problem(entry.origin.where, path[0], notes[path[0]], fix, value, "warning")
            told.setdefault(path[0], warning)
    return list(told.values())
