"""What a forked process of the tests does: run a script as if Python had been started for it."""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import runpy
import sys
from pathlib import Path


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
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(
        multiprocessing.get_all_start_methods()[0], force=True
    )  # Python's own, for loaders
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    import cpuinfo

    # DeepSpeed asks for the processor's name, a second each time, whenever it makes one of its CPU optimizers.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    gc.freeze()  # else every end_training() walks all that the imports made
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
