"""`Accelerator()` without a launcher's help: as tasks of srun, under mpirun, under torchrun, and alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ends_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

# DDP saves each process DeepSpeed's import. The strategy is not the scheduler's concern.
SCRIPT = """
import os, torch
from zero_plugin import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.ones(1)).item()
place = (accelerator.process_index, accelerator.local_process_index, accelerator.num_processes)
os.write(1, " ".join(map(str, (*place, total, os.linesep))).encode())
accelerator.end_training()
"""
MEETS = ["0 0 2 2.0", "1 1 2 2.0"]


def clean(environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "OMP_NUM_THREADS": "1"}


def test_tasks_of_srun_find_each_other(
    tmp_path: Path,
    environment: dict[str, str],
    lines_of: Callable[..., Iterator[str]],
    forked_alone: dict[str, str],
    start_program: Callable[..., subprocess.Popen[str]],
) -> None:
    """Two processes with srun's variables for two tasks of one node form a group.

    One alone in a batch script does too.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    tasks = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "node7"}
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "4"}
    environments = [{**job, **tasks, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"] + [batch]
    command, common = [sys.executable, "script.py"], {**clean(environment), **forked_alone}
    started = [start_program(command, cwd=tmp_path, env={**common, **variables}) for variables in environments]
    done = ends_of(*started)
    assert [list(map(str.strip, lines_of(output.splitlines()))) for _, output, _ in done] == [
        [line] for line in (*MEETS, "0 0 1 1.0")
    ], done


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (openmpi-bin) is not installed")
def test_processes_of_mpirun_find_each_other(
    tmp_path: Path, environment: dict[str, str], lines_of: Callable[..., Iterator[str]]
) -> None:
    """`mpirun -n 2 python script.py` is a run of two processes."""
    (tmp_path / "script.py").write_text(SCRIPT)
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        ["mpirun", "--oversubscribe", "-n", "2", sys.executable, "script.py"],
        cwd=tmp_path,
        env={**clean(environment), **allowed},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(map(str.strip, lines_of(done.stdout.splitlines()))) == MEETS
