"""One row for each key: its names, flag, variable, type and default, and what fills it if it is `auto`.

`LaunchSettings` has a row for each launch key. The field and the sentence below it define the key's type, default,
schema, comment in a written config, and flag with its help. `TRAINING` has a row for each of DeepSpeed's keys that
has a further name, or that more than a rule can fill. `schema/deepspeed.schema.json` describes all of DeepSpeed's keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from zero_plugin.config.amounts import BANDWIDTH_PATTERN, BYTES_PATTERN, read_bandwidth, read_bytes
from zero_plugin.config.choices import Checks
from zero_plugin.config.tree import KeyPath

# Topics of the flags, in the order of the help.
TOPICS: Final = (
    *("The usual flags", "Hardware", "ZeRO and the loop", "Compilation", "Program"),
    *("Logs and restarts", "Several machines"),
)
USUAL, HARDWARE, LOOP, COMPILATION, PROGRAM, LOGS, SEVERAL = TOPICS


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `zero-plugin launch`.

    Attributes:
        topic: the topic of the help that shows the flag.
        place: the flag's position in the topic.
        help: help text; "" for the description of the key.
        metavar: placeholder for the value in the help, if the key's type does not give one.
        short: a second spelling.
        sets: launch keys that a switch without a key of its own sets; None for other flags.
    """

    topic: str
    place: int
    help: str = ""
    metavar: str = ""
    short: str = ""
    sets: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Key:
    """A key with all its names.

    Attributes:
        name: the dotted name of a launch key or of a key in DeepSpeed's configuration.
        field: Accelerate's short name below `deepspeed_config`; "" for none.
        flag: the flag. Its name is the field, or the key if there is no field.
        variable: the environment variable in which Accelerate's launcher passes the key; "" for none.
        filled_by: what fills the key if it is `auto`. `loop`: only the loop, also if the key is absent. `script`: also
            other layers, i.e. Accelerate's `prepare` or transformers' Trainer. `plan`: the memory plan. "": a rule of
            `config/resolve`, or DeepSpeed's default.
        setup: the field of `plan.situation.Setup` for the key; "" for none.
        stages: the only ZeRO stages that read the key in DeepSpeed 0.19.8's engine as this package runs it; empty for
            all.
        option: the options of `zero-plugin explain` that fill the key as a run would; "" for `--set`.
        elsewhere: the key's names in other libraries, if they are spelled too differently to be guessed.
    """

    name: str = ""
    field: str = ""
    flag: Flag | None = None
    variable: str = ""
    filled_by: Literal["", "loop", "script", "plan"] = ""
    setup: str = ""
    stages: tuple[int, ...] = ()
    option: str = ""
    elsewhere: tuple[str, ...] = ()

    @functools.cached_property
    def path(self) -> KeyPath:
        """The key's path in its tree."""
        return tuple(self.name.split("."))

    @property
    def typed(self) -> str:
        """The name in a launch config and as a flag."""
        return self.field or self.name


def _names(value: Any) -> Any:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip()) if isinstance(parts, list | tuple) else parts


def gpu_list(value: Any) -> str:
    """Return `gpu_ids` in any of its forms as text: `all`, `0`, `0,1`."""
    ids = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return ids.replace(" ", "")


def _any_of(*branches: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*branches]})


_TEXT: Final = {"type": "string"}
_CLASS_NAMES: Final = {"type": "array", "items": {"type": "string", "not": {"const": "auto"}}}
_BY_WORKER: Final = {"type": "string", "pattern": r"^(\d+:[0-3],?)+$", "examples": ["0:3,1:2"]}
_SIZE: Final = {"type": "string", "pattern": BYTES_PATTERN, "examples": ["24GiB"]}
_SPEED: Final = {"type": "string", "pattern": BANDWIDTH_PATTERN, "examples": ["400Gb"]}
_ClassNames = Annotated[tuple[str, ...], BeforeValidator(_names), _any_of(_TEXT, _CLASS_NAMES, {"type": "null"})]
_GpuIds = Annotated[
    str,
    BeforeValidator(gpu_list),
    _any_of(_TEXT, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}),
]
_Streams = Annotated[str, BeforeValidator(str), _any_of({"type": "integer", "minimum": 0, "maximum": 3}, _BY_WORKER)]
_Bytes = Annotated[int, BeforeValidator(read_bytes), _any_of({"type": "integer", "minimum": 1}, _SIZE)]
_Bandwidth = Annotated[float, BeforeValidator(read_bandwidth), WithJsonSchema(_SPEED)]
_PAIRS = r"^(\s*[^=,\s]+\s*=\s*[^,\s][^,]*(,|$))*\s*$"  # key=value,key=value; torchrun needs a value for each key


