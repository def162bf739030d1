"""Start one process on a machine of a hostfile. DeepSpeed's launcher, mpirun or srun runs this file there.

The command is `remote_worker.py RUN CONFIG`. RUN marks the processes of one launch. CONFIG is everything that a process
needs, encoded as one word without characters that a shell interprets.
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

# Prefixes of the variables that a run depends on. All other variables stay on this machine.
_SENT: Final = (
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "CUDA_", "UCX_", "DS_", "ACCELERATE_"),
    *("ZERO_PLUGIN_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "WANDB_", "MLFLOW_", "XDG_CACHE_HOME"),
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED"),
)
# DeepSpeed's launcher sets the first on each machine, and reads the second's file on this machine.
_NOT_SENT: Final = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")
_SECRET: Final = frozenset(
    ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIAL", "CREDENTIALS", "AUTH")
)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The configuration of one launch, for its processes on all machines.

    Attributes:
        folder: working folder of the program.
        arguments: the program and its arguments, in the worker file's format.
        environment: variables to set.
        deepspeed_config: for scripts that read a DeepSpeed JSON; None without ZeRO.
        main_address, main_port: the rendezvous, if the program that starts the processes does not set it.
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
    """Encode the configuration as letters, digits, `-`, `_` and `=`."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(asdict(config)).encode(), 9)).decode()


def decode_config(word: str) -> WorkerConfig:
    """Decode a word of `encode_config`."""
    return WorkerConfig(**json.loads(zlib.decompress(base64.urlsafe_b64decode(word))))


def choose_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Choose the variables to send, by an allow-list. Return them, and the names left out because they look secret."""
    wanted = [name for name in sorted(environ) if name.startswith(_SENT) and name not in _NOT_SENT]
    kept = tuple(name for name in wanted if _SECRET.intersection(name.upper().split("_")))
    return {name: environ[name] for name in wanted if name not in kept}, kept


def main() -> None:
    """Run the program of the encoded configuration as process LOCAL_RANK of this machine."""
    config = decode_config(sys.argv[2])
    try:
        os.chdir(config.folder)
    except OSError as error:
        raise SystemExit(
            f"{socket.gethostname()}: cannot open {config.folder}, the folder of the launch ({error.strerror}).\n"
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
    """Return the variables that differ between machines: number of threads, DeepSpeed's device, network interface."""
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
