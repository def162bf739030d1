"""What a launch is, decided and typed before anything starts: program, processes, meeting point, environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zero_plugin.config.document import Document
from zero_plugin.launch.hostfile import Host

__all__ = ["LOOPBACK", "Hosts", "LaunchSpec", "Program", "Rendezvous", "Replicas", "Setting"]

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
