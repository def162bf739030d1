"""What a worker leaves for the launcher when memory has run out."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.config.run_files import CUT_VARIABLE, Shortage, leave_shortage, micro_batch_cut, take_shortage


def test_a_shortage_is_taken_once(tmp_path: Path) -> None:
    """The launcher reads what a worker of the newest attempt left, and finds nothing of it later."""
    error_file = tmp_path / "none_x" / "attempt_0" / "1" / "error.json"
    error_file.parent.mkdir(parents=True)
    shortage = Shortage("where", "what to do", cut=2, micro_batch=4)
    assert leave_shortage(shortage, {CUT_VARIABLE: "1", "TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert take_shortage(tmp_path) == shortage
    assert take_shortage(tmp_path) is None


def test_nobody_reads_it(tmp_path: Path) -> None:
    """Under torchrun itself, without a launcher, and where it cannot be written, the worker has to say it itself."""
    shortage = Shortage("where", "what to do")
    assert not leave_shortage(shortage, {})
    assert not leave_shortage(shortage, {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_0" / "1" / "error.json")})
    gone = {CUT_VARIABLE: "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "1" / "error.json")}
    assert not leave_shortage(shortage, gone)


def test_the_cut_of_this_attempt() -> None:
    """One micro-batch of each batch as long as no launcher says more."""
    assert (micro_batch_cut({}), micro_batch_cut({CUT_VARIABLE: "4"})) == (1, 4)
