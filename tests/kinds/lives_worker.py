"""Lives on paths: STORE RANK WORLD PATHS FOLDER FIRST COUNT; each process writes its rows."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from device import DEVICE, place_process

os.environ["DS_ACCELERATOR"] = DEVICE

import cpuinfo
import torch.distributed as dist
from lives import Life, PlainLife, PreparedLife, draw, live
from loops import difference, prepared

from zero_plugin.errors import ZeroPluginError

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a second each time


def compare(life: Life, path: str, world: int, folder: Path) -> tuple[float | None, str]:
    """The largest relative difference after a training, or None and the error that the life ended in."""
    try:
        wanted = live(life, PlainLife(world), folder)
        with prepared(path) as loop:
            found = live(life, PreparedLife(loop.accelerator), folder)
        return max(map(difference, found, wanted)), ""
    except ZeroPluginError as error:
        return None, f"refused: {type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - one failing life must not hide the others
        return None, traceback.format_exc()


def main() -> None:
    """Every life on every path, one after the other."""
    store, rank, world, paths, place, first, count = sys.argv[1:]
    os.environ.update(place_process(rank, world))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60)
    )
    with (Path(place) / f"rank-{rank}.jsonl").open("w") as rows:
        for seed in range(int(first), int(first) + int(count)):
            for path in paths.split(","):
                gc.collect()
                gc.freeze()  # else every end_training() walks all that imports have made until then
                dist.barrier()
                print(f"=== {seed} on {path}", flush=True)
                folder = Path(place) / f"{path}-{seed}"
                rows.write(json.dumps([seed, path, *compare(draw(seed), path, int(world), folder)]) + "\n")
                rows.flush()
                dist.barrier()
                shutil.rmtree(folder, ignore_errors=True)
    gc.unfreeze()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
