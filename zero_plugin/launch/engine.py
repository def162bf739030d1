"""Runs a spec on torchrun's engine, in this process, until every worker is gone.

Workers end within seconds when one has failed, and in their own time at SIGTERM; what they started ends too.
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

AFTER_FAILURE_S: Final = 5  # what a failed run's other workers have; torch's own is 30
_LOOK_S: Final = 0.05
_PLACES_S: Final = 2.0  # for workers to write where they are


@contextmanager
def end_workers_so(grace_s: float, on_failure: Callable[[Mapping[int, Any]], None]) -> Iterator[dict[int, str]]:
    """While it is entered, torchrun ends its workers in two ways, in place of its one.

    After a failure of one, the others get SIGTERM, and SIGKILL some seconds later. When the launcher gets a signal, the
    worker processes get it, and SIGKILL after `grace_s`; what they have started themselves (processes that load data)
    gets nothing meanwhile, so that a worker that saves a checkpoint then still has its data. A compiler that builds an
    op for them ends with them, and the build's lock is removed.

    Args:
        grace_s: see above.
        on_failure: is called after a failure, when no worker is left, with torchrun's records of those that had
            failed by themselves.

    Yields:
        By rank, what a worker did that others may have waited for when one failed; filled while it is entered.
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
        # What processes that have ended well left running was meant to stay.
        for process in processes.values() if death_sig is None else alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # each worker leads a group of its own
        builds.end()
        if failed:
            on_failure(failed)

    with replaced(SubprocessContext, "close", end):  # there is no public way to have what that does
        yield idle


class _TimedLines:
    """A stream that writes the time before each line that torchrun shows of a worker, unless the line begins with one.

    Args:
        stream: where it writes.
        role: torchrun's name for the workers.
    """

    def __init__(self, stream: Any, role: str) -> None:
        self._stream = stream
        self._untimed = re.compile(rf"\[{re.escape(role)}\d+\]:(?!\d{{4}}-\d\d-\d\d[ T]\d\d:\d\d)")

    def write(self, text: str) -> int:
        """Write `text`, which is one line where torchrun writes it."""
        if self._untimed.match(text):
            text = f"{logging.Formatter().formatTime(logging.makeLogRecord({}))} {text}"
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def timed_lines(role: str) -> Iterator[None]:
    """While it is entered, what the workers write through this process has the time before each line."""
    with redirect_stdout(_TimedLines(sys.stdout, role)), redirect_stderr(_TimedLines(sys.stderr, role)):
        yield


def _why_idle(pid: int, code: int | None) -> str:
    """What keeps a process from running, by the kernel's word; "" for nothing, and for one that has failed."""
    if code is not None:
        return {0: HAD_ENDED, -signal.SIGTERM: TERMINATED}.get(code, "")
    state = (process_stat(pid) or [""])[0]
    by = {"T": "by a signal (SIGSTOP, Ctrl-Z)", "t": "by a debugger"}.get(state)
    return f"{STOPPED} {by}" if by else ""


def _places(running: Mapping[int, tuple[Any, Mapping[str, str]]]) -> dict[int, str]:
    """By rank, where workers are that let others wait, which each writes at a signal.

    Args:
        running: each one's process and environment.
    """
    files = {}
    for rank, (process, environment) in running.items():
        file = Path(environment[ERROR_FILE]).parents[1] / f"{RUNNING_AT}.{rank}"
        if SHOWS_PLACE is not None and file.exists():  # else it does not listen
            process.send_signal(SHOWS_PLACE)
            files[rank] = file
    deadline = time.monotonic() + _PLACES_S
    while any(not file.stat().st_size for file in files.values()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 5)
    found = {rank: running_at(file.read_text(errors="replace")) for rank, file in files.items()}
    return {rank: place for rank, place in found.items() if place}


# Loggers whose warnings repeat what the report says.
_NOISE = (
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.agent.server.api",
    "torch.multiprocessing.spawn",
)


