"""A worker's report to the launcher after it ran out of memory."""

from __future__ import annotations

from pathlib import Path

from zero_plugin.config.run_files import (
    CUT_VARIABLE,
    OutOfMemoryReport,
    leave_out_of_memory_report,
    micro_batch_cut,
    take_out_of_memory_report,
)


def test_a_report_is_taken_once(tmp_path: Path) -> None:
    """The launcher reads the report of a worker of the newest attempt. A second read finds none."""
    error_file = tmp_path / "none_x" / "attempt_0" / "1" / "error.json"
    error_file.parent.mkdir(parents=True)
    report = OutOfMemoryReport("where", "what to do", cut=2, micro_batch=4)
    assert leave_out_of_memory_report(report, {CUT_VARIABLE: "1", "TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert take_out_of_memory_report(tmp_path) == report
    assert take_out_of_memory_report(tmp_path) is None


def test_nobody_reads_it(tmp_path: Path) -> None:
    """Under torchrun, without a launcher, or if writing fails, the worker must report itself."""
    report = OutOfMemoryReport("where", "what to do")
    assert not leave_out_of_memory_report(report, {})
    assert not leave_out_of_memory_report(
        report, {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempt_0" / "1" / "error.json")}
    )
    gone = {CUT_VARIABLE: "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "gone" / "1" / "error.json")}
    assert not leave_out_of_memory_report(report, gone)


def test_the_cut_of_this_attempt() -> None:
    """It is one micro-batch of each batch until a launcher requests more."""
    assert (micro_batch_cut({}), micro_batch_cut({CUT_VARIABLE: "4"})) == (1, 4)
