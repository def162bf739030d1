"""The tests' forked processes, which run a script as though Python had been started for it.

A fork copies a process that has imported what nearly every script needs. So no script spends seconds on imports.
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
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import runpy
import signal
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

SERVER = "ZERO_PLUGIN_TESTS_FORK_SERVER"  # variable of pytest's processes: the socket of their `ForkServer`
FORKS = "ZERO_PLUGIN_TESTS_FORKS"  # variable of a launch: the same, for it and its workers
ALONE = "ZERO_PLUGIN_TESTS_FORKED_ALONE"  # the same, for one Python and not for its children
LAUNCHES = ["-m", "zero_plugin", "launch"]
WORKER = "zero_plugin/launch/worker.py"
_AS_PYTHON = "<forked>"
_FRAMES_OF_RUN = (_AS_PYTHON, runpy.__file__, "<frozen runpy>")
# These imports load torch, DeepSpeed and all modules of this package that a training needs. They also load the imports
# of checks and of DeepSpeed's library detection.
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
# Half of the checks train models of transformers, in processes of several groups.
_MODELS = ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
# Variables that those modules would get from the scripts that import them.
_WHILE_IMPORTED = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Fork:
    """A script that a fork runs, with the attribute names of `subprocess.Popen`.

    Args:
        place: the socket of a `ForkServer`.
        command: path of the script, and its arguments.
        environment: the complete environment.
        output: an open file for the script's output.
    """

    def __init__(self, place: str, command: list[str], environment: dict[str, str], output: int) -> None:
        self.returncode: int | None = None
        request = {"command": command, "environment": environment, "folder": str(Path.cwd())}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(place)
        with Path(os.devnull).open("rb") as nothing:
            socket.send_fds(self._server, [b"."], [nothing.fileno(), output, output])
        self._server.sendall(f"{json.dumps({**request, 'cores': [*os.sched_getaffinity(0)]})}\n".encode())
        self._replies = self._server.makefile("r")
        self.pid = int(self._replies.readline())

    def poll(self) -> int | None:
        """Return the exit code, or None while the fork runs."""
        if self.returncode is None and multiprocessing.connection.wait([self._server], 0):
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the fork and return its exit code."""
        if self.returncode is None:
            self.returncode = int(self._replies.readline())
            self._replies.close()
            self._server.close()
        return self.returncode

    def kill(self) -> None:
        """Kill the fork."""
        if self.poll() is None:
            self._server.sendall(bytes([signal.SIGKILL]))


def run_as_worker(request: dict[str, Any], *streams: int) -> None:
    """Run `zero-plugin launch`, one of its workers, or any other Python program in a forked process.

    Args:
        request: the program's `command` after Python's name, its `environment`, `folder` and `cores`, and the `asker`,
            the process that it replaces.
        *streams: the program's standard input, output and error.
    """
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2))
    os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's own start may ignore these
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _enter_namespaces(request["asker"])
    command = request["command"]
    unbuffered = command[0] == "-u"
    command = command[unbuffered:]
    if command[:3] == LAUNCHES or WORKER in command[0]:  # both leave before the interpreter's end
        _run(command, request["environment"], request["folder"])
    else:
        _end_as_python(lambda: _run(command, request["environment"], request["folder"]))


def _enter_namespaces(asker: int) -> None:
    """Enter the requesting process's network and host name."""
    for kind in ("net", "uts"):
        there = Path(f"/proc/{asker}/ns/{kind}")
        if there.stat().st_ino != Path(f"/proc/self/ns/{kind}").stat().st_ino:
            with there.open() as namespace:
                assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(
                    ctypes.get_errno()
                )


def _end_as_python(run: Callable[[], None]) -> NoReturn:
    """Run, and end like a Python that was started for it: its messages, its last calls, its exit code."""
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 - as Python itself does
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES_OF_RUN:
            frames = frames.tb_next
        sys.last_value = error
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
    gc.freeze()  # without this, every end_training() would walk all objects of the imports
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


class ForkServer:
    """A server that forks for all of pytest's processes through a socket: `Fork`, and startup/sitecustomize.py.

    The parent of all forks starts once, with the first fork: its imports take seconds of a processor.

    Args:
        place: path of the socket. Next to it, each requesting process has a file that names its fork.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*IMPORTED_BEFORE, *_MODELS])
        self._turn = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(place))
        self._listener.listen(64)
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """End the service."""
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
                _start_server()
                worker.start()
                # Any thread that starts the next one would ask whether this one has ended. Only one thread may.
                multiprocessing.process._children.discard(worker)
            self._place.with_name(str(asker)).write_text(str(worker.pid))
            for stream in streams:
                os.close(stream)
            with contextlib.suppress(ConnectionError):  # it was killed, which the code below detects
                asks.sendall(f"{worker.pid}\n".encode())
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
            with contextlib.suppress(ConnectionError):
                asks.sendall(f"{worker.exitcode}\n".encode())


def _start_server() -> None:
    """Start the parent of all forks, with its variables, unless it runs."""
    before = {name: os.environ.get(name) for name in _WHILE_IMPORTED}
    os.environ.update(_WHILE_IMPORTED)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def forks_of(pid: int) -> list[int]:
    """Return the fork that a process last requested, if any."""
    file = Path(os.environ.get(SERVER, "no server")).with_name(str(pid))
    return [int(file.read_text())] if file.is_file() else []


def _process_of(asks: socket.socket) -> int:
    """Return the process at the other end."""
    pid: int
    pid, _, _ = struct.unpack("3i", asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid


class _Descriptor:
    """An open file, which has another number in the fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _number_of, (multiprocessing.reduction.DupFd(self._number),)


def _number_of(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number


def _as_python(code: types.CodeType) -> types.CodeType:
    """Return the code under a file name of Python's own, so no frame of it is taken for the script's."""
    inner = tuple(_as_python(one) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=_AS_PYTHON, co_consts=inner)


# The frames around a forked script, like Python's own around a script.
for _around in [o for o in vars().values() if isinstance(o, types.FunctionType) and o.__module__ == __name__]:
    _around.__code__ = _as_python(_around.__code__)
