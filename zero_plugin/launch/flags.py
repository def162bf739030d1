"""Merge launch flags and the config file into one checked document, and write a first launch config.

The first launch config suits this machine and asks no questions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from zero_plugin.config.check import check_document
from zero_plugin.config.commented import write_config
from zero_plugin.config.document import Document, Said
from zero_plugin.config.find import default_config_file, find_config_file, overlay_flags, path_of, read_assignments
from zero_plugin.config.keys import ACCUMULATION, CLIPPING, CONFIG_FILE, FLAGS, KEYS, STAGE, ZERO_FIELDS
from zero_plugin.config.launch_settings import COMPILER_KEYS, COMPILER_PREFIX, ignored_keys
from zero_plugin.config.located import read_scalar
from zero_plugin.config.read import DEFAULT_STAGE, named_file, read_document
from zero_plugin.config.tree import AUTO, Entry, KeyPath, Origin, show
from zero_plugin.distributed.messages import show_messages
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.machine.hardware import Machine, look_at_machine

_logger = logging.getLogger(__name__)

# Keys that each switch sets: the device, and how the processes work together. `_on_cpu` does the rest for `--cpu`.
_SWITCHES: Final = {name: flag.sets for name, flag in FLAGS.items() if flag.sets}
_FILE_FLAG: Final = f"--{CONFIG_FILE.name}"


def document_from_flags(
    flags: Mapping[str, str | bool], assignments: Iterable[str] = (), content: bytes | None = None
) -> Document:
    """Read the config file, let the flags override it, and check the result.

    Args:
        flags: the typed values, by the flag's name with underscores.
        assignments: further keys and values in the format of `--set`.
        content: the config file's content if known. The flag then only gives the file's name.

    Raises:
        ConfigError: all problems of the file, of the flags, and between them.
    """
    if "config_file" not in flags and (found := find_config_file(os.environ)) is not None:
        try:
            return document_from_flags({**flags, "config_file": str(found)}, assignments)
        except ConfigError as error:
            raise ConfigError(_with_reason(error.problems, found)) from None
    document = Document()
    if "config_file" in flags:
        file = str(flags["config_file"])
        document = read_document(named_file(file) if content is None else file, content)
    zero_flags = [name for name in (*ZERO_FIELDS, CONFIG_FILE.name) if name in flags]
    if len(document.deepspeed) and not len(document.launch):  # a DeepSpeed JSON alone
        zero_flags.append("config_file")
    if CONFIG_FILE.name in flags:
        document = _with_training(document, read_document(str(flags[CONFIG_FILE.name])))
    problems = list(_contradictions(flags, document))
    document = overlay_flags(document, {**_said(flags), **read_assignments(assignments, "--set")})
    if zero_flags and not document.launch.value("distributed_type"):
        what = "a DeepSpeed config alone" if zero_flags[0] == "config_file" else f"--{zero_flags[0]}"
        requested = Entry("DEEPSPEED", Origin("rule", f"--{zero_flags[0]}", f"{what} requests ZeRO"))
        document = document.lay({("distributed_type",): requested})
    if "cpu" in flags:
        document = _on_cpu(document)
    reads_json = CONFIG_FILE.name in flags or "config_file" in zero_flags or len(document.sources) > 1
    on_zero = document.launch.value("distributed_type") == "DEEPSPEED"
    if on_zero and not reads_json and not document.deepspeed.has_section(*STAGE.path):
        document = document.lay({("deepspeed", *STAGE.path): DEFAULT_STAGE})
    notes = tuple(dict.fromkeys([*document.notes, *ignored_keys(document.launch)]))
    document = replace(document, notes=notes, problems=(*document.problems, *problems))
    return replace(document, notes=check_document(document))


def _with_reason(problems: Sequence[Problem], file: Path) -> list[Problem]:
    """Add to the first problem of an automatically found file why that file was read."""
    why = "It was read because no --config_file is given; name one, or write a new one with `zero-plugin config`."
    first = next((problem for problem in problems if problem.where.startswith(str(file))), None)
    return [replace(problem, fix=f"{problem.fix} {why}") if problem is first else problem for problem in problems]


def _with_training(document: Document, training: Document) -> Document:
    """Replace the training part of `document` by another's as a whole. Two configurations are never mixed by key."""
    sections = {path: where for path, where in document.sections.items() if path[0] != "deepspeed"}
    notes, problems = [*document.notes, *training.notes], [*document.problems, *training.problems]
    if len(document.deepspeed):
        old, new = document.sources[0], training.sources[0]
        message = f"{new} replaces the complete training part of {old}"
        notes.append(Problem(_FILE_FLAG, "", message, "", severity="note"))
    if len(training.launch):
        message = f"{training.sources[0]} is a launch config, not a DeepSpeed configuration"
        problems.append(Problem(_FILE_FLAG, "", message, "Name a DeepSpeed JSON here, or write --config_file."))
    return replace(
        document,
        deepspeed=training.deepspeed,
        sources=(*document.sources, *training.sources),
        sections={**sections, **training.sections},
        notes=tuple(notes),
        problems=tuple(problems),
    )


