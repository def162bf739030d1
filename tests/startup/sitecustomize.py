"""Start-up code of every Python that the tests start, found by PYTHONPATH.

mlflow is hidden, as on most machines, because DeepSpeed imports an installed mlflow, which takes a second.

If a test sets the variable below, `zero-plugin launch` and its workers are forks of a process with all imports done.
The started process only forwards its arguments, its signals, and the fork's exit. A second variable does the same for
any Python, whose own children are not forks.

See `ForkServer` in forked.py.
"""

from __future__ import annotations

import os
import sys

FORKS = "ZERO_PLUGIN_TESTS_FORKS"
ALONE = "ZERO_PLUGIN_TESTS_FORKED_ALONE"
COMMAND = sys.orig_argv[1:]
if COMMAND and COMMAND[0].endswith("/zero-plugin"):  # the script that pip writes
    COMMAND[:1] = ["-m", "zero_plugin"]
LAUNCHES = COMMAND[:3] == ["-m", "zero_plugin", "launch"]


def be_forked(place: str) -> None:
    """Let the server at `place` run this program, and end like the fork."""
    import ctypes
    import json
    import signal
    import socket

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the launcher, as the worker itself would
    environment = {name: value for name, value in os.environ.items() if name != FORKS or LAUNCHES}
    request = {"command": COMMAND, "environment": environment, "folder": os.getcwd()}  # noqa: PTH109
    request["cores"] = [*os.sched_getaffinity(0)]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(f"{json.dumps(request)}\n".encode())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        replies = server.makefile()
        replies.readline()  # its process id
        code = int(replies.readline())
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


sys.modules["mlflow"] = None  # type: ignore[assignment]
WORKS = any(argument.endswith("zero_plugin/launch/worker.py") for argument in sys.orig_argv[1:3])
if ALONE in os.environ:
    be_forked(os.environ.pop(ALONE))
elif FORKS in os.environ and (LAUNCHES or WORKS):
    be_forked(os.environ[FORKS])
