"""`zero-plugin check` on files."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.cli.check import check
from zero_plugin.errors import ConfigError


def test_good_files_are_said_to_be_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each file."""
    (tmp_path / "a.yaml").write_text("num_processes: 2\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 2}}')
    check([str(tmp_path / "a.yaml"), str(tmp_path / "b.json")])
    assert capsys.readouterr().out.count("no problem found") == 2


def test_what_a_run_without_zero_drops_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that describes ZeRO and asks for a run without it is right, and told what it leaves out."""
    zero = "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
    (tmp_path / "a.yaml").write_text(f"distributed_type: MULTI_CPU\n{zero}")
    (tmp_path / "b.yaml").write_text(f"distributed_type: DEEPSPEED\n{zero}")
    check([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")])
    asker = tmp_path / "a.yaml"
    assert capsys.readouterr().out.splitlines() == [
        f"ZeRO stage 2 and optimizer offload to cpu dropped, as {asker}:1:1 asks",
        f"{asker}: no problem found",
        f"{tmp_path / 'b.yaml'}: no problem found",
    ]


def test_problems_of_all_files_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every problem of every file, each with its file and line; the good file is still said to be good."""
    (tmp_path / "a.yaml").write_text("mixed_precision: bf17\nnum_proceses: 2\n")
    (tmp_path / "b.json").write_text('{"zero_optimization": {"stage": 4}}')
    (tmp_path / "c.yaml").write_text("num_processes: 2\n")
    with pytest.raises(ConfigError) as caught:
        check([str(tmp_path / name) for name in ("a.yaml", "b.json", "c.yaml")])
    assert len(caught.value.problems) == 3
    for where in ("a.yaml:1:", "a.yaml:2:", "b.json:1:"):
        assert where in str(caught.value)
    assert "c.yaml: no problem found" in capsys.readouterr().out
