"""`zero-plugin checkpoint`: inspect, verify and convert checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.summary import (
    KINDS,
    Kind,
    ModelSummary,
    Summary,
    find_deepspeed,
    recognise,
    several_checkpoints,
    summarise,
)
from zero_plugin.checkpoint.verify import find_damage, find_wrong_files
from zero_plugin.cli.output import print_json, print_line, print_rows
from zero_plugin.config.amounts import require_bytes, show_bytes
from zero_plugin.distributed.messages import working
from zero_plugin.errors import CheckpointError, printable
from zero_plugin.tensors.safetensors_files import read_model_folder

# What to do with a folder that is not a checkpoint of this package.
_WHAT_TO_DO: Final[Mapping[Kind, str]] = {
    "model": "load_weights() reads it directly; `zero-plugin checkpoint import` makes a checkpoint for load_state()",
    "deepspeed": "zero-plugin checkpoint import {folder} OUT",
    "deepspeed_universal": "DeepSpeed loads it with checkpoint: {{load_universal: true}}; import does not support it",
    "pickled_model": "save its weights as safetensors first: model.save_pretrained(OUT)",
}


def _describe_other(folder: Path, kind: Kind) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Describe a folder that is not a checkpoint of this package. Return facts, and its tensors if not pickled."""
    facts: dict[str, Any] = {"is": KINDS[kind]}
    if kind == "deepspeed":
        facts |= _deepspeed_facts(find_deepspeed(folder) or folder)
    if kind != "model":
        return facts, []
    model = read_model_folder(folder)
    facts |= {
        "model": model.model_class,
        "tensors": len(model.places),
        "bytes": sum(place.size for place in model.places.values()),
        "types": sorted({place.type_name for place in model.places.values()}),
        "tied": len(model.tied),
    }
    return facts, [_listed("weight", name, place) for name, place in model.places.items()]


def _show_other(folder: Path, kind: Kind, facts: Mapping[str, Any]) -> None:
    print_line(f"{folder}: {facts['is']}")
    for name, value in list(facts.items())[1:]:  # the first fact is in the line above
        shown = show_bytes(value) if name == "bytes" else ", ".join(value) if isinstance(value, list) else value
        print_line(f"  {name:<10} {shown}")
    if kind in _WHAT_TO_DO:
        print_line(f"  {_WHAT_TO_DO[kind].format(folder=folder)}")


def _deepspeed_facts(folder: Path) -> dict[str, Any]:
    """Derive facts from file names only: the files are pickles, and opening them needs torch."""
    models = list(folder.glob("*_model_states.pt"))
    ranks = len(list(folder.glob("*_optim_states.pt")))
    is_partitioned = any(path.name.startswith("zero_pp_rank_") for path in models)
    return {
        "folder": str(folder),
        "ZeRO stage": "3" if is_partitioned else "1 or 2" if ranks else "0",
        "processes": str(ranks) if ranks else "not stored",
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
    }


def _encode(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "folder": str(summary.folder)}


def _listed(kind: str, name: str, place: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "shape": list(place.shape), "type": place.type_name, "file": place.file}


def _show_checkpoint(summary: Summary) -> None:
    rows = {
        "step": "not trained" if summary.step is None else f"{summary.step:,}",
        "size": f"{show_bytes(summary.bytes)} in {len(summary.files)} files",
        "precision": summary.precision,
        "written by": _written_by(summary.topology),
        "at": summary.created,
        "versions": ", ".join(f"{name} {found}" for name, found in summary.versions.items() if found),
    }
    _print_table(str(summary.folder), (), [[name, str(value)] for name, value in rows.items() if value])
    for model in summary.models:
        _show_model(model)
    _print_table("", ("file", "size"), [[path, show_bytes(size)] for path, size in summary.files.items()])
    if summary.damage:
        print_line(f"\ndamaged: {summary.damage}")


def _show_model(model: ModelSummary) -> None:
    total = model.trained + model.frozen
    words = [f"{total:,} parameters and buffers ({model.trained:,} trained, {model.frozen:,} frozen or buffers)"]
    words += [f"{model.tied} tied names"] if model.tied else []
    words += [model.algorithm] if model.algorithm else []
    kinds = [[kind.kind, str(kind.tensors), show_bytes(kind.bytes), ", ".join(kind.types)] for kind in model.kinds]
    _print_table(f"\n{model.kind}: {', '.join(words)}", ("kind", "tensors", "size", "types"), kinds)


