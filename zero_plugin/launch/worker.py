"""Run the user's program inside a worker. The first rank to fail reports why, and no rank outlives the launcher.

The launcher starts this file by its path, so no file in the user's folder can shadow its imports:

    worker.py SCRIPT ARGUMENT…          as `python SCRIPT` would
    worker.py -m MODULE ARGUMENT…       as `python -m MODULE` would
    worker.py --no_python PROGRAM …     replaces this process by PROGRAM
    worker.py --cores LIST/LIST/… …     binds this process to the LIST of its local rank, then one of these
    worker.py --replicas N FUNCTION …   torch_xla calls FUNCTION of SCRIPT or MODULE on N devices of a TPU, or on `all`

Only local rank 0 reads standard input. Other ranks get end-of-file, so they cannot steal input from rank 0.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import runpy
import signal
import sys
import threading
import zlib
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from io import BufferedRandom, BufferedWriter, TextIOWrapper
from pathlib import Path
from stat import S_ISREG
from types import ModuleType, TracebackType
from typing import Any

# Files in the attempt's folder. Names of the second and third end with the rank.
FIRST_FAILURE = "first_failure"  # the rank that failed first, its exit code, exception class and error digest
FAILURE_OF = "failure_of"  # one for each rank that failed in Python: the digest of its error
RUNNING_AT = "running_at"  # the rank's Python stack when it received `SHOWS_PLACE`
SHOWS_PLACE = getattr(signal, "SIGRTMAX", None)  # a signal that scripts do not handle; macOS has none
LOST_PEER = "lost_peer"  # replaces the class in `FIRST_FAILURE` if the error only means that a peer does not answer
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable; the attempt's folder is two levels above that file
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
INTERRUPTED = 130  # 128 + SIGINT
_NOT_WRITTEN = 120  # Python's exit code if standard output cannot be written
_LONGEST_LINE = 240
_STARTERS = (__file__, str(Path(__file__).with_name("tpu.py")))  # their frames are hidden from tracebacks


def main() -> None:
    """Run the program of the command line and end this process. Never returns."""
    die_with_launcher()
    faulthandler.enable()
    show_place_at_end()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.meta_path.insert(0, DeepSpeedImports())
    if sys.argv[1] == "--cores":
        bind_to_cores(sys.argv[2].split("/")[local_rank])
        del sys.argv[1:3]
    if sys.argv[1] == "--no_python":
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the user's own program
    code = _run_program()
    if "torch" in sys.modules:
        end_process(code)
    raise SystemExit(code)


class DeepSpeedImports:
    """An import hook that runs `builds.AFTER_IMPORT` when a script, or a library of the script, imports DeepSpeed."""

    _WATCHED = ("deepspeed.ops", "deepspeed.ops.op_builder.builder")

    def __init__(self) -> None:
        for name in self._WATCHED:
            if name in sys.modules:  # this process was forked from a process that had imported the module
                self._follow(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """Return Python's own spec, with a loader that calls back."""
        spec = PathFinder.find_spec(name, path) if name in self._WATCHED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            execute(module)
            self._follow(module)

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec

    def _follow(self, module: ModuleType) -> None:
        from zero_plugin.strategies.deepspeed.builds import AFTER_IMPORT

        AFTER_IMPORT[module.__name__](module)


