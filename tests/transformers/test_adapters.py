"""The table in docs/adapters.md, of PEFT's methods on each path, is what two processes train beside plain torch."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "adapters.md"
# Those that differ from each other by more than their shapes.
DAILY = (
    "DoRA",
    "LoRA, `modules_to_save`",
    "`merge_adapter`",
    "`merge_adapter`, whole weights",
    "AdaLoRA",
    "AdaLoRA, `update_and_allocate`",
)

Table = dict[tuple[str, str], str]


def _table() -> Table:
    """The word of each method on each path, as the page has them."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    titles, *rows = rows
    return {(method, title): word for method, *words in rows for title, word in zip(titles[1:], words, strict=True)}


def _trained(
    run_processes: Callable[..., list[str]], folder: Path, methods: tuple[str, ...]
) -> tuple[Table, list[str]]:
    run_processes(HERE / "adapters_worker.py", 2, json.dumps(methods), folder)
    found: Table = {}
    errors = []
    for file in sorted(folder.glob("rank-*.jsonl")):
        for method, title, word, error in map(json.loads, file.read_text().splitlines()):
            assert found.setdefault((method, title), word) == word, f"{method} on {title}: the processes differ"
            if word == "error":
                assert "accelerator.whole_weights(model)" in error or "update_and_allocate()" in error
            elif error:
                errors.append(f"{method} on {title}: {error}")
    return found, errors


def test_the_table_has_each_method_and_path() -> None:
    """In the order of `adapter_methods`."""
    sys.path.insert(0, str(HERE))
    from adapter_methods import METHODS, PATHS

    assert list(_table()) == [(method, title) for method in METHODS for title in PATHS]


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_methods_that_differ_most(run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """What changes shapes, merges, or reads gradients trains as the table says, and an error is ours."""
    found, errors = _trained(run_processes, tmp_path, DAILY)
    table = _table()
    assert found == {at: table[at] for at in found}, errors
    assert {method for method, _ in found} == set(DAILY)


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_every_method(run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """All of the table."""
    found, errors = _trained(run_processes, tmp_path, ())
    assert found == _table(), errors
