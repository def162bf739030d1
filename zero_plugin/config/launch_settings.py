"""Accelerate's launch keys as read from a document: the supported ones, the refused ones, and those without effect.

`dynamo_config` requests `torch.compile`. It is read as Accelerate writes it and as flags set it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from zero_plugin.config.amounts import LEAST_MEMORY, read_bytes
from zero_plugin.config.choices import DynamoBackend
from zero_plugin.config.document import Document, offload_devices
from zero_plugin.config.keys import STAGE, LaunchSettings
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Tree, did_you_mean, dotted, is_valid, legal, show
from zero_plugin.errors import Problem


@functools.cache
def launch_schema() -> Mapping[str, Any]:
    """Return the JSON Schema of the launch keys, made from `LaunchSettings`."""
    return LaunchSettings.model_json_schema()


def launch_settings(document: Document) -> LaunchSettings:
    """Return the launch part of a checked document with defaults; `auto` and `null` are absent, `NO` is one process."""
    known = LaunchSettings.model_fields
    given = {path[0]: entry.value for path, entry in document.launch.entries.items() if path[0] in known}
    if given.get("distributed_type") == "NO" and "num_processes" in given:
        given["num_processes"] = 1
    return LaunchSettings(**{name: value for name, value in given.items() if value not in (None, AUTO)})


def asks_for_cpu(settings: LaunchSettings) -> bool:
    """Return whether a document requests the CPU, also on a machine with GPUs."""
    return settings.use_cpu or settings.distributed_type == "MULTI_CPU"


def asks_for_tpu(settings: LaunchSettings) -> bool | None:
    """Return whether a document requests a TPU, None if it leaves that open; `XLA` is Accelerate's newer word."""
    return None if settings.distributed_type in (None, "NO") else settings.distributed_type in ("TPU", "XLA")


def asks_for_deepspeed(document: Document, settings: LaunchSettings) -> bool:
    """Return whether a document requests ZeRO by its `distributed_type` or, if that is open, by a ZeRO section."""
    kind = settings.distributed_type
    return kind == "DEEPSPEED" or (kind is None and document.deepspeed.has_section("zero_optimization"))


def dropped_zero(document: Document, settings: LaunchSettings) -> str:
    """Describe what a `distributed_type` without ZeRO drops from the ZeRO section; "" if it drops nothing.

    The text names the place of `distributed_type`, and what a TPU does instead.
    """
    if asks_for_deepspeed(document, settings):
        return ""
    stage = document.deepspeed.value(*STAGE.path)
    parts = [] if stage in (None, 0) else [f"ZeRO stage {'auto' if stage is AUTO else stage}"]
    devices = offload_devices(document.deepspeed)
    parts += [f"{what} offload to {device}" for what, device in devices.items() if device not in ("none", AUTO)]
    if not parts:
        return ""
    asked = document.launch.get("distributed_type")
    dropped = f"{' and '.join(parts)} dropped" + (f", as {asked.origin.where} asks" if asked else "")
    complete = "; each TPU device holds the complete model, its gradients and optimizer states"
    return dropped + complete if asks_for_tpu(settings) else dropped


# On only one machine of a pod, the TPU's runtime would wait for the others.
ON_EVERY_MACHINE: Final = (
    "start the same command on every machine of the TPU: gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all "
    "--command='zero-plugin launch --tpu …'"
)
# Accelerate's keys that have no effect here. They are accepted, so configs of Accelerate need no edits. Each with the
# reason and the fix.
WITHOUT_MEANING: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "tpu_vm"),
        ("the cloud's command line names the machines of a TPU", f"Delete the key, and {ON_EVERY_MACHINE}."),
    ),
    **dict.fromkeys(
        ("command_file", "commands"),
        (
            "the cloud's command line sends commands to them",
            "Delete the key, and send them: gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all --command='…'",
        ),
    ),
    "tpu_env": (
        "the workers have the environment of this command",
        "Delete the key, and write NAME=value before the command.",
    ),
    "tpu_use_sudo": (
        "the workers run as the user who starts them",
        "Delete the key, and write sudo before the command.",
    ),
    "downcast_bf16": (
        "torch_xla deprecates its switches that cast everything",
        "Delete the key, and write mixed_precision: bf16, which computes by autocast; weights stay fp32.",
    ),
    "fsdp_config": ("FSDP only", "Delete the key."),
    "fp8_config": ("fp8 only", "Delete the key."),
    "megatron_lm_config": ("Megatron-LM only", "Delete the key."),
    "deepspeed_fields_from_accelerate_config": ("Accelerate writes it for itself", "Delete the key."),
}

# Values of these keys that request nothing.
SAYS_NOTHING: Final[tuple[Any, ...]] = (None, False, "", "no", (), {}, AUTO)

# Accelerate's keys whose effect this package lacks: a function that tells whether a leaf and its value request the
# effect, and the fix.
REFUSED_KEYS: Final[Mapping[str, tuple[Callable[[str, Any], bool], str]]] = {
    "tpu_use_cluster": (lambda *_: True, f"Delete the key, and {ON_EVERY_MACHINE}."),
    "compute_environment": (
        lambda _, value: value != "LOCAL_MACHINE",
        "Only LOCAL_MACHINE is supported; delete the key.",
    ),
    "parallelism_config": (
        lambda leaf, value: leaf.endswith("_size") and "_dp_" not in leaf and value not in (1, "1"),
        "Write 1, or delete it: processes share samples (sp_size), or each has samples of its own.",
    ),
    "ipex_config": (lambda leaf, _: leaf == "ipex", "Delete the key; torch itself has the CPU kernels."),
    "mpirun_config": (
        lambda leaf, _: leaf.endswith("hostfile"),
        "Delete the key, and start the same command on every machine with its own machine_rank.",
    ),
}

