"""`zero-plugin explain`: print every value that a run would use, with its origin."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Final, Literal, TypeAlias

import typer

from zero_plugin.cli.launch_flags import LENGTH, options_of, typed_flags, typed_options, with_launch_flags, with_options
from zero_plugin.cli.output import print_json, print_line, print_rows
from zero_plugin.config.document import Document
from zero_plugin.config.keys import TRAINING, LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, asks_for_tpu, launch_settings
from zero_plugin.config.read import STANDARD_INPUT
from zero_plugin.config.resolve.facts import (
    Facts,
    LoopFacts,
    MachineFacts,
    ModelFacts,
    OptimizerFacts,
    Resolved,
    Row,
    SchedulerFacts,
    StrategyName,
    list_defaults,
    list_values,
    unset_row,
)
from zero_plugin.config.resolve.resolve import check_sequence_groups, resolve
from zero_plugin.config.tree import AUTO, KeyPath, dotted, show
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.build import with_plan
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.machine.hardware import has_gpu_driver
from zero_plugin.plan.model_source import probe_model_folder

Device: TypeAlias = Literal["cpu", "cuda", "xla"]

_FIRST: Final = ("launch", "precision", "batch", "zero_optimization", "optimizer", "scheduler")
_SECTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("mixed_precision", "fp16", "bf16", "torch_autocast", "data_types"), "precision"),
    **{key.name: "batch" for key in TRAINING if key.filled_by == "loop"},
    "scheduler_counts": "scheduler",
}
_STYLES: Final = {"flag": "cyan", "code": "cyan", "rule": "green", "default": "dim", "open": "yellow", "unset": "dim"}

# By key: the option that sets a value which only a run determines. Keys without an option need --set.
_OPTIONS: Final = {key.name: key.option for key in TRAINING if key.option}


@dataclass(frozen=True, slots=True)
class Explained:
    """One document, resolved as far as possible."""

    document: Document
    facts: Facts
    resolved: Resolved
    rows: Sequence[Row]
    assumed: str = ""  # why this device was assumed; "" if an option or a key names the device

    @property
    def name(self) -> str:
        """The files read, for messages."""
        return ", ".join(self.document.sources) or "no file"

    @property
    def headline(self) -> str:
        """One line with the files, the strategy and the devices."""
        machine = self.facts.machine
        path = "DeepSpeed" if self.facts.strategy == "deepspeed" else self.facts.strategy
        where = f"{self.name}: {path} on {machine.all_processes} × {machine.accelerator}"
        return where + (f", assumed: {self.assumed} (--accelerator)" if self.assumed else "")


_fact = options_of("Values that a run determines")
_FILE: Final = "Launch YAML or DeepSpeed JSON, or - for standard input; default: launch's."
_FORMAT: Final = "A table, JSON, or the JSON that DeepSpeed would get."
_ALL: Final = "Also show keys with DeepSpeed's defaults."
_MODEL: Final = "Folder of a transformers model: config.json, headers of *.safetensors."


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `zero-plugin explain` in addition to the launch flags."""

    files: Annotated[list[str] | None, typer.Argument(metavar="FILE", help=_FILE)] = None
    diff: Annotated[bool, typer.Option("--diff", help="Show only values that differ between two files.")] = False
    output: Annotated[Literal["table", "json", "deepspeed"], typer.Option("--format", help=_FORMAT)] = "table"
    everything: Annotated[bool, typer.Option("--all", help=_ALL)] = False
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the file; repeatable.")
    ] = None
    world_size: Annotated[int | None, _fact("Processes; default: num_processes or 1.", min=1)] = None
    accelerator: Annotated[
        Literal["cpu", "cuda"] | None, _fact("Device of the workers; default: what the file needs, or this machine's.")
    ] = None
    micro_batch: Annotated[int | None, _fact("The training DataLoader's batch size.", min=1)] = None
    lr: Annotated[float | None, _fact("The optimizer's learning rate.", min=0)] = None
    weight_decay: Annotated[float | None, _fact("The optimizer's weight decay.", min=0)] = None
    steps: Annotated[int | None, _fact("DummyScheduler's total_num_steps.", min=1)] = None
    warmup_steps: Annotated[int | None, _fact("DummyScheduler's warmup_num_steps.", min=0)] = None
    hidden_size: Annotated[int | None, _fact("The model's hidden size.", min=1)] = None
    model: Annotated[str | None, _fact(_MODEL, metavar="PATH")] = None
    sequence_length: Annotated[int | None, _fact(LENGTH, min=1)] = None

    @property
    def facts(self) -> Facts:
        """The options' facts of a run. 0 processes means the document's number.

        Raises:
            ConfigError: the folder has no model, or its size is unknown.
        """
        given = {"lr": self.lr, "weight_decay": self.weight_decay}
        given = {name: value for name, value in given.items() if value is not None}
        optimizer = OptimizerFacts(given=given, placeholder=True, given_by="the command line") if given else None
        scheduler = SchedulerFacts(True, self.steps, self.warmup_steps, given_by="the command line")
        return Facts(
            loop=LoopFacts(self.micro_batch, "--micro_batch" if self.micro_batch else ""),
            machine=MachineFacts(processes=self.world_size or 0),
            model=_model_facts(self.model, self.hidden_size),
            optimizer=optimizer,
            scheduler=None if self.steps is None and self.warmup_steps is None else scheduler,
            complete=False,
        )


