"""Launch a function of a notebook, or of any running program, in forked copies of this process.

The copies run on torchrun's engine, or on the devices of a TPU. Nothing is pickled, and no copy is left when a launch
ends. Before the launch, a trial copy shows whether CUDA and several threads work in a copy.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import overlay_code
from zero_plugin.config.installed import replaced
from zero_plugin.config.keys import CONFIG_FILE
from zero_plugin.config.read import document_from_code
from zero_plugin.distributed.messages import show_messages
from zero_plugin.distributed.process_end import ENDING_SIGNALS, flush_output, own_signals
from zero_plugin.errors import LaunchError
from zero_plugin.launch import engine
from zero_plugin.launch.build import build_spec
from zero_plugin.launch.report import FirstFailure, describe_failure
from zero_plugin.launch.spec import LaunchSpec, Program
from zero_plugin.launch.tpu import ENDED_SILENTLY, run_to_end
from zero_plugin.launch.worker import ERROR_FILE, INTERRUPTED, die_with_launcher, put_first
from zero_plugin.machine.hardware import look_at_machine
from zero_plugin.machine.process_place import variables_while
from zero_plugin.machine.xla_runtime import explain_start, import_torch_xla

_logger = logging.getLogger(__name__)

_ANY_PORT: Final = "29500"  # Accelerate's default: not requested by the user, so one machine may take any free port
_CUDA_IS_DEAD: Final = 3  # exit code of the trial copy
_TRIAL_SECONDS: Final = 2.0  # a copy answers within milliseconds, or hangs forever
# The engine checks for GPUs. This variable makes torch ask the driver: after asking CUDA, copies could not use CUDA.
_DRIVER_ASKED: Final = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_LEFT: Final = ("TORCHELASTIC_SIGNALS_TO_HANDLE",)  # variables that the engine leaves in the environment
_FAILURE: Final = "failure"  # file with the traceback of the copy that failed first
# The function and its arguments, which copies inherit. torch_xla would pickle arguments of its own call.
_called: tuple[Callable[..., Any], tuple[Any, ...]] | None = None


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

    The function sees everything that exists here: the notebook's names, modules, data. Its changes stay in the copies.
    Create `Accelerator()` inside the function. With one process, the function runs here, without a copy. On a TPU,
    each device has a copy.

    Args:
        function: the training function. It may be defined in a cell.
        args: the function's positional arguments, any iterable.
        num_processes: on this machine; default: from `config`, or one for each GPU or TPU device, or one.
        mixed_precision: `fp16` or `bf16`; `no` leaves the choice to `config` and to the function.
        use_port: port on `master_addr` where several machines meet. One machine takes a free port.
        master_addr: address of machine 0.
        node_rank: this machine's number.
        num_nodes: number of machines. Make the same call on each, with its own `node_rank`.
        rdzv_backend, rdzv_endpoint, rdzv_conf, rdzv_id: the rendezvous of several machines, in torchrun's terms.
        max_restarts: how often all processes start again after a failure.
        monitor_interval: seconds between two checks of the processes.
        log_line_prefix_template: torchrun's prefix for lines that torchrun copies.
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content, for every `Accelerator()`.

    Raises:
        ConfigError: all problems of the configuration or the launch that keep it from running here.
        LaunchError: copies of this process cannot work any more, or a process failed (with its traceback).
    """
    values: dict[str, tuple[str, Any]] = {}
    if num_processes is not None:
        values["num_processes"] = (f"num_processes={num_processes}", num_processes * num_nodes)
    if str(mixed_precision).lower() != "no":
        values["mixed_precision"] = (f"mixed_precision={mixed_precision!r}", str(mixed_precision))
    if max_restarts:
        values["max_restarts"] = (f"max_restarts={max_restarts}", max_restarts)
    if monitor_interval != 0.1:
        values["monitor_interval"] = (f"monitor_interval={monitor_interval}", monitor_interval)
    if num_nodes > 1:
        options = ",".join(f"{name}={value}" for name, value in (rdzv_conf or {}).items())
        values |= {
            "num_machines": (f"num_nodes={num_nodes}", num_nodes),
            "machine_rank": (f"node_rank={node_rank}", node_rank),
            "main_process_ip": (f"master_addr={master_addr!r}", master_addr),
            "rdzv_backend": (f"rdzv_backend={rdzv_backend!r}", rdzv_backend),
            "rdzv_conf": ("rdzv_conf=…", options),
        }
    if num_nodes > 1 or str(use_port) != _ANY_PORT:
        values["main_process_port"] = (f"use_port={use_port!r}", int(use_port))
    spec = _build(function, _document(config, values, "notebook_launcher"), rdzv_endpoint or None)
    if rdzv_id != "none":
        spec = replace(spec, rendezvous=replace(spec.rendezvous, run_id=rdzv_id))
    with _launch_variables(spec):
        if spec.replicas is not None:
            _run_on_devices(function, tuple(args), spec.replicas.count)
        elif spec.local_processes * spec.machines == 1:
            function(*args)
        else:
            _run_forked(spec, function, tuple(args), line_prefix=log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: Iterable[Any] = (), num_processes: int = 2) -> None:
    """Run `function(*args)` in several processes on the CPU, each a copy of this one.

    Args:
        function: the function to run.
        args: the function's positional arguments, any iterable.
        num_processes: number of processes.

    Raises:
        LaunchError: copies of this process cannot work any more, or a process failed (with its traceback).
    """
    values = {
        "num_processes": (f"num_processes={num_processes}", num_processes),
        "use_cpu": ("on the CPU", True),
    }
    spec = _build(function, _document(None, values, "debug_launcher"), None)
    with _launch_variables(spec):
        _run_forked(spec, function, tuple(args))


