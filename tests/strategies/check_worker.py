"""Runs checks in one group of processes: STORE RANK WORLD CHECKS FOLDER; CHECKS are `module` or `module.name`.

A module lists `CHECKS`: name -> (processes it runs on, function of an empty folder). Each process writes the outcome of
each check, "ok" or a traceback.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from device import DEVICE, ON_GPU, place_process

os.environ["DS_ACCELERATOR"] = DEVICE

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from line_contexts import enter_context
from torch.nn.parallel import DistributedDataParallel


def follow_models() -> weakref.WeakSet[torch.nn.Module]:
    """The engines and DDP wrappers that exist, from now on."""
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    for kind in (DeepSpeedEngine, DistributedDataParallel):
        kind.__init__ = noting(kind.__init__, alive)  # type: ignore[method-assign]
    return alive


def noting(build: Callable[..., None], alive: weakref.WeakSet[torch.nn.Module]) -> Callable[..., None]:
    @functools.wraps(build)
    def noted(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        alive.add(self)

    return noted


def run_check(check: Callable[[Path], None], folder: Path) -> None:
    """Run a check; on a GPU again, with its own models and tensors made there, if it gave a model there CPU tensors."""
    try:
        check(folder)
    except RuntimeError as error:
        if not ON_GPU or not any(words in str(error) for words in ("same device", "two devices", "should be the same")):
            raise
        (again := folder / "again").mkdir()
        with torch.device(DEVICE):
            check(again)


def main() -> None:
    """Run every check that was asked for and is for this number of processes."""
    store, rank, world, asked, output = sys.argv[1:6]
    wanted = set(asked.split(","))
    os.environ.update(place_process(rank, world))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120)
    )
    outcomes = {}
    alive = follow_models()
    checks = {
        f"{module}.{name}": check
        for module in dict.fromkeys(name.split(".")[0] for name in asked.split(","))
        for name, (worlds, check) in importlib.import_module(module).CHECKS.items()
        if int(world) in worlds and wanted & {module, f"{module}.{name}"}
    }
    gc.collect()
    for name, check in checks.items():
        gc.freeze()  # else every end_training() walks all that imports have made until then: 0.2 s
        folder = Path(output) / name
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        dist.barrier()
        print(f"=== {name}", flush=True)
        enter_context(f"{name} on {world}")
        try:
            run_check(check, folder)
            if ON_GPU:
                time.sleep(0.05)  # autograd's thread of the GPU lets go of a graph after the backward has returned
            gc.collect()
            for _ in range(2):  # what autograd's objects hold, in C++, is garbage only when these are gone
                if alive:
                    gc.collect()
            assert not alive, f"the check leaves {[type(model).__name__ for model in alive]}"
            alive.clear()
            outcomes[name] = "ok"
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - one failing check must not hide the others
            outcomes[name] = traceback.format_exc()
            print(outcomes[name], flush=True)
            alive.clear()
    (Path(output) / f"rank-{rank}.json").write_text(json.dumps(outcomes))
    gc.unfreeze()
    gc.collect()  # engines that still hold the group: its threads may abort a process that ends
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
