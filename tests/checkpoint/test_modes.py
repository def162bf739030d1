"""The umask decides who may read a run's files. Records and locks are never readable for strangers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from zero_plugin import Accelerator, ProjectConfiguration


@pytest.mark.parametrize("umask", [0o077, 0o002], ids=oct)
def test_modes_of_all_that_a_run_creates(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With umask 077 no file is readable for others. With 002 the group may write all but the user's private files."""
    monkeypatch.setenv("ZERO_PLUGIN_RUNS", str(tmp_path / "out" / "runs"))
    before = os.umask(umask)
    try:
        out = tmp_path / "out"
        out.mkdir()
        project = ProjectConfiguration(str(out / "run"), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project, log_with="jsonl")
        net = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        accelerator.init_trackers("tracked", {"lr": 0.1})
        accelerator.log({"loss": 1.0}, step=1)
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        accelerator.save_state()
        accelerator.save_model(model, out / "model")
        accelerator.save({"a": 1}, out / "saved.pt")
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in out.rglob("*")}
        accelerator.end_training()
    finally:
        os.umask(before)
    assert {".checkpoints.lock", "manifest.json", "metrics.jsonl", "saved.pt"} <= {path.name for path in modes}
    for path, mode in modes.items():
        whole = 0o777 if path.is_dir() else 0o666
        private = path.name.startswith("resolved") or path.name == "runs"
        expected = whole & 0o700 if private else whole & ~umask
        if path.suffix == ".lock":
            expected &= 0o770
        assert oct(mode) == oct(expected), path
