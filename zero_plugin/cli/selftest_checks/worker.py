"""One process of the self-test: runs every check, and one of each machine writes down what came of them."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from zero_plugin.accelerator import Accelerator
from zero_plugin.cli.selftest_checks.checks import (
    Run,
    check_all_gather,
    check_all_reduce,
    check_barrier,
    check_broadcast,
    check_checkpoint,
    check_data_loader,
    check_host_and_device,
    check_nvme,
    check_optimizer_step,
)
from zero_plugin.cli.selftest_checks.outcome import STEPS, CheckError, LeftOut, Outcome, note
from zero_plugin.config.choices import DistributedType
from zero_plugin.config.plugins import InitProcessGroupKwargs
from zero_plugin.distributed.collectives import gather_object
from zero_plugin.errors import LaunchError, MachineError

_CHECKS: dict[str, Callable[[Run], str]] = {
    "barrier": check_barrier,
    "all_reduce": check_all_reduce,
    "all_gather": check_all_gather,
    "broadcast": check_broadcast,
    "data loader": check_data_loader,
    "optimizer step": check_optimizer_step,
    "checkpoint": check_checkpoint,
    "host and device": check_host_and_device,
    "NVMe": check_nvme,
}
assert ["processes", *_CHECKS] == list(STEPS)
_PATIENCE = timedelta(seconds=60)  # of one collective; building an op first is in none


def main() -> None:
    """`worker.py OUTCOMES FOLDER`: the file to write, and a folder that all processes see, or "" for none."""
    outcomes, folder = sys.argv[1:]
    os.dup2(2, 1)  # what libraries print is no part of the command's own output
    began = time.perf_counter()
    tells = os.environ.get("LOCAL_RANK", "0") == "0"  # to the command, which runs on each machine
    if tells:
        note(Outcome("processes", "begun"), Path(outcomes))
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)])
    tells = accelerator.is_local_main_process  # on a TPU no variable says so
    run = Run(accelerator, Path(folder) if folder else None)
    if tells:
        note(Outcome("processes", "ok", _describe(run), time.perf_counter() - began), Path(outcomes))
    for name, check in _CHECKS.items():
        if tells:
            note(Outcome(name, "begun"), Path(outcomes))
        outcome = _run(name, check, run)
        if tells:
            note(outcome, Path(outcomes))
    if accelerator.is_main_process and run.folder is not None:
        shutil.rmtree(run.folder, ignore_errors=True)
    accelerator.end_training()


def _run(name: str, check: Callable[[Run], str], run: Run) -> Outcome:
    """A check on all processes: it is ok if it is on each."""
    began = time.perf_counter()
    own = ("ok", "", "")
    try:
        own = ("ok", check(run), "")
    except LeftOut as reason:
        own = ("left out", str(reason), "")
    except CheckError as failure:
        own = ("wrong", str(failure), "")
    except (MachineError, LaunchError) as error:  # they say themselves what to do
        what, _, advice = str(error).partition("\n")
        own = ("wrong", what, advice)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what the check has found
        traceback.print_exc()
        own = ("wrong", f"{type(error).__name__}: {error}", "")
    everyones = gather_object([own])
    seconds = time.perf_counter() - began
    wrong = {rank: (said, advice) for rank, (status, said, advice) in enumerate(everyones) if status == "wrong"}
    if wrong:
        ranks = ", ".join(map(str, wrong))
        said, advice = next(iter(wrong.values()))
        return Outcome(name, "wrong", said if run.processes == 1 else f"on rank {ranks}: {said}", seconds, advice)
    status, said, _ = everyones[0]
    return Outcome(name, "left out" if status == "left out" else "ok", said, seconds)


def _describe(run: Run) -> str:
    """How many processes of what kind, and how they train."""
    accelerator = run.accelerator
    settings = [str(accelerator.mixed_precision).replace("no", "fp32")]
    if accelerator.distributed_type is DistributedType.DEEPSPEED:
        zero = accelerator.document.deepspeed.section("zero_optimization")
        settings.insert(0, f"ZeRO-{zero.value('stage', default=0)}")
        devices = {what: zero.value(f"offload_{what}", "device") for what in ("optimizer", "param")}
        settings += [f"{what} offload to {device}" for what, device in devices.items() if device not in (None, "none")]
    elif run.processes > 1:
        settings.insert(0, "DDP" if run.device.type != "xla" else "data parallel")
    else:
        settings.insert(0, "one process")
    return f"{run.processes} × {run.device.type}, {', '.join(settings)}"


if __name__ == "__main__":
    main()
