"""`zero-plugin explain`: every value that a run would use, and where it came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.cli.flags import typed_flags, with_launch_flags, with_options
from zero_plugin.cli.output import Explained, print_difference, print_table
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed, asks_for_tpu, launch_settings
from zero_plugin.config.read import STANDARD_INPUT
from zero_plugin.config.resolve.facts import (
    PLACEMENT,
    Facts,
    LoopFacts,
    MachineFacts,
    ModelFacts,
    OptimizerFacts,
    Row,
    SchedulerFacts,
    StrategyName,
    list_defaults,
    list_values,
)
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import AUTO, dotted
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.build import SizedModel, with_plan
from zero_plugin.launch.flags import document_from_flags
from zero_plugin.machine.hardware import has_gpu_driver
from zero_plugin.plan.model_source import probe_model_folder

# Which option brings what a run would, by the key that waits for it; any other waits for --set.
_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "--micro_batch"
    ),
    **dict.fromkeys(("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr"), "--lr"),
    "optimizer.params.weight_decay": "--weight_decay",
    "scheduler.params.total_num_steps": "--steps",
    "scheduler.params.warmup_num_steps": "--warmup_steps",
    **dict.fromkeys(
        (
            "zero_optimization.reduce_bucket_size",
            "zero_optimization.allgather_bucket_size",
            "zero_optimization.stage3_prefetch_bucket_size",
            "zero_optimization.stage3_param_persistence_threshold",
        ),
        "--hidden_size or --model",
    ),
    **dict.fromkeys(("zero_optimization.sub_group_size", "zero_optimization.offload_param.buffer_size"), "--model"),
    **dict.fromkeys(map(dotted, PLACEMENT), "--model with --gpu_memory"),
}


class _Format(str, Enum):
    table = "table"
    json = "json"
    deepspeed = "deepspeed"


class _Accelerator(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


def _fact(flag: str, text: str, least: float | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel="What a run would tell", min=least, show_default=False)


_FILE: Final = "Launch YAML or DeepSpeed JSON, or - for standard input; default: launch's."
_LENGTH: Final = "Tokens of a sample; default: 2048, or the model's positions if fewer."


@dataclass(frozen=True, slots=True)
class Options:
    """What can be typed beside the launch flags."""

    file: Annotated[str | None, typer.Argument(metavar="FILE", help=_FILE, show_default=False)] = None
    diff: Annotated[
        str | None, typer.Option("--diff", metavar="OTHER", help="Show only what OTHER resolves differently.")
    ] = None
    output: Annotated[
        _Format, typer.Option("--format", help="A table, JSON, or the JSON that DeepSpeed would be given.")
    ] = _Format.table
    everything: Annotated[bool, typer.Option("--all", help="Also DeepSpeed's defaults of keys nobody wrote.")] = False
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Lay a value over the file; repeatable.", show_default=False),
    ] = None
    world_size: Annotated[int | None, _fact("--world_size", "Processes; default: num_processes, else 1.", 1)] = None
    accelerator: Annotated[
        _Accelerator | None, _fact("--accelerator", "What the workers run on; default: what is here.")
    ] = None
    micro_batch: Annotated[int | None, _fact("--micro_batch", "The training DataLoader's batch size.", 1)] = None
    lr: Annotated[float | None, _fact("--lr", "The optimizer's learning rate.", 0)] = None
    weight_decay: Annotated[float | None, _fact("--weight_decay", "The optimizer's weight decay.", 0)] = None
    steps: Annotated[int | None, _fact("--steps", "DummyScheduler's total_num_steps.", 1)] = None
    warmup_steps: Annotated[int | None, _fact("--warmup_steps", "DummyScheduler's warmup_num_steps.", 0)] = None
    hidden_size: Annotated[int | None, _fact("--hidden_size", "The model's hidden size.", 1)] = None
    model: Annotated[
        str | None, _fact("--model", "Folder of a transformers model: config.json, headers of *.safetensors.")
    ] = None
    sequence_length: Annotated[int | None, _fact("--sequence_length", _LENGTH, 1)] = None

    @property
    def facts(self) -> Facts:
        """What is said of a run; processes of 0 are the document's.

        Raises:
            ConfigError: the folder holds no model, or tells no size.
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
def explain(ctx: typer.Context, options: Options) -> None:
    """Resolve FILE as far as it can be without a run, and print every value with where it came from.

    What only a run can tell is shown as open, with the option that would stand for it here. Contradictions, and fields
    that nothing could ever fill, are errors: exit code 2.
    """
    if options.file == options.diff == "-":
        raise typer.BadParameter("standard input can be read once; name a file.", param_hint="--diff")
    facts, flags = options.facts, typed_flags(ctx)
    ours = _explain_file(options.file, flags, options, facts)
    if options.diff is not None:
        theirs = _explain_file(options.diff, flags, replace(options, everything=False), facts)
        print_difference(ours, theirs, as_json=options.output is _Format.json)
    elif options.output is _Format.json:
        print(json.dumps(_as_json(ours), indent=2, ensure_ascii=False))
    elif options.output is _Format.deepspeed:
        print(json.dumps(_deepspeed_config(ours), indent=2))
    else:
        print_table(ours, _OPTIONS)


