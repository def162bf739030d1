"""What a forked process of the tests does: run a script as if Python had been started for it.

It is a copy of a process that has imported what nearly every script needs, so that no script spends seconds on that.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.reduction
import os
import runpy
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from device import ON_GPU
from line_contexts import enter_context

FORKS = "ZERO_PLUGIN_TESTS_FORKS"  # variable: the socket of `Workers`
ALONE = "ZERO_PLUGIN_TESTS_FORKED_ALONE"  # the same, for one Python and none that it starts
FORK_OF: dict[int, int] = {}  # by the process that has asked for it
LAUNCHES = ["-m", "zero_plugin", "launch"]
WORKER = "zero_plugin/launch/worker.py"
_FRAMES_OF_RUN = (__file__, runpy.__file__, "<frozen runpy>")
# Whoever imports these has torch, DeepSpeed and all of this package's modules that a training needs; also what checks,
# and DeepSpeed's looks for libraries, import.
IMPORTED_BEFORE = (
    "cpuinfo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "jsonschema",
    "pytest",
    "safetensors.torch",
    "setuptools",
    "torch._dynamo",
    "torch.distributed.run",
    "zero_plugin.accelerator",
    "zero_plugin.cli.launch",
    "zero_plugin.launch.engine",
    "zero_plugin.strategies.deepspeed.session",
    "zero_plugin.strategies.deepspeed.strategy",
)


def run_as_script(command: list[str], environment: dict[str, str], folder: str, log: str) -> None:
    """Run `command`, a script with its arguments, in a process that was forked; what it prints goes into a file.

    Args:
        command: path of the script, and its arguments.
        environment: all of it.
        folder: in which it runs.
        log: a file, which is made.
    """
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    try:
        _run(command, environment, folder)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them


def run_as_worker(request: dict[str, Any], *streams: int) -> None:
    """Run `zero-plugin launch`, a worker of one, or any other program of Python, in a process that was forked.

    Args:
        request: the `command` after Python's name, the `environment`, the `folder` and the `cores` that it was started
            with, and the `asker`, whose place it takes.
        *streams: its standard input, output and error.
    """
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2))
    os.sched_setaffinity(0, request["cores"])
    _enter_namespaces(request["asker"])
    command = request["command"]
    unbuffered = command[0] == "-u"
    command = command[unbuffered:]
    if command[:3] == LAUNCHES or WORKER in command[0]:  # both leave before the interpreter's end
        _run(command, request["environment"], request["folder"])
    else:
        _end_as_python(lambda: _run(command, request["environment"], request["folder"]))


def _enter_namespaces(asker: int) -> None:
    """The network and the host name of the process that has asked for this one."""
    for kind in ("net", "uts"):
        there = Path(f"/proc/{asker}/ns/{kind}")
        if there.stat().st_ino != Path(f"/proc/self/ns/{kind}").stat().st_ino:
            with there.open() as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(
                    ctypes.get_errno()
                )


def _end_as_python(run: Callable[[], None]) -> NoReturn:
    """Run, and end as a Python does that was started for it: its messages, its last calls, its exit code."""
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 - as Python itself does
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES_OF_RUN:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = 1
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit((code or 0) & 255)


def _run(command: list[str], environment: dict[str, str], folder: str) -> None:
    missing = set(IMPORTED_BEFORE) - set(sys.modules)
    assert ON_GPU or not missing, f"not imported before, which costs each process seconds: {missing}"
    os.environ.clear()
    os.environ.update(environment)
    enter_context(os.environ.get("PYTEST_CURRENT_TEST", ""))
    os.chdir(folder)
    multiprocessing.set_start_method(
        multiprocessing.get_all_start_methods()[0], force=True
    )  # Python's own, for loaders
    gc.freeze()  # else every end_training() walks all that the imports made
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, folder)
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), vars(main))
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")


class Workers:
    """Forks for launches whose tests are not about processes; startup/sitecustomize.py asks for them.

    Args:
        context: it forks.
        place: a socket is made there.
    """

    def __init__(self, context: multiprocessing.context.ForkServerContext, place: Path) -> None:
        self._context = context
        self._turn = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """No more of them."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                asks, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(asks,), daemon=True).start()

    def _serve(self, asks: socket.socket) -> None:
        with asks:
            _, streams, _, _ = socket.recv_fds(asks, 1, 3)
            with asks.makefile("rb") as lines:
                request = json.loads(lines.readline())
            request["asker"] = asker = _process_of(asks)
            worker = self._context.Process(target=run_as_worker, args=(request, *map(_Descriptor, streams)))
            with self._turn:
                worker.start()
                # Whichever thread starts the next one would ask whether this one has ended, which only one may.
                multiprocessing.process._children.discard(worker)
            FORK_OF[asker] = worker.pid
            for stream in streams:
                os.close(stream)
            while worker.is_alive():
                if asks not in multiprocessing.connection.wait([worker.sentinel, asks]):
                    continue
                number = asks.recv(1)
                if number:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(worker.pid, number[0])
                else:  # it was killed
                    worker.kill()
                    worker.join()
                    return
            asks.sendall(str(worker.exitcode).encode())


def _process_of(asks: socket.socket) -> int:
    """Who is at the other end."""
    pid: int
    pid, _, _ = struct.unpack("3i", asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid


class _Descriptor:
    """An open file, which has some other number in the fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _number_of, (multiprocessing.reduction.DupFd(self._number),)


def _number_of(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number
