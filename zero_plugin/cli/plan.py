"""`zero-plugin plan`: compute memory and time of every stage and offload, and choose the fastest that fits.

Prints the Pareto-optimal setups, fastest first, with details of the chosen setup, then setups that do not fit. Other
forms are a table of all setups, and all numbers as JSON.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.cli.launch_flags import LENGTH, options_of, typed_options, with_options
from zero_plugin.cli.output import print_json, print_line, print_rows, terminal_width
from zero_plugin.config.amounts import require_bandwidth, require_bytes, require_count, show_bytes
from zero_plugin.config.installed import garbage_collection_paused
from zero_plugin.config.keys import TRAINING
from zero_plugin.config.rules.sections import unequal_heads, unequal_sequence_groups
from zero_plugin.distributed.messages import show_messages
from zero_plugin.errors import ConfigError, Problem, printable
from zero_plugin.machine.hardware import has_gpu_driver
from zero_plugin.plan.machines import UNNAMED, state_cluster
from zero_plugin.plan.model_source import ModelSource, changed_activations, find_source, open_model
from zero_plugin.plan.plan_files import check_picture, draw_plan, write_plan
from zero_plugin.plan.search import ALIKE, Candidate, Choice, Wanted
from zero_plugin.plan.search import plan as make_plan
from zero_plugin.plan.situation import Cluster, Workload, describe_budget, is_known, name_setup, optimizer_sizes
from zero_plugin.plan.what_if import WhatIf, what_if

_HEAD: Final = ("", "strategy", "batch", "device", "CPU memory", "step", "samples/s", "why not")
_CHOSEN: Final = "→"
_SHOWN: Final = 6  # setups in the short table
_TERMS: Final = 4  # in one memory's sum
_NAMED: Final = 2  # setups named below it that do not fit
_ALWAYS: Final = ("", "ZeRO", "device", "samples/s", "speed")  # shown even if all rows agree
_WIDE: Final = 110  # terminal columns for the full table
_PLACES: Final = {"none": "", "cpu": "CPU", "nvme": "NVMe"}
# Flags with another name than the field that they fix.
_FLAGS: Final = {key.setup: key.field for key in TRAINING if key.setup and key.field}


@dataclass(frozen=True, slots=True)
class Report:
    """A plan with its inputs.

    Attributes:
        work, cluster, wanted: the inputs.
        choice: the result.
        what_if: changes that make a setup fit; None if not requested.
    """

    work: Workload
    cluster: Cluster
    wanted: Wanted
    choice: Choice
    what_if: WhatIf | None = None

    @property
    def headline(self) -> str:
        """One line with the model and the machines."""
        cluster, length = self.cluster, self.work.activations.sample_length
        device = cluster.device_name or f"devices of {show_bytes(cluster.device_bytes)}, as fast as {UNNAMED}"
        parts = [f"{self.work.model.name}, {show_count(self.work.model.elements)} parameters"]
        parts += [f"{length} tokens per sample"] if length > 1 else []
        parts += [f"on {cluster.devices} × {device}"]
        parts += [f"{cluster.nodes} nodes"] if cluster.nodes > 1 else []
        parts += [f"each sample shared by {cluster.shared_by}"] if cluster.shared_by > 1 else []
        return ", ".join(parts)


def show_count(count: int) -> str:
    """Return a count with a unit, such as 6.74B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * size:  # the smaller unit would round this to 1000
            return f"{_number(count / size)}{unit}"
    return str(count)


