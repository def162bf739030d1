"""Trains methods of PEFT on paths: STORE RANK WORLD METHODS FOLDER; each process writes its rows."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

from device import DEVICE, place_process

os.environ["DS_ACCELERATOR"] = DEVICE

import torch.distributed as dist
from adapter_methods import METHODS, PATHS, REFUSED, RIGHT, build, train
from paths import running

from zero_plugin.errors import ZeroPluginError


def run(method: str, path: str) -> tuple[str, str]:
    """The table's word for a method on a path, and its error."""
    own, optimizer = build(method)
    wanted = list(train(method, own, own, optimizer, lambda loss: loss.backward(), lambda whole: whole))
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        with running(path) as accelerator:
            own, given = build(method)
            model, stepping = accelerator.prepare(own, given)
            found = list(
                train(
                    method,
                    own,
                    model,
                    stepping,
                    accelerator.backward,
                    lambda whole: whole.chunk(world)[rank],
                    lambda: accelerator.whole_weights(model),
                )
            )
    except ZeroPluginError as error:
        return REFUSED, str(error)
    except Exception:  # noqa: BLE001 - one failing method must not hide the others
        return "fails", traceback.format_exc()
    off = max(float((got - want).norm() / want.norm()) for got, want in zip(found, wanted, strict=True))
    return (RIGHT, "") if off < 1e-5 else ("wrong", f"off by {off:.1e}")


def main() -> None:
    """Every method on every path."""
    store, rank, world, methods, folder = sys.argv[1:]
    os.environ.update(place_process(rank, world))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60)
    )
    with (Path(folder) / f"rank-{rank}.jsonl").open("w") as rows:
        for method in json.loads(methods) or METHODS:
            for title, path in PATHS.items():
                gc.collect()
                gc.freeze()  # else every end_training() walks all that imports have made until then
                dist.barrier()
                print(f"=== {method} on {path}", flush=True)
                rows.write(json.dumps([method, title, *run(method, path)]) + "\n")
                rows.flush()
    gc.unfreeze()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
