"""`zero-plugin config`: ask how to train, and write the answers as a commented launch config.

Each question is asked only if the previous answers leave it open.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.cli.output import print_line
from zero_plugin.cli.prompts import Prompts, prompts_for_terminal
from zero_plugin.config import keys
from zero_plugin.config.check import check_document
from zero_plugin.config.commented import update_config, write_config
from zero_plugin.config.document import Document
from zero_plugin.config.find import default_config_file, find_config_file
from zero_plugin.config.read import read_document
from zero_plugin.errors import ConfigError, LaunchError, Problem
from zero_plugin.launch.flags import basic_values, best_precision
from zero_plugin.launch.spec import obstacle
from zero_plugin.machine.hardware import Machine, look_at_machine

_STAGES: Final[Mapping[int | str, str]] = {
    0: "nothing is partitioned: every process holds all, as with DDP",
    1: "optimizer states are partitioned over the processes",
    2: "optimizer states and gradients are partitioned",
    3: "optimizer states, gradients and weights are partitioned",
    "auto": "auto: the plan chooses stage and offload from the model and the memory",
}
_PLACES: Final = {
    "none": "no offload: they stay on the device",
    "cpu": "in CPU memory",
    "nvme": "on a local NVMe disk",
}
_PRECISIONS: Final = {
    "no": "no: fp32",
    "bf16": "bf16: half the memory for weights and activations, the range of fp32",
    "fp16": "fp16: for GPUs without bf16; the loss is scaled",
    "auto": "auto: bf16 if the training device supports it, otherwise fp16, otherwise no",
}
_COMPILERS: Final = {
    "no": "no: the model is not compiled",
    "INDUCTOR": "inductor: torch's own, which generates kernels for the device",
    "CUDAGRAPHS": "cudagraphs: recorded launches, no new kernels",
    "AOT_EAGER": "aot_eager: traced and run without new kernels, to find code that cannot be traced",
}
_COMPILER_MODES: Final = {
    "default": "default: fast compilation",
    "reduce-overhead": "reduce-overhead: CUDA graphs, for small batches",
    "max-autotune": "max-autotune: tries kernels, slow compilation",
}
_LAUNCHERS: Final = {
    "standard": "standard: you start the same command on every machine, with the machine's number",
    "pdsh": "pdsh: DeepSpeed's launcher starts the hosts of a hostfile by ssh, from this machine",
    "openmpi": "openmpi: the same by mpirun",
    "slurm": "slurm: the same by srun",
    "nossh": "nossh: a hostfile, and you start the same command on every machine, with the machine's number",
    **{name: f"{name}: DeepSpeed's launcher, not tested here" for name in keys.UNTESTED_LAUNCHERS},
}


def ask_launch_config(prompts: Prompts, machine: Machine, precision: str) -> dict[str, Any]:
    """Ask for a launch config.

    Args:
        prompts: asks the questions.
        machine: this machine, which gives defaults only: the config may be meant for another machine.
        precision: the default for mixed precision.

    Returns:
        The config in Accelerate's layout, keys in the order of `LaunchSettings`, without most default values.
    """
    found = f" ({machine.gpus} found here)" if machine.gpus else " (none found here)"
    devices = {"gpu": f"GPUs{found}", "cpu": "CPU", "tpu": f"TPU ({machine.tpu or 'none found here'})"}
    default = "gpu" if machine.gpus else "tpu" if machine.tpu else "cpu"
    device = prompts.choose("Which device trains the model?", devices, default)
    machines = prompts.read("How many machines?", _whole(1), "1")
    answers: dict[str, Any] = {"num_machines": machines} if machines > 1 else {}
    answers |= _ask_processes(prompts, device, machine.gpus, machines)
    answers |= _ask_how(prompts, device, answers.get("num_processes", 0))
    training: dict[str, Any] = {}
    document = Document()
    if answers["distributed_type"] == "DEEPSPEED":
        training, document = _ask_zero(prompts)
        if machines > 1:
            training |= _ask_launcher(prompts)
    if machines > 1 and device != "tpu":  # a TPU's runtime finds the machines
        answers |= _ask_rendezvous(prompts, machines, training.get("deepspeed_multinode_launcher", "standard"))
    answers |= _ask_precision(prompts, device, document, precision)
    if device == "tpu":
        answers["main_training_function"] = prompts.read(
            "Function of the script to call for each device:", _named, "main"
        )
    compiler = "" if device == "tpu" else ", the compiler"
    if prompts.confirm(f"Set rarer options too: logs, threads, restarts{compiler}?", default=False):
        answers |= _ask_rare(prompts, device)
    ordered = {name: answers[name] for name in keys.LAUNCH if name in answers}
    sections = {"dynamo_config": answers.get("dynamo_config"), "deepspeed_config": training}
    return {**ordered, **{name: section for name, section in sections.items() if section}}


def _ask_processes(prompts: Prompts, device: str, gpus: int, machines: int) -> dict[str, Any]:
    ids = "all"
    if device == "gpu":
        ids = prompts.read("Which GPUs of each machine: all, or numbers such as 0,1?", _gpu_ids, "all")
    chosen = 0 if ids == "all" else len(ids.split(","))

    def parse(line: str) -> int:
        number = _whole(machines)(line)
        if number % machines:
            raise ValueError(f"Type a multiple of {machines}, the number of machines.")
        if chosen and number > machines * chosen:
            raise ValueError(f"Type at most {machines * chosen}: each process has a GPU of its own.")
        return number

    over = f", on all {machines} machines together" if machines > 1 else ""
    if device == "tpu":
        count = prompts.read(f"How many devices{over}? (auto: all devices)", _or_auto(parse), "auto")
        return {} if count == "auto" else {"num_processes": count}
    each = chosen or (max(1, gpus) if device == "gpu" else 1)
    count = prompts.read(f"How many processes{over}?", parse, str(each * machines))
    return {"gpu_ids": ids, "num_processes": count} if chosen else {"num_processes": count}


def _ask_how(prompts: Prompts, device: str, processes: int) -> dict[str, Any]:
    """Ask how the processes train together. Return `distributed_type` and `use_cpu`."""
    if device == "tpu":
        return {"distributed_type": "XLA"}
    on_cpu = {"use_cpu": True} if device == "cpu" else {}
    zero = {"DEEPSPEED": "ZeRO, by DeepSpeed: optimizer states, gradients, weights partitioned or offloaded"}
    if processes == 1:
        default, kinds = "NO", {"NO": "one process with the complete model"} | zero
    else:
        default, kinds = "DEEPSPEED", {f"MULTI_{device.upper()}": "DDP: every process holds the complete model"} | zero
    return {"distributed_type": prompts.choose("Which strategy?", kinds, default), **on_cpu}


def _ask_zero(prompts: Prompts) -> tuple[dict[str, Any], Document]:
    """Ask for the training part. Return the answers, and the document of a DeepSpeed JSON if one is used."""
    if prompts.confirm("Do you have a DeepSpeed JSON to use?", default=False):
        file, document = prompts.read("Its path:", _deepspeed_file)
        answers: dict[str, Any] = {keys.CONFIG_FILE.name: file}
        stage = document.deepspeed.value(*keys.STAGE.path)
    else:
        answers, document = _ask_stage(prompts), Document()
        stage = answers[keys.STAGE.field]
    if stage == 3:
        if not prompts.confirm("Build partitioned models in transformers' from_pretrained?", default=True):
            answers["zero3_init_flag"] = False
        if prompts.confirm("Name mixture-of-experts layers that are not found automatically?", default=False):
            names = prompts.read("Their class names, comma-separated:", _named)
            answers["deepspeed_moe_layer_cls_names"] = names
    return answers, document


def _ask_stage(prompts: Prompts) -> dict[str, Any]:
    stage = prompts.choose("Which ZeRO stage?", _STAGES, 2)
    answers: dict[str, Any] = {keys.STAGE.field: stage}
    path = ""
    if stage == "auto":
        answers |= {keys.OFFLOAD_OPTIMIZER.field: "auto", keys.OFFLOAD_PARAM.field: "auto"}
    offloads = {"optimizer": ("optimizer states", stage in (1, 2, 3)), "param": ("weights", stage == 3)}
    for name, (what, possible) in offloads.items():
        if not possible:
            continue
        places = {place: line for place, line in _PLACES.items() if place != "nvme" or stage == 3}
        place = prompts.choose(f"Where to offload {what}?", places, "none")
        answers[f"offload_{name}_device"] = place
        if place == "nvme":
            path = prompts.read(f"Folder on the NVMe disk for {what}:", _named, path)
            answers[f"offload_{name}_nvme_path"] = path
    if stage == 3:
        gathered = prompts.confirm(
            "Save models with unpartitioned 16-bit weights, gathered from all processes?", default=True
        )
        answers[keys.SAVE_16BIT.field] = gathered
    steps = "How many micro-batches per optimizer step? (auto: the script decides)"
    answers[keys.ACCUMULATION.field] = prompts.read(steps, _or_auto(_whole(1)), "auto")
    norm = "At which norm to clip gradients? (0: never, auto: the script decides)"
    answers[keys.CLIPPING.field] = prompts.read(norm, _or_auto(_norm), "auto")
    return answers


def _ask_launcher(prompts: Prompts) -> dict[str, Any]:
    launcher = prompts.choose("What starts the other machines?", _LAUNCHERS, "standard")
    answers = {"deepspeed_multinode_launcher": launcher}
    if launcher == "standard":
        return answers
    answers["deepspeed_hostfile"] = prompts.read("Hostfile, with a line `host slots=GPUS` for each machine:", _named)
    choices = {"all": "all hosts", "inclusion": "only some hosts", "exclusion": "all except some hosts"}
    choice = prompts.choose("Which hosts of the file?", choices, "all")
    if choice != "all":
        answers[f"deepspeed_{choice}_filter"] = prompts.read("Which, e.g. host-1@host-2:0,2:", _named)
    return answers


def _ask_rendezvous(prompts: Prompts, machines: int, launcher: str) -> dict[str, Any]:
    """Ask how machines find each other. Launchers with a hostfile handle that, except `nossh`."""
    if launcher not in ("standard", "nossh"):
        return {}
    answers: dict[str, Any] = {"rdzv_backend": "static"}
    if launcher == "standard":
        backends = {"static": "static: you number the machines", "c10d": "c10d: machines get numbers as they arrive"}
        answers["rdzv_backend"] = prompts.choose("How do the machines find each other?", backends, "static")
    if answers["rdzv_backend"] == "static":
        answers["machine_rank"] = prompts.read(
            f"Which machine is this, 0 to {machines - 1}?", _whole(0, machines - 1), "0"
        )
    answers["main_process_ip"] = prompts.read("Address of machine 0 for the other machines:", _named)
    answers["main_process_port"] = prompts.read("A free port on machine 0:", _whole(1, 65535), "29500")
    return answers


def _ask_precision(prompts: Prompts, device: str, document: Document, default: str) -> dict[str, Any]:
    """Ask for mixed precision if the DeepSpeed JSON leaves it open."""
    typed = {half: document.deepspeed.value(half, "enabled") for half in ("bf16", "fp16")}
    options = {name: line for name, line in _PRECISIONS.items() if typed.get(name) is not False}
    if device != "gpu":
        options.pop("fp16", None)
    if True in typed.values() or set(options) <= {"no", "auto"}:
        return {}
    return {"mixed_precision": prompts.choose("Mixed precision?", options, default if default in options else "no")}


def _ask_rare(prompts: Prompts, device: str) -> dict[str, Any]:
    rare = {
        "log_dir": prompts.read("Folder for a log of each worker, or none:", _text, "none"),
        "num_cpu_threads_per_process": prompts.read(
            "Threads of each process? (auto: cores divided by processes)", _or_auto(_whole(1)), "auto"
        ),
        "max_restarts": prompts.read("How often may all workers restart after a crash?", _whole(0), "0"),
        "debug": prompts.confirm("Show the launcher's own log?", default=False),
    }
    absent = {"log_dir": "none", "num_cpu_threads_per_process": "auto", "max_restarts": 0, "debug": False}
    answers: dict[str, Any] = {key: value for key, value in rare.items() if value != absent[key]}
    if device == "tpu":  # torch_xla compiles automatically
        return answers
    compiler = prompts.choose("Compile the model with torch.compile?", _COMPILERS, "no")
    if compiler != "no":
        mode = prompts.choose("Which compiler mode?", _COMPILER_MODES, "default")
        answers["dynamo_config"] = {"dynamo_backend": compiler, "dynamo_mode": mode}
        if prompts.confirm("Compile only one of the repeated blocks, which is faster?", default=False):
            answers["dynamo_config"]["dynamo_use_regional_compilation"] = True
    return answers


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    wanted = f"from {least} to {most}" if most < math.inf else f"of at least {least}"

    def parse(line: str) -> int:
        if not (line.isascii() and line.isdigit() and len(line) < 10 and least <= int(line) <= most):
            raise ValueError(f"Type a whole number {wanted}.")
        return int(line)

    return parse


def _norm(line: str) -> float:
    try:
        number = float(line)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError("Type a number of at least 0.")
    return number


def _or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse_or_auto(line: str) -> Any:
        return "auto" if line.lower() == "auto" else parse(line)

    return parse_or_auto


def _text(line: str) -> str:
    if not line:
        raise ValueError("A value is required.")
    return line


def _named(line: str) -> str:
    if line.lower() in ("", "none", "auto"):  # in the file, these words never name a folder, hostfile or host
        raise ValueError("Type a name or a path. The words none and auto are not names.")
    return line


def _gpu_ids(line: str) -> str:
    ids = [part.strip() for part in line.split(",")]
    if line != "all" and not (all(part.isascii() and part.isdigit() for part in ids) and len(set(ids)) == len(ids)):
        raise ValueError("Type all, or numbers such as 0,1, each once.")
    return ",".join(ids)


def _deepspeed_file(line: str) -> tuple[str, Document]:
    """Return the path and document of a valid DeepSpeed JSON. The path is absolute: the config may move elsewhere."""
    file = Path(_text(line)).expanduser().resolve()
    try:
        document = read_document(file)
        check_document(document)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if len(document.launch):
        raise ValueError(f"{file} is a launch config, not a DeepSpeed JSON.")
    return str(file), document


def config(
    action: Annotated[
        Literal["default", "update"] | None,
        typer.Argument(
            metavar="default|update", help="As in Accelerate: default means --default, update means --update."
        ),
    ] = None,
    config_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="File to write instead of the default file.")
    ] = None,
    default: Annotated[bool, typer.Option(help="Write a config for this machine without asking.")] = False,
    update: Annotated[str | None, typer.Option(metavar="FILE", help="Rewrite FILE with today's keys.")] = None,
) -> None:
    """Ask questions, and write a launch config that explains each key. Ctrl-C stops without writing.

    The default file is $HF_HOME/zero_plugin/default_config.yaml, which
    `zero-plugin launch` reads without --config_file. An existing file is
    replaced only if you agree.
    """
    default = default or action == "default"
    if action == "update" and update is None:
        update, config_file = config_file or str(find_config_file(os.environ) or default_config_file(os.environ)), None
    try:
        if update is None:
            _write(Path(config_file) if config_file else default_config_file(os.environ), default)
        elif default or config_file is not None:
            other = "--default" if default else "--config_file"
            raise ConfigError([Problem("--update", "", f"contradicts {other}", "Keep one of the two.")])
        else:
            print_line("\n".join(update_config(Path(update))))
    except KeyboardInterrupt:
        print()  # the next output starts on a line of its own
        raise typer.Exit(130) from None
    except EOFError:
        print()
        raise LaunchError("the input ended before all questions were answered; nothing was written") from None


def _write(file: Path, default: bool) -> None:
    blocked = None if file.is_dir() else obstacle(file.parent)
    if file.is_dir() or blocked is not None:  # reported before the questions, not after them
        why = "it is a folder" if blocked is None else f"{blocked} is no folder that can be written"
        fix = "Give --config_file the path of a file that can be written."
        raise ConfigError([Problem("--config_file", "", f"{file} cannot be written: {why}", fix)])
    prompts = prompts_for_terminal()
    if file.exists() and not prompts.confirm(f"{file} exists. Replace it?", default=False):
        print("nothing is written")
        raise typer.Exit(1)
    machine = look_at_machine()
    precision = best_precision(machine)
    values = basic_values(machine, precision) if default else ask_launch_config(prompts, machine, precision)
    write_config(values, file)
    taken = find_config_file(os.environ)
    named = "" if taken is not None and taken == file else f" --config_file {file}"
    print_line(f"written: {file}\nrun it:  zero-plugin launch{named} train.py")