def _number(value: float) -> str:
    """Format with three significant digits; from 1000 on, with all integer digits."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def print_report(report: Report, written: Sequence[Path], *, every: bool) -> None:
    """Print a report.

    Args:
        report: the report to print.
        written: files that were written.
        every: whether to print all setups in search order, each with the reason for its rejection.
    """
    print_line(report.headline, "bold", wraps=True)
    print_line(_memories(report.cluster, report.wanted.margin), wraps=True)
    if every:
        _print_all(report)
    else:
        _print_best(report)
    notes = [*_about_chosen(report, every=every), *_about_what_if(report), *(f"written: {file}" for file in written)]
    for note in notes:
        print_line(note, "bold green" if note.startswith(_CHOSEN) else "", wraps=True)


def _print_best(report: Report) -> None:
    """Print the Pareto-optimal setups, fastest first, then setups that do not fit. Show only columns that differ."""
    chosen = report.choice.chosen
    fitting = sorted((c for c in report.choice.table if not c.rejected), key=lambda c: c.seconds_per_sample)
    fitting.sort(key=lambda c: c is not chosen)
    best: list[Candidate] = []
    for candidate in fitting:
        if not any(_is_as_good(other, candidate) for other in best):
            best.append(candidate)
    hidden, further = len(fitting) - min(len(best), _SHOWN), best[_SHOWN:]
    best = best[:_SHOWN]
    cells = [_cells(candidate, report) for candidate in best]
    columns = [name for name in (cells[0] if cells else ()) if name in _ALWAYS or len({c[name] for c in cells}) > 1]
    styles = ["bold green" if candidate is chosen else "" for candidate in best]
    styled = [[(one[name], style) for name in columns] for one, style in zip(cells, styles, strict=True)]
    if styled:
        print_rows(styled, columns, unbroken=columns)
    if hidden:
        gain = f"{len(further)} of them in less memory" if further else "and gain nothing"
        print_line(f"{hidden} more fit, {gain}; --all prints every strategy")
    for line in _not_fitting(report):
        print_line(line, "dim", wraps=True)


def _is_as_good(one: Candidate, other: Candidate) -> bool:
    """Return whether `one` is as fast as `other` and needs no more memory, to three digits."""
    figures = [
        (c.seconds_per_sample, c.footprint.device_bytes, c.footprint.host_bytes, c.footprint.nvme_bytes)
        for c in (one, other)
    ]
    return all(float(f"{a:.3g}") <= float(f"{b:.3g}") for a, b in zip(*figures, strict=True))


def _cells(candidate: Candidate, report: Report) -> dict[str, str]:
    """Return a setup's cells in the short table. Without a known GPU, speed is relative to the chosen setup."""
    setup, needed, chosen = candidate.setup, candidate.footprint, report.choice.chosen
    assert chosen is not None  # this candidate fits, so a setup is chosen
    speed = {"speed": f"{chosen.seconds_per_sample / candidate.seconds_per_sample:.2f}"}
    if report.cluster.device_name:
        speed = {"samples/s": _samples_per_second(candidate, report)}
    share = f" {setup.ratio:.0%}" if setup.offload_optimizer != "none" and setup.ratio < 1 else ""
    return {
        "": _CHOSEN if candidate is chosen else "",
        "ZeRO": "DDP" if setup.stage is None else f"stage {setup.stage}",
        "optimizer": f"{_PLACES[setup.offload_optimizer]}{share}",
        "params": _PLACES[setup.offload_param],
        "recompute": "yes" if setup.activation_checkpointing else "",
        "device": show_bytes(needed.device_bytes),
        "CPU": show_bytes(needed.host_bytes),
        "NVMe": show_bytes(needed.nvme_bytes) if needed.nvme_bytes else "",
        **speed,
    }


def _samples_per_second(candidate: Candidate, report: Report) -> str:
    return _number(report.cluster.groups / candidate.seconds_per_sample)


def _not_fitting(report: Report) -> list[str]:
    """Return lines on setups that do not fit, with reasons. If none fits, name the two that are closest to fitting."""
    rejected, cluster = [candidate for candidate in report.choice.table if candidate.rejected], report.cluster
    short = sorted((c for c in rejected if c.short), key=lambda c: c.footprint.device_bytes)
    lines = []
    if report.choice.chosen is None:
        short.sort(key=lambda c: c.footprint.excess(cluster))
        lines = [f"  {name_setup(c.setup)}: {c.rejected}" for c in short[:_NAMED]]
        if len(short) > _NAMED:
            lines.append(f"and {len(short) - _NAMED} more; --all prints every strategy")
    elif short:
        named = [f"{name_setup(c.setup)} ({c.rejected.partition(',')[0]})" for c in short]
        more = f", and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        lines.append(f"does not fit: {', '.join(named[:_NAMED])}{more}")
    reasons = Counter(c.rejected for c in rejected if not c.short)
    lines += [f"{count} not tried: {reason}" for reason, count in reasons.items()]
    return lines