def _show_several(folder: Path, summaries: Sequence[Summary]) -> None:
    rows = [
        [
            summary.folder.name,
            "" if summary.step is None else f"{summary.step:,}",
            show_bytes(summary.bytes) if summary.bytes else "",
            summary.created or "",
            f"damaged: {summary.damage}" if summary.damage else _written_by(summary.topology),
        ]
        for summary in summaries
    ]
    _print_table(str(folder), ("checkpoint", "step", "size", "at", "written by"), rows)


def _written_by(topology: Mapping[str, Any]) -> str:
    phrases = {
        "imported_from": "imported from {}",
        "strategy": "{}",
        "zero_stage": "ZeRO stage {}",
        "optimizer_on": "optimizer on {}",
        "parameters_on": "parameters on {}",
        "processes": "{} process" if topology.get("processes") == 1 else "{} processes",
        "run": "run {}",
    }
    return ", ".join(phrase.format(topology[key]) for key, phrase in phrases.items() if key in topology)


def _print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_line(title, "bold")
    print_rows(rows, head, to_the_right=("size", "tensors", "step"))


def _verify(folder: Path) -> bool:
    """Read a checkpoint and print what differs. Return whether the checkpoint is complete."""
    damages: list[str] = []
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        damages = [str(error)]
    else:
        wrong = find_wrong_files(folder, manifest)
        total = sum(size for path, (size, _) in manifest.files.items() if path not in wrong)

        from zero_plugin.checkpoint.load import find_differences

        with working(f"reading {folder.name}", total) as work:
            differing = find_differences(folder, manifest, work.advance, skipped=wrong)
            damages = [*wrong.values(), *(f"{folder}/{line}" for line in differing)]
    if damages:
        print_line("\n".join([f"{folder}: damaged", *(f"  {line}" for line in damages)]))
    else:
        print_line(f"{folder}: complete ({len(manifest.files)} files, {show_bytes(total)})")
    return not damages


_Dir = Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, or a folder of several.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="Path to write; must not exist without --overwrite.")]
_Overwrite = Annotated[bool, typer.Option(help="Replace OUT, if it is a checkpoint or a model.")]
_Shard = Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a weight file, e.g. 5GB.")]
_Trust = Annotated[bool, typer.Option(help="Build any class that DeepSpeed's files name, which may run any code.")]