# Launchers that this package tests, and further ones of DeepSpeed's that it does not test.
LAUNCHERS = ("standard", "pdsh", "openmpi", "slurm", "nossh")
UNTESTED_LAUNCHERS = ("mvapich", "mpich", "impi")


class LaunchSettings(BaseModel):
    """The launch part of a document. Names and meanings are Accelerate's, except `debug`; `auto` means the default.

    The sentence below a field describes the key in the schema, and is its comment in a written configuration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    distributed_type: Literal["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "TPU", "XLA"] | None = None
    """DEEPSPEED (ZeRO), MULTI_GPU or MULTI_CPU (DDP), NO (one process), TPU or XLA. Default: by the machine."""
    mixed_precision: Annotated[
        Literal["no", "fp16", "bf16", "auto"] | None, Flag(USUAL, 7), Key(variable="ACCELERATE_MIXED_PRECISION")
    ] = None
    """no (fp32), bf16, fp16, or auto: best for the device. Default: what the fp16 and bf16 sections enable."""
    prefer: Annotated[Literal["code", "file"] | None, Flag(LOOP, 3)] = None
    """code or file: what counts where an argument in code differs from file or flag. Default: it is an error."""
    num_processes: Annotated[int | None, Flag(USUAL, 2)] = Field(None, ge=1)
    """Processes on all machines together, 1 or more. Default: one for each accelerator of the machine."""
    num_machines: Annotated[int, Flag(USUAL, 3)] = Field(1, ge=1)
    """Machines that take part, 1 or more. Default: 1."""
    min_machines: Annotated[int | None, Flag(SEVERAL, 1)] = Field(None, ge=1)
    """The fewest machines that a run may continue on; needs c10d and max_restarts. Default: all."""
    machine_rank: Annotated[int, Flag(SEVERAL, 2)] = Field(0, ge=0)
    """This machine's rank, from 0; different on each machine. Default: 0."""
    main_process_ip: Annotated[str | None, Flag(SEVERAL, 3)] = None
    """Address of machine 0, as the others reach it. Default: this machine."""
    main_process_port: Annotated[int | None, Flag(SEVERAL, 4)] = Field(None, ge=0, le=65535)
    """Port on machine 0, up to 65535. Default, and for 0: a free one; 29500 with several machines."""
    rdzv_backend: Annotated[Literal["static", "c10d", "etcd", "etcd-v2"], Flag(SEVERAL, 6)] = "static"
    """torchrun's rendezvous: static (each machine has its rank), c10d, etcd or etcd-v2. Default: static."""
    rdzv_conf: Annotated[str, Flag(SEVERAL, 8)] = Field("", pattern=_PAIRS, examples=["timeout=60,read_timeout=60"])
    """torchrun's options for the rendezvous: key=value,key=value. Default: none."""
    same_network: Annotated[bool, Flag(SEVERAL, 5)] = False
    """true or false: whether all machines are in one local network; it has no effect here. Default: false."""
    gpu_ids: Annotated[_GpuIds, Flag(HARDWARE, 3, metavar="TEXT")] = "all"
    """all, or numbers such as "0,1" among the GPUs that the launcher sees. Default: all."""
    use_cpu: Annotated[bool, Key(variable="ACCELERATE_USE_CPU")] = False
    """true or false: train on the CPU, also if there are GPUs. Default: false."""
    enable_cpu_affinity: Annotated[bool, Flag(HARDWARE, 5)] = False
    """true or false: bind each process to the cores of its GPU's NUMA node. Default: false."""
    num_cpu_threads_per_process: Annotated[int | None, Flag(HARDWARE, 4)] = Field(None, ge=1)
    """OMP_NUM_THREADS of each process, 1 or more. Default: cores divided by local processes."""
    max_restarts: Annotated[int, Flag(LOGS, 9)] = Field(0, ge=0)
    """How often all workers start again after a crash, 0 or more. Default: 0."""
    auto_resume: Annotated[bool, Flag(LOGS, 10)] = False
    """true: the script must call resume(). false: resume() skips earlier launches. Default: neither."""
    grace_period: Annotated[float, Flag(LOGS, 11)] = Field(30.0, ge=0)
    """Seconds that the processes have to save and end after SIGTERM, 0 or more. Default: 30."""
    monitor_interval: Annotated[float, Flag(LOGS, 8)] = Field(0.1, gt=0)
    """Seconds between two checks of the workers by torchrun, above 0. Default: 0.1."""
    log_dir: Annotated[str | None, Flag(LOGS, 1, metavar="PATH")] = None
    """Folder for a log of each worker. Default: none are written."""
    tee: Annotated[_Streams | None, Flag(LOGS, 2, metavar="TEXT", short="-t")] = None
    """Show and log: 0 none, 1 stdout, 2 stderr, 3 both; by rank 0:3,1:2. Default: 3 with log_dir, 0 without."""
    role: Annotated[str, Flag(LOGS, 3)] = "default"
    """torchrun's name for the workers, in their log lines and as ROLE_NAME. Default: default."""
    debug: Annotated[bool, Flag(LOGS, 7)] = False
    """true or false: show the launcher's own log. Default: false."""
    quiet: Annotated[bool, Flag(LOGS, 4, short="-q")] = False
    """true or false: show only warnings and errors, of the workers too. Default: false."""
    verbose: Annotated[bool, Flag(LOGS, 5, short="-v")] = False
    """true or false: show chosen values, learning rates and short work too. Default: false."""
    log_timestamps: Annotated[bool, Flag(LOGS, 6)] = False
    """true or false: put the time before each message, and before each line that tee shows. Default: false."""
    main_training_function: Annotated[str, Flag(PROGRAM, 3)] = "main"
    """Function of the script that a launch on a TPU calls. Default: main."""
    checks: Annotated[Checks, Flag(LOOP, 11)] = "all"
    """all, start (only in the first steps) or off: which mistakes in the loop are looked for. Default: all."""
    scheduler_counts: Literal["steps", "processes"] = "processes"
    """Learning-rate schedulers count optimizer steps (steps), or one per process and step. Default: processes."""
    deepspeed_hostfile: Annotated[str | None, Flag(SEVERAL, 9, metavar="PATH")] = None
    """File with a line `host slots=GPUS` for each machine, for DeepSpeed's launcher. Default: none."""
    deepspeed_multinode_launcher: Annotated[str | None, Flag(SEVERAL, 10)] = Field(
        None, pattern=r"^\w[\w-]*$", examples=list(LAUNCHERS)
    )
    """standard (torchrun on each), pdsh, openmpi, slurm, nossh, …. Default: pdsh with a hostfile, or standard."""
    deepspeed_exclusion_filter: Annotated[str | None, Flag(SEVERAL, 12)] = None
    """Hosts and slots to leave out, in DeepSpeed's notation, e.g. host-1@host-2:0,2. Default: none."""
    deepspeed_inclusion_filter: Annotated[str | None, Flag(SEVERAL, 11)] = None
    """Hosts and slots to use, in DeepSpeed's notation, e.g. host-1@host-2:0,2. Default: all."""
    deepspeed_moe_layer_cls_names: Annotated[
        _ClassNames | None, Flag(LOOP, 10), Key(variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    ] = None
    """Classes of mixture-of-experts, comma-separated, for ZeRO-3, in addition to detected ones. Default: none."""
    gpu_memory: Annotated[_Bytes | None, Flag(HARDWARE, 6, metavar="SIZE")] = None
    """Memory of one device that the plan of stage auto may use, e.g. 24GiB. Default: what is free."""
    host_memory: Annotated[_Bytes | None, Flag(HARDWARE, 7, metavar="SIZE")] = None
    """CPU memory of one machine that the plan of stage auto may use, e.g. 64GiB. Default: what is free."""
    network: Annotated[_Bandwidth | None, Flag(HARDWARE, 8, metavar="SIZE")] = None
    """Bandwidth of each machine's network that the plan of stage auto counts on, e.g. 400Gb. Default: 200Gb."""
    zero3_init_flag: Annotated[bool | None, Flag(LOOP, 8), Key(variable="ACCELERATE_DEEPSPEED_ZERO3_INIT")] = None
    """true or false: at stage 3, transformers' from_pretrained builds models partitioned. Default: true."""


def _launch_row(name: str, facts: list[Any]) -> Key:
    row = next((fact for fact in facts if isinstance(fact, Key)), Key())
    return replace(row, name=name, flag=next((fact for fact in facts if isinstance(fact, Flag)), None))


LAUNCH: Final = {name: _launch_row(name, field.metadata) for name, field in LaunchSettings.model_fields.items()}

ZERO: Final = "zero_optimization"
_LOADER: Final[Mapping[str, Any]] = {"filled_by": "loop", "option": "--micro_batch"}
_PLAN: Final[Mapping[str, Any]] = {"filled_by": "plan", "option": "--model with --gpu_memory"}
_MODEL_SIZE: Final[Mapping[str, Any]] = {"filled_by": "script", "option": "--hidden_size or --model"}


def _row(name: str, field: str, flag: Flag, **more: Any) -> Key:
    """Return a row for a key that also has a short name in Accelerate."""
    prefix = "ACCELERATE_DEEPSPEED_" if name.startswith(ZERO) else "ACCELERATE_"
    return Key(name, field, flag, prefix + field.upper(), **more)


STAGE: Final = _row(f"{ZERO}.stage", "zero_stage", Flag(USUAL, 4), setup="stage", **_PLAN)
OFFLOAD_OPTIMIZER: Final = _row(
    f"{ZERO}.offload_optimizer.device", "offload_optimizer_device", Flag(USUAL, 5), setup="offload_optimizer", **_PLAN
)
OPTIMIZER_FOLDER: Final = _row(
    f"{ZERO}.offload_optimizer.nvme_path", "offload_optimizer_nvme_path", Flag(LOOP, 5, metavar="PATH")
)
OFFLOAD_PARAM: Final = _row(
    f"{ZERO}.offload_param.device", "offload_param_device", Flag(USUAL, 6), setup="offload_param", **_PLAN
)
PARAM_FOLDER: Final = _row(f"{ZERO}.offload_param.nvme_path", "offload_param_nvme_path", Flag(LOOP, 6, metavar="PATH"))
SAVE_16BIT: Final = _row(
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save", "zero3_save_16bit_model", Flag(LOOP, 9), stages=(3,)
)
GLOBAL_BATCH: Final = Key("train_batch_size", **_LOADER)
_MICRO: Final = ("per_device_train_batch_size", "micro_batch_size")
MICRO_BATCH: Final = Key("train_micro_batch_size_per_gpu", setup="micro_batch", elsewhere=_MICRO, **_LOADER)
ACCUMULATION: Final = _row(
    "gradient_accumulation_steps", "gradient_accumulation_steps", Flag(USUAL, 8), setup="accumulation", **_LOADER
)
CLIPPING: Final = _row(
    "gradient_clipping", "gradient_clipping", Flag(LOOP, 7), filled_by="loop", elsewhere=("max_grad_norm",)
)
SEQUENCE: Final = Key("sequence_parallel_size", flag=Flag(LOOP, 4), variable="PARALLELISM_CONFIG_SP_SIZE")
_OF_STAGES_1_AND_2: Final = (
    *("use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "round_robin_gradients", "parameter_alignment"),
)
_OF_STAGE_3: Final = (
    *("stage3_model_persistence_threshold", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("memory_efficient_linear", "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
    *("save_muon_momentum_buffer_in_memory", "leaf_module.classes", "leaf_module.names", "leaf_module.name_suffixes"),
)
TRAINING: Final = (
    *(STAGE, OFFLOAD_OPTIMIZER, OPTIMIZER_FOLDER, OFFLOAD_PARAM, PARAM_FOLDER, SAVE_16BIT),
    *(GLOBAL_BATCH, MICRO_BATCH, ACCUMULATION, CLIPPING, SEQUENCE),
    Key(f"{ZERO}.reduce_bucket_size", setup="reduce_bucket", stages=(1, 2, 3), **_MODEL_SIZE),
    Key(f"{ZERO}.stage3_prefetch_bucket_size", setup="prefetch_bucket", stages=(3,), **_MODEL_SIZE),
    Key(f"{ZERO}.stage3_param_persistence_threshold", setup="persistence_threshold", stages=(3,), **_MODEL_SIZE),
    Key(f"{ZERO}.stage3_max_live_parameters", setup="max_live_parameters", stages=(3,)),
    Key(f"{ZERO}.stage3_max_reuse_distance", setup="max_reuse_distance", stages=(3,)),
    Key(f"{ZERO}.sub_group_size", setup="sub_group_size", stages=(3,), option="--model"),
    Key(f"{ZERO}.overlap_comm", setup="overlap_comm", stages=(2, 3)),
    Key(f"{ZERO}.offload_optimizer.ratio", setup="ratio"),
    Key(f"{ZERO}.offload_param.buffer_size", setup="param_buffer", option="--model"),
    *(Key(f"{ZERO}.{name}", stages=(1, 2, 3)) for name in ("contiguous_gradients", "reduce_scatter")),
    *(Key(f"{ZERO}.{name}", stages=(1, 2)) for name in _OF_STAGES_1_AND_2),
    *(Key(f"{ZERO}.{name}", stages=(3,)) for name in _OF_STAGE_3),
    *(Key(f"{half}.enabled", filled_by="script") for half in ("fp16", "bf16")),
    Key("optimizer.params.lr", filled_by="script", option="--lr", elsewhere=("learning_rate",)),
    Key("optimizer.params.betas", filled_by="script"),
    Key("optimizer.params.eps", filled_by="script", elsewhere=("epsilon", "adam_epsilon")),
    Key("optimizer.params.weight_decay", filled_by="script", option="--weight_decay"),
    Key("scheduler.params.warmup_min_lr", filled_by="script"),
    Key("scheduler.params.warmup_max_lr", filled_by="script", option="--lr"),
    Key("scheduler.params.warmup_num_steps", filled_by="script", option="--warmup_steps"),
    Key("scheduler.params.total_num_steps", filled_by="script", option="--steps", elsewhere=("num_training_steps",)),
    Key("scheduler.params.cycle_max_lr", option="--lr"),
)
# Keys for the placement of parameters, gradients and optimizer states, which the memory plan chooses.
PLACEMENT: Final = tuple(key.path for key in TRAINING if key.filled_by == "plan")
BATCH: Final = (GLOBAL_BATCH, MICRO_BATCH, ACCUMULATION)
KEYS: Final[Mapping[str, Key]] = {**LAUNCH, **{key.typed: key for key in TRAINING}}  # by name in a launch config

# Fields under `deepspeed_config`: short names for DeepSpeed's keys, and launch keys.
SHORT_FIELDS: Final[Mapping[str, KeyPath]] = {key.field: key.path for key in TRAINING if key.field}
ZERO_FIELDS: Final = tuple(name for name, path in SHORT_FIELDS.items() if path[0] == ZERO)
LAUNCH_FIELDS: Final = tuple(name for name in LAUNCH if name.startswith(("deepspeed_", "zero3_")))

CONFIG_FILE: Final = Key(
    "deepspeed_config_file",
    flag=Flag(LOOP, 2, "DeepSpeed JSON instead of the file's `deepspeed_config`.", metavar="PATH"),
    variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
)


def _switch(topic: str, place: int, text: str, short: str = "", **sets: Any) -> Flag:
    return Flag(topic, place, text, short=short, sets=sets)


_LAUNCHED: Final = "YAML launch config or DeepSpeed JSON; or a ready one by name, such as zero2."
_MODEL: Final = "Model for a plan before the start: a transformers folder, or module:function."
_LENGTH: Final = "Tokens of a sample, for --model; default: 2048, or the model's positions if fewer."
_ON_TPU: Final = "Data parallelism over the devices of a TPU, without DeepSpeed."
_ON_GPUS: Final = "Data parallelism (DDP) on GPUs, without ZeRO."
# All flags except the compiler's, which `launch_settings.compiler_schema` describes.
FLAGS: Final[Mapping[str, Flag]] = {
    **{key.typed: key.flag for key in (*LAUNCH.values(), *TRAINING, CONFIG_FILE) if key.flag is not None},
    "config_file": Flag(USUAL, 1, _LAUNCHED, metavar="PATH", short="--config"),
    "model": Flag(PROGRAM, 4, _MODEL, metavar="PATH"),
    "sequence_length": Flag(PROGRAM, 5, _LENGTH, metavar="INT"),
    "rdzv_endpoint": Flag(SEVERAL, 7, "host:port of the rendezvous."),
    "cpu": _switch(USUAL, 9, "Run on the CPU, also with GPUs.", use_cpu=True),
    "multi_gpu": _switch(HARDWARE, 1, _ON_GPUS, distributed_type="MULTI_GPU", use_cpu=False),
    "tpu": _switch(HARDWARE, 2, _ON_TPU, distributed_type="XLA", use_cpu=False),
    "use_deepspeed": _switch(LOOP, 1, "Train with DeepSpeed ZeRO.", distributed_type="DEEPSPEED"),
    "module": _switch(PROGRAM, 1, "The program is a module, as with `python -m`.", "-m"),
    "no_python": _switch(PROGRAM, 2, "The program is an executable."),
    "dry_run": _switch(USUAL, 10, "Print the environment and the torchrun command; start nothing."),
}
