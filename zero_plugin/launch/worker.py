"""Run the user's program inside a worker: the first rank to fail says why, and no rank outlives the launcher.

The launcher starts this file by its path, so that nothing in the user's folder can shadow what it imports:

    worker.py SCRIPT ARGUMENT…          as `python SCRIPT` would
    worker.py -m MODULE ARGUMENT…       as `python -m MODULE` would
    worker.py --no_python PROGRAM …     replaces this process by PROGRAM
    worker.py --cores LIST/LIST/… …     binds this process to the LIST of its local rank, then one of these
    worker.py --replicas N FUNCTION …   torch_xla calls FUNCTION of SCRIPT or MODULE on N devices of a TPU, or on `all`

Standard input is local rank 0's; the others, which could only snatch lines from it, see its end.
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

FIRST_FAILURE = "first_failure"  # in the attempt's folder: the rank that failed first, exit code, exception, digest
FAILURE_OF = (
    "failure_of"  # beside it, with the rank in the name, for each that failed in Python: the digest of its error
)
RUNNING_AT = "running_at"  # beside it, with the rank in the name: its Python stack at that signal
SHOWS_PLACE = getattr(signal, "SIGRTMAX", None)  # one that no script handles; there is none on macOS
LOST_PEER = "lost_peer"  # written there for an exception that only says that another process does not answer
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable of torchrun's; the attempt's folder is above it
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
INTERRUPTED = 130  # 128 + SIGINT
_NOT_WRITTEN = 120  # with which Python ends where its standard output cannot be written
_LONGEST_LINE = 240
_STARTERS = (__file__, str(Path(__file__).with_name("tpu.py")))  # whose frames are none of the user's


def main() -> None:
    """Run what the command line names, and end this process as Python does; never returns for `--no_python`."""
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
    """Has `builds.AFTER_IMPORT` run when a script, or a library that it uses, imports DeepSpeed."""

    _WATCHED = ("deepspeed.ops", "deepspeed.ops.op_builder.builder")

    def __init__(self) -> None:
        for name in self._WATCHED:
            if name in sys.modules:  # this process is a fork of one that has imported it
                self._follow(sys.modules[name])

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """Python's own, whose loader calls back."""
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
    """Tell why a worker, or a replica in one, that ends with `error` does; its exit code."""
    if isinstance(error, KeyboardInterrupt):
        sys.last_value = error  # as python sets it: no process waits at its end for one that has not come there
        _claim_first_failure(INTERRUPTED, rank, KeyboardInterrupt.__name__)
        return INTERRUPTED  # the launcher says what happened
    if not isinstance(error, SystemExit):
        return _report_exception(error, rank)
    if error.code is None:
        return 0
    if isinstance(error.code, int):  # others see its lowest byte, and 255 of a number that C cannot hold
        code = error.code & 0xFF if -(2**63) <= error.code < 2**63 else 0xFF
    else:
        code = 1
        _write_error(error.code)
    if code:
        _claim_first_failure(code, rank)
    return code


def read_first_failure() -> int | None:
    """The exit code of the rank that failed first in this attempt, None where none has left it."""
    file = _mark()
    return int(file.read_text().split()[1]) if file is not None and file.exists() else None


def bind_to_cores(cores: str) -> None:
    """Let this process, and all that it starts, run on `cores` only, written as the kernel does: `0-3,8`."""
    pairs = [piece.partition("-") for piece in cores.split(",")]
    os.sched_setaffinity(0, {core for a, _, b in pairs for core in range(int(a), int(b or a) + 1)})


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file as `__main__`, in a module that stays: spawned children and pickles look it up there."""
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
    """Do what Python does at an exit, but for finalizing the interpreter, and end this process.

    A gloo thread that frees a tensor, after a collective that Python has waited for, needs the interpreter. If that is
    being finalized, Python 3.10-3.13 unwind the thread, and C++ aborts: "terminate called without an active exception".
    These threads cannot be ended reliably: engines, DDP and hooks hold their group from C++, and then they outlive
    `destroy_process_group`. So this waits for threads, calls what was registered for the exit, drops the script's
    objects (but after an error, whose traceback refers to them), and flushes open regular files.

    Args:
        code: the exit code; 120 in place of 0 where stdout or stderr cannot be written.
    """
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if getattr(sys, "last_value", None) is None:  # else a traceback holds the script's objects
        threading.excepthook = lambda _: None  # errors of daemon threads, which Python would have stopped
        if (script := vars(sys.modules["__main__"])) is not globals():
            script.clear()
        gc.collect()
    written = [_flush(stream) for stream in (sys.stdout, sys.stderr)]
    if not all(written):
        code = code or _NOT_WRITTEN
    for kind in (TextIOWrapper, (BufferedWriter, BufferedRandom)):  # text files first: they write into buffered ones
        for file in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
            with suppress(OSError, ValueError):  # one without a file, or a closed one
                if S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe may have nobody who reads it
                    _flush(file)
    os._exit(code & 0xFF)


def _flush(file: Any) -> bool:
    """Whether all that was written to `file` has left this process."""
    try:
        if file is not None and not getattr(file, "closed", False):
            file.flush()
    except Exception:  # noqa: BLE001 - a full disk, a reader that has gone
        return False
    return True


def _run_program() -> int:
    """Run what the command line names and print what ended it; the exit code."""
    own = os.getpid()
    try:
        if sys.argv[1] == "--replicas":
            _run_replicas(sys.argv[2:])
        elif sys.argv[1] == "-m":
            run_module(sys.argv[2], sys.argv[3:])
        else:
            run_script(sys.argv[1], sys.argv[2:])
    except BaseException as error:  # noqa: BLE001 - whatever ends the script
        if os.getpid() != own:  # a copy that the script has made of itself: its end says nothing of the run
            os.environ.pop(ERROR_FILE, None)
        return report_end(error, os.environ.get("RANK", "0"))
    return 0


def _run_replicas(arguments: list[str]) -> None:
    """Not before it is needed: the launcher's other workers import nothing but the standard library here."""
    count, function, *program = arguments
    _set_import_folder(Path.cwd() if program[0] == "-m" else Path(program[0]).resolve().parent)
    from zero_plugin.launch.tpu import run_replicas

    run_replicas(function, count, program)


