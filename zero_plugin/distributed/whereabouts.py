"""Finds a script's current line and long operations in its thread's stack, and the `sys.exit` that ended it."""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
import threading
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

# Frames in these folders are not the script's: this package, torch, other installed packages, and Python itself.
_PACKAGE = f"{Path(__file__).resolve().parents[1]}/"
_TORCH = f"{Path(torch.__file__).resolve().parent}/"
_LIBRARIES = (_PACKAGE, _TORCH, *(f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "purelib", "platlib")), "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")  # the user's packages, or those of another environment on the path

NO_LINE = "its end"  # place of a script that runs no line of its own

# Long operations that are no sign of a mistake: a file or folder on the stack during the operation, and its verb.
_BUSY = {
    "<frozen importlib._bootstrap>": "imports",
    f"{_TORCH}utils/cpp_extension.py": "compiles",
    f"{_TORCH}utils/file_baton.py": "waits for the build of",
    f"{_TORCH}_dynamo/convert_frame.py": "compiles",
    f"{_TORCH}_inductor/compile_fx.py": "compiles",
    f"{_TORCH}serialization.py": "saves or loads",
    f"{_PACKAGE}checkpoint/": "saves or loads",
    "/safetensors/": "saves or loads",
}


class Running(NamedTuple):
    """A running function: its file, line and name, and the name of the module or build that it works on.

    It holds no frame: a frame would keep the function's objects, such as a model, alive after its end.
    """

    file: str
    line: int
    function: str
    about: str


def running_functions(thread: int) -> list[Running]:
    """Return the running functions of a thread, the innermost first."""
    found, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        found.append(Running(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, _named_in(frame)))
        frame = frame.f_back
    return found


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)


def script_line(running: Iterable[Running]) -> str:
    """Return `file:line` of the script's innermost function outside of libraries."""
    return next((f"{one.file}:{one.line}" for one in running if not _is_library(one.file)), NO_LINE)


def begins_loop(running: Iterable[Running]) -> bool:
    """Return whether the script's line is a loop over a prepared loader, which makes its own collective calls."""
    own = takewhile(lambda one: _is_library(one.file), running)
    return any((one.file, one.function) == (f"{_PACKAGE}data/loader.py", "__iter__") for one in own)


def long_operation(running: Iterable[Running]) -> str:
    """Return the long operation in the script's line (import, compilation, save or load), or ""."""
    done, name = "", ""
    for one in running:
        if not _is_library(one.file):
            if done or one.function != "<module>":
                break
            continue  # the lines of a module run during its import, so look at the importing frames too
        kind = next((kind for file, kind in _BUSY.items() if file in one.file), "")
        # The outermost operation is the most informative. A wait for a build's lock is inside a compilation, but is
        # not reported as one.
        if kind and not (done.startswith("waits") and kind == "compiles"):
            done, name = kind, ""
        if kind:
            name = one.about or name
    return f"{done} {name}".strip()


def _named_in(frame: FrameType) -> str:
    """Return the name of the module or extension that a frame imports or builds, from its argument `name`."""
    code = frame.f_code
    if code.co_name not in ("_find_and_load", "_jit_compile", "load") or not _is_library(code.co_filename):
        return ""
    name = frame.f_locals.get("name")
    return name if isinstance(name, str) else ""


_last_exit = ""


class _Exit(SystemExit):
    """The SystemExit of `sys.exit`, which drops its note if the script catches it and continues.

    Python frees a caught exception while the script's frames exist. It frees the one that ends the script after them.
    """

    def __del__(self) -> None:
        global _last_exit
        if not sys.is_finalizing() and script_line(running_functions(threading.get_ident())) != NO_LINE:
            _last_exit = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


# Tracebacks show the class as Python's own SystemExit.
_Exit.__module__, _Exit.__name__, _Exit.__qualname__ = "builtins", "SystemExit", "SystemExit"


def note_exits() -> None:
    """Patch `sys.exit` to note its argument and its place.

    Python keeps neither for exit functions, which report to the other processes why this one ends. `raise SystemExit`,
    `quit()`, and a `sys.exit` that the script has imported by name cannot be noted.
    """
    leave = sys.exit
    if hasattr(leave, "__wrapped__"):
        return

    @functools.wraps(leave)
    def noted(status: Any = None, /) -> NoReturn:
        global _last_exit
        if threading.current_thread() is not threading.main_thread():  # `sys.exit` only ends the thread there
            leave(status)
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        place = "" if caller is None else f" at {caller.f_code.co_filename}:{caller.f_lineno}"
        _last_exit = f"sys.exit({str(status)[:80]}){place}"
        try:
            leave(status)
        except SystemExit as plain:
            values = plain.args
        raise _Exit(*values)

    sys.exit = noted


def last_exit() -> str:
    """Return the `sys.exit` that ends the script, for example `sys.exit(0) at file:line`; "" if none is known."""
    return _last_exit
