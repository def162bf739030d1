"""Detects a TPU without torch and without starting the TPU; and starts torch_xla's runtime for it.

Problems of torch_xla or its devices are described in a sentence.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from zero_plugin.config.installed import installed_version
from zero_plugin.errors import LaunchError, MachineError

PJRT_DEVICE: Final = "PJRT_DEVICE"  # selects the runtime that torch_xla loads
_GOOGLE: Final = "0x1ae0"  # PCI vendor. torch_xla 2.9 finds chips the same way, in torch_xla/_internal/tpu.py
_CHIPS: Final = frozenset(("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"))  # v2/v3 v4 v5p v5e v6e v7x
# A container may hide the PCI bus. Other devices use both folders too, so a variable must name a TPU as well.
_NODES: Final = ("dev/accel[0-9]*", "dev/vfio/[0-9]*")
_VARIABLES: Final = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_NAME", "COLAB_TPU_ADDR")


def find_tpu(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return the sign of a TPU here, in half a sentence; "" without a TPU, or if `PJRT_DEVICE` names another device.

    Args:
        environ: this process's environment.
        root: the file system's root.
    """
    chosen = environ.get(PJRT_DEVICE, "")
    if chosen:
        return f"{PJRT_DEVICE} is {chosen}" if chosen.partition("_")[0] == "TPU" else ""
    if chips := sum(1 for _ in _chips(root)):
        return f"{chips} TPU chip{'s' if chips > 1 else ''} on the PCI bus"
    node = next((path for pattern in _NODES for path in sorted(root.glob(pattern))), None)
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    return f"{node} is there and {variable} is set" if node is not None and variable is not None else ""


def _chips(root: Path) -> Iterator[Path]:
    for folder in root.glob("sys/bus/pci/devices/*"):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and device in _CHIPS:
            yield folder


_INSTALL: Final = "pip install 'zero-plugin[tpu]'"
_RUNTIMES: Final = ("TPU", "CPU")


def find_version_problem(version: Callable[[str], str | None] = installed_version) -> str:
    """Describe a problem of the installed torch_xla, with the command that fixes it; "" for none. Do not import it.

    torch_xla does not declare which torch it needs. It is built for the torch of the same major and minor version.

    Args:
        version: returns the version of an installed package; None if it is missing.
    """
    xla, torch = version("torch_xla"), version("torch")
    if xla is None:
        return f"a TPU needs torch_xla, which is not installed: {_INSTALL}"
    if torch is None or _minor(xla) == _minor(torch):
        return ""
    wanted = ".".join(map(str, _minor(xla)))
    return (
        f"torch_xla {xla} is built for torch {wanted}, and this is torch {torch}: {_INSTALL}\n"
        "Use a separate environment if other packages need the newer torch."
    )


def import_torch_xla() -> Any:
    """Import torch_xla, with its `runtime` and `core.xla_model`. Only this function in zero_plugin imports it.

    Raises:
        MachineError: it is missing, or is built for another torch than the installed one.
    """
    if problem := find_version_problem():
        raise MachineError(problem)
    try:
        return importlib.import_module("torch_xla")
    except ImportError as error:  # an undefined symbol of another torch, or a Python without a shared library
        versions = f"torch_xla {installed_version('torch_xla')}, torch {installed_version('torch')}"
        raise MachineError(
            f"torch_xla cannot be imported ({versions}): {error}\nIt is built for one torch and for a Python with a "
            f"shared libpython. Install matching versions: {_INSTALL}"
        ) from error


def start_runtime(environ: Mapping[str, str] = os.environ) -> str:
    """Start the XLA runtime of this process, and return its name, `TPU` or `CPU`.

    Call this before any `backward`: torch's autograd engine counts devices once, and crashes on devices added later.

    Args:
        environ: the environment. With `PJRT_DEVICE`, the user may choose the CPU to try things there.

    Raises:
        LaunchError: the runtime does not run on a TPU, and the user has not requested the CPU.
        MachineError: torch_xla or the runtime does not work here.
    """
    asked = environ.get(PJRT_DEVICE, "")  # read before the import, which sets it if it is unset
    runtime = import_torch_xla().runtime
    found = str(runtime.device_type())
    if found not in _RUNTIMES or (found == "CPU" and not asked):
        runs_on = f"{PJRT_DEVICE} is {asked}" if asked else "torch_xla finds none here"
        if not asked:  # torch_xla has set it, and a second try would take it for the user's choice
            os.environ.pop(PJRT_DEVICE, None)
        raise LaunchError(
            f"the run is to train on a TPU, but {runs_on}.\nSet {PJRT_DEVICE}=TPU on a machine with a TPU, or "
            f"{PJRT_DEVICE}=CPU to try the same path without one; for GPUs leave --tpu and distributed_type out."
        )
    try:
        runtime.addressable_device_count()
    except (RuntimeError, OSError) as error:
        raise explain_start(error) from error
    return found


def explain_start(error: Exception) -> MachineError:
    """Return the error to raise if the start of the XLA runtime has raised `error`."""
    return MachineError(
        f"the XLA runtime does not start with {PJRT_DEVICE}={os.environ.get(PJRT_DEVICE, '')}: {error}\n"
        f"Another process may hold the TPU, which serves one process at a time; or libtpu is missing: {_INSTALL}"
    )


def check_world_size(found: int, environ: Mapping[str, str] = os.environ) -> None:
    """Compare the number of replicas that the XLA runtime connects with the number that the launcher started.

    Without this check, unconnected processes would train separately: their all-reduce silently does nothing.

    Args:
        found: `torch_xla.runtime.world_size()`.
        environ: the environment; `WORLD_SIZE` is the launcher's number, absent if the runtime decides.

    Raises:
        LaunchError: the numbers differ.
    """
    meant = environ.get("WORLD_SIZE", "")
    if not meant or int(meant) == found:
        return
    devices = f"{found} device{'s' if found != 1 else ''}"
    raise LaunchError(
        f"{meant} processes were started, but the XLA runtime connects {devices} "
        f"({PJRT_DEVICE}={environ.get(PJRT_DEVICE, '')}): gradients would not be averaged.\n"
        f"Start the script by `zero-plugin launch --tpu`, not by torchrun, with --num_processes {found} or without it."
    )


def refuse_threads(found: int) -> None:
    """Refuse replicas that are threads of one process: they would share a process group and the state of a run.

    torch_xla makes threads if a process has several devices: TPU v2 and v3, and several replicas with
    `PJRT_DEVICE=CPU`.

    Args:
        found: `torch_xla.runtime.world_size()`.

    Raises:
        LaunchError: several replicas are threads of this process, and torch was not switched to one process group per
            thread.
    """
    if found == 1 or import_torch_xla().runtime.addressable_device_count() == 1:
        return
    groups = importlib.import_module("torch.distributed.distributed_c10d")
    if isinstance(groups._world, groups._World):
        raise LaunchError(
            f"the XLA runtime runs {found} replicas, and several are threads of one process, as on TPU v2 and v3 "
            f"and with {PJRT_DEVICE}=CPU. Each needs a process of its own, as on TPU v4 and newer.\n"
            "Start one replica: --num_processes 1."
        )


def _minor(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
