"""Accelerate's launch keys as one typed, frozen object: who runs, where, how many, and in which precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO, Tree

__all__ = [
    "REFUSED_KEYS",
    "REFUSED_VALUES",
    "WITHOUT_MEANING",
    "LaunchSettings",
    "asks_for_deepspeed",
    "ignored_keys",
    "launch_schema",
    "launch_settings",
]


def _names(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip()) if isinstance(parts, list | tuple) else parts


def _gpu_list(value: Any) -> Any:
    ids = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return ids.replace(" ", "")


_ClassNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}),
]
_GpuIds = Annotated[
    str,
    BeforeValidator(_gpu_list),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
    ),
]


class LaunchSettings(BaseModel):
    """The launch part of a document. Names and meanings are Accelerate's, but for `debug`; `auto` means the default."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    distributed_type: Literal["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "TPU", "XLA"] | None = None
    """How the processes work together. Default: found from the flags and the machine."""
    mixed_precision: Literal["no", "fp16", "bf16", "auto"] | None = None
    """Computation type; `auto` is settled with the device. Default: what `fp16` and `bf16` sections say, else `no`."""
    num_processes: int | None = Field(None, ge=1)
    """Processes on all machines together. Default: one for each accelerator of the machine."""
    num_machines: int = Field(1, ge=1)
    """Machines that take part. Default: 1."""
    machine_rank: int = Field(0, ge=0)
    """Which of the machines this is, counted from 0. Default: 0."""
    main_process_ip: str | None = None
    """Address of the machine of rank 0. Default: this machine."""
    main_process_port: int | None = Field(None, ge=0, le=65535)
    """Port of the rendezvous. Default, and for 0: a free one; 29500 with several machines, which must all know it."""
    rdzv_backend: Literal["static", "c10d", "etcd", "etcd-v2"] = "static"
    """How torchrun's agents find each other. Default: `static`."""
    rdzv_conf: str = ""
    """Further rendezvous settings of torchrun, `key=value,key=value`. Default: none."""
    same_network: bool = False
    """Whether all machines are in one local network; torchrun has no use for it. Default: false."""
    gpu_ids: _GpuIds = "all"
    """`all`, or the GPUs to use on this machine, e.g. `0,1`. Default: `all`."""
    use_cpu: bool = False
    """Train on the CPU although there is an accelerator. Default: false."""
    enable_cpu_affinity: bool = False
    """Bind each process to the cores near its GPU. Default: false."""
    num_cpu_threads_per_process: int | None = Field(None, ge=1)
    """OMP_NUM_THREADS of each process. Default: cores divided by local processes."""
    max_restarts: int = Field(0, ge=0)
    """How often torchrun starts the group again after a crash. Default: 0."""
    monitor_interval: float = Field(0.1, gt=0)
    """Seconds between two looks of torchrun at its workers. Default: 0.1."""
    log_dir: str | None = None
    """Folder for the workers' logs. Default: none are written."""
    debug: bool = False
    """Show the launcher's own log. Default: false."""
    main_training_function: str = "main"
    """Function that TPU and notebook launches call. Default: `main`."""
    scheduler_counts: Literal["steps", "processes"] = "processes"
    """What a prepared schedule counts: applied optimizer steps, or Accelerate's way, one per process and step. Default:
    `processes`, so that a script moved from Accelerate keeps its curve."""
    deepspeed_hostfile: str | None = None
    """File that names the hosts for DeepSpeed's own launcher. Default: none."""
    deepspeed_multinode_launcher: (
        Literal["pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm"] | None
    ) = None
    """What starts the other machines. Default: `pdsh` with a hostfile, else `standard` (torchrun on every machine)."""
    deepspeed_exclusion_filter: str | None = None
    """Hosts and slots to leave out, in DeepSpeed's notation. Default: none."""
    deepspeed_inclusion_filter: str | None = None
    """Hosts and slots to use, in DeepSpeed's notation. Default: all."""
    deepspeed_moe_layer_cls_names: _ClassNames | None = None
    """Classes of mixture-of-experts layers that ZeRO-3 gathers whole, comma-separated; not read yet. Default: none."""
    zero3_init_flag: bool | None = None
    """Build models partitioned from the start; not read yet, models are built whole. Default: false."""


