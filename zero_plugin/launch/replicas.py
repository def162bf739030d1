"""Run a function of the user's program on every device of a TPU, each in a process or thread that torch_xla starts."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from zero_plugin.config.handover import from_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.distributed.stop_request import install_stop_handler
from zero_plugin.errors import LaunchError
from zero_plugin.launch.worker import ERROR_FILE, die_with_launcher, read_first_failure, report_end
from zero_plugin.machine.xla_runtime import explain_start, import_torch_xla

# What torchrun tells its worker of the group that this is alone in.
_OF_TORCHRUN: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    "TORCHELASTIC_RUN_ID",  # seeing it, torch_xla.launch would start nothing
)
_MEETING: Final = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
ENDED_SILENTLY: Final = (
    "the process of a replica ended without a word of Python's: the kernel may have killed it for want of host memory "
    "(`dmesg` tells), or XLA ended it, whose own words are above."
)
_importing = threading.Lock()
_begun: list[int] = []  # replicas of this process


def run_replicas(function: str, count: str, program: list[str]) -> None:
    """Call `function` of the program on every device, and return when all calls have.

    Args:
        function: a name in the program's module, called without arguments.
        count: how many devices there must be, or `all`.
        program: the script and its arguments, or `-m`, the module and its arguments.

    Raises:
        MachineError: torch_xla does not work here.
        SystemExit: a replica has failed, and said why.
    """
    is_module = program[0] == "-m"
    name, *arguments = program[is_module:]
    sys.argv[:] = [name, *arguments]
    leave_torchrun(count)
    os.environ["PYTHONUNBUFFERED"] = "1"  # as this process; the replicas' inherit no flag
    torch_xla = import_torch_xla()
    with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault(ERROR_FILE, str(Path(folder) / "0" / "error.json"))  # torchrun has not started this
        replica = functools.partial(_run_replica, note=_NotesStops())
        passed_on: list[int] = [] if count == "1" else _pass_stops_on()
        try:
            torch_xla.launch(replica, args=(function, name, is_module), debug_single_process=count == "1")
        except BrokenProcessPool:
            if passed_on:
                raise SystemExit(128 + passed_on[0]) from None
            if (code := read_first_failure()) is not None:
                raise SystemExit(code) from None
            raise LaunchError(ENDED_SILENTLY) from None
        except (RuntimeError, OSError) as error:
            if _begun:
                raise  # the script's own, on the one device
            raise explain_start(error) from error


def leave_torchrun(count: str) -> None:
    """Take out of the environment what torchrun says of its worker; replicas learn their places from the XLA runtime.

    On one machine they may still meet at the launcher's store. With several, each machine's launcher has its own.

    Args:
        count: replicas that there must be, which `WORLD_SIZE` then says; or `all`.
    """
    document = from_environment(os.environ)
    alone = document is None or launch_settings(document).num_machines == 1
    for name in (*_OF_TORCHRUN, *(() if alone else _MEETING)):
        os.environ.pop(name, None)
    if count != "all":
        os.environ["WORLD_SIZE"] = count


def end_training() -> None:
    """End every `Accelerator` and the process group of this replica, together with the others; a thread has no exit."""
    state = sys.modules.get("zero_plugin.loop.state")
    if state is not None and state.PartialState._shared_state:
        state.PartialState().destroy_process_group()


class _NotesStops:
    """Unpickled by the main thread of a replica's process, which alone can say what a signal does."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install_stop_handler, ()


def _pass_stops_on() -> list[int]:
    """Let SIGTERM go to the replicas, who may save before they end; the signals that have come."""
    passed_on: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        passed_on.append(number)
        for child in multiprocessing.active_children():
            child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    return passed_on


def _run_replica(rank: int, function: str, name: str, is_module: bool, *, note: Any) -> None:  # noqa: ARG001
    """One device's part.

    Where it fails, its process ends at once: others wait for it in a collective, and torch_xla for them in their order.
    """
    _begun.append(rank)
    apart = parent_process() is not None
    if apart:
        die_with_launcher()
    try:
        _find_function(function, name, is_module)()
        end_training()
    except SystemExit as end:
        if end.code in (None, 0):
            end_training()
        elif apart:
            _leave(end, rank)
        else:
            raise
    except BaseException as error:
        if apart:
            _leave(error, rank)
        raise


def _leave(error: BaseException, rank: int) -> NoReturn:
    code = report_end(error, rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _find_function(function: str, name: str, is_module: bool) -> Callable[[], Any]:
    with _importing:
        module = importlib.import_module(name) if is_module else _import_script(Path(name))
    found = getattr(module, function, None)
    if not callable(found):
        raise LaunchError(
            f"{name} has no function {function}, which a TPU launch calls for each device.\n"
            "Put the training into it, or name another with --main_training_function."
        )
    return found  # type: ignore[no-any-return]


def _import_script(script: Path) -> ModuleType:
    """The script as the module of its name, so that what it defines can be found there by pickles."""
    file, name = script.resolve(), script.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file:
        return known
    if known is not None:
        raise LaunchError(f"a TPU launch imports {script} as {name}, and that is another module already. Rename it.")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "the launcher has seen that it is a Python file"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
