"""A training that changes its path twice: XLA devices, then ZeRO-3 or DDP, then XLA devices again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="`make test-tpu` has torch_xla, in an environment of its own")

ELSEWHERE = Path(__file__).with_name("elsewhere.py")
WORLD = 2


@pytest.mark.timeout(900)
def test_a_run_goes_on_from_xla_on_zero_3_and_ddp_and_back(
    run_case: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Each epoch's losses, norms and rates, and the final weights, equal those of one run without a change.

    DDP runs on this environment's torch, which is older than that of the other tests.
    """
    python = os.environ.get("ZERO_PLUGIN_PYTHON")  # of the environment that has DeepSpeed, and its own torch
    if python is None:
        pytest.skip("ZERO_PLUGIN_PYTHON names no interpreter that has DeepSpeed; `make test-tpu` sets it")
    done = run_case("saving")
    assert done.returncode == 0, done.stderr[-4000:]
    train_elsewhere(python, "zero3", tmp_path)
    train_elsewhere(sys.executable, "ddp", tmp_path)
    done = run_case("resuming")
    assert done.returncode == 0, done.stderr[-4000:]


def train_elsewhere(python: str, kind: str, folder: Path) -> None:
    command = [python, str(ELSEWHERE), str(folder / f"store-{kind}")]
    variables = {"ZERO_PLUGIN_RUNS": str(folder / "runs"), "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{kind}-{rank}.log" for rank in range(WORLD)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            arguments = [str(rank), str(WORLD), kind, str(folder)]
            environment = {**os.environ, **variables}
            workers.append(subprocess.Popen([*command, *arguments], stdout=output, stderr=output, env=environment))
    try:
        codes = [worker.wait(timeout=240) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert codes == [0] * WORLD, "\n".join(log.read_text()[-4000:] for log in logs)