def _print_all(report: Report) -> None:
    """Print all setups: as a table on a wide terminal, in two lines each on a narrow one, as plain lines elsewhere."""
    rows = [_row(candidate, report) for candidate in report.choice.table]
    styles = ["bold green" if row[0] else "dim" if row[-1] else "" for row in rows]
    if (width := terminal_width()) is not None and width < _WIDE:
        for (mark, strategy, *numbers, why), style in zip(rows, styles, strict=True):
            print_line(f"{mark or ' '} {strategy}{f': {why}' if why else ''}", style, wraps=True)
            named = zip(_HEAD[2:-1], numbers, strict=True)
            print_line(f"    {', '.join(f'{name} {number}' for name, number in named if number)}", style, wraps=True)
    else:
        styled = [[(cell, style) for cell in row] for row, style in zip(rows, styles, strict=True)]
        print_rows(styled, _HEAD, unbroken=_HEAD[2:-1])


def as_json(report: Report) -> dict[str, Any]:
    """Return all numbers: bytes, seconds, elements."""
    chosen, activations = report.choice.chosen, report.work.activations
    return {
        "model": {
            "name": report.work.model.name,
            "parameters": report.work.model.elements,
            "trainable": report.work.model.trainable,
            "source": report.work.model.source,
        },
        "activations": {"source": activations.source, "sample_length": activations.sample_length},
        "optimizer": asdict(report.work.optimizer),
        "cluster": asdict(report.cluster),
        "margin": report.wanted.margin,
        "chosen": None if chosen is None else report.choice.table.index(chosen),
        "candidates": [_candidate(candidate) for candidate in report.choice.table],
        "what_if": None if report.what_if is None else _what_if(report.what_if),
    }


def _row(candidate: Candidate, report: Report) -> tuple[str, ...]:
    setup, needed = candidate.setup, candidate.footprint
    return (
        _CHOSEN if candidate is report.choice.chosen else "",
        name_setup(setup),
        f"{setup.micro_batch} × {setup.accumulation}",
        show_bytes(needed.device_bytes),
        show_bytes(needed.host_bytes) + (f" + {show_bytes(needed.nvme_bytes)} NVMe" if needed.nvme_bytes else ""),
        "" if candidate.rejected else f"{candidate.time.seconds:.3g} s",
        "" if candidate.rejected else _samples_per_second(candidate, report),
        candidate.rejected,
    )


def _memories(cluster: Cluster, margin: float) -> str:
    """Return the size of each memory, and how much of it the plan may use."""
    found = {"device": cluster.device_bytes, "CPU memory of a node": cluster.host_bytes, "NVMe": cluster.nvme_bytes}
    return "; ".join(f"{name}: {describe_budget(size, margin)}" for name, size in found.items() if size)


def _about_chosen(report: Report, *, every: bool) -> list[str]:
    chosen, cluster = report.choice.chosen, report.cluster
    if chosen is None:
        return ["", f"nothing fits with {report.wanted.margin:.0%} of each memory left free"]
    needed = chosen.footprint
    batch = chosen.setup.micro_batch * chosen.setup.accumulation * cluster.groups
    fastest = min(c.seconds_per_sample for c in report.choice.table if not c.rejected)
    is_fastest = chosen.seconds_per_sample <= fastest * (1 + 1e-8)
    which = "the fastest that fits" if is_fastest else f"the simplest within {ALIKE:.0%} of the fastest that fits"
    fits = f"{which} with {report.wanted.margin:.0%} left free"
    places = (
        (f"device, {needed.device_phase}", needed.device, needed.device_bytes, cluster.device_bytes),
        ("CPU memory", needed.host, needed.host_bytes, cluster.host_bytes),
        ("NVMe", needed.nvme, needed.nvme_bytes, cluster.nvme_bytes),
    )
    sizes = f"{batch} samples per optimizer step, micro-batch {chosen.setup.micro_batch} × {chosen.setup.accumulation}"
    lines = ["", f"{_CHOSEN} {name_setup(chosen.setup)}: {fits}; {sizes}"]
    lines += [
        f"  {place}: {_terms(terms, None if every else _TERMS)} = {show_bytes(size)} of {show_bytes(there)}"
        for place, terms, size, there in places
        if size
    ]
    seconds = ", ".join(f"{name} {value:.3g} s" for name, value in chosen.time.terms.items())
    if cluster.device_name or every:
        lines.append(f"  step: {seconds} = {chosen.time.seconds:.3g} s")
    else:
        lines.append(f"  GPU model unknown: the order is for {UNNAMED}; --gpu names another")
    sources = f"activations: {report.work.activations.source}"
    lines.append(f"  sizes: {report.work.model.source}; {sources}" if every else f"  {sources}")
    assumed = _assumptions(report)
    if every:
        lines += [f"  {name} {source}" for name, source in assumed.items()]
    elif assumed:
        lines.append(f"  assumed (--all prints the reasons): {', '.join(assumed)}")
    return lines


