"""The launch flags, one line each: Accelerate's names, with `-` or `_`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any, Final, get_type_hints

import typer


@dataclass(frozen=True, slots=True)
class LaunchFlag:
    """A flag: its spellings, whether it is a switch, and its help.

    Values are read as the file would read them (`auto`, numbers, true/false), so that a wrong one is reported by the
    same check and in the same words.
    """

    name: str
    help: str
    group: str
    switch: bool = False
    short: tuple[str, ...] = ()


_RUN, _ZERO, _MACHINES, _ENGINE = "Configuration", "ZeRO and the loop", "Several machines", "Program and run"

LAUNCH_FLAGS: Final = (
    LaunchFlag("config_file", "YAML launch config or DeepSpeed JSON.", _RUN, short=("--config",)),
    LaunchFlag("num_processes", "Processes over all machines; default: one per GPU, one on a CPU.", _RUN),
    LaunchFlag("mixed_precision", "no, fp16, bf16 or auto.", _RUN),
    LaunchFlag("cpu", "Run on the CPU, without DeepSpeed.", _RUN, switch=True),
    LaunchFlag("multi_gpu", "Plain data parallelism on GPUs.", _RUN, switch=True),
    LaunchFlag("tpu", "Data parallelism over the devices of a TPU, without DeepSpeed.", _RUN, switch=True),
    LaunchFlag("use_deepspeed", "ZeRO by DeepSpeed.", _RUN, switch=True),
    LaunchFlag("dynamo_backend", "Compile the model: inductor, eager, …; default: no.", _RUN),
    LaunchFlag("dynamo_mode", "default, reduce-overhead or max-autotune.", _RUN),
    LaunchFlag("dynamo_use_fullgraph", "Refuse a model that breaks into several graphs.", _RUN, switch=True),
    LaunchFlag("dynamo_use_dynamic", "Compile for changing shapes.", _RUN, switch=True),
    LaunchFlag("dynamo_use_regional_compilation", "Compile repeated blocks once for all.", _RUN, switch=True),
    LaunchFlag("gpu_ids", "GPUs to use among those visible here, e.g. 0,2; default: all.", _RUN),
    LaunchFlag("deepspeed_config_file", "DeepSpeed JSON in place of the file's `deepspeed_config`.", _ZERO),
    LaunchFlag("zero_stage", "0, 1, 2, 3 or auto.", _ZERO),
    LaunchFlag("offload_optimizer_device", "none, cpu, nvme or auto.", _ZERO),
    LaunchFlag("offload_param_device", "none, cpu, nvme (stage 3) or auto.", _ZERO),
    LaunchFlag("offload_optimizer_nvme_path", "Folder on a local NVMe disk.", _ZERO),
    LaunchFlag("offload_param_nvme_path", "Folder on a local NVMe disk.", _ZERO),
    LaunchFlag("gradient_accumulation_steps", "Micro-batches per optimizer step, or auto.", _ZERO),
    LaunchFlag("gradient_clipping", "Largest gradient norm, or auto.", _ZERO),
    LaunchFlag("gpu_memory", "Of each device, for the plan of zero_stage auto: 24GiB; default: what is free.", _ZERO),
    LaunchFlag("host_memory", "Of each machine, for the plan of zero_stage auto; default: what is free.", _ZERO),
    LaunchFlag("model", "For a plan before the start: a transformers model's folder, or module:function.", _ZERO),
    LaunchFlag(
        "sequence_length", "Tokens of a sample, for --model; default: 2048, or the model's positions if fewer.", _ZERO
    ),
    LaunchFlag("zero3_init_flag", "true or false: build the model in partitions at stage 3.", _ZERO),
    LaunchFlag("zero3_save_16bit_model", "true or false: gather 16-bit weights when saving at stage 3.", _ZERO),
    LaunchFlag("deepspeed_moe_layer_cls_names", "Classes of mixture-of-experts layers, comma-separated.", _ZERO),
    LaunchFlag("num_cpu_threads_per_process", "OMP_NUM_THREADS; default: cores over processes.", _ENGINE),
    LaunchFlag("log_dir", "Folder for a log of each worker; its lines on the screen are then prefixed.", _ENGINE),
    LaunchFlag("tee", "Streams to show and log: 0, 1 (output), 2 (errors), 3, or 0:3,1:2.", _ENGINE, short=("-t",)),
    LaunchFlag("role", "torchrun's name for the workers.", _ENGINE),
    LaunchFlag(
        "enable_cpu_affinity", "Bind each process to the cores near its GPU, by NUMA node.", _ENGINE, switch=True
    ),
    LaunchFlag("monitor_interval", "Seconds between two looks at the workers.", _ENGINE),
    LaunchFlag("num_machines", "Machines in the run.", _MACHINES),
    LaunchFlag("min_machines", "Go on with so few when others are lost; default: all.", _MACHINES),
    LaunchFlag("machine_rank", "This machine's number, from 0.", _MACHINES),
    LaunchFlag("main_process_ip", "Address of machine 0.", _MACHINES),
    LaunchFlag("main_process_port", "Port on machine 0; on one machine a free one is taken.", _MACHINES),
    LaunchFlag("same_network", "Accepted, as with Accelerate; torchrun does not ask.", _MACHINES, switch=True),
    LaunchFlag("rdzv_backend", "torchrun's rendezvous: static or c10d.", _MACHINES),
    LaunchFlag("rdzv_endpoint", "host:port of the rendezvous.", _MACHINES),
    LaunchFlag("rdzv_conf", "Rendezvous options, key=value,key=value.", _MACHINES),
    LaunchFlag(
        "deepspeed_hostfile", "Lines `host slots=GPUS`: DeepSpeed's launcher starts them all from here.", _MACHINES
    ),
    LaunchFlag(
        "deepspeed_multinode_launcher", "pdsh, openmpi, slurm, nossh, …; standard: torchrun on each.", _MACHINES
    ),
    LaunchFlag("deepspeed_inclusion_filter", "Hosts and slots to use: host-1@host-2:0,2.", _MACHINES),
    LaunchFlag("deepspeed_exclusion_filter", "Hosts and slots to leave out.", _MACHINES),
    LaunchFlag("main_training_function", "Function that a TPU launch calls for each device; default: main.", _ENGINE),
    LaunchFlag("module", "The program is a module, as with `python -m`.", _ENGINE, switch=True, short=("-m",)),
    LaunchFlag("no_python", "The program is an executable.", _ENGINE, switch=True),
    LaunchFlag("max_restarts", "Start all workers again after a failure, this often.", _ENGINE),
    LaunchFlag("auto_resume", "accelerator.resume() goes on from the newest checkpoint at once.", _ENGINE, switch=True),
    LaunchFlag("grace_period", "Seconds that the workers have to save and end after SIGTERM.", _ENGINE),
    LaunchFlag("dry_run", "Print the environment and the torchrun command; start nothing.", _ENGINE, switch=True),
    LaunchFlag("quiet", "Say only what goes wrong.", _ENGINE, switch=True, short=("-q",)),
    LaunchFlag("debug", "Show the launcher's own log.", _ENGINE, switch=True),
)


def with_launch_flags(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `ctx` and keywords the launch flags; `typed_flags(ctx)` tells which were typed.

    Args:
        left_out: names of flags that would say nothing to this command.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [
            inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
            for flag in LAUNCH_FLAGS
            if flag.name not in left_out
        ]
        command.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        return command

    return give


def with_options(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `ctx` and a dataclass the options that the fields of the dataclass describe.

    Args:
        record: the dataclass; each field is annotated with its option, and has a default.
    """
    hints = get_type_hints(record, include_extras=True)

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(ctx: typer.Context, **values: Any) -> None:
            command(ctx, record(**{field.name: values[field.name] for field in fields(record)}))

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        own = [
            inspect.Parameter(field.name, context.kind, default=field.default, annotation=hints[field.name])
            for field in fields(record)
        ]
        run.__signature__ = inspect.Signature([context, *own])  # type: ignore[attr-defined]
        return run

    return give


def typed_flags(ctx: typer.Context) -> dict[str, Any]:
    """The launch flags that the user typed, by name."""
    names = {flag.name for flag in LAUNCH_FLAGS}
    return {name: value for name, value in ctx.params.items() if name in names and value is not None}


def _annotation(flag: LaunchFlag) -> Any:
    option = typer.Option(f"--{flag.name}", *flag.short, help=flag.help, rich_help_panel=flag.group, show_default=False)
    return Annotated[bool | None, option] if flag.switch else Annotated[str | None, option]
