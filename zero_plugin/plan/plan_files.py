"""Writes a plan to a file: its setup as a config to launch with, or all candidates as a plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.document import yaml_text
from zero_plugin.config.keys import ACCUMULATION, CLIPPING, GLOBAL_BATCH, MICRO_BATCH, SAVE_16BIT, ZERO
from zero_plugin.config.parallelism import SEQUENCE_KEY
from zero_plugin.errors import ConfigError, MachineError, Problem
from zero_plugin.plan.run_plan import KEYS
from zero_plugin.plan.search import Candidate, Choice
from zero_plugin.plan.situation import Cluster, Setup, budget, describe_budget, name_setup

_OPTIMIZERS: Final = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "adagrad": "Adagrad", "sgd": "SGD"}
# The fields that each stage reads; the config check warns about others.
_READ: Final[Mapping[int, tuple[str, ...]]] = {
    0: (),
    1: ("reduce_bucket",),
    2: ("reduce_bucket", "overlap_comm"),
    3: ("reduce_bucket", "overlap_comm", "prefetch_bucket", "persistence_threshold", "sub_group_size"),
}
_SUFFIXES: Final = (".yaml", ".yml", ".json")


def write_plan(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> None:
    """Write `config_text` to a new file.

    Raises:
        ConfigError: see `config_text`; or the file exists.
        MachineError: the file cannot be written.
    """
    text = config_text(file, candidate, cluster, optimizer, nvme_path)
    if file.exists():
        raise ConfigError([Problem("--output", "", f"{file} exists", "Name a new file, or remove that one.")])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.\nName another file.") from None


def config_text(file: Path, candidate: Candidate, cluster: Cluster, optimizer: str, nvme_path: str | None) -> str:
    """Return the configuration as YAML or JSON, depending on the file's suffix.

    Args:
        file: `.yaml`, `.yml` or `.json`.
        candidate: the strategy.
        cluster: the machines.
        optimizer: its name in lower case. `adam`, `adamw`, `lion`, `adagrad` and `sgd` get an `optimizer` section; the
            script builds any other.
        nvme_path: folder for NVMe offload.

    Raises:
        ConfigError: the suffix is different, the plan is JSON without ZeRO, which DeepSpeed's format cannot express, or
            NVMe has no folder.
    """
    setup = candidate.setup
    if file.suffix not in _SUFFIXES:
        raise _problem(f"{file} is neither YAML nor JSON", f"Name it {file.stem}.yaml or {file.stem}.json.")
    if "nvme" in (setup.offload_optimizer, setup.offload_param) and not nvme_path:
        raise ConfigError([Problem("--nvme_path", "", "is missing for a plan with NVMe", "Name the drive's folder.")])
    if file.suffix != ".json":
        head = f"# {name_setup(setup)}, as planned by `zero-plugin plan`.\n"
        head += f"#   zero-plugin launch --config_file {file.name} train.py\n"
        if setup.activation_checkpointing:
            head += "# The script switches activation checkpointing on: model.gradient_checkpointing_enable().\n"
        return head + yaml_text(_launch_values(setup, cluster, optimizer, nvme_path))
    if setup.stage is None:
        raise _problem(
            "a DeepSpeed JSON cannot express training without ZeRO", "Name a .yaml, or give --zero_stage auto."
        )
    return json.dumps(_training_values(setup, cluster, optimizer, nvme_path), indent=2) + "\n"


def _launch_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None) -> dict[str, Any]:
    """Return the keys of a launch config in Accelerate's layout, with the training config under `deepspeed_config`."""
    kind = "DEEPSPEED" if setup.stage is not None else "MULTI_GPU" if cluster.processes > 1 else "NO"
    return {
        "distributed_type": kind,
        "num_processes": cluster.processes,
        **({"num_machines": cluster.nodes} if cluster.nodes > 1 else {}),
        "mixed_precision": setup.precision,
        "deepspeed_config": _training_values(setup, cluster, optimizer, nvme_path),
    }