def _assumptions(report: Report) -> dict[str, str]:
    """Return assumptions about the machines and their reasons, if they matter for a setup that fits."""
    cluster, fitting = report.cluster, [c for c in report.choice.table if not c.rejected]
    matters = {
        "network_bandwidth": cluster.nodes > 1,
        "adam_bandwidth": any(c.setup.offload_optimizer != "none" for c in fitting),
        **dict.fromkeys(("nvme_read", "nvme_write"), any(c.footprint.nvme_bytes for c in fitting)),
    }
    assumed = {name: source for name, source in cluster.sources.items() if source.startswith("assumed")}
    return {name: source for name, source in assumed.items() if matters.get(name, True)}


def _about_what_if(report: Report) -> list[str]:
    if report.what_if is None:
        return []
    lines = ["", "any one of these changes is enough:"] if report.what_if.changes else []
    lines += [f"  {_as_flag(change.what)}: {name_setup(change.chosen.setup)}" for change in report.what_if.changes]
    lines += ["memory saved on each device by:"] if report.what_if.savings else []
    lines += [f"  {what}: {show_bytes(size)}" for what, size in report.what_if.savings]
    largest = report.what_if.largest_elements
    lines.append(f"the largest model of this shape that fits: {show_count(largest) if largest else 'none'}")
    return lines


def _as_flag(change: str) -> str:
    """Return a change as the flag to leave out, if the change frees a fixed field; otherwise unchanged."""
    field, fixed, value = change.partition(" free instead of ")
    if not fixed:
        return change
    shown = "" if field == "activation_checkpointing" else f" {value}"
    negated = "no_" if value == "False" else ""
    return f"without --{negated}{_FLAGS.get(field, field)}{shown}"


