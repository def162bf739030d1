"""Environment variables, and what the machine says of itself without starting a device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.version import parse

from zero_plugin.config.choices import parse_flag_from_env as parse_flag_from_env
from zero_plugin.config.choices import str_to_bool as str_to_bool
from zero_plugin.machine.process_place import variables_while
from zero_plugin.machine.scheduler_job import MPI, TORCH

_logger = logging.getLogger(__name__)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of these variables that is set and not negative."""
    for key in env_keys:
        if (value := int(os.environ.get(key, -1))) >= 0:
            return value
    return default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The variable's text."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """The given modules that have been imported."""
    return [name for name in library_names if name in sys.modules]


# ---- contexts --------------------------------------------------------------------------------------------------------


@contextmanager
def clear_environment() -> Iterator[None]:
    """No environment variables inside; afterwards those of before."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Variables set inside, names in capitals and values as text; afterwards as before."""
    with variables_while({key.upper(): str(value) for key, value in kwargs.items()}):
        yield


# ---- the machine -----------------------------------------------------------------------------------------------------


@dataclass
class CPUInformation:
    """This process among the others, as a launcher's variables say.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """What torchrun, Intel MPI, Open MPI or MVAPICH2 say in the environment; one process where none does."""
    launchers = (TORCH, *MPI)
    return CPUInformation(
        rank=get_int_from_env([names.rank for names in launchers], 0),
        world_size=get_int_from_env([names.world_size for names in launchers], 1),
        local_rank=get_int_from_env([names.local_rank for names in launchers], 0),
        local_world_size=get_int_from_env([names.local_size for names in launchers], 1),
    )


def get_gpu_info() -> tuple[list[str], int]:
    """Names of the NVIDIA GPUs, and how many there are.

    Raises:
        OSError, CalledProcessError: nvidia-smi is missing or fails.
    """
    names = _ask_nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Version of the NVIDIA driver.

    Raises:
        OSError, CalledProcessError: nvidia-smi is missing or fails.
    """
    return _ask_nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """False where NCCL must not use P2P or InfiniBand: several RTX 40 on a driver older than 550.40.07."""
    try:
        names, count = get_gpu_info()
        affected = count > 1 and any("RTX 40" in name for name in names)
        return not affected or parse(get_driver_version()) >= parse("550.40.07")
    except (OSError, subprocess.SubprocessError):
        return True  # no NVIDIA GPUs, so nothing to avoid


def _ask_nvidia_smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()  # noqa: S603 - fixed words
