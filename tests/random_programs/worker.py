"""Runs programs on paths, one after the other, in one process group: STORE RANK WORLD JOBS FOLDER.

After a program that failed the processes end, and the caller starts new ones for the rest.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from device import DEVICE, process_group

os.environ["DS_ACCELERATOR"] = DEVICE

import cpuinfo
import torch
from grammar import Program
from packaged import run

from zero_plugin.errors import ZeroPluginError

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # saves a second each time


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job's records, or its failure."""
    begun = time.perf_counter()
    try:
        state, found = run(Program(**job["program"]), job["path"], job["part"], Path(job["folder"]))
        state.accelerator.end_training()
    except ZeroPluginError as error:
        found = {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    except Exception:  # noqa: BLE001 - one failing program must not hide the others
        found = {"failed": traceback.format_exc()}
    return {**found, "seconds": time.perf_counter() - begun}


def main() -> None:
    """Run every job in turn. Each process writes its findings to a file."""
    store, rank, world, jobs, folder = sys.argv[1:]
    with process_group(store, rank, world, seconds=60) if world != "1" else nullcontext():
        run_jobs(rank, jobs, folder)


def run_jobs(rank: str, jobs: str, folder: str) -> None:
    """Run each job in turn."""
    for job in json.loads(Path(jobs).read_text()):
        gc.collect()
        gc.freeze()  # otherwise every end_training() walks all objects that imports have made until then
        print(f"=== {job['id']}", flush=True)
        Path(folder, f"{job['id']}.{rank}.begun").touch()
        found = attempt(job)
        file = Path(folder, f"{job['id']}.{rank}.pt")
        torch.save(found, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        if "refused" in found or "failed" in found:
            sys.stdout.flush()
            os._exit(3)


if __name__ == "__main__":
    main()
