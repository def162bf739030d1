"""What a forked process of the tests does: run a script as if Python had been started for it.

It is a copy of a process that has imported what nearly every script needs, so that no script spends seconds on that.
"""

from __future__ import annotations

import atexit
import contextlib
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
import sys
import threading
from pathlib import Path
from typing import Any

from device import ON_GPU
from line_contexts import enter_context

FORKS = "ZERO_PLUGIN_TESTS_FORKS"  # variable: the socket of `Workers`
# Whoever imports these has torch, DeepSpeed and all of this package's modules that a training needs.
IMPORTED_BEFORE = (
    "cpuinfo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.module_inject.auto_ep_layer",
    "jsonschema",
    "safetensors.torch",
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
    """Run `zero-plugin launch`, or a worker of one, in a process that was forked.

    Args:
        request: the `command` after Python's name, the `environment`, the `folder` and the `cores` that it was started
            with.
        *streams: its standard input, output and error.
    """
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True) for n in (1, 2))
    os.sched_setaffinity(0, request["cores"])
    command = request["command"]
    unbuffered = command[0] == "-u"
    _run(command[unbuffered:], request["environment"], request["folder"])


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
            worker = self._context.Process(target=run_as_worker, args=(request, *map(_Descriptor, streams)))
            with self._turn:
                worker.start()
                # Whichever thread starts the next one would ask whether this one has ended, which only one may.
                multiprocessing.process._children.discard(worker)
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


class _Descriptor:
    """An open file, which has some other number in the fork."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _number_of, (multiprocessing.reduction.DupFd(self._number),)


def _number_of(descriptor: Any) -> int:
    number: int = descriptor.detach()
    return number
