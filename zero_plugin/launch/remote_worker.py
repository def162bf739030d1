"""Starts one process on a machine of a hostfile, where DeepSpeed's launcher, mpirun or srun has reached it.

Started by its path, as `remote_worker.py RUN CONFIG`: RUN marks the processes of one launch, CONFIG is all that a
process needs, encoded as one word that no shell on the way can misread.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import shutil
import socket
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.keys import CONFIG_FILE
from zero_plugin.launch import worker
from zero_plugin.machine.hardware import choose_cores, count_cores, find_gpus, has_gpu_driver
from zero_plugin.machine.network import network_variables
from zero_plugin.machine.process_place import find_place

# Variables that a run depends on, by how their names start. All else of the environment stays on this machine.
_SENT: Final = (
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "CUDA_", "UCX_", "DS_", "ACCELERATE_"),
    *("ZERO_PLUGIN_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "WANDB_", "MLFLOW_", "XDG_CACHE_HOME"),
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED"),
)
# DeepSpeed's launcher sets the first on each machine, and reads the file of the second here.
_NOT_SENT: Final = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
_SECRET: Final = frozenset(
    ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIAL", "CREDENTIALS", "AUTH")
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One launch, for a process of it on any machine.

    Attributes:
        folder: where the program runs.
        arguments: the program and its arguments, as the worker file takes them.
        environment: variables to set.
        deepspeed_config: for scripts that read a DeepSpeed JSON; None without ZeRO.
        main_address, main_port: the rendezvous, if what starts the processes does not set it.
        bind: whether each process is bound to cores.
    """

    folder: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    deepspeed_config: Mapping[str, Any] | None
    main_address: str
    main_port: int
    bind: bool


def encode_config(config: WorkerConfig) -> str:
    """The configuration in letters, digits, `-`, `_` and `=`."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(asdict(config)).encode(), 9)).decode()


def decode_config(word: str) -> WorkerConfig:
    """The configuration that `encode_config` made into this word."""
    return WorkerConfig(**json.loads(zlib.decompress(base64.urlsafe_b64decode(word))))


def choose_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables to send, by an allow-list, and the names of those on it that are not sent as they hold secrets."""
    wanted = [name for name in sorted(environ) if name.startswith(_SENT) and name not in _NOT_SENT]
    kept = tuple(name for name in wanted if _SECRET.intersection(name.upper().split("_")))
    return {name: environ[name] for name in wanted if name not in kept}, kept


def main() -> None:
    """Run the program of the encoded configuration on the command line, as this machine's process number LOCAL_RANK."""
    config = decode_config(sys.argv[2])
    try:
        os.chdir(config.folder)
    except OSError as error:
        raise SystemExit(
            f"{socket.gethostname()}: the launch was typed in {config.folder}, and here that is {error.strerror!r}.\n"
            "Every machine of the hostfile needs the same folders, for example on a shared file system."
        ) from None
    os.environ.update(config.environment)
    if "RANK" not in os.environ:
        os.environ.setdefault("MASTER_ADDR", config.main_address)
        os.environ.setdefault("MASTER_PORT", str(config.main_port))
        if (place := find_place(os.environ)) is not None:
            os.environ.update(place.environment(os.environ))
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    on_gpus = has_gpu_driver() and os.environ.get("DS_ACCELERATOR") != "cpu"
    for name, value in _machine_variables(here, on_gpus=on_gpus).items():
        os.environ.setdefault(name, value)
    if config.bind:
        _bind(here, on_gpus=on_gpus)
    if config.deepspeed_config is not None:
        folder = tempfile.mkdtemp(prefix="zero_plugin_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = Path(folder) / "deepspeed.json"
        file.write_text(json.dumps(config.deepspeed_config, indent=2))
        os.environ[CONFIG_FILE.variable] = str(file)
    sys.argv[1:] = config.arguments
    worker.main()


def _machine_variables(processes: int, *, on_gpus: bool) -> Mapping[str, str]:
    """The variables that differ between machines: the number of threads, DeepSpeed's device, the network interface."""
    variables = {"OMP_NUM_THREADS": str(max(1, count_cores() // processes)), "LOCAL_WORLD_SIZE": str(processes)}
    if not on_gpus:
        variables["DS_ACCELERATOR"] = "cpu"
    is_only_machine = processes == int(os.environ.get("WORLD_SIZE", "1"))
    if is_only_machine:
        return variables
    return variables | network_variables(os.environ.get("MASTER_ADDR", ""), nccl=on_gpus)


def _bind(processes: int, *, on_gpus: bool) -> None:
    gpus = find_gpus(processes, os.environ) if on_gpus else ()
    cores = choose_cores(processes, gpus).cores
    if cores:
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"])])


if __name__ == "__main__":
    main()
