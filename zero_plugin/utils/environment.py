"""Environment variables, and facts about the machine that do not need a device."""

from __future__ import annotations

import functools
import inspect
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
from zero_plugin.utils.lazy import stand_in

_logger = logging.getLogger(__name__)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of these variables that is set and not negative, or `default`."""
    for key in env_keys:
        if (value := int(os.environ.get(key, -1))) >= 0:
            return value
    return default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the variable's text, or `default`."""
    return os.environ.get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the given modules that have been imported."""
    return [name for name in library_names if name in sys.modules]


# ---- contexts --------------------------------------------------------------------------------------------------------


@contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables inside the context, and restore them afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set variables inside the context, with names in capitals and values as text; restore them afterwards."""
    with variables_while({key.upper(): str(value) for key, value in kwargs.items()}):
        yield


@contextmanager
def _accelerate_variables_restored() -> Iterator[None]:
    """Restore the `ACCELERATE_…` variables afterwards."""
    before = _accelerate_variables()
    try:
        yield
    finally:
        for name in _accelerate_variables():
            del os.environ[name]
        os.environ.update(before)


def _accelerate_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Restore the `ACCELERATE_…` variables after each call of a function, or of each test of a class.

    Args:
        func_or_cls: a function, also an asynchronous one; or a class: its methods `test…` and those of its subclasses
            are replaced.
    """
    if not isinstance(func_or_cls, type):
        return _restoring(func_or_cls)
    cls: Any = func_or_cls
    own = vars(cls).get("__init_subclass__")

    def extend_to_subclass(subclass: Any, /, **kwargs: Any) -> None:
        begin = super(cls, subclass).__init_subclass__ if own is None else own.__get__(None, subclass)
        begin(**kwargs)
        _restore_after_tests(subclass)

    cls.__init_subclass__ = classmethod(extend_to_subclass)
    _restore_after_tests(cls)
    return cls


def _restore_after_tests(cls: type) -> None:
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("test") and inspect.isfunction(method):
            setattr(cls, name, _restoring(method))


def _restoring(function: Any) -> Any:
    if not inspect.iscoroutinefunction(function):
        return _accelerate_variables_restored()(function)

    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        with _accelerate_variables_restored():
            return await function(*args, **kwargs)

    return run


# ---- the machine -----------------------------------------------------------------------------------------------------


@dataclass
class CPUInformation:
    """The ranks of this process, according to a launcher's variables.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among the processes of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read the variables of torchrun, Intel MPI, Open MPI or MVAPICH2; one process if none of them is set."""
    launchers = (TORCH, *MPI)
    return CPUInformation(
        rank=get_int_from_env([names.rank for names in launchers], 0),
        world_size=get_int_from_env([names.world_size for names in launchers], 1),
        local_rank=get_int_from_env([names.local_rank for names in launchers], 0),
        local_world_size=get_int_from_env([names.local_size for names in launchers], 1),
    )


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA GPUs, and their number.

    Raises:
        OSError, CalledProcessError: nvidia-smi is missing or fails.
    """
    names = _ask_nvidia_smi("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver.

    Raises:
        OSError, CalledProcessError: nvidia-smi is missing or fails.
    """
    return _ask_nvidia_smi("driver_version")[0]


def check_cuda_p2p_ib_support() -> bool:
    """Return False if NCCL must not use P2P or InfiniBand: several RTX 40 on a driver older than 550.40.07."""
    try:
        names, count = get_gpu_info()
        affected = count > 1 and any("RTX 40" in name for name in names)
        return not affected or parse(get_driver_version()) >= parse("550.40.07")
    except (OSError, subprocess.SubprocessError):
        return True  # no NVIDIA GPUs, so nothing to avoid


def _ask_nvidia_smi(field: str) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).strip().splitlines()  # noqa: S603 - fixed words


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
