"""A launch on the machines of a hostfile by DeepSpeed's launcher: the hostfile, the exact command, and its run.

This module adds what DeepSpeed's launcher lacks. It reports all problems of the hostfile and the filters together,
contacts every machine before anything starts, and leaves no process on any machine afterwards.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from zero_plugin.config.document import Document
from zero_plugin.config.keys import LAUNCHERS, LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, launch_settings
from zero_plugin.config.read import nearest_file
from zero_plugin.config.resolve.resolve import config_for_scripts
from zero_plugin.config.tree import AUTO, did_you_mean, show
from zero_plugin.distributed.process_end import ENDING_SIGNALS, own_signals
from zero_plugin.errors import LaunchError, MachineError, Problem
from zero_plugin.launch import remote_worker
from zero_plugin.launch.command import foreign_variables, program_arguments
from zero_plugin.launch.remote_worker import WorkerConfig, choose_variables, encode_config
from zero_plugin.launch.spec import (
    STATIC_PORT,
    Host,
    Hosts,
    LaunchSpec,
    Rendezvous,
    Request,
    Setting,
    find_program_problems,
)
from zero_plugin.machine.hardware import port_is_free
from zero_plugin.machine.network import is_own_address

_logger = logging.getLogger(__name__)

_CHOOSE_HOSTS: Final = ("pdsh", "slurm", "nossh")  # other launchers start on all hosts of the hostfile
_ONLY_TORCHRUN: Final = (
    *("max_restarts", "min_machines", "grace_period", "log_dir"),
    *("tee", "role", "monitor_interval", "rdzv_backend", "rdzv_conf"),
)
_NONE: Final = (None, "", "none")
_BREAKS_PDSH: Final = frozenset(" \t\n\"'\\$`&|;<>()*?[]{}~#!")
_LINE: Final = re.compile(r"(\S+)\s+slots=(\d+)(?:\s+max[-_]slots=\d+)?")
_LEGAL: Final = "Write a line `host slots=GPUS` for each machine."
_TOOLS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "pdsh": (("pdsh", "ssh"), "Type `sudo apt-get install pdsh openssh-client`."),
    "openmpi": (("mpirun", "ompi_info"), "Type `sudo apt-get install openmpi-bin`."),
    "slurm": (("srun", "sinfo"), "Start this on a machine of the SLURM cluster."),
}
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_ANSWERS_WITHIN_S: Final = 30
_STOPS_WITHIN_S: Final = 10.0
_AT_ONCE: Final = 32
_SIGNAL_CODES: Final = range(256 - 31, 255)  # DeepSpeed turns a rank's -9 into 247; 255 is ssh's own error code


# ---- the hostfile ----------------------------------------------------------------------------------------------------


def read_hostfile(file: str) -> tuple[list[Host], list[Problem]]:
    """Read the hosts of a file with lines `host slots=N`. Return the hosts in file order, and all problems.

    Args:
        file: the path. In the file, `#` starts a comment.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        fix = nearest_file(Path(file)) if isinstance(error, FileNotFoundError) else _LEGAL
        return [], [Problem(file, "", f"the hostfile cannot be read: {why}", fix)]
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text, where = line.partition("#")[0].strip(), f"{file}:{number}:1"
        found = _LINE.fullmatch(text)
        if not text:
            continue
        if found is None:
            problems.append(Problem(where, "", f"`{text}` is no host with its slots", _LEGAL))
        elif found[2].strip("0") == "":
            problems.append(Problem(where, "", f"{found[1]} has no slots", "Write 1 or more, or delete the line."))
        elif found[1] in hosts:
            message = f"{found[1]} is listed already, at {hosts[found[1]].where}"
            problems.append(Problem(where, "", message, "Write each host once, with all its slots."))
        else:
            hosts[found[1]] = Host(found[1], tuple(range(int(found[2]))), where)
    if not hosts and not problems:
        problems.append(Problem(file, "", "the hostfile names no host", _LEGAL))
    return list(hosts.values()), problems


