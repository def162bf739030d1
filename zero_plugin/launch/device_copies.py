"""Run a function of a notebook on every device of a TPU, in copies of this process that torch_xla makes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Final

from zero_plugin.errors import LaunchError
from zero_plugin.launch.forked import find_threads, meant_to_fork, variables_while
from zero_plugin.launch.replicas import ENDED_SILENTLY, end_training
from zero_plugin.launch.worker import die_with_launcher, put_first
from zero_plugin.strategies.xla_runtime import explain_start, import_torch_xla

__all__ = ["run_on_devices"]

_FAILURE: Final = "failure"  # file with the traceback of the replica that failed first
_called: tuple[Callable[..., Any], tuple[Any, ...]] | None = None  # what copies inherit; torch_xla would pickle it


def run_on_devices(function: Callable[..., Any], args: tuple[Any, ...], count: int | None) -> None:
    """Run `function(*args)` on the devices of a TPU; on one device it runs here.

    When this returns or raises, no copy is left.

    Args:
        function: what to run; it needs no name that another process could import.
        args: its arguments; nothing is pickled.
        count: how many devices there must be; None takes all.

    Raises:
        LaunchError: this process cannot be copied any more; a copy has failed.
        MachineError: torch_xla or the runtime does not work here.
    """
    global _called
    torch_xla = import_torch_xla()
    if count == 1:
        torch_xla.launch(_call_here, args=(function, args), debug_single_process=True)
        return
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise LaunchError(
            "this process has used an XLA device already, and its copies could not.\n"
            "Restart the kernel, and keep what uses a device inside the launched function."
        )
    threads = find_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), on_gpus=False)
    _called = (function, args)
    wanted = {"FORK_LAUNCHED": "1", **({} if count is None else {"WORLD_SIZE": str(count)})}
    with tempfile.TemporaryDirectory(prefix="zero_plugin_") as folder, variables_while(wanted), meant_to_fork():
        try:
            with _copies_end_with_ctrl_c():
                torch_xla.launch(_run_copy, args=(folder, threads), start_method="fork")
        except BrokenProcessPool:
            failure = Path(folder) / _FAILURE
            raise LaunchError(failure.read_text() if failure.exists() else ENDED_SILENTLY) from None
        except (RuntimeError, OSError) as error:  # the runtime's, since the function's end its copy
            raise explain_start(error) from error
        finally:
            _called = None


def _call_here(_rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    function(*args)


def _run_copy(rank: int, folder: str, threads: int) -> None:
    """One device's part; where it fails, its process ends at once, and torch_xla then ends the others."""
    die_with_launcher()
    assert _called is not None, "the copy was made after it was set"
    function, args = _called
    sys.modules["torch"].set_num_threads(threads)
    if (state := sys.modules.get("zero_plugin.state")) is not None:
        state.forget_run()
    try:
        function(*args)
        end_training()
    except BaseException as error:  # noqa: BLE001 - the outermost frame of the user's function
        if isinstance(error, SystemExit) and error.code in (None, 0):
            end_training()
            return
        own_frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        told = "".join(traceback.format_exception(type(error), error, own_frames)).rstrip()
        put_first(Path(folder) / _FAILURE, f"process {rank} failed first; all are stopped.\n\n{told}")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def _copies_end_with_ctrl_c() -> Iterator[None]:
    """torch_xla would wait for them, and they train on in threads that hear of no signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    others = set(multiprocessing.active_children())

    def end(*_: Any) -> None:
        for copy in set(multiprocessing.active_children()) - others:
            copy.kill()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
