"""The plot of a plan: every option drawn, in the promised kinds of file, readable in grey."""

from __future__ import annotations

import builtins
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.errors import ConfigError, MachineError
from zero_plugin.plan.decoder import decoder_activations, decoder_sizes
from zero_plugin.plan.machines import state_cluster
from zero_plugin.plan.plan_files import _worth_drawing, draw_plan
from zero_plugin.plan.search import Choice, Wanted, plan
from zero_plugin.plan.situation import Cluster, Workload, name_setup


def planned(gpu_memory: int = 40 * 2**30) -> tuple[Choice, Cluster]:
    model = decoder_sizes(parameters=7_000_000_000)
    cluster = state_cluster(gpu_memory=gpu_memory, host_memory=512 * 2**30, gpus=8)
    return plan(Workload(model, decoder_activations(model, 2048)), cluster, Wanted(global_batch=64)), cluster


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra `pictures`")


@pytest.mark.usefixtures("_matplotlib")
def test_every_way_that_could_run_is_drawn(tmp_path: Path) -> None:
    """An SVG's text has each option's name, the chosen one in green, the capacity, and the terms."""
    import matplotlib as mpl

    choice, cluster = planned()
    file = tmp_path / "plan.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # letters as text, not as outlines
        draw_plan(file, choice, cluster, "a model on 8 GPUs", 0.1)
    text = file.read_text()
    assert "a model on 8 GPUs" in text
    assert "capacity 40 GiB, budget 36 GiB" in text
    for candidate in choice.table:
        assert (f">{name_setup(candidate.setup)}  " in text) == (candidate.rejected != "no NVMe disk is stated")
    assert choice.chosen is not None
    line = next(line for line in text.splitlines() if f">{name_setup(choice.chosen.setup)}  " in line)
    assert "#1d7a3a" in line
    for term in ("parameters", "optimizer states", "gradients", "activations"):
        assert f">{term}<" in text


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("gpu_memory", [2 * 2**30, 40 * 2**30, 80 * 2**30])
def test_no_label_covers_a_bar_or_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_memory: int) -> None:
    """All numbers are next to their axes, and the lines' meaning is above them and in the legend."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    draw_plan(tmp_path / "plan.png", *planned(gpu_memory), "a model on 8 GPUs", 0.1)
    (figure,) = drawn
    figure.draw_without_rendering()
    device, host = figure.axes
    for axes in (device, host):
        area = axes.get_window_extent()
        assert axes.texts
        assert all(text.get_window_extent().x0 > area.x1 for text in axes.texts)
        assert axes.get_title("left").startswith("capacity ")
    assert all(text.get_window_extent().x1 < host.get_window_extent().x0 for text in device.texts)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"capacity", "budget"} < set(names)


def test_what_is_short_of_locked_memory_alone_is_drawn() -> None:
    """A limit of `ulimit -l` can be raised. A missing disk cannot be added."""
    model = decoder_sizes(parameters=7_000_000_000)
    roomy = state_cluster(gpu_memory=400 * 2**30, host_memory=2**41, gpus=8, nvme=2**43)
    cluster = replace(roomy, memlock_bytes=1)
    choice = plan(Workload(model, decoder_activations(model, 2048)), cluster, Wanted(global_batch=64))
    locked = [c for c in choice.table if "ulimit -l" in c.rejected and "budget" not in c.rejected]
    assert locked
    assert all(c in _worth_drawing(choice) for c in locked)
    without = replace(roomy, nvme_bytes=0)
    choice = plan(Workload(model, decoder_activations(model, 2048)), without, Wanted(global_batch=64))
    assert not any(c.setup.offload_optimizer == "nvme" for c in _worth_drawing(choice))


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_kinds_of_file(tmp_path: Path, suffix: str, magic: bytes) -> None:
    """The suffix chooses the format, also if nothing fits."""
    choice, cluster = planned(2 * 2**30)
    assert choice.chosen is None
    file = tmp_path / f"plan{suffix}"
    draw_plan(file, choice, cluster, "nothing fits", 0.1)
    assert file.read_bytes().startswith(magic)


def test_the_colours_stay_apart_in_grey() -> None:
    """Adjacent terms of a bar differ in lightness."""
    from zero_plugin.plan.plan_files import _COLOURS

    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    shades = [lightness(colour) for colour in _COLOURS]
    assert all(abs(one - other) > 30 for one, other in pairwise(shades))


def test_wrong_names_and_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another suffix names the legal ones. Without matplotlib the message says what to install."""
    choice, cluster = planned()
    with pytest.raises(ConfigError, match=r"plan\.png, \.svg or \.pdf"):
        draw_plan(tmp_path / "plan.jpeg", choice, cluster, "", 0.1)
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(MachineError, match=r"pip install 'zero-plugin\[pictures\]'"):
        draw_plan(tmp_path / "plan.png", choice, cluster, "", 0.1)
