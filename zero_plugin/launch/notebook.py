"""Launches a function of a notebook: in forked copies of this process, or on the devices of a TPU.

Launch a function of a notebook, or of any running program: `notebook_launcher` and `debug_launcher`.

Run a function of a notebook on every device of a TPU, in copies of this process that torch_xla makes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import overlay_code
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.tree import KeyPath
from zero_plugin.errors import LaunchError
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.command import CONFIG_FILE_VARIABLE
from zero_plugin.launch.engine import configuration_file
from zero_plugin.launch.forked import find_threads, meant_to_fork, run_forked, variables_while
from zero_plugin.launch.replicas import ENDED_SILENTLY, end_training
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.launch.worker import die_with_launcher, put_first
from zero_plugin.machine.hardware import look_at_machine
from zero_plugin.machine.xla_runtime import explain_start, import_torch_xla

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
    if (state := sys.modules.get("zero_plugin.loop.state")) is not None:
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


_ANY_PORT: Final = "29500"  # Accelerate's default: nobody asked for it, and on one machine nobody has to know it


def notebook_launcher(
    function: Callable[..., Any],
    args: Iterable[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = _ANY_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> None:
    """Run `function(*args)` in several processes, each a copy of this one, and return when all have ended.

    What the function finds here, it has there: names of the notebook, modules, data. What it changes stays there. One
    process is no copy: the function then runs here. `Accelerator()` belongs inside the function. On a TPU, each of its
    devices has a copy.

    Args:
        function: the training; also one that is defined in a cell.
        args: its positional arguments, any iterable.
        num_processes: on this machine; by default what `config` says, else one for each GPU or TPU device, else one.
        mixed_precision: `fp16` or `bf16`; `no` leaves it to `config` and to the function.
        use_port: where several machines meet, on `master_addr`; on one machine a free port is taken.
        master_addr: address of machine 0.
        node_rank: this machine's number.
        num_nodes: machines; the same call runs on each, with its own `node_rank`.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: the rendezvous of several machines, in torchrun's terms.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: torchrun's prefix of lines that it copies.
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content, for every `Accelerator()`.

    Raises:
        ConfigError: everything about the configuration or the launch that cannot run here.
        LaunchError: this process cannot be copied any more, or a process has failed; then with its traceback.
    """
    values: dict[KeyPath, tuple[str, Any]] = {}
    if num_processes is not None:
        values["num_processes",] = (f"num_processes={num_processes}", num_processes * num_nodes)
    if str(mixed_precision).lower() != "no":
        values["mixed_precision",] = (f"mixed_precision={mixed_precision!r}", str(mixed_precision))
    if max_restarts:
        values["max_restarts",] = (f"max_restarts={max_restarts}", max_restarts)
    if monitor_interval != 0.1:
        values["monitor_interval",] = (f"monitor_interval={monitor_interval}", monitor_interval)
    if num_nodes > 1:
        options = ",".join(f"{name}={value}" for name, value in (rdzv_conf or {}).items())
        values["num_machines",] = (f"num_nodes={num_nodes}", num_nodes)
        values["machine_rank",] = (f"node_rank={node_rank}", node_rank)
        values["main_process_ip",] = (f"master_addr={master_addr!r}", master_addr)
        values["rdzv_backend",] = (f"rdzv_backend={rdzv_backend!r}", rdzv_backend)
        values["rdzv_conf",] = ("rdzv_conf=…", options)
    if num_nodes > 1 or str(use_port) != _ANY_PORT:
        values["main_process_port",] = (f"use_port={use_port!r}", int(use_port))
    spec = _build(function, _document(config, values, "notebook_launcher"), rdzv_endpoint or None)
    if rdzv_id != "none":
        spec = replace(spec, rendezvous=replace(spec.rendezvous, run_id=rdzv_id))
    with _variables(spec):
        if spec.replicas is not None:
            run_on_devices(function, tuple(args), spec.replicas.count)
        elif spec.local_processes * spec.machines == 1:
            function(*args)
        else:
            run_forked(spec, function, tuple(args), line_prefix=log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in several processes on the CPU, each a copy of this one.

    Args:
        function: what to run.
        args: its positional arguments, any iterable.
        num_processes: how many.

    Raises:
        LaunchError: this process cannot be copied any more, or a process has failed; then with its traceback.
    """
    values: dict[KeyPath, tuple[str, Any]] = {
        ("num_processes",): (f"num_processes={num_processes}", num_processes),
        ("use_cpu",): ("on the CPU", True),
    }
    spec = _build(function, _document(None, values, "debug_launcher"), None)
    with _variables(spec):
        run_forked(spec, function, tuple(args))


def _document(config: Any, values: Mapping[KeyPath, tuple[str, Any]], call: str) -> Document:
    if config is None:
        document = Document()
    elif isinstance(config, Mapping):
        document = document_from_mapping(config, f"{call}(config=…)")
    else:
        document = read_document(str(Path(config)))
    document = overlay_code(
        document,
        {path: value for path, (_, value) in values.items()},
        {path: f"{call}({told})" for path, (told, _) in values.items()},
    )
    return replace(document, notes=check_document(document))


def _build(function: Callable[..., Any], document: Document, endpoint: str | None) -> LaunchSpec:
    program = Program(getattr(function, "__qualname__", repr(function)), kind="function")
    spec = build_spec(document, program, look_at_machine(), os.environ, rendezvous_endpoint=endpoint)
    if spec.replicas is not None:
        devices = "every XLA device" if spec.replicas.count is None else f"{spec.replicas.count} × XLA"
        print(f"zero_plugin: {program.name} runs on {devices}", file=sys.stderr, flush=True)  # noqa: T201
        return spec
    added = spec.environment.get("DS_ACCELERATOR")
    where = "the CPU" if (added.value if added else os.environ.get("DS_ACCELERATOR")) == "cpu" else "GPUs"
    reason = f" ({spec.local_processes_reason})" if spec.local_processes_reason else ""
    line = f"zero_plugin: {program.name} runs in {spec.local_processes} processes on {where}{reason}"
    print(line if spec.local_processes > 1 else line.replace("processes", "process"), file=sys.stderr, flush=True)  # noqa: T201
    return spec


def _variables(spec: LaunchSpec) -> contextlib.ExitStack:
    """The launch's environment variables, here and in what is forked from here, until the launch ends."""
    values = {name: setting.value for name, setting in spec.environment.items()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(variables_while(values, [CONFIG_FILE_VARIABLE]))
        stack.enter_context(configuration_file(spec))
        return stack.pop_all()
