"""Run the bodies of tests in one group of processes: STORE RANK WORLD REQUESTS FOLDER; see on_paths.py.

REQUESTS is a file that names the tests. Each process writes the outcome of each test into FOLDER: "ok", a traceback, or
the reason for a skip.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from device import DEVICE, ON_GPU, place_process, process_group

os.environ["DS_ACCELERATOR"] = DEVICE
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from line_contexts import enter_context
from on_paths import SKIPPED
from torch.nn.parallel import DistributedDataParallel

PATIENCE = "ZERO_PLUGIN_TESTS_PATIENCE"
"""Variable: seconds for which a process waits in a collective."""


def follow_models() -> weakref.WeakSet[torch.nn.Module]:
    """Record the engines and DDP wrappers that are created from now on."""
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    for kind in (DeepSpeedEngine, DistributedDataParallel):
        kind.__init__ = noting(kind.__init__, alive)  # type: ignore[method-assign]
    return alive


def noting(build: Callable[..., None], alive: weakref.WeakSet[torch.nn.Module]) -> Callable[..., None]:
    """Wrap a constructor to add its objects to `alive`."""

    @functools.wraps(build)
    def noted(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        alive.add(self)

    return noted


@functools.cache
def load(file: str) -> types.ModuleType:
    """Load a file of tests as a module. It imports its folder's helpers by name."""
    path = Path(file)
    if file not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_body(body: Callable[..., None], request: dict[str, Any], folder: Path, **own: Any) -> None:
    """Run a test.

    On a GPU, run it again, with its own models and tensors there, if it passed CPU tensors to a GPU model.
    """

    def run(place: Path) -> None:
        place.mkdir(exist_ok=True)
        given = {**own, "folder": place}
        body(**request["arguments"], **{name: given[name] for name in request["takes"]})

    try:
        run(folder)
    except RuntimeError as error:
        if not ON_GPU or not any(words in str(error) for words in ("same device", "two devices", "should be the same")):
            raise
        with torch.device(DEVICE):
            run(folder / "again")


def main() -> None:
    """Run every requested test."""
    store, rank, world, requests, output = sys.argv[1:6]
    asked = json.loads(Path(requests).read_text())
    bodies = [getattr(load(request["file"]), request["function"]).body for request in asked]
    if "store" in asked[0]["takes"]:  # the test makes its own group, and ends it
        os.environ.update(place_process(rank, world))
        request, body = asked[0], bodies[0]
        enter_context(request["id"])
        run_body(body, request, Path(output, "0"), rank=int(rank), store=f"file://{store}")
        Path(output, f"rank-{rank}.json").write_text(json.dumps({request["id"]: "ok"}))
        return
    with process_group(store, rank, world, seconds=float(os.environ.get(PATIENCE, "120"))):
        outcomes = {}
        alive = follow_models()
        gc.collect()
        for index, (request, body) in enumerate(zip(asked, bodies, strict=True)):
            gc.freeze()  # without this, every end_training() would walk all objects of the imports: 0.2 s
            name = request["id"]
            torch.manual_seed(0)
            dist.barrier()
            print(f"=== {name}", flush=True)
            enter_context(name)
            try:
                run_body(body, request, Path(output, str(index)), rank=int(rank))
                if ON_GPU:
                    time.sleep(0.05)  # autograd's thread of the GPU releases a graph after the backward has returned
                gc.collect()
                for _ in range(2):  # C++ objects held by autograd become garbage only when these are gone
                    if alive:
                        gc.collect()
                assert not alive, f"the test leaves {[type(model).__name__ for model in alive]}"
                alive.clear()
                outcomes[name] = "ok"
            except pytest.skip.Exception as skip:
                outcomes[name] = f"{SKIPPED}{skip}"
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - one failing test must not hide the others
                outcomes[name] = traceback.format_exc()
                print(outcomes[name], flush=True)
                alive.clear()
        Path(output, f"rank-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