def _explain_file(file: str | None, flags: Mapping[str, str | bool], options: Options, facts: Facts) -> Explained:
    """Resolve one file against what is known without a run.

    Args:
        file: None for what `launch` would use, `-` for standard input.
        flags: launch flags, as `document_from_flags` takes them.
        options: its accelerator is None for what this machine seems to have; its model is for a plan where one is
            waited for and the machines' memory is known.
        facts: of the run; processes of 0 are the document's.

    Raises:
        ConfigError: everything that no run could fix.
    """
    accelerator: Literal["cpu", "cuda"] | None = None if options.accelerator is None else options.accelerator.value
    sized = None if options.model is None else SizedModel(options.model, options.sequence_length)
    content = sys.stdin.buffer.read() if file == "-" else None
    if file is not None:
        flags = {**flags, "config_file": file if content is None else STANDARD_INPUT}
    document = document_from_flags(flags, options.settings or [], content)
    _check_processes(document, facts.machine.processes)
    settings = launch_settings(document)
    on_tpu = asks_for_tpu(settings)
    guessed: Literal["cpu", "cuda"] = "cuda" if has_gpu_driver() and not asks_for_cpu(settings) else "cpu"
    kind: Literal["cpu", "cuda", "xla"] = "xla" if on_tpu else accelerator or guessed
    processes = facts.machine.processes or settings.num_processes or 1
    strategy: StrategyName = "xla" if on_tpu else "ddp" if processes > 1 else "single"
    if asks_for_deepspeed(document, settings):
        strategy = "deepspeed"
    machine = MachineFacts(accelerator=kind, processes=processes, fp16=kind == "cuda")
    facts = replace(facts, machine=machine, strategy=strategy)
    try:
        facts = with_plan(document, facts, sized)
        resolved = resolve(document, facts)
    except ConfigError as error:
        raise error if accelerator or on_tpu else _with_other_machine(document, facts, sized, error) from None
    rows = [*list_values(document, resolved), *(list_defaults(resolved) if options.everything else ())]
    return Explained(document, facts, resolved, rows)


def _check_processes(document: Document, world_size: int) -> None:
    """Refuse a `--world_size` beside another number of processes on the same command line; a file's it replaces."""
    typed = document.launch.get("num_processes")
    if world_size and typed and typed.origin.kind == "flag" and typed.value not in (None, AUTO, world_size):
        message = f"{world_size}, but {typed.origin} says {typed.value}"
        raise ConfigError([Problem("--world_size", "", message, "Keep one of the two.")])


def _with_other_machine(document: Document, facts: Facts, sized: SizedModel | None, error: ConfigError) -> ConfigError:
    """The error of a machine that was only guessed: what is right on a GPU, where this machine has none, says so."""
    on_gpu_facts = replace(facts, machine=replace(facts.machine, accelerator="cuda", fp16=True))
    try:
        resolve(document, with_plan(document, on_gpu_facts, sized))
        remaining: tuple[Problem, ...] = ()
    except ConfigError as on_gpu:
        remaining = on_gpu.problems
    hint = "Or give --accelerator cuda, if the workers have GPUs."
    return ConfigError([p if p in remaining else replace(p, fix=f"{p.fix} {hint}") for p in error.problems])


def _model_facts(folder: str | None, hidden_size: int | None) -> ModelFacts | None:
    if folder is None:
        return None if hidden_size is None else ModelFacts(hidden_size, "--hidden_size")
    found = probe_model_folder(folder, "--model")
    if hidden_size is None and found.hidden_size is None and not found.parameters:
        message = f"{folder} tells no size: its config.json states no width, and there are no weights"
        raise ConfigError([Problem("--model", "", message, "Give --hidden_size too.")])
    if hidden_size is None:
        return found
    return ModelFacts(hidden_size, "--hidden_size", found.largest_parameter, found.parameters)


def _as_json(explained: Explained) -> dict[str, Any]:
    facts = explained.facts
    return {
        "files": list(explained.document.sources),
        "strategy": facts.strategy,
        "accelerator": facts.machine.accelerator,
        "processes": facts.machine.processes,
        "values": [row.as_json() for row in explained.rows],
        "notes": [note.headline for note in explained.document.notes],
    }


def _deepspeed_config(explained: Explained) -> dict[str, Any]:
    """What DeepSpeed would be given; it has no open field.

    Raises:
        ConfigError: a field is open, or the run would not go through DeepSpeed.
    """
    where = explained.name
    if explained.facts.strategy != "deepspeed":
        fix = "Add --use_deepspeed, or name a file that asks for ZeRO."
        raise ConfigError([Problem(where, "", "asks for no DeepSpeed, so DeepSpeed would be given nothing", fix)])
    open_rows = [row for row in explained.rows if row.kind == "open" and row.path[0] != "scheduler"]
    if open_rows:
        raise ConfigError([_still_open(row, where) for row in open_rows])
    return explained.resolved.deepspeed_config()


def _still_open(row: Row, where: str) -> Problem:
    key = dotted(row.path)
    option = _OPTIONS.get(key, f"--set {key}=…")
    return Problem(row.where or where, key, f"is open: it waits for the {row.reason}", f"Give {option}.")
