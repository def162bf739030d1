"""Builds of C++ ops: the ops of a run, their tools, and locks of killed builds, for which torch waits silently."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from zero_plugin.config.document import offload_devices
from zero_plugin.config.installed import is_at_least
from zero_plugin.config.run_files import cache_folder
from zero_plugin.config.tree import AUTO, Tree
from zero_plugin.errors import MachineError
from zero_plugin.machine.hardware import PROC, process_stat

_log = logging.getLogger(__name__)

_CPU_OPS: Final = {"adam": "cpu_adam", "adamw": "cpu_adam", "adagrad": "cpu_adagrad", "lion": "cpu_lion"}
_GPU_OPS: Final = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_QUIET_S: Final = 180.0  # a running build on another machine writes some file within this time
_LOOK_S: Final = 0.5
# Since this torch, a builder uses a kernel lock, which the kernel releases if the builder is killed. The file stays.
_LOCKED_BY_KERNEL: Final = "2.14"

INSTALL_COMPILER: Final = "sudo apt-get install g++   (Fedora: sudo dnf install gcc-c++; conda: conda install gxx)"
INSTALL_NINJA: Final = "pip install ninja   (and have the environment's bin folder on the PATH)"
INSTALL_LIBAIO: Final = (
    "sudo apt-get install libaio-dev   (Fedora: sudo dnf install libaio-devel; conda: conda install libaio)"
)
_WITHOUT_OP: Final = {
    **dict.fromkeys(
        _CPU_OPS.values(),
        "zero_force_ds_cpu_optimizer: false in the DeepSpeed config: torch's own optimizer then runs on the CPU, which "
        "is slower.",
    ),
    **dict.fromkeys(_GPU_OPS.values(), "torch_adam: true in optimizer.params: Adam and AdamW are then torch's own."),
    **dict.fromkeys(("async_io", "pin_memory"), "device: cpu instead of nvme."),
}


def needed_ops(training: Tree, optimizer: str | None, *, on_gpu: bool) -> list[str]:
    """Return the DeepSpeed ops that a run loads, by the names of their builders.

    Args:
        training: the run's configuration. An open offload device may become any device.
        optimizer: the class or `type` of the engine's optimizer, in small letters; None without one.
        on_gpu: whether the run computes on GPUs.
    """
    zero = training.section("zero_optimization")
    devices = list(offload_devices(training).values())
    by_torch = bool(training.value("optimizer", "params", "torch_adam"))
    by_section = training.value("optimizer", "type") not in (None, AUTO)
    ops = []
    forced = training.get("zero_force_ds_cpu_optimizer")
    any_by_torch = forced is not None and forced.origin.typed_by_user and forced.value is False
    if devices[0] in ("cpu", "nvme", AUTO) and optimizer in _CPU_OPS and not (by_torch or any_by_torch):
        ops.append(_CPU_OPS[optimizer])
    if devices[0] not in ("cpu", "nvme") and on_gpu and by_section and optimizer in _GPU_OPS and not by_torch:
        ops.append(_GPU_OPS[optimizer])
    if on_gpu and any(zero.value(f"zero_quantized_{what}") is True for what in ("weights", "gradients")):
        ops.append("quantizer")
    return [*ops, "pin_memory", "async_io"] if "nvme" in devices else ops


def build_folder(environ: Mapping[str, str], torch_cuda: str | None) -> Path:
    """Return the folder in which torch keeps the ops of this Python and this torch."""
    if environ.get("TORCH_EXTENSIONS_DIR"):
        return _root_folder(environ)
    kind = f"cu{torch_cuda.replace('.', '')}" if torch_cuda else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return _root_folder(environ) / f"{python}_{kind}"


def _root_folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TORCH_EXTENSIONS_DIR") or cache_folder(environ) / "torch_extensions")


def missing_builds(ops: Collection[str], folder: Path) -> list[str]:
    """Return the `ops` that are not built in `folder`."""
    return [op for op in ops if not (folder / op / f"{op}.so").is_file()]


def find_libaio(environ: Mapping[str, str], root: Path = Path("/")) -> tuple[Path | None, Path | None]:
    """Find the header and the library of libaio in a compiler's folders; None for a missing one.

    Args:
        environ: the environment. `CPATH`, `CFLAGS` and `CONDA_PREFIX` name more folders for headers; `LIBRARY_PATH`,
            `LDFLAGS` and `CONDA_PREFIX` for libraries.
        root: the root of the file system.
    """
    headers = (folder / "libaio.h" for folder in _folders(environ, "CPATH", "CFLAGS", "-I", "include", root))
    libraries = (
        file
        for folder in _folders(environ, "LIBRARY_PATH", "LDFLAGS", "-L", "lib", root)
        for file in [*folder.glob("libaio.so"), *folder.glob("*-linux-gnu*/libaio.so")]
    )
    return next((file for file in headers if file.exists()), None), next(libraries, None)


def _folders(
    environ: Mapping[str, str], variable: str, flags: str, letter: str, kind: str, root: Path
) -> Iterator[Path]:
    yield from (Path(name) for name in environ.get(variable, "").split(":") if name)
    yield from (Path(flag[2:]) for flag in shlex.split(environ.get(flags, "")) if flag.startswith(letter))
    if prefix := environ.get("CONDA_PREFIX"):
        yield Path(prefix, kind)
    yield from (root / "usr" / kind, root / "usr" / "local" / kind)
    if kind == "lib":
        yield from (root / "usr" / "lib64", root / "lib64")


def describe_missing_tools(ops: Collection[str], folder: Path, environ: Mapping[str, str]) -> str | None:
    """Describe the tools that this machine lacks to build or load `ops`, and how to do without; None if complete.

    Args:
        ops: the ops that a run loads.
        folder: the folder of their builds.
        environ: the environment, with `PATH` and `CXX`.
    """
    to_build, missing = missing_builds(ops, folder), {}
    path, compiler = environ.get("PATH", ""), environ.get("CXX", "c++")
    if ops and shutil.which("ninja", path=path) is None:  # torch needs ninja even to load a built op
        missing["ninja is not on the PATH"] = INSTALL_NINJA
    if to_build and shutil.which(shlex.split(compiler)[0], path=path) is None:
        missing[f"the C++ compiler {compiler} is not on the PATH"] = INSTALL_COMPILER
    if "async_io" in to_build and None in find_libaio(environ):
        missing["libaio's header or library is not installed"] = INSTALL_LIBAIO
    if not missing:
        return None
    loads = f"This run {'compiles' if to_build else 'loads'} DeepSpeed's {', '.join(to_build or ops)}"
    without = dict.fromkeys(_WITHOUT_OP[op] for op in to_build or ops if op in _WITHOUT_OP)
    lines = [f"{loads}, but {' and '.join(missing)}.", *missing.values()]
    return "\n".join([*lines, *(f"Or do without: write {key}" for key in without)])


def find_stale_build_locks(ops: Collection[str], folder: Path) -> list[Path]:
    """Find locks of `ops` in `folder` that no process of this machine holds, as far as visible.

    torch's builder creates `lock` in the op's folder. It keeps the file open while it compiles or checks whether to
    compile. A process killed meanwhile leaves the file behind. A newer torch ignores the file.
    """
    if is_at_least("torch", _LOCKED_BY_KERNEL):
        return []
    stale = [lock for op in ops if (lock := folder / op / "lock").exists() and not _is_open_somewhere(lock)]
    return [lock for lock in stale if lock.exists()]  # a builder may have finished between the two looks


def refuse_stale_build_locks(ops: Collection[str], folder: Path) -> None:
    """Raise if an op that this run loads has a stale lock. Wait first, because another machine may hold the lock.

    Raises:
        MachineError: a lock is stale. The message names the lock and the command that removes it.
    """
    warned: list[Path] = []
    while stale := find_stale_build_locks(ops, folder):
        removals = (f"  rm {lock}" for lock in stale)
        advice = "\n".join(["If no other machine is building into this folder, remove it:", *removals])
        if all(time.time() - _last_change(lock.parent) > _QUIET_S for lock in stale):
            raise MachineError(
                "A C++ op build was killed and left its lock behind; this run would wait for it forever.\n" + advice
            )
        if stale != warned:
            names = ", ".join(lock.parent.name for lock in stale)
            _log.warning("waiting for a build of %s, which no process of this machine runs. %s", names, advice)
            warned = stale
        time.sleep(_LOOK_S)


class RunningBuilds:
    """The builds of some processes, to end with them: a killed builder leaves its compilers and its lock."""

    def __init__(self) -> None:
        self._compilers: set[tuple[int, Path]] = set()
        self._locks: set[Path] = set()

    def record_builds(self, processes: Collection[int]) -> None:
        """Record the lock files that these processes and their descendants hold.

        The compilers that run in the same folders are recorded too.
        """
        family = _with_children(processes)
        locks = {lock for process in family for lock in _open_locks(process)}
        folders = {lock.parent for lock in locks}
        self._locks |= locks
        self._compilers |= {(process, cwd) for process in family if (cwd := _working_folder(process)) in folders}

    def end(self) -> None:
        """Kill the compilers of processes that are gone, and remove their leftover locks."""
        for process, folder in self._compilers:
            if _working_folder(process) == folder:  # otherwise it has ended, and its id may be reused
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
        for lock in self._locks:
            if not _is_open_somewhere(lock):
                lock.unlink(missing_ok=True)


def _last_change(folder: Path) -> float:
    """Return the time of the last write in `folder`; now if it is gone."""
    times = []
    for file in (folder, *folder.iterdir()) if folder.is_dir() else ():
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times, default=time.time())


def _is_open_somewhere(file: Path) -> bool:
    """Return whether a process of this machine has `file` open; True if unknown.

    It is unknown without /proc, and if the file's owner has processes here whose files are not visible. Hidden files of
    other users' processes are ignored, because a builder creates its lock itself and so owns it.
    """
    if not Path("/proc").is_dir():
        return True
    wanted = file.resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process or the file may be gone by now
            try:
                if any(_target(descriptor) == wanted for descriptor in (process / "fd").iterdir()):
                    return True
            except PermissionError:
                if process.stat().st_uid == file.stat().st_uid:
                    return True
    return False


def _open_locks(process: int) -> Iterator[Path]:
    cache = _root_folder(os.environ).resolve()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            file = _target(descriptor)
            if file is not None and file.name == "lock" and cache in file.parents:
                yield file


def _working_folder(process: int) -> Path | None:
    return _target(Path(f"/proc/{process}/cwd"))


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:  # the process ended meanwhile, or belongs to another user
        return None


def _with_children(processes: Collection[int]) -> set[int]:
    """Return these processes and all their living descendants."""
    stats = {int(folder.name): process_stat(int(folder.name)) for folder in PROC.glob("[0-9]*")}
    parents = {process: int(stat[1]) for process, stat in stats.items() if stat}
    family = set(processes)
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family
