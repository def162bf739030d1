"""What a process on another machine needs, as one word that no shell on the way can misread."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["Parcel", "choose_variables", "pack", "unpack"]

# Variables that a run depends on, by how their names start. All else of the environment stays on this machine.
_SENT: Final = (
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "KMP_", "MKL_", "CUDA_", "UCX_", "DS_", "ACCELERATE_"),
    *("ZERO_PLUGIN_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "DATASETS_", "WANDB_", "MLFLOW_", "XDG_CACHE_HOME"),
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED"),
)
_NOT_SENT: Final = ("CUDA_VISIBLE_DEVICES", "DS_ENV_FILE")  # the launcher's own word on each machine, and its own file
_SECRET: Final = frozenset(
    ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIAL", "CREDENTIALS", "AUTH")
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """One launch, for a process of it on any machine.

    Attributes:
        folder: where the program runs.
        arguments: the program and its arguments, as the worker file takes them.
        environment: variables to set.
        deepspeed_config: for scripts that read a DeepSpeed JSON; None without ZeRO.
        main_address, main_port: where the processes meet, where what starts them does not say.
        bind: whether each process is bound to cores.
    """

    folder: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    deepspeed_config: Mapping[str, Any] | None
    main_address: str
    main_port: int
    bind: bool


def pack(parcel: Parcel) -> str:
    """The parcel in letters, digits, `-`, `_` and `=`."""
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(asdict(parcel)).encode(), 9)).decode()


def unpack(word: str) -> Parcel:
    """The parcel that `pack` made into this word."""
    return Parcel(**json.loads(zlib.decompress(base64.urlsafe_b64decode(word))))


def choose_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The variables to send, by an allow-list, and the names of those on it that stay here since they hold a secret."""
    wanted = [name for name in sorted(environ) if name.startswith(_SENT) and name not in _NOT_SENT]
    kept = tuple(name for name in wanted if _SECRET.intersection(name.upper().split("_")))
    return {name: environ[name] for name in wanted if name not in kept}, kept
