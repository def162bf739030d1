"""The picture of a run: loss and learning rate against the step, as a PNG and as numbers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw_curves", "save_curves"]

_INK, _MUTED, _BLUE, _RED = "#222222", "#8a8a8a", "#1f5fa8", "#c0392b"


def save_curves(folder: Path, losses: Sequence[float], rates: Sequence[float], held_out: float) -> str:
    """Write `curves.csv`, and `curves.png` where matplotlib is installed; returns a sentence that names the files.

    Args:
        folder: an existing folder.
        losses: training loss of each step, bits per byte.
        rates: learning rate that each step used.
        held_out: loss on held-out text after the last step, bits per byte.
    """
    table = folder / "curves.csv"
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_bits_per_byte", "learning_rate"])
        writer.writerows(zip(range(1, len(losses) + 1), losses, rates, strict=True))
    try:
        draw_curves(folder / "curves.png", losses, rates, held_out)
    except ModuleNotFoundError:
        return f"curves: {table} (for a picture: pip install 'zero-plugin[pictures]')"
    return f"curves: {folder / 'curves.png'}, {table}"


def draw_curves(path: Path, losses: Sequence[float], rates: Sequence[float], held_out: float) -> None:
    """Draw the curves of `save_curves` into a PNG of 1600 × 1200 pixels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    # Not pyplot: it would choose a window system and keep the figure alive.
    from matplotlib.figure import Figure

    steps = range(1, len(losses) + 1)
    figure = Figure(figsize=(8, 6), dpi=200, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))

    top.plot(steps, losses, color=_BLUE, alpha=0.25, linewidth=1, label="training, each step")
    reach = max(1, len(losses) // 50)
    top.plot(steps, _smooth(losses, reach), color=_BLUE, linewidth=2, label=f"training, mean of {2 * reach + 1} steps")
    top.plot(len(losses), held_out, "o", color=_RED, markersize=7, clip_on=False, zorder=3, label="held-out text")
    top.annotate(
        f"{held_out:.2f}", (len(losses), held_out), (-2, 10), textcoords="offset points", ha="right", color=_RED
    )
    top.set_ylabel("loss (bits per byte)", color=_INK)
    top.set_ylim(bottom=0)
    top.legend(facecolor="white", edgecolor="none", framealpha=1, labelcolor=_INK)
    top.set_title("A byte-level GPT learns Python's standard library", loc="left", color=_INK)

    bottom.plot(steps, rates, color=_INK, linewidth=1.5)
    bottom.set_ylabel("learning rate", color=_INK)
    bottom.set_xlabel("step", color=_INK)
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    bottom.set_xlim(0, len(losses))

    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_MUTED)
        axes.tick_params(colors=_MUTED, labelcolor=_INK)
        axes.grid(axis="y", color=_MUTED, alpha=0.2, linewidth=0.8)
    figure.savefig(path)


def _smooth(values: Sequence[float], reach: int) -> list[float]:
    """Mean over `reach` steps to either side, over fewer at the ends."""
    windows = (values[max(0, i - reach) : i + reach + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
