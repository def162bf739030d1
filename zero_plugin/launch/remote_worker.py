"""Start one process where DeepSpeed's launcher, mpirun or srun has reached a machine of the run.

Started by its path, as `remote_worker.py RUN WORD`: RUN marks the processes of one launch, WORD holds all the rest.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from zero_plugin.launch import worker
from zero_plugin.launch.affinity import choose_cores, find_gpus
from zero_plugin.launch.foreign import CONFIG_FILE_VARIABLE
from zero_plugin.launch.machine import count_cores, has_gpu_driver
from zero_plugin.launch.parcel import unpack
from zero_plugin.probe.network import interface_towards
from zero_plugin.probe.scheduler import find_place

__all__ = ["main"]


def main() -> None:
    """Run the program of the parcel on the command line, as this machine's process number LOCAL_RANK."""
    parcel = unpack(sys.argv[2])
    try:
        os.chdir(parcel.folder)
    except OSError as error:
        raise SystemExit(
            f"{socket.gethostname()}: the launch was typed in {parcel.folder}, and here that is {error.strerror!r}.\n"
            "Every machine of the hostfile needs the same folders, for example on a shared file system."
        ) from None
    os.environ.update(parcel.environment)
    if "RANK" not in os.environ:
        os.environ.setdefault("MASTER_ADDR", parcel.main_address)
        os.environ.setdefault("MASTER_PORT", str(parcel.main_port))
        if (place := find_place(os.environ)) is not None:
            os.environ.update(place.environment(os.environ))
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    on_gpus = has_gpu_driver() and os.environ.get("DS_ACCELERATOR") != "cpu"
    for name, value in _of_this_machine(here, on_gpus=on_gpus).items():
        os.environ.setdefault(name, value)
    if parcel.bind:
        _bind(here, on_gpus=on_gpus)
    if parcel.deepspeed_config is not None:
        folder = tempfile.mkdtemp(prefix="zero_plugin_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder) / "deepspeed.json"
        file.write_text(json.dumps(parcel.deepspeed_config, indent=2))
        os.environ[CONFIG_FILE_VARIABLE] = str(file)
    sys.argv[1:] = parcel.arguments
    worker.main()


def _of_this_machine(processes: int, *, on_gpus: bool) -> Mapping[str, str]:
    """What `zero-plugin launch` sets on its own machine: threads, DeepSpeed's device, the way to the others."""
    found = {"OMP_NUM_THREADS": str(max(1, count_cores() // processes)), "LOCAL_WORLD_SIZE": str(processes)}
    if not on_gpus:
        found["DS_ACCELERATOR"] = "cpu"
    alone = processes == int(os.environ.get("WORLD_SIZE", "1"))
    interface = None if alone else interface_towards(os.environ.get("MASTER_ADDR", ""))
    if interface is not None:
        found["GLOO_SOCKET_IFNAME"] = interface
        if on_gpus:
            found["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return found


def _bind(processes: int, *, on_gpus: bool) -> None:
    gpus = find_gpus(processes, os.environ) if on_gpus else ()
    cores = choose_cores(processes, gpus).cores
    if cores:
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"])])


if __name__ == "__main__":
    main()
