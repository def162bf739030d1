"""Copies between GPU and CPU memory wait for their tensors: a late stream changes no number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200), pytest.mark.usefixtures("built_ops")]

WORKER = Path(__file__).parent / "streams_worker.py"


@pytest.mark.parametrize(
    ("path", "precision"),
    [
        ("single", "bf16"),
        ("zero1", "bf16"),
        ("zero2", "bf16"),
        ("zero2-cpu", "bf16"),
        ("zero2-cpu", "no"),
        ("zero3", "bf16"),
        ("zero3-cpu", "bf16"),
        ("zero3-cpu", "fp16"),
        ("zero3-nvme", "bf16"),
    ],
)
def test_a_late_stream_changes_nothing(
    path: str, precision: str, run_processes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Losses, weights, and an asynchronous save are bitwise equal with and without delays."""
    run_processes(WORKER, 1, path, precision, tmp_path)
    quiet, *late = torch.load(tmp_path / "results.pt")
    assert len(quiet["losses"]) == 12
    assert quiet["losses"][-1] < quiet["losses"][0]
    assert len(quiet["written"]) > 10
    for result in late:
        assert torch.equal(result["losses"], quiet["losses"])
        for part in ("weights", "written"):
            assert result[part].keys() == quiet[part].keys()
            wrong = [name for name, tensor in quiet[part].items() if not torch.equal(result[part][name], tensor)]
            assert not wrong, f"{part}: {wrong}"
