"""What a launch is: what is requested, and the decided spec: program, processes, rendezvous, environment, machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, to_environment
from zero_plugin.config.launch_settings import LaunchSettings, asks_for_deepspeed
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.errors import ConfigError, Problem

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
class Host:
    """One machine: its name for ssh, the slots (GPUs, or processes on a CPU) to use, and where it is written."""

    name: str
    slots: tuple[int, ...]
    where: str


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
        settings: its launch part; what it says of supervision, logs and restarts is followed as it is.
        local_processes: workers that this machine starts.
        local_processes_reason: why as many, empty where the user configured it.
        machines: machines in the run, this one included.
        environment: variables added for the workers, by name.
        deepspeed_config: for scripts that read a DeepSpeed JSON, a file while the run lasts; None without ZeRO.
        cores: the cores that each local rank is bound to; empty binds none.
        cores_reason: why these, or why none although it was requested.
        hosts: what DeepSpeed's launcher starts in place of torchrun; None on one machine, or where torchrun is started
            on each. Then `local_processes` are those of the first host.
        replicas: what runs on the devices of a TPU; None elsewhere. Then `local_processes` is 1.
    """

    program: Program
    document: Document
    settings: LaunchSettings
    local_processes: int
    machines: int
    rendezvous: Rendezvous
    environment: Mapping[str, Setting]
    deepspeed_config: Mapping[str, Any] | None = None
    local_processes_reason: str = ""
    cores: tuple[frozenset[int], ...] = ()
    cores_reason: str = ""
    hosts: Hosts | None = None
    replicas: Replicas | None = None

    @property
    def streams(self) -> str:
        """What torchrun's `--tee` is given: all streams of all workers where there is a log folder, unless typed."""
        return self.settings.tee or ("3" if self.settings.log_dir else "0")


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as it was requested.

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
        """Whether ZeRO is requested."""
        return asks_for_deepspeed(self.document, self.settings)

    def where(self, key: str) -> str:
        """Where a launch key was written, as a person would say it."""
        entry = self.document.launch.get(key)
        return str(entry.origin) if entry else "launch"

    def problem(self, key: str, message: str, fix: str, value: str = "") -> Problem:
        """What is wrong with a launch key, at the place where it was written."""
        return Problem(self.where(key), key, message, fix, value)

    def common_environment(self, processes: int | None = None) -> dict[str, Setting]:
        """The variables that workers of every kind of launch get: the configuration, and how many threads it sets.

        Args:
            processes: workers on all machines, where that is known.
        """
        handed_over = to_environment(self.document, processes)
        added = {ENVIRONMENT_VARIABLE: Setting(handed_over, "the configuration, for the workers")}
        if (threads := self.settings.num_cpu_threads_per_process) is not None:
            added["OMP_NUM_THREADS"] = Setting(str(threads), self.where("num_cpu_threads_per_process"))
        return added

    def resolve(
        self,
        problems: Iterable[Problem],
        *,
        accelerator: Literal["cpu", "cuda", "xla"],
        processes: int,
        bf16: bool = True,
    ) -> Resolved:
        """What the document resolves to before a run, unless something speaks against the launch.

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
