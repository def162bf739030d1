"""Prints a plan: a line for every way of training, the chosen one marked and taken apart; or all of it as JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.plan.amounts import show_gib
from zero_plugin.plan.naming import name_setup
from zero_plugin.plan.options import Wanted
from zero_plugin.plan.search import Candidate, Plan
from zero_plugin.plan.situation import Activations, Cluster, ModelSizes, OptimizerSizes
from zero_plugin.plan.what_if import WhatIf

__all__ = ["Report", "as_json", "print_report"]

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
        machine = self.cluster.device_name or f"devices of {show_gib(self.cluster.device_bytes)}"
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
        show_gib(needed.device_bytes),
        show_gib(needed.host_bytes) + (f" + {show_gib(needed.nvme_bytes)} NVMe" if needed.nvme_bytes else ""),
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
        f"  {place}: {_terms(terms)} = {show_gib(size)} of {show_gib(there)}"
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
    return " + ".join(f"{name} {show_gib(size)}" for name, size in ordered)


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
