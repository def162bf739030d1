"""What a launch is: what is requested, what speaks against it on this machine, and the decided spec."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, to_environment
from zero_plugin.config.keys import LaunchSettings
from zero_plugin.config.launch_settings import asks_for_cpu, asks_for_deepspeed
from zero_plugin.config.read import nearest_file
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.resolve.resolve import resolve_before_run
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed.messages import QUIET_VARIABLE, TIMES_VARIABLE, VERBOSE_VARIABLE
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.machine.hardware import Machine, port_is_free

LOOPBACK: Final = "loopback"  # the rendezvous of one machine, which is this package's own
STATIC_PORT: Final = 29500  # torch.distributed's own default: all machines must know it before they can talk
_MOST_PROCESSES: Final = 1024  # a slip of the keyboard must not exhaust the machine


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
        shown = {"quiet": QUIET_VARIABLE, "verbose": VERBOSE_VARIABLE, "log_timestamps": TIMES_VARIABLE}
        for key, variable in shown.items():
            if getattr(self.settings, key):
                added[variable] = Setting("1", self.where(key))
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


# ---- what speaks against it ------------------------------------------------------------------------------------------


def find_problems(request: Request, machine: Machine, gpus: int) -> Iterator[Problem]:
    """Everything that speaks against this launch on this machine.

    Args:
        request: what is to be launched.
        machine: what the workers will see.
        gpus: GPUs of this machine that the run may use; 0 for a run on the CPU.
    """
    settings = request.settings
    yield from find_program_problems(request.program)
    if request.endpoint and settings.num_machines == 1:
        fix = "Leave it out, or add --num_machines."
        yield Problem("--rdzv_endpoint", "", "has no effect: there is one machine", fix)
    yield from _gpus(request, machine)
    yield from _processes(request, gpus)
    if request.program.kind == "function" and settings.min_machines not in (None, settings.num_machines):
        message = "processes that are copies of a notebook do not continue without a machine"
        yield request.problem("min_machines", message, "Delete it, or start a script with `zero-plugin launch`.")
    yield from _rendezvous(request)
    yield from find_log_problems(request)
    yield from _nvme_folders(request)


def find_program_problems(program: Program) -> Iterator[Problem]:
    """A working folder that is gone, a script that is no file, or a program that is not found."""
    try:
        Path.cwd()
    except FileNotFoundError:  # libraries that torch loads would end the worker
        yield Problem("command line", "", "the working folder has been removed", "Change into one that is there: cd.")
    if program.kind == "script" and not Path(program.name).is_file():
        yield Problem("command line", "", f"{program.name} is not a file", nearest_file(Path(program.name)))
    if program.kind == "executable" and shutil.which(program.name) is None:
        yield Problem("command line", "", f"{program.name} is not an executable here", "Name one that is on the PATH.")


def _gpus(request: Request, machine: Machine) -> Iterator[Problem]:
    kind, ids = request.document.launch.get("distributed_type"), request.settings.gpu_ids
    none_here = "there is no GPU here that torch can use"
    if not machine.gpus and kind is not None and kind.value == "MULTI_GPU" and kind.origin.kind == "flag":
        yield request.problem("distributed_type", none_here, "Give --cpu in its place.")
    if ids == "all" or asks_for_cpu(request.settings):
        return
    names, known = ids.split(","), [str(number) for number in range(machine.gpus)]
    unknown = [name for name in names if name not in known]
    if unknown and not known:
        yield request.problem("gpu_ids", none_here, "Delete it, or add --cpu.")
    elif unknown:
        fix = f"Write all, or some of {','.join(known)}: they count the GPUs that this process sees."
        yield request.problem("gpu_ids", f"{','.join(unknown)}: no GPU here has that number", fix)
    elif len(set(names)) < len(names):
        yield request.problem("gpu_ids", f"{ids} names a GPU twice", "Write each number once.")


def _processes(request: Request, gpus: int) -> Iterator[Problem]:
    machines = request.settings.num_machines
    here = (request.settings.num_processes or 0) // machines
    if gpus and here > gpus:
        fix = f"Write at most {gpus * machines}, since each process has a GPU of its own; or add --cpu."
        message = f"{here} processes on this machine, which has {gpus} usable GPUs"
        yield request.problem("num_processes", message, fix)
    elif here > _MOST_PROCESSES:
        fix = f"Write at most {_MOST_PROCESSES * machines}."
        yield request.problem("num_processes", f"{here} processes are more than one machine can run", fix)


def find_log_problems(request: Request) -> Iterator[Problem]:
    """A folder for logs that cannot be made or written."""
    if request.settings.log_dir is not None and (blocked := obstacle(request.settings.log_dir)) is not None:
        message = f"{blocked} is no folder that can be written"
        yield request.problem("log_dir", message, "Name a folder that can be made or written.")


def _nvme_folders(request: Request) -> Iterator[Problem]:
    training = request.document.deepspeed
    for offload in ("offload_optimizer", "offload_param") if request.on_deepspeed else ():
        section = ("zero_optimization", offload)
        entry = training.get(*section, "nvme_path")
        if training.value(*section, "device") != "nvme" or entry is None or not isinstance(entry.value, str):
            continue
        if (blocked := obstacle(entry.value)) is not None:
            message = f"{blocked} is no folder that can be written"
            fix = "Name a folder on a local NVMe disk that can be made or written."
            yield Problem(entry.origin.where, training.typed(*section, "nvme_path"), message, fix)


def obstacle(folder: str | Path) -> Path | None:
    """What exists of `folder` already, if nothing can be made below that."""
    path = Path(folder)
    existing = next((parent for parent in (path, *path.parents) if os.access(parent, os.F_OK)), Path())
    return None if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else existing


def _rendezvous(request: Request) -> Iterator[Problem]:
    """Where the machines meet, which must be known to all, and its port, which must be free on machine 0."""
    settings = request.settings
    if settings.num_machines == 1:
        port = settings.main_process_port
        if port and not port_is_free(port):
            fix = "Leave it out: a free one is then taken."
            yield request.problem("main_process_port", f"port {port} is taken on this machine", fix)
        return
    static = settings.rdzv_backend == "static"
    if not request.endpoint and not settings.main_process_ip:
        fix = "Give --main_process_ip, machine 0's address, the same on each machine."
        yield request.problem("main_process_ip", "missing for several machines", fix)
    if not request.endpoint and settings.main_process_port == 0:
        fix = "Give one port to all machines; 29500 is taken where none is given."
        yield request.problem("main_process_port", "0, but all machines must know it", fix)
    if static and request.document.launch.value("machine_rank") in (None, AUTO):
        fix = f"Give --machine_rank, this machine's number, 0 to {settings.num_machines - 1}."
        yield request.problem("machine_rank", "missing for several machines", fix)
    port = settings.main_process_port or STATIC_PORT
    if static and not request.endpoint and not settings.machine_rank and not port_is_free(port):
        message = f"port {port} is taken on this machine, which is machine 0"
        yield request.problem("main_process_port", message, "Give another --main_process_port to all machines.")