def filter_hosts(
    hosts: list[Host], text: str, *, exclude: bool, where: str, key: str
) -> tuple[list[Host], list[Problem]]:
    """Apply a filter `host@host:SLOT,SLOT` to `hosts`. Return the remaining hosts in their order, and all problems.

    Args:
        hosts: the hosts of the hostfile.
        text: the filter. A host without slots means all its slots.
        exclude: whether the filter names slots to leave out.
        where, key: where the filter is written, and its key.
    """
    named: dict[str, set[int]] = {}
    problems = []
    for part, name, slots in _parts(text):
        host = next((host for host in hosts if host.name == name), None)
        if host is None:
            near = did_you_mean(name, [host.name for host in hosts])
            fix = f"Did you mean {near}?" if near else f"Write some of {', '.join(host.name for host in hosts)}."
            problems.append(Problem(where, key, f"{name or 'an empty name'} is no host of the hostfile", fix, text))
        elif slots is None or not slots <= set(host.slots):
            fix = f"Write {name}, or some of its slots: {name}:{','.join(map(str, host.slots))}."
            problems.append(Problem(where, key, f"`{part}`: {name} has no such slots", fix, text))
        else:
            named.setdefault(name, set()).update(slots or host.slots)
    left = []
    for host in hosts:
        chosen = named.get(host.name, set())
        slots_left = tuple(slot for slot in host.slots if (slot in chosen) != exclude)
        if slots_left:
            left.append(Host(host.name, slots_left, host.where))
    if not left and not problems:
        problems.append(Problem(where, key, "leaves no host", "Leave some slot of some host.", text))
    return left, problems


def _parts(text: str) -> Iterator[tuple[str, str, set[int] | None]]:
    """Yield each part of a filter: as typed, its host, its slots (empty: all; None: not a list of numbers)."""
    for part in text.replace(" ", "").split("@"):
        name, colon, numbers = part.partition(":")
        typed = numbers.split(",") if colon else []
        yield part, name, {int(number) for number in typed} if all(n.isdigit() for n in typed) else None


# ---- the command -----------------------------------------------------------------------------------------------------


def requested_launcher(settings: LaunchSettings) -> str:
    """Return `standard` for torchrun on every machine, otherwise a launcher name for DeepSpeed's launcher."""
    hostfile = settings.deepspeed_hostfile not in _NONE
    launcher = settings.deepspeed_multinode_launcher or ("pdsh" if hostfile else "standard")
    return launcher if hostfile or settings.num_machines > 1 else "standard"


def build_hosts_spec(request: Request) -> LaunchSpec:
    """Decide everything about a launch on the machines of a hostfile.

    Args:
        request: the launch. Its settings name the hostfile.

    Raises:
        ConfigError: all problems of the hostfile, the filters and the launch, in one error.
    """
    document, settings, program = request.document, request.settings, request.program
    launcher, on_cpu = requested_launcher(settings), asks_for_cpu(settings)
    hosts, problems = _chosen_hosts(request, launcher)
    problems += [*find_program_problems(program), *_problems(request, launcher)]
    problems += _counts(request, launcher, hosts) if hosts else ()
    resolved = request.resolve(
        problems,
        accelerator="cpu" if on_cpu else "cuda",
        processes=settings.num_processes or sum(len(host.slots) for host in hosts) or 1,
    )
    each = _fewer_slots(settings, launcher, hosts)
    if each is not None:
        hosts = [replace(host, slots=host.slots[:each]) for host in hosts]
    sent, kept = choose_variables(request.environ)
    environment = {
        **request.common_environment(sum(len(host.slots) for host in hosts)),
        # `sent`, not the complete environment: the hosts see only the variables that are sent.
        **foreign_variables(replace(request, environ=sent), resolved, on_cpu=on_cpu),
    }
    if on_cpu:
        environment["DS_ACCELERATOR"] = Setting("cpu", "for DeepSpeed: the run is on the CPU")
    address, port = settings.main_process_ip or hosts[0].name, settings.main_process_port or STATIC_PORT
    config = config_for_scripts(document, resolved) if request.on_deepspeed else None
    worker_config = WorkerConfig(
        folder=str(Path.cwd()),
        arguments=program_arguments(program),
        environment={**sent, **{name: setting.value for name, setting in environment.items()}},
        deepspeed_config=config,
        main_address=address,
        main_port=port,
        bind=settings.enable_cpu_affinity,
    )
    run = f"zero_plugin_{uuid.uuid4().hex}"
    runner = _runner(settings, launcher, each, address, port)
    command = (*runner, str(Path(remote_worker.__file__)), run, encode_config(worker_config))
    return LaunchSpec(
        program,
        document,
        settings,
        local_processes=len(hosts[0].slots),
        machines=len(hosts),
        rendezvous=Rendezvous("static", f"{address}:{port}", run),
        environment=environment,
        deepspeed_config=config,
        hosts=Hosts(launcher, tuple(hosts), command, run, tuple(sent), kept),
    )


