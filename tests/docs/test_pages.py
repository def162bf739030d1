"""README and docs do what they print: each block is typed in order, in an empty folder with an empty home."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks_of, commands_of, missing_lines
from tables import BEFORE, CAMPAIGN, CANNOT_RUN, COMPARED_ELSEWHERE, ENDLESS, EXIT_CODES, SECOND_MACHINE, SHORTER, Row

pytestmark = pytest.mark.programs

PLAYED = [str(page.relative_to(ROOT)) for page in PAGES if blocks_of(page)]
LATER = sorted({page for page, _ in CAMPAIGN})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "form"),
    [
        *((page, "daily") for page in PLAYED),
        *(pytest.param(page, "campaign", marks=pytest.mark.campaign) for page in LATER),
    ],
)
def test_page_does_what_it_prints(
    path: str,
    form: str,
    run_processes: Callable[..., list[str]],
    forked_workers: dict[str, str],
    built_ops: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are written, Python runs, and commands exit with the page's code and print what it shows."""
    if form == "campaign" and path in {page for page, _ in SECOND_MACHINE}:
        made = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"its second machine is a network namespace, which cannot be made here: {made.stderr.strip()}")
    for name, value in forked_workers.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "reader").mkdir()
    run_processes(Path(__file__).with_name("play.py"), 1, path, tmp_path / "reader", form, seconds=600)


def test_rows_exist_and_nine_of_ten_blocks_run() -> None:
    """Each row of the tables matches a block or command of a page. Few blocks cannot run, each for a reason."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert len(CANNOT_RUN) <= len(blocks) / 10, f"{len(CANNOT_RUN)} of {len(blocks)} blocks do not run"
    firsts = [(block.page, block.first) for block in blocks]
    assert {*CANNOT_RUN, *COMPARED_ELSEWHERE, *BEFORE} == _fitting([*CANNOT_RUN, *COMPARED_ELSEWHERE, *BEFORE], firsts)
    commands = [(block.page, typed) for block in blocks if block.types for typed, _ in commands_of(block)]
    rows = [*EXIT_CODES, *SHORTER, *CAMPAIGN, *SECOND_MACHINE, *ENDLESS]
    assert set(rows) == _fitting(rows, commands)


def _fitting(rows: list[Row], found: list[Row]) -> set[Row]:
    return {row for row in rows if any(page == row[0] and text.startswith(row[1]) for page, text in found)}


def test_output_is_compared_line_by_line() -> None:
    """Numbers may differ, words may not, and the order counts."""
    printed = "first 12\nsecond   a b\nthird\n"
    assert missing_lines("first 7\n…\nsecond a b", printed) == []
    assert missing_lines("second a b\nfirst 7", printed) == ["first 7"]
    assert missing_lines("fourth", printed) == ["fourth"]
