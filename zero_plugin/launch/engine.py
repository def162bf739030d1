"""Run a spec on torchrun's engine, in this process, until every worker has ended.

After a failure the other workers end within seconds. After SIGTERM they have the grace period. Processes that the
workers started end with them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

from zero_plugin.config.installed import garbage_collection_paused, replaced
from zero_plugin.config.keys import CONFIG_FILE
from zero_plugin.config.run_files import (
    CUT_VARIABLE,
    OutOfMemoryReport,
    make_private_folder,
    take_out_of_memory_report,
)
from zero_plugin.errors import LaunchError
from zero_plugin.launch.command import NEW_STORE, worker_command
from zero_plugin.launch.hosts import run_on_hosts
from zero_plugin.launch.report import (
    HAD_ENDED,
    STOPPED,
    TERMINATED,
    describe_end,
    describe_failure,
    find_first_failure,
    running_at,
    shell_code,
)
from zero_plugin.launch.spec import LaunchSpec, Rendezvous
from zero_plugin.launch.worker import ERROR_FILE, RUNNING_AT, SHOWS_PLACE
from zero_plugin.machine.hardware import MemoryWatch, process_stat
from zero_plugin.machine.op_builds import RunningBuilds

_logger = logging.getLogger(__name__)

AFTER_FAILURE_S: Final = 5  # time for the other workers of a failed run to end; torch's default is 30
_LOOK_S: Final = 0.05
_PLACES_S: Final = 2.0  # time for workers to write their stacks


@contextmanager
def end_workers_so(grace_s: float, on_failure: Callable[[Mapping[int, Any]], None]) -> Iterator[dict[int, str]]:
    """Replace how torchrun ends workers while the context is entered.

    After a worker fails, the others get SIGTERM, and SIGKILL some seconds later. When the launcher receives a signal,
    it forwards the signal to the workers, and sends SIGKILL after `grace_s`. Processes that the workers started (data
    loader workers) get no signal meanwhile, so a worker that saves a checkpoint still has its data. Compilers that
    build ops for the workers end with them, and the launcher removes the build locks.

    Args:
        grace_s: seconds between the forwarded signal and SIGKILL.
        on_failure: called after a failure, when no worker is left, with torchrun's records of the workers that
            failed on their own.

    Yields:
        By rank, what a worker did at the first failure that other ranks may have waited for. Filled during the context.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    idle: dict[int, str] = {}
    close = SubprocessContext.close

    def end(workers: Any, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:  # noqa: ARG001
        processes = {int(workers.envs[k]["RANK"]): handler.proc for k, handler in workers.subprocess_handlers.items()}
        alive = [process for process in processes.values() if process.poll() is None]
        failed: dict[int, ProcessFailure] = {}
        builds = RunningBuilds()
        builds.record_builds([process.pid for process in alive])
        if death_sig is None:
            codes = {rank: process.poll() for rank, process in processes.items()}
            idle.clear()
            idle.update({k: why for k, code in codes.items() if (why := _why_idle(processes[k].pid, code))})
            failed = {rank: ProcessFailure(rank, processes[rank].pid, code, "") for rank, code in codes.items() if code}
            running = [rank for rank, code in codes.items() if code is None and rank not in idle]
            environments = {int(environment["RANK"]): environment for environment in workers.envs.values()}
            idle.update(_places({rank: (processes[rank], environments[rank]) for rank in running}))
            close(workers, None, AFTER_FAILURE_S)
        else:
            for process in alive:
                process.send_signal(death_sig)
            deadline = time.monotonic() + grace_s
            while any(process.poll() is None for process in alive) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
            builds.record_builds([process.pid for process in alive if process.poll() is None])
            close(workers, signal.SIGKILL, AFTER_FAILURE_S)
        # After a stop signal only workers that were still alive lose their children: a worker that ended successfully
        # left its own running on purpose.
        for process in processes.values() if death_sig is None else alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each worker leads a group of its own
        builds.end()
        if failed:
            on_failure(failed)

    with replaced(SubprocessContext, "close", end):  # torch has no public hook for ending workers
        yield idle


class _TimedLines:
    """A stream that puts the time before each worker line that torchrun shows, unless the line has a time already.

    Args:
        stream: the stream to write to.
        role: torchrun's name for the workers.
    """

    def __init__(self, stream: Any, role: str) -> None:
        self._stream = stream
        self._untimed = re.compile(rf"\[{re.escape(role)}\d+\]:(?!\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d)")

    def write(self, text: str) -> int:
        """Write `text`. torchrun writes one worker line per call."""
        if self._untimed.match(text):
            text = f"{logging.Formatter().formatTime(logging.makeLogRecord({}))} {text}"
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def timed_lines(role: str) -> Iterator[None]:
    """Put the time before each line that the workers write through this process, while the context is entered."""
    with redirect_stdout(_TimedLines(sys.stdout, role)), redirect_stderr(_TimedLines(sys.stderr, role)):
        yield


def _why_idle(pid: int, code: int | None) -> str:
    """Return why a process is not running, from its exit code or the kernel's state; "" if it runs or has failed."""
    if code is not None:
        return {0: HAD_ENDED, -signal.SIGTERM: TERMINATED}.get(code, "")
    state = (process_stat(pid) or [""])[0]
    by = {"T": "by a signal (SIGSTOP, Ctrl-Z)", "t": "by a debugger"}.get(state)
    return f"{STOPPED} {by}" if by else ""


def _places(running: Mapping[int, tuple[Any, Mapping[str, str]]]) -> dict[int, str]:
    """Signal running workers to write their stacks. Return, by rank, where workers are that keep others waiting.

    Args:
        running: each rank's process and environment.
    """
    files = {}
    for rank, (process, environment) in running.items():
        file = Path(environment[ERROR_FILE]).parents[1] / f"{RUNNING_AT}.{rank}"
        if SHOWS_PLACE is not None and file.exists():  # without the file, the signal has no handler and would kill
            process.send_signal(SHOWS_PLACE)
            files[rank] = file
    deadline = time.monotonic() + _PLACES_S
    while any(not file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 5)
    found = {rank: running_at(file.read_text(errors="replace")) for rank, file in files.items()}
    return {rank: place for rank, place in found.items() if place}


# Loggers whose warnings repeat the report.
_NOISE = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)