def _document(config: Any, values: Mapping[str, tuple[str, Any]], call: str) -> Document:
    """Read the configuration, overridden by the launcher's arguments (by key: the argument as text, and its value)."""
    document = document_from_code(config, f"{call}(config=…)")
    document = overlay_code(document, {(key,): (f"{call}({text})", value) for key, (text, value) in values.items()})
    return replace(document, notes=check_document(document))


def _build(function: Callable[..., Any], document: Document, endpoint: str | None) -> LaunchSpec:
    program = Program(getattr(function, "__qualname__", repr(function)), kind="function")
    spec = build_spec(document, program, look_at_machine(), os.environ, rendezvous_endpoint=endpoint)
    show_messages()
    if spec.replicas is not None:
        devices = "every XLA device" if spec.replicas.count is None else f"{spec.replicas.count} × XLA"
        _logger.info("%s runs on %s", program.name, devices)
        return spec
    added = spec.environment.get("DS_ACCELERATOR")
    where = "the CPU" if (added.value if added else os.environ.get("DS_ACCELERATOR")) == "cpu" else "GPUs"
    reason = f" ({spec.local_processes_reason})" if spec.local_processes_reason else ""
    count = "1 process" if spec.local_processes == 1 else f"{spec.local_processes} processes"
    _logger.info("%s runs in %s on %s%s", program.name, count, where, reason)
    return spec


# ---- copies ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _launch_variables(spec: LaunchSpec) -> Iterator[None]:
    """Set the launch's environment variables, here and in forked copies, until the launch ends."""
    values = {name: setting.value for name, setting in spec.environment.items()}
    with variables_while(values, [CONFIG_FILE.variable]), engine.configuration_file(spec):
        yield


def _run_forked(
    spec: LaunchSpec, function: Callable[..., Any], args: tuple[Any, ...], *, line_prefix: str | None = None
) -> None:
    """Run `function(*args)` in `spec.local_processes` copies of this process.

    When this returns or raises, no copy is left. The caller sets the spec's environment variables before.

    Args:
        spec: the number of copies, and the rendezvous.
        function: the function to run. It needs no importable name.
        args: the function's arguments. Nothing is pickled.
        line_prefix: torchrun's `log_line_prefix_template`.

    Raises:
        LaunchError: copies of this process cannot work any more, a copy failed, or the machines of the run did not
            meet.
    """
    on_gpus = os.environ.get("DS_ACCELERATOR") != "cpu"
    threads = _find_threads(int(os.environ["OMP_NUM_THREADS"]), on_gpus=on_gpus)
    from torch.distributed.elastic.multiprocessing import SignalException

    undisturbed = own_signals(), _signals_wait_for_forks(), _end_copies_soon(), _meant_to_fork()
    with engine.torchrun_ready(spec) as folder, contextlib.ExitStack() as stack:
        for context in (*undisturbed, variables_while(_DRIVER_ASKED, _LEFT)):
            stack.enter_context(context)
        config = engine.torchrun_config(spec, folder, start_method="fork", log_line_prefix_template=line_prefix)
        config.numa_options = None  # torch's default would use CUDA in the copies before they have a device
        try:
            failures = engine.run_torchrun(spec, config, folder, _work, function, args, threads, spec.cores)
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise LaunchError(f"stopped by {error.sigval.name}; no worker is left") from None
        if any(failure.exitcode == INTERRUPTED for failure in failures.values()):
            raise KeyboardInterrupt  # the copies received the signal, and this process lost it
        if failures:
            raise LaunchError(_describe(failures, folder))