def _chosen_hosts(request: Request, launcher: str) -> tuple[list[Host], list[Problem]]:
    settings = request.settings
    file = settings.deepspeed_hostfile
    if file is None or file in _NONE:
        fix = (
            "Name a file with a line `host slots=GPUS` for each machine; or write deepspeed_multinode_launcher: "
            "standard, and start the same command on every machine with its own machine_rank."
        )
        place = request.where("deepspeed_multinode_launcher")
        return [], [Problem(place, "deepspeed_hostfile", f"missing for {launcher}", fix)]
    hosts, problems = read_hostfile(file)
    for kind in ("inclusion", "exclusion"):
        key = f"deepspeed_{kind}_filter"
        text = getattr(settings, key)
        if text in _NONE or problems:
            continue
        if launcher not in _CHOOSE_HOSTS:
            fix = "Delete it, and list only the hosts to use in the hostfile."
            problems.append(request.problem(key, f"{launcher} uses all of the hostfile", fix, show(text)))
            continue
        hosts, problems = filter_hosts(hosts, text, exclude=kind == "exclusion", where=request.where(key), key=key)
        # srun counts tasks. srun cannot use slot 1 without slot 0, nor different numbers of tasks per host.
        if launcher == "slurm" and hosts and not _are_even(hosts):
            message = "slurm takes the slots 0 to N - 1 of each host, with one N for all"
            fix = "Leave slot numbers out of the filter; and filter out hosts with another number of slots."
            problems.append(request.problem(key, message, fix))
    if launcher == "slurm" and hosts and not problems and settings.num_processes is None and not _are_even(hosts):
        message = "slurm starts equally many processes on each host, but the hosts have different numbers of slots"
        fix = "Give all hosts the same number of slots, or filter out hosts with another number."
        problems.append(request.problem("deepspeed_hostfile", message, fix, show(file)))
    return hosts, problems


def _are_even(hosts: Sequence[Host]) -> bool:
    """Return whether all hosts have the same slots, counted from 0."""
    return len({host.slots for host in hosts} | {tuple(range(len(hosts[0].slots)))}) == 1