def run_workers(spec: LaunchSpec) -> int:
    """Start the workers, wait for them and return the exit code for the shell.

    The code is 0, the exit code of the first failing rank, or 128 + n if signal n ended the launcher or that rank.
    When this returns, no worker is left on this machine.

    Args:
        spec: what runs, and where. DeepSpeed's launcher starts the workers on the machines of a hostfile.

    Raises:
        LaunchError: the machines of the run did not meet, or lost their connection.
        MachineError: the program that reaches the machines of a hostfile is not installed.
    """
    if spec.hosts is not None:
        return run_on_hosts(spec.hosts)
    os.environ.update({name: setting.value for name, setting in spec.environment.items()})  # workers get a copy
    os.environ[CUT_VARIABLE] = "1"
    max_restarts, restarts = spec.settings.max_restarts, 0
    if spec.machines > 1 and max_restarts:
        os.environ[NEW_STORE] = "1"  # from the start: all machines must agree, and not all of them see a failure

    def log_restart(failures: Mapping[int, Any]) -> None:
        nonlocal restarts
        restarts += 1
        if restarts <= max_restarts:
            first, smaller = find_first_failure(failures, folder), _cut_micro_batch(take_out_of_memory_report(folder))
            message = "%s; all workers start again (restart %d of %d)%s"
            _logger.warning(message, describe_end(first, spec.machines), restarts, max_restarts, smaller)

    memory, ending = MemoryWatch(), end_workers_so(spec.settings.grace_period, log_restart)
    timed = timed_lines(spec.settings.role) if spec.settings.log_timestamps else nullcontext()
    with timed, torchrun_ready(spec) as folder, configuration_file(spec), memory, ending as idle:
        return _run_until_all_end(spec, folder, memory, idle)


