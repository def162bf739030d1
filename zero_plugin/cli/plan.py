"""`zero-plugin plan`: what every stage and offload costs in memory and time, and which is the fastest that fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from zero_plugin.cli.plan_report import Report, as_json, print_report
from zero_plugin.config.amounts import read_bytes, read_count
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.machine import has_gpu_driver
from zero_plugin.plan.cluster import state_cluster
from zero_plugin.plan.config_file import write_plan
from zero_plugin.plan.model_source import ModelSource, open_model
from zero_plugin.plan.optimizers import is_known, optimizer_sizes
from zero_plugin.plan.options import Wanted
from zero_plugin.plan.picture import check_picture, draw_plan
from zero_plugin.plan.search import search
from zero_plugin.plan.situation import Cluster
from zero_plugin.plan.what_if import what_if

__all__ = ["plan"]


class _Precision(str, Enum):
    no = "no"
    fp16 = "fp16"
    bf16 = "bf16"


class _Stage(str, Enum):
    auto = "auto"
    ddp = "ddp"
    zero = "0"
    one = "1"
    two = "2"
    three = "3"


class _Device(str, Enum):
    auto = "auto"
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


_MODEL, _MACHINES, _TRAINING, _OUTPUT = "The model", "The machines", "What is fixed", "Output"


def _option(flag: str, text: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, show_default=False, **more)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A transformers model's folder or config.json, a folder of *.safetensors, or module:function.",
            show_default=False,
        ),
    ] = None,
    params: Annotated[str | None, _option("--params", "Parameters of a decoder, e.g. 7B.", _MODEL)] = None,
    hidden_size: Annotated[int | None, _option("--hidden_size", "Its width.", _MODEL, min=1)] = None,
    layers: Annotated[int | None, _option("--layers", "Its depth.", _MODEL, min=1)] = None,
    vocabulary: Annotated[int | None, _option("--vocabulary", "Its tokens; default: 32000.", _MODEL, min=1)] = None,
    heads: Annotated[int | None, _option("--heads", "Default: of 128 each.", _MODEL, min=1)] = None,
    kv_heads: Annotated[int | None, _option("--kv_heads", "Default: as many as heads.", _MODEL, min=1)] = None,
    intermediate: Annotated[int | None, _option("--intermediate", "Width of its MLP.", _MODEL, min=1)] = None,
    sequence_length: Annotated[
        int | None,
        _option(
            "--sequence_length", "Tokens of a sample; default: 2048, or the model's positions if fewer.", _MODEL, min=1
        ),
    ] = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no_trace",
            help="Trace the model's activations, which imports torch; else by a decoder's formula.",
            rich_help_panel=_MODEL,
        ),
    ] = True,
    gpu: Annotated[
        str | None, _option("--gpu", "A known GPU, e.g. A100-80GB; default: this machine's.", _MACHINES)
    ] = None,
    gpu_memory: Annotated[str | None, _option("--gpu_memory", "Of each GPU, e.g. 24GiB.", _MACHINES)] = None,
    host_memory: Annotated[str | None, _option("--host_memory", "Of each node, e.g. 64GiB.", _MACHINES)] = None,
    nvme: Annotated[str | None, _option("--nvme", "Free space of each node's NVMe disk, e.g. 2TB.", _MACHINES)] = None,
    gpus: Annotated[int | None, _option("--gpus", "On each node.", _MACHINES, min=1)] = None,
    nodes: Annotated[int | None, _option("--nodes", "Machines.", _MACHINES, min=1)] = None,
    mixed_precision: Annotated[
        _Precision, typer.Option("--mixed_precision", help="Computation type.", rich_help_panel=_TRAINING)
    ] = _Precision.bf16,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="AdamW, Adam, Lion, Adagrad, SGD, …", rich_help_panel=_TRAINING)
    ] = "AdamW",
    global_batch: Annotated[
        int | None, _option("--global_batch", "Samples of an optimizer step, on all GPUs.", _TRAINING, min=1)
    ] = None,
    micro_batch: Annotated[
        int | None, _option("--micro_batch", "Samples of a GPU and backward.", _TRAINING, min=1)
    ] = None,
    accumulation: Annotated[
        int | None, _option("--gradient_accumulation_steps", "Micro-batches of a step.", _TRAINING, min=1)
    ] = None,
    zero_stage: Annotated[
        _Stage, typer.Option("--zero_stage", help="The ZeRO stage; ddp: without ZeRO.", rich_help_panel=_TRAINING)
    ] = _Stage.auto,
    offload_optimizer: Annotated[
        _Device, typer.Option("--offload_optimizer_device", help="Of optimizer states.", rich_help_panel=_TRAINING)
    ] = _Device.auto,
    offload_param: Annotated[
        _Device, typer.Option("--offload_param_device", help="Of parameters.", rich_help_panel=_TRAINING)
    ] = _Device.auto,
    ratio: Annotated[
        float | None, _option("--ratio", "Share of the optimizer on the host.", _TRAINING, min=0, max=1)
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--activation_checkpointing/--no_activation_checkpointing",
            help="Recompute every block in the backward; default: whichever is faster.",
            rich_help_panel=_TRAINING,
            show_default=False,
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(
            "--margin", help="Share of each memory that stays free.", rich_help_panel=_TRAINING, min=0, max=0.9
        ),
    ] = 0.1,
    as_json_text: Annotated[bool, typer.Option("--json", help="All numbers as JSON.", rich_help_panel=_OUTPUT)] = False,
    what_if_asked: Annotated[
        bool,
        typer.Option(
            "--what_if", help="What to change where nothing fits; the largest model that fits.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    picture: Annotated[
        Path | None, _option("--picture", "Draw the memory of every way: FILE.png, .svg or .pdf.", _OUTPUT)
    ] = None,
    output: Annotated[
        Path | None, _option("--output", "Write the chosen way as a config: FILE.yaml or FILE.json.", _OUTPUT)
    ] = None,
    nvme_path: Annotated[str | None, _option("--nvme_path", "Folder for NVMe offload, for --output.", _OUTPUT)] = None,
) -> None:
    """Say what every way of training MODEL costs in memory and time, and choose the fastest that fits.

    Nothing is trained and no weight is loaded; the machines need not be this one. Exit code: 0 where something fits, 1
    where nothing does, 2 for a wrong input.
    """
    sizes = {"hidden_size": hidden_size, "layers": layers, "vocabulary": vocabulary, "heads": heads}
    sizes |= {"kv_heads": kv_heads, "intermediate": intermediate, "parameters": _count("--params", params)}
    cluster = _cluster(gpu, gpus, nodes, {"gpu_memory": gpu_memory, "host_memory": host_memory, "nvme": nvme})
    wanted = Wanted(
        stage=_stage(zero_stage),
        ddp=output is None or output.suffix != ".json",
        precision=mixed_precision.value,
        offload_optimizer=None if offload_optimizer is _Device.auto else offload_optimizer.value,
        offload_param=None if offload_param is _Device.auto else offload_param.value,
        ratio=ratio,
        micro_batch=micro_batch,
        accumulation=accumulation,
        activation_checkpointing=checkpointing,
        global_batch=global_batch,
        margin=margin,
    )
    if picture is not None:
        check_picture(picture)  # before the other file is written
    source = ModelSource(model, trace=trace, **sizes)
    found, activations = open_model(source, sequence_length, wanted.precision)
    states = optimizer_sizes(optimizer, fused=True)
    if not is_known(optimizer):
        message = f"optimizer {states.name} is not known: taken to keep {states.states} tensors, as Adam"
        print(message, file=sys.stderr)
    made = search(found, activations, states, cluster, wanted)
    answers = None
    if what_if_asked or made.chosen is None:
        answers = what_if(found, activations, states, cluster, wanted)
    report = Report(found, activations, states, cluster, wanted, made, answers)
    if output is not None and made.chosen is not None:
        write_plan(output, made.chosen, cluster, states.name, nvme_path)
    if picture is not None:
        draw_plan(picture, made, cluster, report.headline, margin)
    if as_json_text:
        print(json.dumps(as_json(report), indent=2, ensure_ascii=False))
    else:
        print_report(report, [file for file in (output if made.chosen else None, picture) if file is not None])
    if made.chosen is None:
        raise typer.Exit(1)


def _cluster(gpu: str | None, gpus: int | None, nodes: int | None, memories: Mapping[str, str | None]) -> Cluster:
    """The machines as stated; this one where no GPU is, and it has one."""
    sizes = {name: _bytes(f"--{name}", text) for name, text in memories.items()}
    here = None
    if gpu is None and sizes["gpu_memory"] is None and has_gpu_driver():
        from zero_plugin.probe.constants import measure_cluster  # imports torch

        here = measure_cluster(gpus, nodes or 1)
    return state_cluster(gpu=gpu, gpus=gpus, nodes=nodes, here=here, **sizes)


def _stage(asked: _Stage) -> Literal["ddp", 0, 1, 2, 3] | None:
    stages: dict[_Stage, Literal["ddp", 0, 1, 2, 3]] = {
        _Stage.ddp: "ddp",
        _Stage.zero: 0,
        _Stage.one: 1,
        _Stage.two: 2,
        _Stage.three: 3,
    }
    return stages.get(asked)


def _bytes(flag: str, text: str | None) -> int | None:
    size = read_bytes(text)
    if text is not None and size is None:
        raise ConfigError([Problem(flag, "", f"{text!r} is no amount of memory", "Write e.g. 24GiB, 80GB or 2TB.")])
    return size


def _count(flag: str, text: str | None) -> int | None:
    count = None if text is None else read_count(text)
    if text is not None and count is None:
        raise ConfigError([Problem(flag, "", f"{text!r} is no count", "Write e.g. 7B, 350M or 1500000000.")])
    return count