def _training_values(setup: Setup, cluster: Cluster, optimizer: str, nvme_path: str | None) -> dict[str, Any]:
    """Return the setup as a DeepSpeed configuration, or only this package's own keys without ZeRO.

    Values that depend on the loop are `auto`.
    """
    sharing = {SEQUENCE_KEY: cluster.shared_by} if cluster.shared_by > 1 else {}
    if setup.stage is None:
        return {ACCUMULATION.name: setup.accumulation, **sharing}
    values: dict[str, Any] = {
        GLOBAL_BATCH.name: setup.micro_batch * setup.accumulation * cluster.groups,
        MICRO_BATCH.name: setup.micro_batch,
        ACCUMULATION.name: setup.accumulation,
        CLIPPING.name: "auto",
        **sharing,
    }
    if setup.precision != "no":
        values[setup.precision] = {"enabled": True}
    if optimizer in _OPTIMIZERS:
        values["optimizer"] = {"type": _OPTIMIZERS[optimizer], "params": {"lr": "auto", "weight_decay": "auto"}}
    zero: dict[str, Any] = {"stage": setup.stage}
    zero |= {KEYS[name][-1]: getattr(setup, name) for name in _READ[setup.stage]}
    if setup.stage == 3:
        zero[SAVE_16BIT.path[-1]] = True
    for what, device in (("optimizer", setup.offload_optimizer), ("param", setup.offload_param)):
        if device != "none":
            path = {"nvme_path": nvme_path} if device == "nvme" else {}
            share = {"ratio": setup.ratio} if what == "optimizer" and setup.ratio != 1.0 else {}
            zero[f"offload_{what}"] = {"device": device, **path, "pin_memory": setup.pin_memory, **share}
    return {**values, ZERO: zero}


def _problem(message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("--output", "", message, fix)])


_INK, _MUTED, _GREEN, _RED = "#222222", "#8a8a8a", "#1d7a3a", "#c0392b"
# Colours that also differ in lightness, to stay distinct in grey print. Terms beyond the last colour share it.
_COLOURS: Final = ("#12355b", "#2f6fa7", "#7fb2d9", "#c9ddee", "#7a4b12", "#c98a2c", "#f0cf8e", "#5c5c5c", "#b5b5b5")
_ORDER: Final = ("parameters", "master weights", "optimizer states", "gradients", "activations")
_REST: Final = "everything else"
_GIB: Final = 2**30
_PLOT_SUFFIXES: Final = (".png", ".svg", ".pdf")
_CAPACITY: Final[Mapping[str, Any]] = {"color": _INK, "lw": 1.2}
_BUDGET: Final[Mapping[str, Any]] = {"color": _RED, "lw": 1.0, "ls": "--"}
_BEYOND: Final = 2.0  # times the capacity; a longer bar is cut there and annotated with its length


def draw_plan(file: Path, choice: Choice, cluster: Cluster, title: str, margin: float) -> None:
    """Draw one bar of device memory and one of CPU memory per strategy, stacked by term, next to the capacity.

    Args:
        file: `.png`, `.svg` or `.pdf`.
        choice: the result of the search.
        cluster: the machines.
        title: one line above.
        margin: the fraction of memory that stays free.

    Raises:
        ConfigError, MachineError: see `check_picture`; or the file cannot be written.
    """
    check_picture(file)
    from matplotlib.figure import Figure  # not pyplot: it would choose a window system and keep the figure alive
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = _worth_drawing(choice)
    figure = Figure(figsize=(12, 1.9 + 0.34 * len(shown)), dpi=150, layout="constrained")
    device, host = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    on_device, on_host = [c.footprint.device for c in shown], [c.footprint.host for c in shown]
    colours = _colours(*on_device, *on_host)
    _draw_bars(device, on_device, cluster.device_bytes, margin, colours)
    _draw_bars(host, on_host, cluster.host_bytes, margin, colours)
    device.set_yticks(range(len(shown)), [_label(c) for c in shown], fontsize=9)
    device.set_ylim(len(shown) - 0.4, -0.6)  # the first on top
    for label, candidate in zip(device.get_yticklabels(), shown, strict=True):
        chosen = candidate is choice.chosen
        label.set_color(_GREEN if chosen else _MUTED if candidate.rejected else _INK)
        label.set_fontweight("bold" if chosen else "normal")
    device.set_xlabel("GiB on each device", color=_INK)
    host.set_xlabel("GiB of each node's CPU memory", color=_INK)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12)
    device.set_title(
        "strategy, micro-batch × accumulation, time of a step", loc="right", x=-0.02, fontsize=8, color=_MUTED
    )
    handles: dict[str, Any] = {"capacity": Line2D([], [], **_CAPACITY), "budget": Line2D([], [], **_BUDGET)}
    handles |= {name: Patch(color=colour) for name, colour in colours.items()}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    try:
        figure.savefig(file)
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.\nName another file.") from None