def run_workers(spec: LaunchSpec) -> int:
    """Start the workers, wait for them and return the exit code for the shell.

    Args:
        spec: what runs, and where; workers on the machines of a hostfile are DeepSpeed's launcher's.

    The code is 0, the first failing rank's, or 128 + n where signal n ended the launcher or that rank. When this
    returns, no worker is left on this machine.

    Raises:
        LaunchError: the machines of the run did not meet, or lost each other.
        MachineError: what reaches the machines of a hostfile is not installed.
    """
    if spec.hosts is not None:
        return run_on_hosts(spec.hosts)
    os.environ.update({name: setting.value for name, setting in spec.environment.items()})  # workers get a copy
    os.environ[CUT_VARIABLE] = "1"
    max_restarts, restarts = spec.settings.max_restarts, 0
    if spec.machines > 1 and max_restarts:
        os.environ[NEW_STORE] = "1"  # from the start: they have to agree, and not all of them see a failure

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
    """Meet the other machines, run the workers on torchrun's engine, and log what came of them; an exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException

    from zero_plugin.launch.rendezvous import Contact, meet_machines

    config, store = torchrun_config(spec, folder, **_signals_handled()), None  # from now on signals end this process
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
            del store  # the others may need it until torchrun has left their common exit
            if contact.lost:
                contact.leave()


def _run_attempts(spec: LaunchSpec, config: Any, folder: Path, memory: MemoryWatch, idle: Mapping[int, str]) -> int:
    """Run the workers; on one machine again with smaller micro-batches, as long as memory runs out; an exit code."""
    while failures := run_torchrun(spec, config, folder, *worker_command(spec)):
        first = find_first_failure(failures, folder, idle)
        out_of_memory = take_out_of_memory_report(folder)
        # Launchers of several machines begin again together, or not at all: that is --max_restarts.
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
    """The machines of a run have lost each other."""


def run_torchrun(
    spec: LaunchSpec, config: Any, folder: Path, entrypoint: str | Callable[..., Any], *arguments: Any
) -> Mapping[int, Any]:
    """Run the workers on torchrun's engine until every one is gone; torchrun's record of each failed one, by rank.

    Args:
        spec: where they meet.
        config: of `torchrun_config`.
        folder: of `torchrun_ready`.
        entrypoint: what each executes; or a function, which copies of this process call.
        arguments: of either.

    Raises:
        LaunchError: the machines did not meet.
        LostConnectionError: they lost each other.
        SignalException: torch's; this process got a signal that ends it, and has ended its workers.
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
        A folder of this run alone, for the ranks' error files and, where the user keeps them, logs.

    Raises:
        LaunchError: it cannot be made.
    """
    with garbage_collection_paused():
        import torch.distributed.launcher.api  # noqa: F401 - makes the loggers, and sets their levels

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
    """The spec as torchrun's engine takes it.

    Args:
        spec: how many workers, and where they meet.
        folder: of `torchrun_ready`.
        more: fields of torch's launch configuration that the spec says nothing of.
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
    """Let the workers started from now on have smaller micro-batches; how, or "" where they may not."""
    if report is None or not report.cut:
        return ""
    os.environ[CUT_VARIABLE] = str(report.cut)
    return (
        f" with micro-batch {report.micro_batch}, which makes {report.cut} of each of the loader's batches, and as "
        f"many times the accumulation. {report.headline}"
    )


@contextmanager
def configuration_file(spec: LaunchSpec) -> Iterator[None]:
    """The DeepSpeed JSON as a file that lasts as long as the workers, and its name in their environment."""
    if spec.deepspeed_config is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="zero_plugin_", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "deepspeed.json"
        file.write_text(json.dumps(spec.deepspeed_config, indent=2))
        os.environ[CONFIG_FILE.variable] = str(file)
        yield


def _why_not_met(rendezvous: Rendezvous, machines: int, error: Exception) -> str:
    """Why the machines did not find each other, and what to do."""
    if type(error).__name__ == "RendezvousTimeoutError":
        limit = rendezvous.options.get("join_timeout", rendezvous.options.get("timeout", 600))
        return (
            f"not all of the {machines} machines came together at {rendezvous.endpoint} within {limit} s. Nothing was "
            "started here.\nStart the same command on every machine; --rdzv_conf join_timeout=SECONDS waits longer."
        )
    cause = next((str(e) for e in (error.__cause__, error.__context__, error) if e is not None and str(e)), "")
    return (
        f"the machines did not meet at {rendezvous.endpoint}: {cause}\n"
        "The launcher on the machine that has this address must run, and its port be free and open to the others."
    )


def _signals_handled() -> dict[str, Any]:
    """Let signals end this process at once while no worker exists, and torchrun handle them then.

    While torch waits for other machines no Python code runs, so that Ctrl-C would be heard after minutes. Under nohup
    SIGHUP stays ignored: torchrun by itself would end the run when the terminal closes.

    Returns:
        The argument of torch's launch configuration; before 2.10 it has none, and handles SIGHUP under nohup too.
    """
    from torch.distributed.launcher.api import LaunchConfig

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    name = "signals_to_handle"
    return {name: ",".join(n.name for n in numbers)} if name in LaunchConfig.__dataclass_fields__ else {}


def _set_log_level(*, debug: bool) -> None:
    """Have torchrun say more of what it does where `debug`."""
    if debug:
        logging.basicConfig(level=logging.INFO)
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")] if debug else _NOISE
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO if debug else logging.CRITICAL)