def _problems(request: Request, launcher: str) -> Iterator[Problem]:
    settings, defaults = request.settings, launch_settings(Document())
    no_effect = f"has no effect with {launcher}: it is torchrun's"
    for key in _ONLY_TORCHRUN:
        if getattr(settings, key) != getattr(defaults, key):
            fix = "Delete it, or write deepspeed_multinode_launcher: standard."
            yield request.problem(key, no_effect, fix, show(getattr(settings, key)))
    if request.endpoint:
        yield Problem("--rdzv_endpoint", "", no_effect, "Give --main_process_ip and --main_process_port instead.")
    if settings.gpu_ids != "all":
        fix = "Delete it; deepspeed_inclusion_filter chooses slots, as in host-1@host-2:0,2."
        yield request.problem("gpu_ids", "does not apply to other machines", fix, settings.gpu_ids)
    broken = next((path for path in (sys.executable, remote_worker.__file__) if _BREAKS_PDSH.intersection(path)), None)
    if launcher == "pdsh" and broken is not None:
        fix = "Install Python and this package at a path without spaces, or use another launcher."
        yield Problem("deepspeed_multinode_launcher", "", f"pdsh cannot start {broken}: its path breaks apart", fix)
    typed = request.document.launch.get("machine_rank")
    rank = None if typed is None or typed.value is AUTO else typed.value
    port = settings.main_process_port or STATIC_PORT
    if launcher != "nossh" and rank:
        message = f"{rank}, but {launcher} starts all machines from one, and would start the run again from here"
        yield request.problem("machine_rank", message, "Start the command on machine 0 alone.")
    elif launcher == "nossh" and rank is None:
        fix = "Give --machine_rank, this machine's line in the hostfile, from 0."
        yield Problem("launch", "machine_rank", "missing: nossh starts this machine only", fix)
    elif launcher == "nossh" and rank == 0 and not port_is_free(port):
        message = f"port {port} is taken on this machine"
        yield request.problem("main_process_port", message, "Give another to all machines.")
    if request.program.kind == "function":
        fix = "Launch a script; or delete the hostfile, and call this on every machine with its own node_rank."
        yield Problem("launch", "", f"{launcher} cannot send a function to other machines", fix)


def _counts(request: Request, launcher: str, hosts: list[Host]) -> Iterator[Problem]:
    """Yield problems with numbers that the configuration and the hostfile both give, and that disagree."""
    settings = request.settings
    count, slots = len(hosts), sum(len(host.slots) for host in hosts)
    typed = request.document.launch.value("num_machines")
    if typed not in (None, AUTO, count):
        message = f"{typed}, but the hostfile and its filters leave {count}"
        yield request.problem("num_machines", message, f"Write {count}, or delete it.")
    if launcher == "nossh" and settings.machine_rank >= count:
        message = f"{settings.machine_rank}, but there are {count} hosts, and ranks count from 0"
        yield request.problem("machine_rank", message, f"Write at most {count - 1}.")
    wanted = settings.num_processes
    if wanted not in (None, slots) and _fewer_slots(settings, launcher, hosts) is None:
        message = f"{wanted}, but the hostfile and its filters leave {slots} slots on {count} hosts"
        fix = f"Write {slots}, or delete it. For fewer processes, write fewer slots in the hostfile."
        yield request.problem("num_processes", message, fix)


def _fewer_slots(settings: LaunchSettings, launcher: str, hosts: list[Host]) -> int | None:
    """Return the slots to use per host if num_processes requests fewer than all; None for all or if that is illegal."""
    wanted = settings.num_processes
    if wanted in (None, sum(len(host.slots) for host in hosts)) or launcher not in _CHOOSE_HOSTS:
        return None
    if settings.deepspeed_inclusion_filter not in _NONE or settings.deepspeed_exclusion_filter not in _NONE:
        return None
    each, rest = divmod(wanted or 0, len(hosts))
    return each if not rest and 0 < each <= min(len(host.slots) for host in hosts) else None


def _runner(settings: LaunchSettings, launcher: str, each: int | None, address: str, port: int) -> list[str]:
    """Return the command of DeepSpeed's launcher with its options."""
    hostfile = str(Path(settings.deepspeed_hostfile or "").absolute())
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile]
    if launcher == "nossh":
        command += ["--no_ssh", "--node_rank", str(settings.machine_rank)]
    else:
        # --force_multi: if a filter leaves one host, DeepSpeed would otherwise take this machine for that host.
        # --no_ssh_check: `_reach` has tried every host.
        command += ["--launcher", launcher, "--force_multi", "--no_ssh_check"]
    command += ["--no_local_rank"]
    if settings.deepspeed_inclusion_filter not in _NONE:
        command += ["--include", str(settings.deepspeed_inclusion_filter).replace(" ", "")]
    elif settings.deepspeed_exclusion_filter not in _NONE:
        command += ["--exclude", str(settings.deepspeed_exclusion_filter).replace(" ", "")]
    elif each is not None:
        command += ["--num_gpus", str(each)]
    if settings.main_process_ip or launcher != "pdsh":  # with pdsh, DeepSpeed asks the first host for its address
        command += ["--master_addr", address]
    return [*command, "--master_port", str(port), *([] if settings.debug else ["--log_level", "error"])]


