"""`zero-plugin plan`: what every stage and offload costs in memory and time.

`zero-plugin plan`: what every stage and offload costs in memory and time, and which is the fastest that fits.

Prints a plan: a line for every way of training, the chosen one marked and taken apart; or all of it as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.config.amounts import read_count, require_bytes, show_bytes
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.machine.hardware import has_gpu_driver
from zero_plugin.plan.config_file import write_plan
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.model_source import ModelSource, open_model
from zero_plugin.plan.options import Wanted
from zero_plugin.plan.plot import check_picture, draw_plan
from zero_plugin.plan.search import Candidate, Plan, WhatIf, search, what_if
from zero_plugin.plan.situation import (
    Activations,
    Cluster,
    ModelSizes,
    OptimizerSizes,
    is_known,
    name_setup,
    optimizer_sizes,
)

_HEAD: Final = ("", "way of training", "batch", "device", "host", "step", "samples/s", "why not")
_CHOSEN: Final = "→"
_FLAGS: Final[Mapping[str, str]] = {  # that fix a field; any other field has its flag's name
    "stage": "zero_stage",
    "offload_optimizer": "offload_optimizer_device",
    "offload_param": "offload_param_device",
    "accumulation": "gradient_accumulation_steps",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A plan with all that it was made from.

    Attributes:
        model, activations, optimizer, cluster, wanted: what was asked.
        plan: what was found.
        what_if: what would change it; None where nobody asked.
    """

    model: ModelSizes
    activations: Activations
    optimizer: OptimizerSizes
    cluster: Cluster
    wanted: Wanted
    plan: Plan
    what_if: WhatIf | None = None

    @property
    def headline(self) -> str:
        """What is trained on what."""
        machine = self.cluster.device_name or f"devices of {show_bytes(self.cluster.device_bytes)}"
        count = f"{self.cluster.devices} × {machine}"
        nodes = f", {self.cluster.nodes} nodes" if self.cluster.nodes > 1 else ""
        length = f", {self.activations.sample_length} tokens per sample" if self.activations.sample_length > 1 else ""
        return f"{self.model.name}, {show_count(self.model.elements)} parameters{length}, on {count}{nodes}"


def show_count(count: int) -> str:
    """E.g. 6.74B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:  # what would be shown as a thousand of the next unit
            return f"{_number(count / size)}{unit}"
    return str(count)


def _number(value: float) -> str:
    """Three digits, all of them from a thousand on."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def print_report(report: Report, written: Sequence[Path]) -> None:
    """Print it: wrapped in a table on a terminal, aligned plain lines elsewhere.

    Args:
        report: what to print.
        written: files that were written.
    """
    rows = [_row(candidate, report) for candidate in report.plan.candidates]
    notes = [*_about_chosen(report), *_about_what_if(report), *(f"written: {file}" for file in written)]
    if sys.stdout.isatty():
        _print_wrapped(report, rows, notes)
        return
    print(report.headline)
    widths = [max(len(row[column]) for row in [_HEAD, *rows]) for column in range(len(_HEAD))]
    for row in [_HEAD, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in notes:
        print(note)


def as_json(report: Report) -> dict[str, Any]:
    """All numbers: bytes, seconds, elements."""
    chosen = report.plan.chosen
    return {
        "model": {
            "name": report.model.name,
            "parameters": report.model.elements,
            "trainable": report.model.trainable,
            "source": report.model.source,
        },
        "activations": {"source": report.activations.source, "sample_length": report.activations.sample_length},
        "optimizer": asdict(report.optimizer),
        "cluster": {name: _plain(value) for name, value in asdict(report.cluster).items()},
        "margin": report.wanted.margin,
        "chosen": None if chosen is None else report.plan.candidates.index(chosen),
        "candidates": [_candidate(candidate) for candidate in report.plan.candidates],
        "what_if": None if report.what_if is None else _what_if(report.what_if),
    }


def _row(candidate: Candidate, report: Report) -> tuple[str, ...]:
    setup, needed = candidate.setup, candidate.footprint
    processes = report.cluster.processes
    samples = setup.micro_batch * setup.accumulation * processes / candidate.time.seconds
    return (
        _CHOSEN if candidate is report.plan.chosen else "",
        name_setup(setup),
        f"{setup.micro_batch} × {setup.accumulation}",
        show_bytes(needed.device_bytes),
        show_bytes(needed.host_bytes) + (f" + {show_bytes(needed.nvme_bytes)} NVMe" if needed.nvme_bytes else ""),
        "" if candidate.rejected else f"{candidate.time.seconds:.3g} s",
        "" if candidate.rejected else _number(samples),
        candidate.rejected,
    )


def _about_chosen(report: Report) -> list[str]:
    chosen, cluster = report.plan.chosen, report.cluster
    if chosen is None:
        return ["", f"nothing fits with {report.wanted.margin:.0%} of each memory left free"]
    needed = chosen.footprint
    batch = chosen.setup.micro_batch * chosen.setup.accumulation * cluster.processes
    fits = f"the fastest that fits with {report.wanted.margin:.0%} left free"
    places = (
        (f"device, {needed.device_phase}", needed.device, needed.device_bytes, cluster.device_bytes),
        ("host", needed.host, needed.host_bytes, cluster.host_bytes),
        ("NVMe", needed.nvme, needed.nvme_bytes, cluster.nvme_bytes),
    )
    lines = ["", f"{_CHOSEN} {name_setup(chosen.setup)}: {fits}; {batch} samples per optimizer step"]
    lines += [
        f"  {place}: {_terms(terms)} = {show_bytes(size)} of {show_bytes(there)}"
        for place, terms, size, there in places
        if size
    ]
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in chosen.time.terms.items())
    lines.append(f"  step: {seconds} = {chosen.time.seconds:.3g} s")
    lines.append(f"  sizes: {report.model.source}; activations: {report.activations.source}")
    assumed = [f"{name} {source}" for name, source in cluster.sources.items() if source.startswith("assumed")]
    if assumed:
        lines.append(f"  {'; '.join(assumed)}")
    return lines