def _set_import_folder(folder: Path) -> None:
    # Python put this file's own folder first; under -P (safe path) it put nothing.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(folder)
        # Last, so that it shadows nothing: with DeepSpeed, `accelerate launch` lets scripts import from here.
        sys.path.append(str(Path.cwd()))


def die_with_launcher() -> None:
    """Let the kernel kill this process when the launcher dies, even by SIGKILL: nobody else would ever stop it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def show_place_at_end() -> None:
    """Have a signal write where this process is: after a failure, the launcher names those that let others wait."""
    mark = _mark()
    if mark is not None and SHOWS_PLACE is not None:
        with suppress(OSError):
            file = mark.with_name(f"{RUNNING_AT}.{os.environ.get('RANK', '0')}").open("w")
            faulthandler.register(SHOWS_PLACE, file, all_threads=False)


def _write_error(line: object) -> None:
    """As Python itself writes what a program exits with: the program may have any logging, or none."""
    with suppress(Exception):  # None, closed, or a pipe whose reader has gone
        sys.stderr.write(f"{line}\n")


def _report_exception(error: BaseException, rank: str) -> int:
    """Print the complete traceback if no rank failed before, one line otherwise; return the exit code.

    Not an excepthook: torch.distributed replaces that, and loses what is printed if the hook ends the process.
    """
    errors = sys.modules.get("zero_plugin.errors")
    ours = errors is not None and isinstance(error, errors.ZeroPluginError)
    code: int = error.exit_code if ours else 1  # type: ignore[attr-defined]
    sys.last_value = error  # as python sets it, for what runs at exit
    lost = getattr(error, "lost_peer", False) if ours else _lost_a_peer(error)
    lost = lost or (error.__cause__ is not None and _lost_a_peer(error.__cause__))
    text = f"{type(error).__name__}: {error}"
    said = getattr(error, "repeats", None) if ours else None
    digest = str(zlib.crc32((said or str(error)).encode(errors="replace")))
    if _claim_first_failure(code, rank, LOST_PEER if lost else type(error).__name__, digest):
        trace = _without_starters(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    elif (file := _mark()) is None or file.read_text().split()[-1] != digest:  # else the launcher's report names it
        _write_error(f"rank {rank} failed later: {' '.join(text.split())[:_LONGEST_LINE]}")
    return code


def _lost_a_peer(error: BaseException) -> bool:
    """Whether it is an error of torch's that only says that another process does not answer."""
    torch = sys.modules.get("torch.distributed")
    stores = tuple(getattr(torch, name) for name in ("DistNetworkError", "DistStoreError") if hasattr(torch, name))
    if isinstance(error, stores) or not stores:
        return bool(stores)
    from zero_plugin.errors import OF_LOST_PEER  # late: most workers import only the standard library here

    return any(row.find(error) for row in OF_LOST_PEER)


def _without_starters(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without the frames that start the script."""
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
    """Whether no rank of this attempt failed before on this machine; torchrun's error files share a folder."""
    file = _mark()
    if file is None:
        return True
    try:
        file.with_name(f"{FAILURE_OF}.{rank}").write_text("".join(details[-1:]))
        return put_first(file, " ".join([rank, str(code), *details]))
    except OSError:  # no room, or no such folder: better one traceback too many than none
        return True


def put_first(file: Path, text: str) -> bool:
    """Write a file that only the first of several may write; return whether this one is the first.

    Who comes second may end at once, and have the first ended in the midst of its writing. They are processes, or
    threads of one, as replicas on a TPU may be.
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