def check_picture(file: Path) -> None:
    """Raise an error if the plot could not be drawn, before anything is written.

    Raises:
        ConfigError: the suffix is not `.png`, `.svg` or `.pdf`.
        MachineError: matplotlib is not installed.
    """
    if file.suffix not in _PLOT_SUFFIXES:
        fix = f"Name it {file.stem}.png, .svg or .pdf."
        raise ConfigError([Problem("--picture", "", f"{file} is not a supported kind of plot", fix)])
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        message = "a plot needs matplotlib, which is not installed.\npip install 'zero-plugin[pictures]'"
        raise MachineError(message) from None


def _label(candidate: Candidate) -> str:
    time = "" if candidate.rejected else f"  {candidate.time.seconds:.3g} s"
    return f"{name_setup(candidate.setup)}  {candidate.setup.micro_batch}×{candidate.setup.accumulation}{time}"


def _worth_drawing(choice: Choice) -> list[Candidate]:
    """Return all candidates except those that cannot run whatever the memory."""
    return [c for c in choice.table if c.short or not c.rejected] or list(choice.table)


def _colours(*bars: Mapping[str, int]) -> dict[str, str]:
    """Return a colour for each term: first for the model's states, then for the largest terms."""
    totals: Counter[str] = Counter()
    for terms in bars:
        totals.update(terms)
    names = [name for name in _ORDER if name in totals]
    names += sorted(totals.keys() - {*names}, key=lambda name: -totals[name])
    if len(names) > len(_COLOURS):
        names = [*names[: len(_COLOURS) - 1], _REST]
    return dict(zip(names, _COLOURS, strict=False))


def _draw_bars(
    axes: Any, bars: Sequence[Mapping[str, int]], capacity: int, margin: float, colours: Mapping[str, str]
) -> None:
    usable, whole = budget(capacity, margin) / _GIB, capacity / _GIB
    longest = max((sum(terms.values()) for terms in bars), default=0) / _GIB
    end = min(max(longest, whole), _BEYOND * whole)
    for row, terms in enumerate(bars):
        start = 0.0
        sizes = {**terms, _REST: sum(size for name, size in terms.items() if name not in colours)}
        for name, colour in colours.items():
            width = sizes.get(name, 0) / _GIB
            if width and start < end:
                axes.barh(
                    row, min(width, end - start), left=start, height=0.66, color=colour, edgecolor="white", lw=0.4
                )
            start += width
        if start > 0:
            axes.annotate(  # outside of the axes: there the text covers no bar and no line
                f"{'… ' if start > end else ''}{start:.3g}",
                (1.0, row),
                (4, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=_RED if start > usable else _INK,
                annotation_clip=False,
            )
    axes.axvline(whole, **_CAPACITY)
    axes.axvline(usable, **_BUDGET)
    axes.set_title(describe_budget(capacity, margin), loc="left", fontsize=8, color=_INK)
    axes.set_xlim(0, end * 1.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelcolor=_INK)
    axes.grid(axis="x", color=_MUTED, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)
