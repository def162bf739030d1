"""Trains kinds on paths: STORE RANK WORLD PATHS FOLDER KIND…; each process writes its rows."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

from device import DEVICE, place_process

os.environ["DS_ACCELERATOR"] = DEVICE

import cpuinfo
import torch
import torch.distributed as dist
from kinds import KINDS
from loops import Plain, difference, prepared

from zero_plugin.errors import ZeroPluginError

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a second each time


def compare(kind: str, path: str, world: int) -> tuple[float | None, str]:
    """The relative difference of what `kind` ends with on `path`, or None and the error that it ended in."""
    try:
        torch.manual_seed(0)
        wanted = KINDS[kind](Plain(world))
        torch.manual_seed(0)
        with prepared(path) as loop:
            return difference(KINDS[kind](loop), wanted), ""
    except ZeroPluginError as error:
        return None, f"refused: {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - one failing kind must not hide the others
        return None, traceback.format_exc()


def main() -> None:
    """Every kind on every path, one after the other."""
    store, rank, world, paths, folder, *kinds = sys.argv[1:]
    os.environ.update(place_process(rank, world))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60)
    )
    with (Path(folder) / f"rank-{rank}.jsonl").open("w") as rows:
        for kind in kinds or KINDS:
            for path in paths.split(","):
                gc.collect()
                gc.freeze()  # else every end_training() walks all that imports have made until then
                dist.barrier()
                print(f"=== {kind} on {path}", flush=True)
                begun = time.perf_counter()
                rows.write(json.dumps([kind, path, int(world), *compare(kind, path, int(world))]) + "\n")
                rows.flush()
                print(f"=== {time.perf_counter() - begun:.2f} s", flush=True)
    gc.unfreeze()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
