"""Which rank failed first, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from zero_plugin.launch.report import describe_failure, find_first_failure, shell_code
from zero_plugin.launch.worker import FIRST_FAILURE


@dataclass
class Ended:
    """What torchrun records of a worker that failed."""

    exitcode: int
    timestamp: int = 100
    pid: int = 1


@pytest.mark.parametrize(
    ("failures", "mark", "first"),
    [
        ({0: Ended(-15), 1: Ended(3)}, None, (1, 3)),
        ({0: Ended(1), 1: Ended(1)}, "1 1", (1, 1)),
        ({0: Ended(1), 1: Ended(-15)}, "1 7", (1, 7)),
        ({0: Ended(1), 1: Ended(-9)}, "0 1", (1, -9)),
        ({0: Ended(1), 1: Ended(-9, timestamp=130)}, "0 1", (0, 1)),
        ({0: Ended(1), 1: Ended(-11)}, "0 1", (1, -11)),
        ({0: Ended(1, timestamp=101), 1: Ended(2, timestamp=100)}, None, (1, 2)),
    ],
    ids=str,
)
def test_first_failure(failures: dict[int, Ended], mark: str | None, first: tuple[int, int], tmp_path: Path) -> None:
    """A rank that died without a word comes first, then the one that left its mark, last what torchrun stopped."""
    if mark:
        attempt = tmp_path / "run_x" / "attempt_0"
        attempt.mkdir(parents=True)
        (attempt / FIRST_FAILURE).write_text(mark)
    assert find_first_failure(failures, tmp_path) == first


def test_sigkill_is_explained_as_host_memory() -> None:
    """-9 names host memory, this machine's size, and what lowers the use; other ends do not."""
    text = describe_failure(2, -9)
    assert "rank 2" in text
    assert "host memory" in text
    assert "GiB" in text
    assert "host memory" not in describe_failure(2, -11)
    assert "SIGSEGV" in describe_failure(2, -11)
    assert "exit code 3" in describe_failure(2, 3)


def test_shell_codes() -> None:
    """Signals become 128 + n, codes stay."""
    assert [shell_code(code) for code in (0, 3, -9)] == [0, 3, 137]
