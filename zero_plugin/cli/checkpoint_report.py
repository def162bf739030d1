"""Prints what checkpoints and other folders hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.model_folder import read_model_folder
from zero_plugin.checkpoint.recognise import KINDS, Kind, find_deepspeed, recognise, several_checkpoints
from zero_plugin.checkpoint.summary import ModelSummary, Summary, summarise
from zero_plugin.cli.amounts import show_bytes
from zero_plugin.errors import CheckpointError

__all__ = ["report"]


def report(folder: Path, *, tensors: bool, as_json: bool) -> None:
    """Print what a folder holds.

    Args:
        folder: is there.
        tensors: list each of them.
        as_json: one JSON document in place of tables.

    Raises:
        CheckpointError: it holds nothing that is known, or a damaged checkpoint.
    """
    kind = recognise(folder)
    if kind == "checkpoint":
        content, show = _describe_checkpoint(folder, tensors=tensors)
    elif kind == "several":
        summaries = [summarise(path) for path in several_checkpoints(folder)]
        content = {"checkpoints": [_encode(summary) for summary in summaries]}

        def show() -> None:
            _show_several(folder, summaries)
    elif kind is not None:
        content, show = _describe_other(folder, kind, tensors=tensors)
    else:
        legal = "\n".join(f"  {what}" for what in KINDS.values())
        raise CheckpointError(f"{folder} is none of these, by the names of its files:\n{legal}")
    if as_json:
        print(json.dumps({"folder": str(folder), "kind": kind, **content}, indent=2, ensure_ascii=False))
    else:
        show()


def _describe_checkpoint(folder: Path, *, tensors: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    summary = summarise(folder)
    if not summary.models and summary.damage:
        raise CheckpointError(summary.damage)
    listed = _listed_tensors(folder) if tensors else []

    def show() -> None:
        _show_checkpoint(summary)
        _show_tensors(listed)

    return _encode(summary) | ({"tensors": listed} if tensors else {}), show


def _describe_other(folder: Path, kind: Kind, *, tensors: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """A folder that is no checkpoint of this package: what it is, and what to do with it."""
    facts: dict[str, Any] = {"is": KINDS[kind]}
    listed: list[dict[str, Any]] = []
    hint = ""
    if kind == "model":
        model = read_model_folder(folder)
        sizes = [place.size for place in model.places.values()]
        facts |= {
            "model": model.model_class,
            "tensors": len(model.places),
            "bytes": sum(sizes),
            "types": sorted({place.type_name for place in model.places.values()}),
            "tied": len(model.tied),
        }
        hint = "load_weights() takes it as it is; `zero-plugin checkpoint import` makes a checkpoint for load_state()"
        if tensors:
            listed = [_listed("weight", name, place) for name, place in model.places.items()]
    elif kind == "deepspeed":
        facts |= _deepspeed_facts(find_deepspeed(folder) or folder)
        hint = f"zero-plugin checkpoint import {folder} OUT"
    elif kind == "deepspeed_universal":
        hint = "DeepSpeed loads it with checkpoint: {load_universal: true}; it is not imported"
    elif kind == "pickled_model":
        hint = "save its weights as safetensors first: model.save_pretrained(OUT)"

    def show() -> None:
        print(f"{folder}: {facts['is']}")
        for name, value in list(facts.items())[1:]:
            shown = show_bytes(value) if name == "bytes" else ", ".join(value) if isinstance(value, list) else value
            print(f"  {name:<10} {shown}")
        if hint:
            print(f"  {hint}")
        _show_tensors(listed)

    return facts | ({"tensors": listed} if tensors else {}), show


def _deepspeed_facts(folder: Path) -> dict[str, Any]:
    """From the names of its files alone: they are pickles, and opening them takes torch."""
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


def _listed_tensors(folder: Path) -> list[dict[str, Any]]:
    return [
        _listed(kind, name, place)
        for model in read_manifest(folder).models
        for (kind, name), place in model.places.items()
    ]


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
        print(f"\ndamaged: {summary.damage}")


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


def _show_tensors(listed: Iterable[Mapping[str, Any]]) -> None:
    rows = [[t["kind"], t["name"], "×".join(map(str, t["shape"])) or "scalar", t["type"], t["file"]] for t in listed]
    if rows:
        _print_table("", ("kind", "name", "shape", "type", "file"), rows)


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
    """A table that fits the terminal; for a pipe aligned columns, whose lines are never broken."""
    if not sys.stdout.isatty():
        lines = [*([head] if head else []), *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print(*([title] if title else []), sep="")
        for line in lines:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(title, "bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head), header_style="dim")
    for column in head or [""] * len(rows[0]):
        table.add_column(column, overflow="fold", justify="right" if column in ("size", "tensors", "step") else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
