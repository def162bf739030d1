"""What a launch is: what is requested, the machines, and the decided spec.

What a launch is, decided and typed before anything starts: program, processes, meeting point, environment.

The hosts of a run on several machines, from a hostfile and DeepSpeed's filters, checked before anything starts.

What is asked of a launch, and what every way to launch makes of it in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_deepspeed
from zero_plugin.config.read import nearest_file
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.config.validation import did_you_mean
from zero_plugin.errors import ConfigError, Problem

_LINE: Final = re.compile(r"(\S+)\s+slots=(\d+)(?:\s+max[-_]slots=\d+)?")
_LEGAL: Final = "Write a line `host slots=GPUS` for each machine."


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: its name for ssh, the slots (GPUs, or processes on a CPU) to use, and where it is written."""

    name: str
    slots: tuple[int, ...]
    where: str


def read_hostfile(file: str) -> tuple[list[Host], list[Problem]]:
    """The hosts of a file in the form `host slots=N`, in their order, and everything that is wrong with it.

    Args:
        file: its path; `#` starts a comment.
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
            message = f"{found[1]} is there already, at {hosts[found[1]].where}"
            problems.append(Problem(where, "", message, "Write each host once, with all its slots."))
        else:
            hosts[found[1]] = Host(found[1], tuple(range(int(found[2]))), where)
    if not hosts and not problems:
        problems.append(Problem(file, "", "the hostfile names no host", _LEGAL))
    return list(hosts.values()), problems


def filter_hosts(
    hosts: list[Host], text: str, *, exclude: bool, where: str, key: str
) -> tuple[list[Host], list[Problem]]:
    """What `host@host:SLOT,SLOT` leaves of `hosts`, in their order, and what is wrong with it.

    Args:
        hosts: as the hostfile has them.
        text: the filter; a host without slots means all of its slots.
        exclude: whether the filter names what to leave out.
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
    """Each part of a filter: as typed, its host, its slots (none for all; None for what is no list of numbers)."""
    for part in text.replace(" ", "").split("@"):
        name, colon, numbers = part.partition(":")
        typed = numbers.split(",") if colon else []
        yield part, name, {int(number) for number in typed} if all(n.isdigit() for n in typed) else None


LOOPBACK: Final = "loopback"  # the rendezvous of one machine, which is this package's own