def _run_on_devices(function: Callable[..., Any], args: tuple[Any, ...], count: int | None) -> None:
    """Run `function(*args)` on the devices of a TPU. With one device, run the function in this process.

    When this returns or raises, no copy is left.

    Args:
        function: the function to run. It needs no importable name.
        args: the function's arguments. Nothing is pickled.
        count: required number of devices; None takes all.

    Raises:
        LaunchError: copies of this process cannot work any more, or a copy failed.
        MachineError: torch_xla or the runtime does not work here.
    """
    global _called
    torch_xla = import_torch_xla()
    if count == 1:
        torch_xla.launch(lambda _: function(*args), debug_single_process=True)
        return
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise LaunchError(
            "this process has used an XLA device already, and copies of this process could not use one.\n"
            "Restart the kernel, and keep what uses a device inside the launched function."
        )
    threads = _find_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), on_gpus=False)
    _called = (function, args)
    wanted = {"FORK_LAUNCHED": "1", **({} if count is None else {"WORLD_SIZE": str(count)})}
    with tempfile.TemporaryDirectory(prefix="zero_plugin_") as folder, variables_while(wanted), _meant_to_fork():
        try:
            with _copies_end_with_ctrl_c():
                torch_xla.launch(_run_on_device, args=(folder, threads), start_method="fork")
        except BrokenProcessPool:
            failure = Path(folder) / _FAILURE
            raise LaunchError(failure.read_text() if failure.exists() else ENDED_SILENTLY) from None
        except (RuntimeError, OSError) as error:  # from the runtime: an error of the function only ends its copy
            raise explain_start(error) from error
        finally:
            _called = None


def _run_on_device(rank: int, folder: str, threads: int) -> None:
    """Run one device's part. On failure end this process immediately; torch_xla then ends the others."""
    assert _called is not None, "the copy was forked after `_called` was set"
    function, args = _called
    _begin_copy(threads)

    def leave(error: BaseException) -> int:
        _leave_failure(error, rank, Path(folder))
        return 1

    run_to_end(functools.partial(function, *args), leave)


@contextlib.contextmanager
def _copies_end_with_ctrl_c() -> Iterator[None]:
    """Kill the copies on Ctrl-C. torch_xla would wait for them, but their training threads receive no signal."""
    others = set(multiprocessing.active_children())

    def end(*_: Any) -> None:
        for copy in set(multiprocessing.active_children()) - others:
            copy.kill()
        raise KeyboardInterrupt

    with own_signals() as may_handle:
        if may_handle:
            signal.signal(signal.SIGINT, end)
        yield


# ---- before ----------------------------------------------------------------------------------------------------------