def _terms(terms: Mapping[str, int], most: int | None) -> str:
    """Return terms as a sum, the largest first. Terms beyond `most` are combined into one."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    shown = ordered if most is None or len(ordered) <= most + 1 else ordered[:most]
    if rest := sum(size for _, size in ordered[len(shown) :]):
        shown = [*shown, ("others", rest)]
    return " + ".join(f"{name} {show_bytes(size)}" for name, size in shown)


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
    savings = [{"what": what, "bytes": size} for what, size in found.savings]
    return {"changes": changes, "largest_parameters": found.largest_elements, "savings": savings}


_Device = Literal["auto", "none", "cpu", "nvme"]


_model, _machines = options_of("The model"), options_of("The machines")
_training, _output = options_of("Fixed choices"), options_of("Output")
_SOURCE: Final = (
    "A transformers model's folder or config.json, a folder of *.safetensors, a name on the Hugging Face hub, or "
    "module:function."
)
_TRACE: Final = "Trace the model's activations, which imports torch; otherwise use a formula for decoders."
_RECOMPUTE: Final = "Recompute every block in the backward; default: the faster choice."
_OVERLAP: Final = "Reduce gradients during the backward, at stages 2 and 3; default: the faster choice."
_SHARED: Final = "Processes that share each sample, each with a part of every sequence."
_WHAT_IF: Final = "Print what to change if nothing fits, and the largest model that fits."

_Text = str | None
_Count = int | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `zero-plugin plan`."""

    model: Annotated[_Text, typer.Argument(metavar="MODEL", help=_SOURCE)] = None
    params: Annotated[_Text, _model("Parameters of a decoder, e.g. 7B.")] = None
    hidden_size: Annotated[_Count, _model("Hidden size of the decoder.", min=1)] = None
    layers: Annotated[_Count, _model("Number of layers.", min=1)] = None
    vocabulary: Annotated[_Count, _model("Size of the vocabulary; default: 32000.", min=1)] = None
    heads: Annotated[_Count, _model("Attention heads; default: one per 128 of hidden size.", min=1)] = None
    kv_heads: Annotated[_Count, _model("Heads of keys and values; default: as --heads.", min=1)] = None
    intermediate: Annotated[_Count, _model("Hidden size of the MLP.", min=1)] = None
    sequence_length: Annotated[_Count, _model(LENGTH, min=1)] = None
    trace: Annotated[bool, _model(_TRACE, "--trace/--no_trace")] = True
    gpu: Annotated[_Text, _machines("A known GPU, e.g. A100-80GB; default: this machine's.")] = None
    gpu_memory: Annotated[_Text, _machines("Memory of each GPU, e.g. 24GiB.", metavar="SIZE")] = None
    host_memory: Annotated[_Text, _machines("CPU memory of each machine, e.g. 64GiB.", metavar="SIZE")] = None
    nvme: Annotated[_Text, _machines("Free NVMe space of each machine, e.g. 2TB.", metavar="SIZE")] = None
    gpus: Annotated[_Count, _machines("GPUs of each machine.", min=1)] = None
    nodes: Annotated[_Count, _machines("Number of machines.", min=1)] = None
    network: Annotated[
        _Text, _machines("Bandwidth of each machine's network, e.g. 400Gb; default: 200Gb.", metavar="SIZE")
    ] = None
    precision: Annotated[Literal["no", "fp16", "bf16"], _training("Dtype of the computation.", "--mixed_precision")] = (
        "bf16"
    )
    optimizer: Annotated[str, _training("AdamW, Adam, Lion, Adagrad, SGD, …")] = "AdamW"
    global_batch: Annotated[_Count, _training("Samples per optimizer step, on all GPUs.", min=1)] = None
    every_batch: Annotated[bool, _training("Find the largest micro-batch exactly, not as a power of two.")] = False
    micro_batch: Annotated[_Count, _training("Samples per GPU and backward.", min=1)] = None
    accumulation: Annotated[
        _Count, _training("Micro-batches per optimizer step.", "--gradient_accumulation_steps", min=1)
    ] = None
    zero_stage: Annotated[
        Literal["auto", "ddp", "0", "1", "2", "3"], _training("The ZeRO stage; ddp: without ZeRO.")
    ] = "auto"
    offload_optimizer: Annotated[_Device, _training("Device for optimizer states.", "--offload_optimizer_device")] = (
        "auto"
    )
    offload_param: Annotated[_Device, _training("Device for parameters.", "--offload_param_device")] = "auto"
    ratio: Annotated[float | None, _training("Fraction of the optimizer states that is offloaded.", min=0, max=1)] = (
        None
    )
    activation_checkpointing: Annotated[
        bool | None, _training(_RECOMPUTE, "--activation_checkpointing/--no_activation_checkpointing")
    ] = None
    shared_by: Annotated[int, _training(_SHARED, "--sequence_parallel_size", min=1)] = 1
    overlap_comm: Annotated[bool | None, _training(_OVERLAP, "--overlap_comm/--no_overlap_comm")] = None
    margin: Annotated[float, _training("Fraction of each memory that stays free.", min=0, max=0.9)] = 0.1
    every: Annotated[bool, _output("Print every strategy, and why it is not taken.", "--all")] = False
    json: Annotated[bool, _output("Print all numbers as JSON.")] = False
    what_if: Annotated[bool, _output(_WHAT_IF)] = False
    picture: Annotated[Path | None, _output("Draw the memory of every strategy: FILE.png, .svg or .pdf.")] = None
    output: Annotated[Path | None, _output("Write the chosen strategy as a config: FILE.yaml or FILE.json.")] = None
    nvme_path: Annotated[_Text, _output("Folder for NVMe offload, for --output.", metavar="PATH")] = None
    quiet: Annotated[bool, _output("Print nothing but warnings and errors if a strategy fits.", "--quiet", "-q")] = (
        False
    )

    @property
    def source(self) -> ModelSource:
        """The model, by its location or by its sizes.

        Raises:
            ConfigError: `--params` is not a count.
        """
        parameters = require_count("--params", self.params, "7B, 350M or 1500000000")
        return ModelSource(parameters=parameters, **self._named_as_in(ModelSource))

    @property
    def wanted(self) -> Wanted:
        """The fixed fields: options with the name of a field of `Wanted` that are not `auto`, and the stage."""
        fixed = {name: value for name, value in self._named_as_in(Wanted).items() if value != "auto"}
        typed = self.zero_stage
        stage: Any = None if typed == "auto" else int(typed) if typed.isdecimal() else typed
        return Wanted(stage=stage, ddp=self.output is None or self.output.suffix != ".json", **fixed)

    def _named_as_in(self, record: type[Any]) -> dict[str, Any]:
        own = {field.name for field in fields(self)}
        return {field.name: getattr(self, field.name) for field in fields(record) if field.name in own}

    def find_cluster(self) -> Cluster:
        """Return the machines that the options describe, or this machine if it has a GPU and the options name none.

        Raises:
            ConfigError: an amount of memory is invalid, or the memory of a GPU is not known.
        """
        texts = {"gpu_memory": self.gpu_memory, "host_memory": self.host_memory, "nvme": self.nvme}
        sizes = {name: None if text is None else require_bytes(f"--{name}", text) for name, text in texts.items()}
        here = None
        if self.gpu is None and sizes["gpu_memory"] is None and has_gpu_driver():
            from zero_plugin.plan.speeds import measure_cluster  # imports torch

            here = measure_cluster(self.gpus, self.nodes or 1)
        network = None if self.network is None else require_bandwidth("--network", self.network)
        found = state_cluster(gpu=self.gpu, gpus=self.gpus, nodes=self.nodes, network=network, here=here, **sizes)
        if (problem := unequal_sequence_groups(self.shared_by, found.processes)) is not None:
            raise ConfigError([Problem("--sequence_parallel_size", "", *problem)])
        return replace(found, shared_by=self.shared_by)