def _run_until_all_end(spec: LaunchSpec, folder: Path, memory: MemoryWatch, idle: Mapping[int, str]) -> int:
    """Meet the other machines, run the workers on torchrun's engine and log the outcome. Return the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from zero_plugin.launch.rendezvous import Contact, meet_machines

    # From here until torchrun handles signals, a signal ends this process: see `_signals_handled`.
    config, store = torchrun_config(spec, folder, **_signals_handled()), None
    with Contact(spec.rendezvous, spec.machines, spec.settings.min_machines) as contact:
        try:
            store = meet_machines(spec.rendezvous, spec.machines)
            return _run_attempts(spec, config, folder, memory, idle)
        except SignalException as error:
            if contact.lost:
                return 1
            _logger.warning("stopped by %s; no worker is left", error.sigval.name)
            return 128 + int(error.sigval)
        except LostConnectionError as error:
            contact.lost = str(error)
            return 1
        finally:
            del store  # only now: other machines may need this store until torchrun has passed its common exit barrier
            if contact.lost:
                contact.leave()


def _run_attempts(spec: LaunchSpec, config: Any, folder: Path, memory: MemoryWatch, idle: Mapping[int, str]) -> int:
    """Run the workers and return the exit code. On one machine, retry with smaller micro-batches if memory runs out."""
    while failures := run_torchrun(spec, config, folder, *worker_command(spec)):
        first = find_first_failure(failures, folder, idle)
        out_of_memory = take_out_of_memory_report(folder)
        # Launchers of several machines can only restart together, which --max_restarts does.
        if spec.machines == 1 and (smaller := _cut_micro_batch(out_of_memory)):
            _logger.warning("%s; all workers start again%s", describe_end(first), smaller)
            continue
        processes = {rank: failure.pid for rank, failure in failures.items()}
        described = describe_failure(
            first, machines=spec.machines, memory=memory, processes=processes, out_of_memory=out_of_memory, idle=idle
        )
        _logger.error("%s", described)
        return shell_code(first.exitcode)
    return 0


class LostConnectionError(LaunchError):
    """An error for machines of a run that lost their connection."""


def run_torchrun(
    spec: LaunchSpec, config: Any, folder: Path, entrypoint: str | Callable[..., Any], *arguments: Any
) -> Mapping[int, Any]:
    """Run the workers on torchrun's engine until all have ended. Return torchrun's record of each failure, by rank.

    Args:
        spec: names the rendezvous.
        config: from `torchrun_config`.
        folder: from `torchrun_ready`.
        entrypoint: the program that each worker executes, or a function that copies of this process call.
        arguments: the entrypoint's arguments.

    Raises:
        LaunchError: the machines did not meet.
        LostConnectionError: the machines lost their connection.
        SignalException: torch's. This process received an ending signal, and has ended its workers.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        return error.failures
    except (RendezvousError, DistError) as error:
        if any(folder.glob("*/attempt_*")):
            message = f"the connection to the other machines is lost; all workers here are stopped: {error}"
            raise LostConnectionError(message) from error
        raise LaunchError(_why_not_met(spec.rendezvous, spec.machines, error)) from error
    return {}


@contextmanager
def torchrun_ready(spec: LaunchSpec) -> Iterator[Path]:
    """Prepare torchrun's engine in this process, for a launch from a shell or from a notebook.

    Yields:
        This run's own folder, for the ranks' error files and for logs that the user keeps.

    Raises:
        LaunchError: the folder cannot be created.
    """
    with garbage_collection_paused():
        import torch.distributed.launcher.api  # noqa: F401 - creates the loggers and sets their levels

    from zero_plugin.launch import rendezvous

    rendezvous.register()
    _set_log_level(debug=spec.settings.debug)
    if spec.settings.log_dir is None:
        with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    else:
        try:
            make_private_folder(Path(spec.settings.log_dir))
            own = tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d_%H-%M-%S_"), dir=spec.settings.log_dir)
        except OSError as error:
            message = f"log_dir: {spec.settings.log_dir} cannot be written ({error.strerror}). Name another folder."
            raise LaunchError(message) from error
        yield Path(own)