# Accelerate's keys that say nothing about a run on these paths; they are accepted, so that a config moves over.
WITHOUT_MEANING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"), "TPU pods only"),
    **dict.fromkeys(("command_file", "commands"), "TPU pods only"),
    "downcast_bf16": "TPU only",
    "fsdp_config": "FSDP only",
    "fp8_config": "fp8 only",
    "megatron_lm_config": "Megatron-LM only",
    "deepspeed_fields_from_accelerate_config": "Accelerate writes it for itself",
}

# Keys that will have an effect and have none yet.
_NOT_YET: Final[Mapping[str, str]] = {
    "zero3_init_flag": "models are built whole, then partitioned",
    "deepspeed_moe_layer_cls_names": "ZeRO-3 gathers each submodule of a mixture-of-experts layer when it runs",
}
_SAYS_NOTHING: Final[tuple[Any, ...]] = (None, False, "", "no", (), {}, AUTO)

_NO_COMPILE = "Call torch.compile on the model in the script and delete the key."

# Accelerate's keys whose effect this package does not have: which leaf and value ask for the effect, and what to do.
REFUSED_KEYS: Final[Mapping[str, tuple[Callable[[str, Any], bool], str]]] = {
    "compute_environment": (
        lambda _, value: value != "LOCAL_MACHINE",
        "Only LOCAL_MACHINE is supported; delete the key.",
    ),
    "parallelism_config": (
        lambda _, value: isinstance(value, int) and value > 1,
        "Only data parallelism is supported: write 1 for every size, or delete it.",
    ),
    "dynamo_config": (lambda leaf, value: leaf.endswith("backend") and str(value).lower() != "no", _NO_COMPILE),
    "dynamo_backend": (lambda _, value: str(value).lower() != "no", _NO_COMPILE),
    "ipex_config": (
        lambda leaf, value: leaf == "ipex" and value is not False,
        "Delete the key; torch itself has the CPU kernels.",
    ),
    "mpirun_config": (
        lambda leaf, _: leaf.endswith("hostfile"),
        "Delete the key; an MPI environment is recognised by itself.",
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
}


@functools.cache
def launch_schema() -> Mapping[str, Any]:
    """JSON Schema of the launch keys, made from `LaunchSettings`."""
    return LaunchSettings.model_json_schema()


def ignored_keys(launch: Tree) -> list[str]:
    """A note for each key that says something and is not followed."""
    notes = {name: f"has no meaning here ({why})" for name, why in WITHOUT_MEANING.items()}
    notes |= {name: f"has no effect yet ({why})" for name, why in _NOT_YET.items()}
    told: dict[str, str] = {}
    for path, entry in launch.entries.items():
        if path[0] in notes and entry.value not in _SAYS_NOTHING:
            told.setdefault(path[0], f"{entry.origin.where}: {path[0]}: {notes[path[0]]}")
    return list(told.values())


def launch_settings(document: Document) -> LaunchSettings:
    """The launch part of a checked document, with defaults; `auto` and `null` count as absent."""
    known = LaunchSettings.model_fields
    given = {path[0]: entry.value for path, entry in document.launch.entries.items() if path[0] in known}
    return LaunchSettings(**{name: value for name, value in given.items() if value not in (None, AUTO)})


def asks_for_deepspeed(document: Document, settings: LaunchSettings) -> bool:
    """Whether a document asks for ZeRO: by its `distributed_type` or, where that is open, by a ZeRO section."""
    kind = settings.distributed_type
    return kind == "DEEPSPEED" or (kind is None and document.deepspeed.has_section("zero_optimization"))
