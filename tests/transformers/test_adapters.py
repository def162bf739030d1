"""The table of PEFT methods and paths in docs/adapters.md agrees with two training processes and plain torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from on_paths import on_rows, row
from paths import running

from zero_plugin.errors import ZeroPluginError

pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))
from adapter_methods import METHODS, PATHS, REFUSED, RIGHT, build, train

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
# Paths that differ by more than their tensors' shapes.
DAILY = (
    "DoRA",
    "LoRA, `modules_to_save`",
    "`merge_adapter`",
    "`merge_adapter`, whole weights",
    "AdaLoRA",
    "AdaLoRA, `update_and_allocate`",
)
DAILY_PATHS = ("DDP", "2", "3, all partitioned")

Table = dict[tuple[str, str], str]


def _table() -> Table:
    """Return the page's word for each method on each path."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    titles, *rows = rows
    return {(method, title): word for method, *words in rows for title, word in zip(titles[1:], words, strict=True)}


def run(method: str, path: str) -> tuple[str, str]:
    """Return the table's word for a method on a path, and its error."""
    own, optimizer = build(method)
    wanted = list(train(method, own, own, optimizer, lambda loss: loss.backward(), lambda whole: whole))
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        with running(path) as accelerator:
            own, given = build(method)
            model, stepping = accelerator.prepare(own, given)
            found = list(
                train(
                    method,
                    own,
                    model,
                    stepping,
                    accelerator.backward,
                    lambda whole: whole.chunk(world)[rank],
                    lambda: accelerator.whole_weights(model),
                )
            )
    except ZeroPluginError as error:
        return REFUSED, str(error)
    off = max(float((got - want).norm() / want.norm()) for got, want in zip(found, wanted, strict=True))
    return (RIGHT, "") if off < 1e-5 else ("wrong", f"off by {off:.1e}")


def test_the_table_has_each_method_and_path() -> None:
    """The table has each method and path, in the order of `adapter_methods`."""
    assert list(_table()) == [(method, title) for method in METHODS for title in PATHS]


@on_rows(
    ("method", "title"),
    [
        row("", 2, method, title, daily=method in DAILY and title in DAILY_PATHS)
        for method in METHODS
        for title in PATHS
    ],
)
def test_a_method(method: str, title: str) -> None:
    """A method trains on each path as the table says. An error is ours and says what to write."""
    word, said = run(method, PATHS[title])
    assert word == _table()[method, title], f"{word} {said}"
    if word == REFUSED:
        assert "accelerator.whole_weights(model)" in said or "update_and_allocate()" in said
    else:
        assert not said