def _on_cpu(document: Document) -> Document:
    """Apply `--cpu`, which chooses the device only. Data parallelism moves to the CPU; ZeRO stays, with a note.

    An unset distributed type stays open, because the script may request ZeRO.
    """
    kind = document.launch.value("distributed_type")
    if kind not in (None, AUTO, "DEEPSPEED"):
        return overlay_flags(document, {("distributed_type",): ("--cpu", "MULTI_CPU")})
    if kind != "DEEPSPEED" and not document.deepspeed.has_section("zero_optimization"):
        return document
    message = "chooses the device only: ZeRO is requested, and runs on the CPU"
    return replace(document, notes=(*document.notes, Problem("--cpu", "", message, "", severity="note")))


def _said(flags: Mapping[str, str | bool]) -> Said:
    said: dict[KeyPath, tuple[str, Any]] = {}
    for name, text in flags.items():
        if name in _SWITCHES:
            new: dict[KeyPath, Any] = {(key,): value for key, value in _SWITCHES[name].items()}
        elif name.startswith(COMPILER_PREFIX):
            new = {(COMPILER_KEYS[0], name): _read(text)}
        elif name in KEYS:
            new = {path_of((name,)): _read(text)}
        else:  # a flag that names a file, or the program to run
            continue
        said |= {path: (f"--{name}", value) for path, value in new.items()}
    return said


def _read(text: str | bool) -> Any:
    """Convert a flag's text to a value, as in a config file."""
    return read_scalar(text) if isinstance(text, str) and text else text


def _contradictions(flags: Mapping[str, str | bool], document: Document) -> Iterator[Problem]:
    """Yield problems for flags that exclude each other, and for ZeRO flags in a run without ZeRO."""
    keep_one = "Keep one of the two."
    if "sequence_length" in flags and "model" not in flags:
        yield Problem("--sequence_length", "", "has no effect without --model", "Add --model, or leave it out.")
    if "module" in flags and "no_python" in flags:
        yield Problem("--module", "", "contradicts --no_python", keep_one)
    switches = [name for name in _SWITCHES if name in flags]
    typed = document.launch.get("distributed_type")
    if len(switches) > 1 and switches != ["cpu", "use_deepspeed"]:
        yield Problem(f"--{switches[0]}", "", f"contradicts --{switches[1]}", keep_one)
        return
    choosing = next((name for name in switches if "distributed_type" in _SWITCHES[name]), None)
    if choosing is not None:
        kind, chosen, fix = _SWITCHES[choosing]["distributed_type"], f"--{choosing}", "Leave one of the two out."
    elif typed is not None:
        kind, chosen = typed.value, f"distributed_type: {typed.value} at {typed.origin.where}"
        fix = "Add --use_deepspeed, or leave the flag out."
    else:
        return
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        return
    message = f"has no effect without ZeRO, and {chosen} requests a run without it"
    yield from (Problem(f"--{name}", "", message, fix) for name in ZERO_FIELDS if name in flags)
    stage = document.deepspeed.get(*STAGE.path)
    if CONFIG_FILE.name in flags and stage is not None and stage.value not in (None, 0):
        message = f"the stage of {show(stage.value)} at {stage.origin.where} {message}"
        yield Problem(_FILE_FLAG, "", message, fix)


def basic_values(machine: Machine, mixed_precision: str) -> dict[str, Any]:
    """Build a launch config in Accelerate's layout: ZeRO-2 on several GPUs, all devices of a TPU, or one process.

    ZeRO-2 instead of DDP, because ZeRO-2 sends as much data and keeps less. One process has nothing to partition.
    """
    if machine.tpu and not machine.gpus:
        return {"distributed_type": "XLA", "mixed_precision": mixed_precision}
    if machine.gpus < 2:
        alone = {"num_processes": 1, "use_cpu": machine.gpus == 0}
        return {"distributed_type": "NO", "mixed_precision": mixed_precision, **alone}
    return {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": mixed_precision,
        "num_processes": machine.gpus,
        "deepspeed_config": {STAGE.field: 2, ACCUMULATION.field: "auto", CLIPPING.field: "auto"},
    }


def best_precision(machine: Machine) -> str:
    """Return `bf16` for a TPU or for GPUs that compute in bf16, otherwise `no`."""
    if not machine.gpus:
        return "bf16" if machine.tpu else "no"
    from zero_plugin.plan.run_plan import probe_machine  # imports torch, as counting the GPUs did before

    return "bf16" if probe_machine("cuda").bf16 else "no"


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a launch config for this machine, like `accelerate.utils.write_basic_config`. Never replace a file.

    Args:
        mixed_precision: `no`, `fp16`, `bf16` or `auto`.
        save_location: the file; default: the file that `zero-plugin launch` reads without `--config_file`.

    Returns:
        The file's path; False, with a warning, if the file exists already.

    Raises:
        ConfigError: the precision is not legal.
        MachineError: the file cannot be written.
    """
    file = default_config_file(os.environ) if save_location is None else Path(save_location)
    if file.exists():
        show_messages()
        _logger.warning("%s exists and is left as it is. Run `zero-plugin config`, or name another file.", file)
        return False
    write_config(basic_values(look_at_machine(), mixed_precision.lower()), file)
    return file
