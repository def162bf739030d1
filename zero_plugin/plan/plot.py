"""Draws a plan: what every strategy takes of a device and of a host, against what is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from zero_plugin.errors import ConfigError, MachineError, Problem
from zero_plugin.plan.search import Candidate, Choice
from zero_plugin.plan.situation import Cluster, name_setup

_INK, _MUTED, _GREEN, _RED = "#222222", "#8a8a8a", "#1d7a3a", "#c0392b"
# Colours that differ in lightness too, so that they stay apart in grey print; terms beyond the last share one.
_COLOURS: Final = ("#12355b", "#2f6fa7", "#7fb2d9", "#c9ddee", "#7a4b12", "#c98a2c", "#f0cf8e", "#5c5c5c", "#b5b5b5")
_ORDER: Final = ("parameters", "master weights", "optimizer states", "gradients", "activations")
_REST: Final = "everything else"
_GIB: Final = 2**30
_SUFFIXES: Final = (".png", ".svg", ".pdf")
_BEYOND: Final = 2.0  # of the capacity; a bar that would be longer is cut there and says its length


def draw_plan(file: Path, choice: Choice, cluster: Cluster, title: str, margin: float) -> None:
    """Draw a bar of device bytes and one of host bytes per strategy, stacked by term, against the capacity.

    Args:
        file: `.png`, `.svg` or `.pdf`.
        choice: what was found.
        cluster: the machines.
        title: one line above.
        margin: the share that stays free.

    Raises:
        ConfigError, MachineError: see `check_picture`; or the file cannot be written.
    """
    check_picture(file)
    from matplotlib.figure import Figure  # not pyplot: it would choose a window system and keep the figure alive

    shown = _worth_drawing(choice)
    figure = Figure(figsize=(12, 1.9 + 0.34 * len(shown)), dpi=150, layout="constrained")
    device, host = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    colours = _colours([c.footprint.device for c in shown], [c.footprint.host for c in shown])
    limits = ((device, "device", cluster.device_bytes), (host, "host", cluster.host_bytes))
    for axes, kind, capacity in limits:
        _draw_bars(axes, [getattr(c.footprint, kind) for c in shown], capacity, margin, colours)
    device.set_yticks(range(len(shown)), [_label(c) for c in shown], fontsize=9)
    device.set_ylim(len(shown) - 0.4, -0.6)  # the first on top
    for label, candidate in zip(device.get_yticklabels(), shown, strict=True):
        chosen = candidate is choice.chosen
        label.set_color(_GREEN if chosen else _MUTED if candidate.rejected else _INK)
        label.set_fontweight("bold" if chosen else "normal")
    device.set_xlabel("GiB on each device", color=_INK)
    host.set_xlabel("GiB of each node's host memory", color=_INK)
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12)
    device.set_title(
        "strategy, micro-batch × accumulation, time of a step", loc="right", x=-0.02, fontsize=8, color=_MUTED
    )
    handles = [_patch(colour) for colour in colours.values()]
    figure.legend(
        handles, list(colours), loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8
    )
    try:
        figure.savefig(file)
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.\nName another file.") from None


def check_picture(file: Path) -> None:
    """Refuse what could not be drawn, before anything is written.

    Raises:
        ConfigError: another suffix than `.png`, `.svg` or `.pdf`.
        MachineError: matplotlib is not installed.
    """
    if file.suffix not in _SUFFIXES:
        fix = f"Name it {file.stem}.png, .svg or .pdf."
        raise ConfigError([Problem("--picture", "", f"{file} is no kind of picture known here", fix)])
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        message = "a picture needs matplotlib, which is not installed.\npip install 'zero-plugin[pictures]'"
        raise MachineError(message) from None


def _label(candidate: Candidate) -> str:
    time = "" if candidate.rejected else f"  {candidate.time.seconds:.3g} s"
    return f"{name_setup(candidate.setup)}  {candidate.setup.micro_batch}×{candidate.setup.accumulation}{time}"


def _worth_drawing(choice: Choice) -> list[Candidate]:
    """All but those that cannot run whatever the memory."""
    return [c for c in choice.table if c.short or not c.rejected] or list(choice.table)


def _colours(*footprints: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """A colour for each term, the model's states first, then the largest."""
    totals: dict[str, int] = {}
    for terms in (terms for group in footprints for terms in group):
        for name, size in terms.items():
            totals[name] = totals.get(name, 0) + size
    first = [name for name in _ORDER if name in totals]
    names = [*first, *sorted(totals.keys() - {*first}, key=lambda name: -totals[name])]
    if len(names) > len(_COLOURS):
        names = [*names[: len(_COLOURS) - 1], _REST]
    return dict(zip(names, _COLOURS, strict=False))


def _draw_bars(
    axes: Any, bars: Sequence[Mapping[str, int]], capacity: int, margin: float, colours: Mapping[str, str]
) -> None:
    usable, longest = (1 - margin) * capacity / _GIB, max((sum(terms.values()) for terms in bars), default=0) / _GIB
    end = min(max(longest, capacity / _GIB), _BEYOND * capacity / _GIB)
    for row, terms in enumerate(bars):
        start = 0.0
        for name, colour in colours.items():
            width = _width(terms, name, colours) / _GIB
            if width and start < end:
                axes.barh(
                    row, min(width, end - start), left=start, height=0.66, color=colour, edgecolor="white", lw=0.4
                )
            start += width
        if start > 0:
            over = start > usable
            beyond = start > end
            axes.annotate(
                f"{'… ' if beyond else ''}{start:.3g}",
                (min(start, end), row),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=_RED if over else _INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
    axes.axvline(capacity / _GIB, color=_INK, lw=1.2)
    axes.axvline(usable, color=_RED, lw=1.0, ls="--")
    axes.annotate(
        f"{capacity / _GIB:.3g} GiB there, {usable:.3g} usable",
        (capacity / _GIB, 1.0),
        (-3, 4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=_INK,
        annotation_clip=False,
    )
    axes.set_xlim(0, end * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_MUTED)
    axes.tick_params(colors=_MUTED, labelcolor=_INK)
    axes.grid(axis="x", color=_MUTED, alpha=0.2, linewidth=0.8)
    axes.set_axisbelow(True)


def _width(terms: Mapping[str, int], name: str, colours: Mapping[str, str]) -> int:
    if name == _REST:
        return sum(size for term, size in terms.items() if term not in colours)
    return terms.get(name, 0)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour)