@dataclass(frozen=True, slots=True)
class Program:
    """What every worker runs.

    Attributes:
        kind: "script" as `python NAME`, "module" as `python -m NAME`, "executable" as `NAME` itself;
            "function" of the program that launches.
        name: path, module or executable, as typed.
        arguments: its own arguments, untouched.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "executable", "function"] = "script"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the machines of a run meet, in torchrun's terms.

    Attributes:
        backend: `LOOPBACK` on one machine; "c10d" or "static", or another that torchrun knows.
        endpoint: `host:port`; port 0 lets the store take a free one.
        run_id: tells runs that share an endpoint apart.
        options: backend options; with "static", `rank` is this machine's number.
        local_address: by what name workers reach this machine; None lets torchrun look it up.
    """

    backend: str
    endpoint: str
    run_id: str
    options: Mapping[str, str | int] = field(default_factory=dict)
    local_address: str | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One environment variable added for the workers, and why."""

    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines that DeepSpeed's launcher starts, all from one of them (`nossh`: each by itself).

    Attributes:
        launcher: DeepSpeed's name for what reaches them: `pdsh`, `openmpi`, `slurm`, `nossh`, …
        hosts: those that take part, in the order of their ranks.
        command: DeepSpeed's launcher with all that the processes need, to be run in the root folder.
        run: a word in the command line of every process of this launch.
        sent: variables of this process's environment that the processes get, by name.
        kept: secret variables that they do not get.
    """

    launcher: str
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    run: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replicas:
    """What torch_xla starts within the one worker of a machine: a process or thread for each device.

    Attributes:
        function: of the program, called for each device; "" where the program is a function itself.
        count: replicas that are wanted on all machines together; None takes every device.
    """

    function: str
    count: int | None


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One launch on this machine, complete: nothing is looked up or decided after it exists.

    Attributes:
        document: the configuration that is handed to the workers.
        local_processes: workers that this machine starts.
        local_processes_reason: why as many, empty where the user said so.
        machines: machines in the run, this one included.
        min_machines: with how few of them the run begins and goes on; None: with all.
        environment: variables added for the workers, by name.
        deepspeed_config: for scripts that read a DeepSpeed JSON, a file while the run lasts; None without ZeRO.
        max_restarts: how often the whole group is started again after a failure.
        grace_period: seconds that the workers have to end after a signal to the launcher.
        monitor_interval: seconds between two looks at the workers.
        log_dir: folder for a log of each worker beside what it prints; None writes none.
        tee: torchrun's word for which streams of which workers are shown and logged; None takes all with a `log_dir`.
        role: torchrun's name for the workers, in their log lines and as `ROLE_NAME`.
        debug: whether torchrun's own log is shown.
        cores: the cores that each local rank is bound to; empty binds none.
        cores_reason: why these, or why none although it was asked for.
        hosts: what DeepSpeed's launcher starts in place of torchrun; None on one machine, or where torchrun is started
            on each. Then `local_processes` are those of the first host.
        replicas: what runs on the devices of a TPU; None elsewhere. Then `local_processes` is 1.
    """

    program: Program
    document: Document
    local_processes: int
    machines: int
    rendezvous: Rendezvous
    environment: Mapping[str, Setting]
    deepspeed_config: Mapping[str, Any] | None = None
    local_processes_reason: str = ""
    max_restarts: int = 0
    grace_period: float = 30.0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str | None = None
    role: str = "default"
    debug: bool = False
    cores: tuple[frozenset[int], ...] = ()
    cores_reason: str = ""
    min_machines: int | None = None
    hosts: Hosts | None = None
    replicas: Replicas | None = None

    @property
    def streams(self) -> str:
        """What torchrun's `--tee` is given: all streams of all workers where there is a log folder, unless typed."""
        return self.tee or ("3" if self.log_dir else "0")


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as it was asked for.

    Attributes:
        document: checked.
        settings: its launch part.
        program: what every worker runs.
        environ: this process's environment; a variable that the user set there is kept.
        endpoint: `host:port` where machines meet, in place of the main process's address; None where it was not given.
    """

    document: Document
    settings: LaunchSettings
    program: Program
    environ: Mapping[str, str]
    endpoint: str | None

    @property
    def on_deepspeed(self) -> bool:
        """Whether ZeRO is asked for."""
        return asks_for_deepspeed(self.document, self.settings)

    def resolve(
        self,
        problems: Iterable[Problem],
        *,
        accelerator: Literal["cpu", "cuda", "xla"],
        processes: int,
        bf16: bool = True,
    ) -> Resolved:
        """What the document resolves to before a run, unless something stands against the launch.

        Args:
            problems: what was found already.
            accelerator: what the workers will run on.
            processes: workers on all machines.
            bf16: whether the device computes in bf16.

        Raises:
            ConfigError: `problems`, and those of the configuration on these workers, at once.
        """
        found = list(problems)
        try:
            resolved = resolve_before_run(
                self.document,
                accelerator=accelerator,
                processes=processes,
                strategy="xla" if accelerator == "xla" else "deepspeed" if self.on_deepspeed else "ddp",
                bf16=bf16,
            )
        except ConfigError as error:
            raise ConfigError([*found, *error.problems]) from None
        if found:
            raise ConfigError(found)
        return resolved

    def spec(
        self, local_processes: int, machines: int, rendezvous: Rendezvous, environment: Mapping[str, Setting]
    ) -> LaunchSpec:
        """A spec with what the settings say of supervision, logs and restarts; `dataclasses.replace` adds the rest."""
        settings = self.settings
        return LaunchSpec(
            program=self.program,
            document=self.document,
            local_processes=local_processes,
            machines=machines,
            rendezvous=rendezvous,
            environment=environment,
            max_restarts=settings.max_restarts,
            grace_period=settings.grace_period,
            monitor_interval=settings.monitor_interval,
            log_dir=settings.log_dir,
            tee=settings.tee,
            role=settings.role,
            debug=settings.debug,
        )