_SHARDS_LIKE_FSDP = (
    "Write DEEPSPEED with zero_stage: 3, which shards the same states as FSDP's FULL_SHARD. "
    "`zero-plugin check --fix FILE` converts the file."
)
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
    """Return a warning for each key that has a value and no effect."""
    warnings: dict[str, Problem] = {}
    for (name, *below), entry in launch.entries.items():
        if name in WITHOUT_MEANING and name not in warnings and entry.value not in SAYS_NOTHING:
            why, fix = WITHOUT_MEANING[name]
            value = "" if below else show(entry.value)
            warnings[name] = Problem(entry.origin.where, name, f"has no meaning here ({why})", fix, value, "warning")
    return list(warnings.values())


def refused_keys(launch: Tree) -> Iterator[Problem]:
    """Yield problems of keys whose effect this package lacks, of too little memory, and of the compiler's keys."""
    for path, entry in launch.entries.items():
        has_effect, fix = REFUSED_KEYS.get(path[0], (None, ""))
        if has_effect is not None and entry.value not in SAYS_NOTHING and has_effect(path[-1], entry.value):
            yield Problem(entry.origin.where, dotted(path), f"{show(entry.value)} is not supported", fix)
    for name in ("gpu_memory", "host_memory"):
        memory = launch.get(name)
        size = None if memory is None else read_bytes(memory.value)
        if memory is not None and size is not None and size < LEAST_MEMORY:
            message = f"{show(memory.value)} is {size} bytes, which holds no model"
            yield Problem(memory.origin.where, name, message, "Write the unit too, e.g. 24GiB.")
    yield from _compiler_problems(launch)


COMPILER_KEYS: Final = ("dynamo_config", "dynamo_backend")  # the second, at the top level, is from older Accelerates
COMPILER_PREFIX: Final = "dynamo_"

# All keys of a launch config except `deepspeed_config`.
LAUNCH_KEYS: Final = (*LaunchSettings.model_fields, *WITHOUT_MEANING, *REFUSED_KEYS, *COMPILER_KEYS)


def asks_for_nothing(launch: Tree, name: str) -> bool:
    """Return whether a key of a checked document requests nothing, so it can be removed."""
    if name in REFUSED_KEYS:
        return name != "compute_environment"  # the check refuses the others if they request their effect
    leaves = [entry.value for path, entry in launch.entries.items() if path[0] == name]
    return name in {*WITHOUT_MEANING, *COMPILER_KEYS} and all(value in SAYS_NOTHING for value in leaves)


_LEGAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "backend": {
        "enum": [name.lower() for name in DynamoBackend.list()],
        "description": "no, or torch.compile's compiler: INDUCTOR, CUDAGRAPHS, AOT_EAGER, …",
    },
    "mode": {
        "enum": ["default", "reduce-overhead", "max-autotune"],
        "description": "default, reduce-overhead or max-autotune.",
    },
    **{
        name: {"type": "boolean", "description": f"true or false: {what}"}
        for name, what in {
            "use_fullgraph": "refuse a model that breaks into several graphs.",
            "use_dynamic": "compile for changing shapes; by default torch detects them.",
            "use_regional_compilation": "compile one of the repeated blocks for all of them.",
        }.items()
    },
}


def asked_compiler(launch: Tree) -> dict[str, Entry]:
    """Return the configured values: `backend`, `mode`, `use_fullgraph`, `use_dynamic`, `use_regional_compilation`."""
    return {name: Entry(_read(name, entry.value), entry.origin) for _, name, entry in _written(launch)}


def _compiler_problems(launch: Tree) -> Iterator[Problem]:
    """Yield a problem for each name that is no argument of `torch.compile`, and for each illegal value."""
    for path, name, entry in _written(launch):
        if name not in _LEGAL:
            near = did_you_mean(path[-1], [COMPILER_PREFIX + known for known in _LEGAL])
            fix = f"Did you mean {near}?" if near else f"Legal here: {', '.join(COMPILER_PREFIX + n for n in _LEGAL)}."
            yield Problem(entry.origin.where, dotted(path), "unknown key", fix)
        elif not is_valid(_read(name, entry.value), _LEGAL[name]):
            near = did_you_mean(str(entry.value), _LEGAL[name].get("enum", []))
            fix = f"Did you mean {near}? Write" if near else "Write"
            message = f"{show(entry.value)} is not legal here"
            yield Problem(entry.origin.where, dotted(path), message, f"{fix} {legal(_LEGAL[name])}.")


def compiler_schema() -> dict[str, Any]:
    """Return the JSON Schema of the two keys for editors, without `enum`: editors would insist on its lower case."""
    below = {
        COMPILER_PREFIX + name: {key: value for key, value in schema.items() if key != "enum"}
        for name, schema in _LEGAL.items()
    }
    described = "How models are compiled by torch.compile."
    section = {"description": described, "type": ["object", "null"], "properties": below}
    return {"dynamo_config": section, "dynamo_backend": {"description": described, "deprecated": True}}


def _written(launch: Tree) -> Iterator[tuple[KeyPath, str, Entry]]:
    """Yield path, name and entry of all set values. `dynamo_config` comes last, because it takes precedence."""
    for key in reversed(COMPILER_KEYS):
        for path, entry in launch.entries.items():
            if path[0] == key and entry.value not in (None, AUTO, "", {}):
                yield path, path[-1].removeprefix(COMPILER_PREFIX), entry


def _read(name: str, value: Any) -> Any:
    """Normalize a value: Accelerate writes compilers in upper case, and YAML 1.1 reads `no` as false."""
    if name == "backend" and value is False:
        return "no"
    text = value.lower() if isinstance(value, str) else value
    return text == "true" if name.startswith("use_") and text in ("true", "false") else text