# ---- the run ---------------------------------------------------------------------------------------------------------


class _StoppedError(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


def run_on_hosts(hosts: Hosts) -> int:
    """Run DeepSpeed's launcher to its end and return the exit code for the shell.

    Args:
        hosts: the machines, and the command that starts them.

    Raises:
        MachineError: a program that reaches the machines is not installed here.
        LaunchError: a machine cannot be reached. Nothing was started on any machine.
    """
    tools, advice = _TOOLS.get(hosts.launcher, ((), ""))
    if lacking := [tool for tool in tools if shutil.which(tool) is None]:
        verb = "is" if len(lacking) == 1 else "are"
        raise MachineError(
            f"{hosts.launcher} needs {' and '.join(lacking)}, which {verb} not installed on this machine. {advice}"
        )
    _reach(hosts)
    for sentence in _notes(hosts):
        _logger.info(sentence)
    # DeepSpeed sends all variables that start with MLFLOW_ or NCCL_ on a remote shell's command line, even secret ones.
    hidden = hosts.kept if hosts.launcher != "nossh" else ()
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    with _raised_signals():
        runner = subprocess.Popen(hosts.command, cwd="/", env=environ, start_new_session=True)  # noqa: S603 - its purpose
        try:
            code = runner.wait()
        except _StoppedError as stopped:
            _stop(runner, hosts)
            _logger.warning("stopped by %s; no worker is left", signal.Signals(stopped.number).name)
            return 128 + stopped.number
        except BaseException:
            _stop(runner, hosts)
            raise
    if code:
        _stop(runner, hosts)
        code = 128 + 256 - code if code in _SIGNAL_CODES else code if code > 0 else 128 - code
        _logger.error("%s ended with exit code %d; the output of the ranks is above", hosts.launcher, code)
    return code


def _notes(hosts: Hosts) -> Iterator[str]:
    if hosts.launcher not in LAUNCHERS:
        yield f"{hosts.launcher} is passed on to DeepSpeed's launcher; this package has not been tested with it"
    if hosts.kept and hosts.launcher != "nossh":
        yield f"not sent to the other machines, because they look secret: {', '.join(hosts.kept)}; set them there"
    if Path(".deepspeed_env").exists():
        yield "./.deepspeed_env is not read; DeepSpeed reads ~/.deepspeed_env"


def _reach(hosts: Hosts) -> None:
    """Try to reach every machine that the launcher will start by ssh.

    Raises:
        LaunchError: some machines cannot be reached.
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
    """Run a command on a machine by ssh. Return why the command failed, "" if it succeeded."""
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
    """End the processes that DeepSpeed's launcher started: here by signals, elsewhere by this launch's marker word.

    DeepSpeed's own way with pdsh would end every launch of this user on these machines.
    """
    if hosts.launcher != "pdsh" and not _ended(runner, signal.SIGTERM):
        _ended(runner, signal.SIGKILL)
    if hosts.launcher == "pdsh":
        _ended(runner, signal.SIGKILL)
        # The bracket keeps the pattern from matching the shell that runs pkill.
        pattern = f"[{hosts.run[0]}]{hosts.run[1:]}"
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda host: _run_there(host, f"pkill -TERM -f '{pattern}'"), hosts.hosts))


def _ended(runner: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Signal all processes that the runner started here. Return whether all have ended within some seconds."""
    deadline = time.monotonic() + _STOPS_WITHIN_S
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
    """Raise ending signals as an exception, so the launcher can end its workers. Under nohup, SIGHUP stays ignored."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the system's signature
        for other in ENDING_SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the stopping
        raise _StoppedError(number)

    with own_signals():
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