def _about_what_if(report: Report) -> list[str]:
    if report.what_if is None:
        return []
    lines = ["", "any one of these would do:"] if report.what_if.changes else []
    lines += [f"  {_as_flag(change.what)}: {name_setup(change.chosen.setup)}" for change in report.what_if.changes]
    largest = report.what_if.largest_elements
    lines.append(f"the largest model of this shape that fits: {show_count(largest) if largest else 'none'}")
    return lines


def _as_flag(change: str) -> str:
    """A change of what is fixed as the flag to leave out."""
    field, fixed, value = change.partition(" free instead of ")
    if not fixed:
        return change
    shown = "" if field == "activation_checkpointing" else f" {value}"
    negated = "no_" if value == "False" else ""
    return f"without --{negated}{_FLAGS.get(field, field)}{shown}"


def _terms(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return " + ".join(f"{name} {show_bytes(size)}" for name, size in ordered)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    needed = candidate.footprint
    return {
        "name": name_setup(candidate.setup),
        "setup": asdict(candidate.setup),
        "device_bytes": needed.device_bytes,
        "device_phase": needed.device_phase,
        "device": dict(needed.device),
        "host_bytes": needed.host_bytes,
        "host": dict(needed.host),
        "pinned_bytes_per_process": needed.pinned,
        "nvme_bytes": needed.nvme_bytes,
        "nvme": dict(needed.nvme),
        "seconds": candidate.time.seconds,
        "time": dict(candidate.time.terms),
        "hidden_time": dict(candidate.time.hidden),
        "rejected": candidate.rejected,
    }


def _what_if(found: WhatIf) -> dict[str, Any]:
    changes = [{"what": change.what, "chosen": _candidate(change.chosen)} for change in found.changes]
    return {"changes": changes, "largest_parameters": found.largest_elements}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _print_wrapped(report: Report, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(report.headline, "bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column, head in enumerate(_HEAD):
        table.add_column(head, no_wrap=1 < column < len(_HEAD) - 1, overflow="fold")
    for row in rows:
        style = "bold green" if row[0] else "dim" if row[-1] else ""
        table.add_row(*(Text(cell, style) for cell in row))
    console.print(table)
    for note in notes:
        console.print(Text(note, "bold green" if note.startswith(_CHOSEN) else ""))


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
    sizes = {name: None if text is None else require_bytes(f"--{name}", text) for name, text in memories.items()}
    here = None
    if gpu is None and sizes["gpu_memory"] is None and has_gpu_driver():
        from zero_plugin.plan.constants import measure_cluster  # imports torch

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


def _count(flag: str, text: str | None) -> int | None:
    count = None if text is None else read_count(text)
    if text is not None and count is None:
        raise ConfigError([Problem(flag, "", f"{text!r} is no count", "Write e.g. 7B, 350M or 1500000000.")])
    return count