def inspect(
    folder: _Dir,
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a checkpoint's content: step, size, parameters, and the run that wrote it.

    For a folder of several checkpoints, print a line for each. Also describe Hugging Face folders and DeepSpeed
    checkpoints. No tensor is read.
    """
    folder = _existing(folder)
    kind = recognise(folder)
    listed: list[dict[str, Any]] = []
    content: dict[str, Any]
    if kind == "checkpoint":
        summary = summarise(folder)
        if not summary.models and summary.damage:
            raise CheckpointError(summary.damage)
        content, show = _encode(summary), partial(_show_checkpoint, summary)
        models = read_manifest(folder).models if tensors else ()
        listed = [_listed(what, name, place) for model in models for (what, name), place in model.places.items()]
    elif kind == "several":
        summaries = [summarise(path) for path in several_checkpoints(folder)]
        content = {"checkpoints": [_encode(summary) for summary in summaries]}
        show = partial(_show_several, folder, summaries)
    elif kind is not None:
        content, listed = _describe_other(folder, kind)
        show = partial(_show_other, folder, kind, dict(content))
    else:
        legal = "\n".join(f"  {what}" for what in KINDS.values())
        raise CheckpointError(f"{folder} is none of these, by the names of its files:\n{legal}")
    if as_json:
        content |= {"tensors": listed} if tensors and kind != "several" else {}
        print_json({"folder": str(folder), "kind": kind, **content})
        return
    show()
    if tensors and listed:
        rows = [
            [t["kind"], t["name"], "×".join(map(str, t["shape"])) or "scalar", t["type"], t["file"]] for t in listed
        ]
        _print_table("", ("kind", "name", "shape", "type", "file"), rows)


def verify(folder: _Dir) -> None:
    """Read a checkpoint, compare it with its checksums, and name each tensor and file that differs.

    Exit code: 1 if the checkpoint is damaged, otherwise 0. In a folder of several checkpoints, all are read.
    """
    folder = _existing(folder)
    kind = recognise(folder)
    if kind not in ("checkpoint", "several"):
        what = "holds no checkpoint" if kind is None else f"is {KINDS[kind]}, which has no checksums"
        raise CheckpointError(f"{folder} {what}.\nName a checkpoint of save_state, or a folder of several.")
    found = {path: _verify(path) for path in ([folder] if kind == "checkpoint" else several_checkpoints(folder))}
    if all(found.values()):
        return
    if kind == "several":
        good = [path for path, is_complete in found.items() if is_complete]
    else:
        good = [path for path in several_checkpoints(folder.parent) if path != folder and find_damage(path) is None]
    print_line(f"the newest complete one: {good[-1]}" if good else f"no other in {folder.parent} is complete")
    raise typer.Exit(1)


def export(
    folder: _Dir,
    out: _Out,
    to: Annotated[
        Literal["hf", "single", "deepspeed_universal"],
        typer.Option(help="A model folder, one .safetensors file, or DeepSpeed's format."),
    ],
    dtype: Annotated[
        Literal["keep", "fp32", "bf16", "fp16"],
        typer.Option(help="Dtype of the weights; fp32: the fp32 master weights."),
    ] = "keep",
    max_shard_size: _Shard = "10GB",
    model: Annotated[int | None, typer.Option(help="Index of the model, from 0, if there are several.")] = None,
    overwrite: _Overwrite = False,
    trust_pickle: _Trust = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder or one file, or everything in DeepSpeed's universal format.

    DIR may also be a DeepSpeed checkpoint or a model folder. In a folder of several checkpoints, the newest complete
    one is read. The export needs no GPU, and only memory for one tensor.
    """
    if to == "deepspeed_universal" and dtype != "keep":
        raise typer.BadParameter(
            f"{dtype}: a universal checkpoint holds fp32 master weights; leave it out.", param_hint="--dtype"
        )
    target, source_folder = out.expanduser().absolute(), _existing(folder)

    from zero_plugin.checkpoint.convert import open_source
    from zero_plugin.checkpoint.convert.write import write_model, write_single_file, write_universal
    from zero_plugin.checkpoint.save_model import parse_dtype

    source = open_source(source_folder, model=model, trust_pickle=trust_pickle)
    wanted = None if dtype == "keep" else parse_dtype(dtype)
    size = source.bytes_to_write(wanted, weights_only=to != "deepspeed_universal")
    with working(f"writing {target.name}", size) as work:
        how: Any = {"overwrite": overwrite, "progress": work.advance}
        if to == "hf":
            limit = require_bytes("--max_shard_size", max_shard_size)
            write_model(source, target, dtype=wanted, max_shard_bytes=limit, **how)
        elif to == "single":
            write_single_file(source, target, dtype=wanted, **how)
        else:
            write_universal(source, target, **how)
    _print_conversion(source.folder, target, source.notes)


def import_(
    source_folder: Annotated[Path, typer.Argument(metavar="SRC", help="A DeepSpeed checkpoint or a model folder.")],
    out: _Out,
    max_shard_size: _Shard = "10GB",
    overwrite: _Overwrite = False,
    trust_pickle: _Trust = False,
) -> None:
    """Convert a DeepSpeed checkpoint or a Hugging Face folder to a checkpoint for load_state, on any topology.

    A DeepSpeed checkpoint (save_checkpoint, stages 0 to 3) gives weights, fp32 master weights, optimizer states,
    learning-rate schedule and counters. Pickles are read without running any code. A Hugging Face folder gives weights.
    """
    target, folder = out.expanduser().absolute(), _existing(source_folder)
    if recognise(folder) in ("checkpoint", "several"):
        raise CheckpointError(f"{folder} is {KINDS['checkpoint']} already: load_state() and load_weights() take it.")

    from zero_plugin.checkpoint.convert import open_source
    from zero_plugin.checkpoint.convert.write import write_checkpoint

    source = open_source(folder, trust_pickle=trust_pickle)
    limit = require_bytes("--max_shard_size", max_shard_size)
    with working(f"writing {target.name}", source.bytes_to_write(None, weights_only=False)) as work:
        write_checkpoint(source, target, max_shard_bytes=limit, overwrite=overwrite, progress=work.advance)
    _print_conversion(source.folder, target, source.notes)


def _existing(folder: Path) -> Path:
    path = folder.expanduser().absolute()
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}.\nName the folder of a checkpoint, or a folder of several.")
    return path


def _print_conversion(source: Path, target: Path, notes: Iterable[str]) -> None:
    print_line(f"{source} → {target}")
    for note in notes:
        print(printable(f"not converted: {note}"), file=sys.stderr)