def _find_threads(wanted: int, *, on_gpus: bool = True) -> int:
    """Return how many threads torch may compute with in a copy of this process.

    Args:
        wanted: the configured number of threads.
        on_gpus: whether the copy may use CUDA. False on a TPU: importing torch_xla asks CUDA for its devices.

    Raises:
        LaunchError: a copy could not train.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return wanted
    if torch.distributed.is_initialized() and not _end_left_over():
        raise LaunchError(
            "this process has an Accelerator or a process group already, and copies of this process cannot share it.\n"
            "Create the Accelerator inside the launched function. First end this one with accelerator.end_training(), "
            "or restart the kernel."
        )
    if on_gpus and torch.cuda.is_initialized():
        raise LaunchError(_on_cuda("has computed on a GPU"))
    trial = multiprocessing.get_context("fork").Process(target=_try_copy, args=(on_gpus,))
    with _meant_to_fork():
        trial.start()
    trial.join(_TRIAL_SECONDS)
    if trial.exitcode == _CUDA_IS_DEAD:
        raise LaunchError(_on_cuda("has asked CUDA for its devices, e.g. by torch.cuda.is_available(),"))
    if trial.exitcode == 0 or wanted == 1:
        trial.kill()
        return wanted
    trial.kill()
    trial.join()
    _logger.warning(
        "torch has computed here with several threads, which hang in a copy of this process. Each process computes "
        "with one thread. For more threads, restart the kernel and launch before any computation."
    )
    return 1


def _end_left_over() -> bool:
    """End the process group that an earlier run left, if no `Accelerator` is in use. Return whether it has ended.

    An `Accelerator` in use is refused: the launched function may refer to it, and would train alone in each copy.
    """
    from zero_plugin.distributed.processes import end_group_of_one

    gc.collect()  # a dropped Accelerator may be in a reference cycle
    state = sys.modules.get("zero_plugin.loop.state")
    return (state is None or not state.is_initialized()) and end_group_of_one()


def _on_cuda(what: str) -> str:
    return (
        f"this process {what} already, and CUDA does not work in a copy of a process that did.\n"
        "Restart the kernel, and use GPUs only inside the launched function. Import there too every library that looks "
        "for GPUs at import."
    )


def _try_copy(on_gpus: bool) -> None:
    """Try CUDA and several threads in a copy. Exit with 0 if both work; a hang shows that threads do not."""
    import torch

    if on_gpus and torch.cuda._is_in_bad_fork():
        os._exit(_CUDA_IS_DEAD)
    torch.set_num_threads(2)
    torch.ones(2**20).exp_()
    os._exit(0)


def _signals_wait_for_forks() -> contextlib.AbstractContextManager[None]:
    """Delay signals that arrive while torch forks the copies until all copies exist.

    torch raises a signal as an exception. Python's fork hooks would swallow the exception and leave logging locked
    forever, because the hooks hold logging's lock. A copy would also lose signals that arrive before Python runs in
    it, so signals stay blocked in a copy until `_work`.
    """
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    fork: Callable[[Any], None] = MultiprocessContext._start

    def fork_undisturbed(workers: Any) -> None:
        received: list[int] = []
        with own_signals() as may_handle:
            for number in ENDING_SIGNALS if may_handle else ():  # outside the main thread torch handles no signals
                signal.signal(number, lambda number, _: received.append(number))
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
            try:
                fork(workers)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if received:
            for copy in workers.pids().values():
                os.kill(copy, signal.SIGKILL)
            signal.raise_signal(received[0])

    return replaced(MultiprocessContext, "_start", fork_undisturbed)


def _end_copies_soon() -> contextlib.AbstractContextManager[None]:
    """Make copies end as soon after a failure as other workers, while the context is entered."""
    from torch.multiprocessing.spawn import ProcessContext

    wait = ProcessContext._join_procs_with_timeout
    return replaced(
        ProcessContext,
        "_join_procs_with_timeout",
        lambda copies, timeout: wait(copies, min(timeout, engine.AFTER_FAILURE_S)),
    )


@contextlib.contextmanager
def _meant_to_fork() -> Iterator[None]:
    """Silence Python's warning (from 3.12) that a copy of a process with threads may hang. The trial copy checks it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield


# ---- in the copy -----------------------------------------------------------------------------------------------------


def _begin_copy(threads: int) -> None:
    """Drop the launcher's run and threads in a copy, and end the copy when the launcher dies."""
    die_with_launcher()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)
    if (state := sys.modules.get("zero_plugin.loop.state")) is not None:
        state.forget_run()


def _work(function: Callable[..., Any], args: tuple[Any, ...], threads: int, cores: tuple[frozenset[int], ...]) -> None:
    """Run the function like a separate process: with no launcher state, and with its exit hooks at the end."""
    _begin_copy(threads)
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    os.environ["FORK_LAUNCHED"] = "1"
    if cores:
        os.sched_setaffinity(0, cores[int(os.environ["LOCAL_RANK"])])
    atexit._clear()  # the launcher's hooks: multiprocessing would not call them in a copy either
    attempt = Path(os.environ[ERROR_FILE]).parents[1]
    try:
        function(*args)
        atexit._run_exitfuncs()  # ends the training with the other processes
    except SystemExit as end:
        if end.code not in (None, 0):
            _leave_failure(end, os.environ["RANK"], attempt)
            raise
        atexit._run_exitfuncs()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # torch would treat it as success, and wait for the result
    except Exception as error:
        _leave_failure(error, os.environ["RANK"], attempt)
        raise
    finally:
        flush_output()


def _leave_failure(error: BaseException, rank: int | str, folder: Path) -> None:
    """Write the failure and this process's traceback for the launcher, unless another process failed before."""
    own_frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.format_exception(type(error), error, own_frames)
    if (memory := sys.modules.get("zero_plugin.loop.out_of_memory")) is not None:
        lines += [f"{line}\n" for line in memory.describe_end(error)]
    put_first(folder / _FAILURE, f"process {rank} failed first; all are stopped.\n\n{''.join(lines).rstrip()}")


def _describe(failures: Any, folder: Path) -> str:
    """Describe the failure, with the traceback of the process that failed first."""
    rank, failure = next(iter(failures.items()))
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda attempt: int(attempt.name.partition("_")[2]))
    if failure.exitcode < 0 or not attempts or not (file := attempts[-1] / _FAILURE).exists():
        return describe_failure(FirstFailure(rank, failure.exitcode))
    return file.read_text()