@with_options(Options)
def plan(**typed: Any) -> None:
    """Print the memory and time that each strategy needs to train MODEL, and choose the fastest that fits.

    Nothing is trained and no weight is loaded. The machines may be others than this one. Exit code: 0 if a strategy
    fits, 1 if none fits, 2 for invalid input.
    """
    options = typed_options(Options, typed)
    show_messages(quiet=options.quiet, prefix="")
    source = options.source
    if source.model is not None:
        find_source(source)  # first, to report a wrong name before the slow steps
    cluster, wanted = options.find_cluster(), options.wanted
    if options.picture is not None:
        check_picture(options.picture)  # early, before the config file is written
    with garbage_collection_paused():
        model, activations = open_model(source, options.sequence_length, wanted.precision)
    if (problem := unequal_heads(options.shared_by, model.heads)) is not None:
        raise ConfigError([Problem("--sequence_parallel_size", "", *problem)])
    activations = activations.of_a_part(options.shared_by)
    optimizer = optimizer_sizes(options.optimizer, fused=True)
    if not is_known(optimizer.name):
        message = f"optimizer {optimizer.name} is unknown: assuming that it keeps {optimizer.states} tensors, as Adam"
        print(printable(message), file=sys.stderr)
    work = Workload(model, activations, optimizer)
    choice = make_plan(work, cluster, wanted)
    changed = partial(changed_activations, source, options.sequence_length, wanted.precision)
    answers = what_if(work, cluster, wanted, changed) if options.what_if or choice.chosen is None else None
    report = Report(work, cluster, wanted, choice, answers)
    written = []
    if options.output is not None and choice.chosen is not None:
        write_plan(options.output, choice.chosen, cluster, optimizer.name, options.nvme_path)
        written.append(options.output)
    if options.picture is not None:
        draw_plan(options.picture, choice, cluster, report.headline, options.margin)
        written.append(options.picture)
    if options.json:
        print_json(as_json(report))
    elif choice.chosen is None or not options.quiet:
        print_report(report, written, every=options.every)
    if choice.chosen is None:
        raise typer.Exit(1)
