"""The plot of a run: a valid PNG of the promised size, and its numbers."""

import builtins
import csv
import struct
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.demo.train import draw_curves, save_curves

LOSSES, RATES = [8.0, 6.0, 4.5, 4.0], [0.0, 2e-3, 1e-3, 0.0]


def rows(folder: Path) -> list[list[str]]:
    with (folder / "curves.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_picture_is_a_png_of_1600_by_1200(tmp_path: Path) -> None:
    """The file's header says PNG and the size that the docstring promises."""
    pytest.importorskip("matplotlib", reason="the picture needs the extra `pictures`")
    message = save_curves(tmp_path, LOSSES, RATES, held_out=4.2)
    header = (tmp_path / "curves.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1600, 1200)
    assert "curves.png" in message


def test_one_step_can_be_drawn(tmp_path: Path) -> None:
    """The shortest run has a plot too."""
    pytest.importorskip("matplotlib", reason="the picture needs the extra `pictures`")
    save_curves(tmp_path, [8.0], [1e-3], held_out=8.0)
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_numbers_are_written_in_full(tmp_path: Path) -> None:
    """The table holds each step's loss and rate to the last digit."""
    save_curves(tmp_path, LOSSES, RATES, held_out=4.2)
    head, *body = rows(tmp_path)
    assert head == ["step", "loss_bits_per_byte", "learning_rate"]
    assert [[float(cell) for cell in row] for row in body] == [
        [step, loss, rate] for step, (loss, rate) in enumerate(zip(LOSSES, RATES, strict=True), start=1)
    ]


def test_without_matplotlib_the_numbers_stay_and_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without matplotlib only the plot is missing, and the message names what to install."""
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    message = save_curves(tmp_path, LOSSES, RATES, held_out=4.2)
    assert "pip install 'zero-plugin[pictures]'" in message
    assert len(rows(tmp_path)) == 5
    assert not (tmp_path / "curves.png").exists()


def test_no_label_covers_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legend is above the axes, and the held-out text's number next to them, wherever the curve is."""
    pytest.importorskip("matplotlib", reason="the picture needs the extra `pictures`")
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    for losses, held_out in ((LOSSES, 4.2), ([8.0, 7.9, 7.8, 7.7], 7.75), ([8.0, 0.2, 0.1, 0.1], 0.1)):
        draw_curves(tmp_path / "curves.png", losses, RATES, held_out)
        figure = drawn.pop()
        figure.draw_without_rendering()
        top = figure.axes[0]
        area, legend = top.get_window_extent(), top.get_legend()
        assert legend is not None
        assert legend.get_window_extent().y0 >= area.y1
        (number,) = (text for text in top.texts if isinstance(text, Annotation))
        assert number.get_window_extent().x0 > area.x1
        assert number.get_window_extent().x1 <= figure.bbox.x1
