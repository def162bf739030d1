"""Runs scripts one after another in one process group: STORE RANK WORLD LIBRARY FOLDER SCRIPT…

A script gets FOLDER/<its name> for its files and writes its results to `results.json` there. Each process writes the
outcome of each script, "ok" or a traceback.
"""

from __future__ import annotations

import gc
import importlib
import json
import runpy
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from device import process_group
from migrate import migrate


def main() -> None:
    """Run each script with `library`."""
    store, rank, world, library, output, *scripts = sys.argv[1:]
    folder, together = Path(output), int(world) > 1
    with process_group(store, rank, world) if together else nullcontext():
        states = importlib.import_module(f"{library}.state")
        if library == "accelerate":
            # Accelerate's end_training ends this group while DDP still holds it, and then about one gloo process in six
            # aborts.
            states.PartialState.destroy_process_group = lambda *_: None
        outcomes = {}
        for script in map(Path, scripts):
            states.AcceleratorState._reset_state(True)
            states.GradientState._reset_state()
            gc.collect()
            gc.freeze()  # otherwise each collection, of which some scripts run many, walks all imported objects
            own = folder / script.stem
            own.mkdir(exist_ok=True)
            file = own / f"{library}-{rank}.py"
            file.write_text(script.read_text() if library == "accelerate" else migrate(script.read_text()))
            sys.argv[:] = [str(file), str(own / "results.json")]
            print(f"=== {script.stem}", flush=True)
            began = time.perf_counter()
            try:
                runpy.run_path(str(file), run_name="__main__")
                outcomes[script.stem] = "ok"
            except Exception:  # noqa: BLE001 - one failing script must not hide the others
                outcomes[script.stem] = traceback.format_exc()
                print(outcomes[script.stem], flush=True)
            print(f"=== {time.perf_counter() - began:.2f} s", flush=True)
        (folder / f"rank-{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
