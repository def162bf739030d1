"""On one device in fp32 and bf16 the host never waits for the GPU, as in plain torch: steps are queued ahead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

WORKER = Path(__file__).parent / "waits_worker.py"


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_is_queued(precision: str, run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """Half a second of GPU work before a step does not delay the host, with and without clipping."""
    run_processes(WORKER, 1, "single", precision, tmp_path)
    for host, whole in json.loads((tmp_path / "waits.json").read_text()):
        assert host < whole / 2, (host, whole)