def torchrun_config(spec: LaunchSpec, folder: Path, **more: Any) -> Any:
    """Convert the spec to torchrun's launch configuration.

    Args:
        spec: the number of workers and the rendezvous.
        folder: from `torchrun_ready`.
        more: fields of torch's launch configuration that the spec does not have.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=spec.settings.min_machines or spec.machines,
        max_nodes=spec.machines,
        nproc_per_node=spec.local_processes,
        role=spec.settings.role,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), tee=Std.from_str(spec.streams)),
        run_id=spec.rendezvous.run_id,
        rdzv_backend=spec.rendezvous.backend,
        rdzv_endpoint=spec.rendezvous.endpoint,
        rdzv_configs=dict(spec.rendezvous.options),
        max_restarts=spec.settings.max_restarts,
        monitor_interval=spec.settings.monitor_interval,
        local_addr=spec.rendezvous.local_address,
        **more,
    )


def _cut_micro_batch(report: OutOfMemoryReport | None) -> str:
    """Give smaller micro-batches to workers started from now on. Return a description, "" if that is not allowed."""
    if report is None or not report.cut:
        return ""
    os.environ[CUT_VARIABLE] = str(report.cut)
    return (
        f" with micro-batch {report.micro_batch}: each of the loader's batches is split into {report.cut}, and "
        f"accumulation grows by the same factor. {report.headline}"
    )


@contextmanager
def configuration_file(spec: LaunchSpec) -> Iterator[None]:
    """Write the DeepSpeed JSON to a file that exists as long as the workers, and put its name in their environment."""
    if spec.deepspeed_config is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "deepspeed.json"
        file.write_text(json.dumps(spec.deepspeed_config, indent=2))
        os.environ[CONFIG_FILE.variable] = str(file)
        yield


def _why_not_met(rendezvous: Rendezvous, machines: int, error: Exception) -> str:
    """Explain why the machines did not meet, and what to do."""
    if type(error).__name__ == "RendezvousTimeoutError":
        limit = rendezvous.options.get("join_timeout", rendezvous.options.get("timeout", 600))
        return (
            f"not all of the {machines} machines met at {rendezvous.endpoint} within {limit} s. Nothing was started "
            "here.\nStart the same command on every machine; --rdzv_conf join_timeout=SECONDS waits longer."
        )
    cause = next((str(e) for e in (error.__cause__, error.__context__, error) if e is not None and str(e)), "")
    return (
        f"the machines did not meet at {rendezvous.endpoint}: {cause}\n"
        "The launcher on the machine with this address must be running. Its port must be free, and open to the others."
    )


def _signals_handled() -> dict[str, Any]:
    """Let signals end this process immediately while no worker exists. torchrun handles them once workers exist.

    No Python code runs while torch waits for other machines, so Python would handle Ctrl-C only after minutes. Under
    nohup, SIGHUP stays ignored: torchrun alone would end the run when the terminal closes.

    Returns:
        The argument for torch's launch configuration. torch before 2.10 has none, and handles SIGHUP even under nohup.
    """
    from torch.distributed.launcher.api import LaunchConfig

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    name = "signals_to_handle"
    return {name: ",".join(n.name for n in numbers)} if name in LaunchConfig.__dataclass_fields__ else {}


def _set_log_level(*, debug: bool) -> None:
    """Set the levels of torchrun's loggers: INFO with `debug`, otherwise silence those that repeat the report."""
    if debug:
        logging.basicConfig(level=logging.INFO)
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")] if debug else _NOISE
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO if debug else logging.CRITICAL)