@with_launch_flags("config_file", "module", "no_python", "dry_run", "rdzv_endpoint", "model", "sequence_length")
@with_options(Options)
def explain(ctx: typer.Context, **typed: Any) -> None:
    """Resolve each FILE as far as possible without a run, and print every value with its origin.

    A value that only a run determines is shown as open, with the option that sets the value here. Exit code 2:
    contradictions, or fields that no run could fill.
    """
    options = typed_options(Options, typed)
    files: list[str | None] = list(options.files or [])
    if len(files) < (2 if options.diff else 1):
        files.insert(0, None)  # None: the file that `launch` would use
    if files.count("-") > 1:
        raise typer.BadParameter("standard input can be read once; name a file.", param_hint="FILE")
    if options.diff and len(files) != 2:
        raise typer.BadParameter("Name two files.", param_hint="--diff")
    if options.output == "deepspeed" and len(files) > 1:
        raise typer.BadParameter("Name one file.", param_hint="--format deepspeed")
    if options.sequence_length is not None and options.model is None:
        message = "it has an effect only with --model. Add --model FOLDER."
        raise typer.BadParameter(message, param_hint="--sequence_length")
    facts, flags = options.facts, typed_flags(ctx)
    if options.diff:
        options = replace(options, everything=False)
    explained = [_explain_file(file, flags, options, facts) for file in files]
    if options.diff:
        ours, theirs = explained
        print_difference(ours, theirs, as_json=options.output == "json")
    elif options.output == "deepspeed":
        print_json(_deepspeed_config(explained[0]))
    elif options.output == "json":
        found = [_as_json(one) for one in explained]
        print_json(found if len(found) > 1 else found[0])
    else:
        for number, one in enumerate(explained):
            if number:
                print_line("")
            print_table(one)