def report_end(error: BaseException, rank: str) -> int:
    """Report why a worker, or a replica in it, ends with `error`. Return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        sys.last_value = error  # like python: exit hooks then know that this process must not wait for others
        _claim_first_failure(INTERRUPTED, rank, KeyboardInterrupt.__name__)
        return INTERRUPTED  # the launcher prints the reason
    if not isinstance(error, SystemExit):
        return _report_exception(error, rank)
    if error.code is None:
        return 0
    if isinstance(error.code, int):  # other processes see the lowest byte, or 255 if C cannot hold the number
        code = error.code & 0xFF if -(2**63) <= error.code < 2**63 else 0xFF
    else:
        code = 1
        _write_error(error.code)
    if code:
        _claim_first_failure(code, rank)
    return code


def read_first_failure() -> int | None:
    """Return the exit code of the rank that failed first in this attempt, None without a recorded failure."""
    file = _mark()
    return int(file.read_text().split()[1]) if file is not None and file.exists() else None


def bind_to_cores(cores: str) -> None:
    """Bind this process and its children to `cores`, written like the kernel does: `0-3,8`."""
    pairs = [piece.partition("-") for piece in cores.split(",")]
    os.sched_setaffinity(0, {core for a, _, b in pairs for core in range(int(a), int(b or a) + 1)})


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file as `__main__`, in a module that stays: spawned children and pickles look up names there."""
    file = Path(path).absolute()
    sys.argv[:] = [path, *arguments]
    _set_import_folder(file.resolve().parent)
    module = ModuleType("__main__")
    module.__file__ = str(file)
    module.__loader__ = SourceFileLoader("__main__", str(file))
    sys.modules["__main__"] = module
    exec(compile(file.read_bytes(), file, "exec"), module.__dict__)  # noqa: S102 - this file's purpose


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m` does; `sys.argv[0]` becomes its file."""
    sys.argv[:] = [name, *arguments]
    _set_import_folder(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def end_process(code: int) -> None:
    """End this process like Python does at an exit, without finalizing the interpreter.

    A gloo thread needs the interpreter to free a tensor after a collective that Python has waited for. If the
    interpreter is being finalized, Python 3.10-3.13 unwind the thread, and C++ aborts with
    "terminate called without an active exception". Gloo threads cannot be ended reliably: engines, DDP and hooks hold
    their process group from C++, so the threads outlive `destroy_process_group`.

    This function therefore waits for Python's threads, runs the exit hooks, drops the script's objects and flushes
    open regular files. After an error it keeps the script's objects, because the traceback refers to them.

    Args:
        code: the exit code. 0 becomes 120 if stdout or stderr cannot be written.
    """
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if getattr(sys, "last_value", None) is None:  # after an error, the traceback holds the script's objects
        threading.excepthook = lambda _: None  # errors of daemon threads, which Python would have stopped
        if (script := vars(sys.modules["__main__"])) is not globals():
            script.clear()
        gc.collect()
    written = [_flush(stream) for stream in (sys.stdout, sys.stderr)]
    if not all(written):
        code = code or _NOT_WRITTEN
    for kind in (TextIOWrapper, (BufferedWriter, BufferedRandom)):  # text files first: they write into buffered ones
        for file in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
            with suppress(OSError, ValueError):  # a stream without a file, or a closed file
                if S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe may have no reader
                    _flush(file)
    os._exit(code & 0xFF)


def _flush(file: Any) -> bool:
    """Flush `file`. Return whether this process has written all its data."""
    try:
        if file is not None and not getattr(file, "closed", False):
            file.flush()
    except Exception:  # noqa: BLE001 - a full disk, a closed reader
        return False
    return True


def _run_program() -> int:
    """Run the program of the command line and report an error that ends it. Return the exit code."""
    own = os.getpid()
    try:
        if sys.argv[1] == "--replicas":
            _run_replicas(sys.argv[2:])
        elif sys.argv[1] == "-m":
            run_module(sys.argv[2], sys.argv[3:])
        else:
            run_script(sys.argv[1], sys.argv[2:])
    except BaseException as error:  # noqa: BLE001 - whatever ends the script
        if os.getpid() != own:  # a copy that the script forked: the end of a copy is no failure of the run
            os.environ.pop(ERROR_FILE, None)
        return report_end(error, os.environ.get("RANK", "0"))
    return 0


def _run_replicas(arguments: list[str]) -> None:
    """Run replicas on a TPU. The import is late because other workers import only the standard library here."""
    count, function, *program = arguments
    _set_import_folder(Path.cwd() if program[0] == "-m" else Path(program[0]).resolve().parent)
    from zero_plugin.launch.tpu import run_replicas

    run_replicas(function, count, program)


def _set_import_folder(folder: Path) -> None:
    # Python put this file's own folder first; under -P (safe path) it put nothing.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(folder)
        # Last, to shadow nothing: with DeepSpeed, `accelerate launch` lets scripts import from the working folder.
        sys.path.append(str(Path.cwd()))


def die_with_launcher() -> None:
    """Let the kernel kill this process when the launcher dies, even by SIGKILL: no other process would stop it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def show_place_at_end() -> None:
    """Let a signal write this process's stack. After a failure the launcher names ranks that kept others waiting."""
    mark = _mark()
    if mark is not None and SHOWS_PLACE is not None:
        with suppress(OSError):
            file = mark.with_name(f"{RUNNING_AT}.{os.environ.get('RANK', '0')}").open("w")
            faulthandler.register(SHOWS_PLACE, file, all_threads=False)


def _write_error(line: object) -> None:
    """Write a line to stderr like Python does at an exit. The program may have any logging setup, or none."""
    with suppress(Exception):  # stderr may be None, closed, or a pipe with a closed reader
        sys.stderr.write(f"{line}\n")


def _report_exception(error: BaseException, rank: str) -> int:
    """Print the complete traceback if no rank failed before, one line otherwise. Return the exit code.

    An excepthook would not work: torch.distributed replaces it, and loses the output if the hook ends the process.
    """
    errors = sys.modules.get("zero_plugin.errors")
    ours = errors is not None and isinstance(error, errors.ZeroPluginError)
    code: int = error.exit_code if ours else 1  # type: ignore[attr-defined]
    sys.last_value = error  # like python, for exit hooks
    lost = getattr(error, "lost_peer", False) if ours else _lost_a_peer(error)
    lost = lost or (error.__cause__ is not None and _lost_a_peer(error.__cause__))
    text = f"{type(error).__name__}: {error}"
    said = getattr(error, "repeats", None) if ours else None
    digest = str(zlib.crc32((said or str(error)).encode(errors="replace")))
    if _claim_first_failure(code, rank, LOST_PEER if lost else type(error).__name__, digest):
        trace = _without_starters(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    elif (file := _mark()) is None or file.read_text().split()[-1] != digest:
        # The same error is not repeated here: the launcher's report lists the ranks that have it.
        _write_error(f"rank {rank} failed later: {' '.join(text.split())[:_LONGEST_LINE]}")
    return code


def _lost_a_peer(error: BaseException) -> bool:
    """Return whether `error` comes from torch and only means that another process does not answer."""
    torch = sys.modules.get("torch.distributed")
    stores = tuple(getattr(torch, name) for name in ("DistNetworkError", "DistStoreError") if hasattr(torch, name))
    if isinstance(error, stores) or not stores:
        return bool(stores)
    from zero_plugin.errors import OF_LOST_PEER  # late: most workers import only the standard library here

    return any(row.find(error) for row in OF_LOST_PEER)


def _without_starters(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames that start the script from `trace`."""
    frame = trace
    while frame is not None:
        trace = frame.tb_next if _file(frame) in _STARTERS else trace
        frame = frame.tb_next
    while trace is not None and (_file(trace).startswith("<frozen ") or Path(_file(trace)).stem == "runpy"):
        trace = trace.tb_next
    return trace


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def _claim_first_failure(code: int, rank: str, *details: str) -> bool:
    """Record a failure. Return whether no rank of this attempt failed before on this machine."""
    file = _mark()
    if file is None:
        return True
    try:
        file.with_name(f"{FAILURE_OF}.{rank}").write_text("".join(details[-1:]))
        return put_first(file, " ".join([rank, str(code), *details]))
    except OSError:  # disk full, or no such folder: one traceback too many is better than none
        return True


def put_first(file: Path, text: str) -> bool:
    """Write a file that only the first of several writers may write. Return whether this writer was the first.

    Writers are processes, or threads (replicas on a TPU). Linking a complete file is atomic. Without that, a second
    writer could exit immediately and get the first one killed mid-write.
    """
    own = file.with_name(f"{file.name}.{threading.get_native_id()}")
    own.write_text(text)
    try:
        os.link(own, file)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def _mark() -> Path | None:
    error_file = os.environ.get(ERROR_FILE)
    return Path(error_file).parents[1] / FIRST_FAILURE if error_file else None


if __name__ == "__main__":
    main()
