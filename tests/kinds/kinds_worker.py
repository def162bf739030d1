"""Trains kinds on paths in one group of processes: STORE RANK WORLD PATHS FOLDER KIND…; process 0 writes a row each."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import cpuinfo
import torch
import torch.distributed as dist
from kinds import KINDS
from loops import Plain, difference, prepared

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a second each time


def main() -> None:
    """Every kind on every path, one after the other; an error is its row's text."""
    store, rank, world, paths, folder, *kinds = sys.argv[1:]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=300)
    )
    with (Path(folder) / f"rank-{rank}.jsonl").open("w") as rows:
        for kind in kinds or KINDS:
            torch.manual_seed(0)
            wanted = KINDS[kind](Plain(int(world)))
            for path in paths.split(","):
                gc.collect()
                gc.freeze()
                torch.manual_seed(0)
                dist.barrier()
                try:
                    with prepared(path) as loop:
                        found = difference(KINDS[kind](loop), wanted)
                except Exception:  # noqa: BLE001 - one failing kind must not hide the others
                    found = traceback.format_exc()
                rows.write(json.dumps([kind, path, int(world), found]) + "\n")
                rows.flush()
    gc.unfreeze()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