def _explain_file(file: str | None, flags: Mapping[str, str | bool], options: Options, facts: Facts) -> Explained:
    """Resolve one file with the facts that are known without a run.

    Args:
        file: None for the file that `launch` would use, `-` for standard input.
        flags: launch flags, in the format of `document_from_flags`.
        options: `accelerator` None means the device that the file requests. Without a request, take this machine's
            device, or a GPU if the file cannot run on a CPU. `model` is for a plan, if the document waits for one and
            the machines' memory is known.
        facts: facts of the run. 0 processes means the document's number.

    Raises:
        ConfigError: all problems that no run could fix.
    """
    content = sys.stdin.buffer.read() if file == "-" else None
    if file is not None:
        flags = {**flags, "config_file": file if content is None else STANDARD_INPUT}
    document = document_from_flags(flags, options.settings or [], content)
    _check_processes(document, facts.machine.processes)
    settings = launch_settings(document)
    kind, assumed = _choose_device(document, settings, options.accelerator)
    processes = facts.machine.processes or settings.num_processes or 1
    strategy: StrategyName = "xla" if kind == "xla" else "ddp" if processes > 1 else "single"
    if asks_for_deepspeed(document, settings):
        strategy = "deepspeed"
    shared = check_sequence_groups(document, processes)

    def explained(kind: Device, assumed: str) -> Explained:
        machine = MachineFacts(accelerator=kind, processes=processes // shared, fp16=kind == "cuda", shared_by=shared)
        there = replace(facts, machine=machine, strategy=strategy)
        there = with_plan(document, there, options.model, options.sequence_length)
        resolved = resolve(document, there)
        rows = [*list_values(document, resolved), *(list_defaults(resolved) if options.everything else ())]
        return Explained(document, there, resolved, rows, assumed)

    try:
        return explained(kind, assumed)
    except ConfigError as error:
        if kind != "cpu" or not assumed:
            raise
        first = error.problems[0]
        return explained("cuda", f"{first.key or 'the file'} at {first.where} needs a GPU")


def _choose_device(document: Document, settings: LaunchSettings, named: Device | None) -> tuple[Device, str]:
    """Choose the workers' device. Return it, and why it is assumed ("" if an option or a key names the device)."""
    if asks_for_tpu(settings):
        return "xla", ""
    if named is not None or asks_for_cpu(settings):
        return named or "cpu", ""
    if has_gpu_driver():
        return "cuda", "this machine has a GPU"
    for key, value in (("distributed_type", "MULTI_GPU"), ("gpu_ids", settings.gpu_ids)):
        if value != "all" and document.launch.value(key) == value:
            return "cuda", f"{key} at {document.launch.entries[key,].origin.where} requests GPUs"
    return "cpu", "this machine has no GPU"


def _check_processes(document: Document, world_size: int) -> None:
    """Refuse a `--world_size` that contradicts `--num_processes`. A file's number of processes is overridden."""
    typed = document.launch.get("num_processes")
    if world_size and typed and typed.origin.kind == "flag" and typed.value not in (None, AUTO, world_size):
        message = f"{world_size}, but {typed.origin} says {typed.value}"
        raise ConfigError([Problem("--world_size", "", message, "Keep one of the two.")])


def _model_facts(folder: str | None, hidden_size: int | None) -> ModelFacts | None:
    found = None if folder is None else probe_model_folder(folder, "--model")
    if hidden_size is not None:
        return replace(found or ModelFacts(), hidden_size=hidden_size, hidden_size_reason="--hidden_size")
    if found is not None and found.hidden_size is None and not found.parameters:
        message = f"the size of {folder} is unknown: config.json has no hidden size, and there are no weights"
        raise ConfigError([Problem("--model", "", message, "Give --hidden_size too.")])
    return found


def _as_json(explained: Explained) -> dict[str, Any]:
    facts = explained.facts
    return {
        "files": list(explained.document.sources),
        "strategy": facts.strategy,
        "accelerator": facts.machine.accelerator,
        "accelerator_assumed": explained.assumed,
        "processes": facts.machine.all_processes,
        "values": [row.as_json() for row in explained.rows],
        "notes": [note.headline for note in explained.document.notes],
    }


def _deepspeed_config(explained: Explained) -> dict[str, Any]:
    """Return the JSON that DeepSpeed would get, without open fields.

    Raises:
        ConfigError: a field is open, or the run would not use DeepSpeed.
    """
    where = explained.name
    if explained.facts.strategy != "deepspeed":
        fix = "Add --use_deepspeed, or name a file that requests ZeRO."
        raise ConfigError([Problem(where, "", "does not request DeepSpeed, so DeepSpeed would get no config", fix)])
    open_rows = [row for row in explained.rows if row.kind == "open" and row.path[0] != "scheduler"]
    if open_rows:
        raise ConfigError([_still_open(row, where) for row in open_rows])
    return explained.resolved.deepspeed_config()


def _still_open(row: Row, where: str) -> Problem:
    key = dotted(row.path)
    option = _OPTIONS.get(key, f"--set {key}=…")
    return Problem(row.where or where, key, f"is open: it waits for the {row.reason}", f"Give {option}.")


# ---- output ----------------------------------------------------------------------------------------------------------


def print_table(explained: Explained) -> None:
    """Print every value with its origin, then the notes."""
    launch_keys = set(explained.document.launch) | set(explained.resolved.launch)
    sections: dict[str, list[tuple[str, str, str, str]]] = {}
    for row in explained.rows:
        section = _section(row.path, is_launch=row.path in launch_keys)
        hint = _OPTIONS.get(dotted(row.path), "--set") if row.kind == "open" else ""
        line = (dotted(row.path), _value(row), _origin(row) + (f" ({hint})" if hint else ""), _STYLES.get(row.kind, ""))
        sections.setdefault(section, []).append(line)
    ordered = sorted(sections, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    waiting = sum(row.kind == "open" for row in explained.rows)
    keys = {dotted(row.path) for row in explained.rows}
    logged = [line for line in explained.resolved.logged if line.partition(" = ")[0] not in keys]
    notes = [*(note.headline for note in explained.document.notes), *logged]
    if waiting:
        notes.append(f"{waiting} open: a run determines them; here, set them with the options in parentheses")
    _print_sections(explained.headline, {name: sections[name] for name in ordered}, notes)


def print_difference(ours: Explained, theirs: Explained, *, as_json: bool) -> None:
    """Print the keys that two documents resolve to different values, with both values and their origins.

    A key that only one document has counts with DeepSpeed's default in the other.
    """
    sides = [{row.path: row for row in side.rows} for side in (ours, theirs)]
    pairs = []
    for path in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [
            side.get(path) or unset_row(path, explained.resolved.tree.value("optimizer", "type"))
            for side, explained in zip(sides, (ours, theirs), strict=True)
        ]
        if pair[0].value != pair[1].value or (pair[0].kind == "open") != (pair[1].kind == "open"):
            pairs.append((dotted(path), pair))
    names = [ours.name, theirs.name]
    if as_json:
        differences = [{"path": path, "values": [row.as_json() for row in pair]} for path, pair in pairs]
        print_json({"files": names, "differences": differences})
        return
    if not pairs:
        print_line(f"{names[0]} and {names[1]} resolve to the same values")
    widths = (max(map(len, names)) + 2, max((len(_value(row)) for _, pair in pairs for row in pair), default=0))
    for key, pair in pairs:
        print_line(key)
        print_rows(
            [(f"  {name}", _value(row), _origin(row)) for name, row in zip(names, pair, strict=True)], widths=widths
        )


def _section(path: KeyPath, *, is_launch: bool) -> str:
    if path[0] in _SECTIONS:
        return _SECTIONS[path[0]]
    if is_launch:
        return "launch"
    return path[0] if len(path) > 1 else "engine"


def _value(row: Row) -> str:
    if row.kind == "open" and row.value == "auto":
        return "open"
    return row.value if isinstance(row.value, str) else show(row.value)


def _origin(row: Row) -> str:
    """Describe a value's origin in a few words."""
    if row.kind == "open":
        return f"waits for {'' if row.reason.startswith('Dummy') else 'the '}{row.reason}"
    if row.kind in ("file", "flag", "code"):
        return _place(row.where)
    words = ["auto"] if row.was_auto else ["rule"] if row.kind == "rule" else []
    if row.kind != "rule" and "default" not in row.reason:
        words.append("DeepSpeed's default")
    return ": ".join([*words, row.reason])


def _place(where: str) -> str:
    """Shorten `folder/ds.json:12:5` to `ds.json:12`. The headline has the complete path."""
    found = re.fullmatch(r"([^:]*):(\d+):\d+", where)
    return f"{Path(found[1]).name}:{found[2]}" if found else where


def _print_sections(headline: str, sections: Mapping[str, Sequence[Sequence[str]]], notes: Sequence[str]) -> None:
    """Print lines of a key, its value, the value's origin and their style."""
    columns = get_terminal_size().columns if sys.stdout.isatty() else 0
    if columns:  # on a terminal, keys do not repeat the section's name, and long keys are wrapped
        sections = {
            name: [(key.removeprefix(f"{name}."), *rest) for key, *rest in lines] for name, lines in sections.items()
        }
    every = [line for lines in sections.values() for line in lines]
    keys, values = (max((len(line[column]) for line in every), default=0) for column in (0, 1))
    if columns:  # at least two fifths of the terminal stay free for the origins
        keys, values = min(keys, columns * 2 // 5), min(values, columns // 5)
    print_line(headline, "bold", wraps=True)
    for section, lines in sections.items():
        print_line(f"\n{section}", "bold")
        rows = [
            ("  " + "\n    ".join(_folded(key, keys)), (value, "" if style == "dim" else style), (origin, style))
            for key, value, origin, style in lines
        ]
        print_rows(rows, widths=(keys + 2, values))
    for number, note in enumerate(notes):
        print_line(f"{'' if number else chr(10)}note: {note}", "dim", wraps=True)


def _folded(name: str, width: int) -> list[str]:
    """Break a long name into lines of at most `width` characters, after an underscore or a dot."""
    lines: list[str] = []
    while len(name) > width:
        cut = max(name.rfind("_", 0, width), name.rfind(".", 0, width)) + 1 or width
        lines.append(name[:cut])
        name, width = name[cut:], width - 2 if not lines[1:] else width
    return [*lines, name]
