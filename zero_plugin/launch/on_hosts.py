"""Run DeepSpeed's launcher on the machines of a hostfile: each is reached before, and nothing is left on any after."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from zero_plugin.errors import LaunchError, MachineError
from zero_plugin.launch.spec import Host, Hosts
from zero_plugin.machine.network import is_own_address

_TOOLS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "pdsh": (("pdsh", "ssh"), "sudo apt-get install pdsh openssh-client"),
    "openmpi": (("mpirun", "ompi_info"), "sudo apt-get install openmpi-bin"),
    "slurm": (("srun", "sinfo"), "start this on a machine of the SLURM cluster"),
}
_TESTED: Final = ("pdsh", "openmpi", "slurm", "nossh")
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_ANSWERS_WITHIN_S: Final = 30
_STOPS_WITHIN_S: Final = 10.0
_AT_ONCE: Final = 32
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SIGNAL_CODES: Final = range(256 - 31, 255)  # DeepSpeed passes a rank's -9 on as 247; 255 is ssh's own


class _StoppedError(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def run_on_hosts(hosts: Hosts, *, quiet: bool = False) -> int:
    """Run DeepSpeed's launcher to its end and return the exit code for the shell.

    Args:
        hosts: the machines, and the command that starts them.
        quiet: whether nothing is said that is no error.

    Raises:
        MachineError: a program that reaches the machines is not installed here.
        LaunchError: a machine cannot be reached; nothing was started on any.
    """
    tools, install = _TOOLS.get(hosts.launcher, ((), ""))
    if lacking := [tool for tool in tools if shutil.which(tool) is None]:
        raise MachineError(f"{hosts.launcher} needs {' and '.join(lacking)}, not installed here. Type: {install}")
    _reach(hosts)
    if not quiet:
        for sentence in _said(hosts):
            print(sentence, file=sys.stderr)  # noqa: T201
    # DeepSpeed sends what MLFLOW_ and NCCL_ start with, secret or not, on the command line of a remote shell.
    hidden = hosts.kept if hosts.launcher != "nossh" else ()
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    with _raised_signals():
        runner = subprocess.Popen(hosts.command, cwd="/", env=environ, start_new_session=True)  # noqa: S603 - its purpose
        try:
            code = runner.wait()
        except _StoppedError as stopped:
            _stop(runner, hosts)
            print(f"stopped by {signal.Signals(stopped.number).name}; no worker is left", file=sys.stderr)  # noqa: T201
            return 128 + stopped.number
        except BaseException:
            _stop(runner, hosts)
            raise
    if code:
        _stop(runner, hosts)
        code = 128 + 256 - code if code in _SIGNAL_CODES else code if code > 0 else 128 - code
        print(f"{hosts.launcher} ended with exit code {code}; the output of the ranks is above", file=sys.stderr)  # noqa: T201
    return code


def _said(hosts: Hosts) -> Iterator[str]:
    if hosts.launcher not in _TESTED:
        yield f"{hosts.launcher} is passed on to DeepSpeed's launcher; this package has not been tested with it"
    if hosts.kept and hosts.launcher != "nossh":
        yield f"not sent to the other machines, since they look secret: {', '.join(hosts.kept)}; set them there"
    if Path(".deepspeed_env").exists():
        yield "./.deepspeed_env is not read; DeepSpeed reads ~/.deepspeed_env"


def _reach(hosts: Hosts) -> None:
    """Try every machine by ssh, where that is what will start it.

    Raises:
        LaunchError: some cannot be reached.
    """
    if hosts.launcher in ("nossh", "slurm") or "SLURM_JOB_ID" in os.environ:
        return
    tried = [host for host in hosts.hosts if hosts.launcher == "pdsh" or not is_own_address(host.name)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda host: _run_there(host, "true"), tried))
    failed = [f"  {host.name} ({host.where}): {why}" for host, why in zip(tried, answers, strict=True) if why]
    if failed:
        raise LaunchError(
            "\n".join([f"{len(failed)} of {len(tried)} hosts cannot be reached by ssh; nothing was started:", *failed])
            + f"\nThis must work without a password: ssh {failed[0].split()[0]} true"
        )


def _run_there(host: Host, command: str) -> str:
    """Run a command on a machine by ssh; why that failed, "" if it did not."""
    options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    try:
        done = subprocess.run(  # noqa: S603 - the hosts are the user's own
            [*_SSH, *options, host.name, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWERS_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip().replace("\n", "; ") or f"exit code {done.returncode}"


def _stop(runner: subprocess.Popen[bytes], hosts: Hosts) -> None:
    """End what DeepSpeed's launcher started: here by signals, elsewhere by the word that marks this launch.

    Its own way by pdsh would end every launch of this user on these machines.
    """
    if hosts.launcher != "pdsh" and not _ended(runner, signal.SIGTERM, _STOPS_WITHIN_S):
        _ended(runner, signal.SIGKILL, _STOPS_WITHIN_S)
    if hosts.launcher == "pdsh":
        _ended(runner, signal.SIGKILL, _STOPS_WITHIN_S)
        # The bracket keeps the pattern from finding the shell that looks for it.
        pattern = f"[{hosts.run[0]}]{hosts.run[1:]}"
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda host: _run_there(host, f"pkill -TERM -f '{pattern}'"), hosts.hosts))


def _ended(runner: subprocess.Popen[bytes], number: signal.Signals, seconds: float) -> bool:
    """Send a signal to all that the runner started on this machine; whether all had ended after so many seconds."""
    deadline = time.monotonic() + seconds
    sent = False
    while time.monotonic() < deadline:
        try:
            os.killpg(runner.pid, 0 if sent else number)
        except ProcessLookupError:
            runner.wait()
            return True
        sent = True
        runner.poll()
        time.sleep(0.05)
    return False


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Signals that end a launcher are raised in it, so that it ends its workers; under nohup SIGHUP stays ignored."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the system's signature
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # a second one must not break off the stopping
        raise _StoppedError(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
