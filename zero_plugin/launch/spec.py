"""The data of a launch: the request, the problems that prevent it on this machine, and the complete spec."""

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

LOOPBACK: Final = "loopback"  # the rendezvous of one machine, this package's own
STATIC_PORT: Final = 29500  # torch.distributed's default: all machines must know the port before they can communicate
_MOST_PROCESSES: Final = 1024  # a typing error must not exhaust the machine


@dataclass(frozen=True, slots=True)
class Program:
    """The program that every worker runs.

    Attributes:
        kind: "script" runs `python NAME`, "module" runs `python -m NAME`, "executable" runs `NAME`;
            "function" is a function of the launching program.
        name: path, module or executable, as typed.
        arguments: the program's arguments, unchanged.
    """

    name: str
    arguments: tuple[str, ...] = ()
    kind: Literal["script", "module", "executable", "function"] = "script"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of a run's machines, in torchrun's terms.

    Attributes:
        backend: `LOOPBACK` on one machine; "c10d", "static", or another backend of torchrun's.
        endpoint: `host:port`; with port 0 the store takes a free port.
        run_id: distinguishes runs that share an endpoint.
        options: backend options; with "static", `rank` is this machine's number.
        local_address: the name by which workers reach this machine; None: torchrun looks it up.
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
    """One machine: its name for ssh, the slots (GPUs, or processes on a CPU) to use, and its place in the hostfile."""

    name: str
    slots: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """The machines that DeepSpeed's launcher starts, all from one machine (`nossh`: each starts itself).

    Attributes:
        launcher: DeepSpeed's name for the program that reaches the machines: `pdsh`, `openmpi`, `slurm`, `nossh`, …
        hosts: the participating machines, in the order of their ranks.
        command: DeepSpeed's launcher with everything that the processes need. Run it in the root folder.
        run: a word in the command line of every process of this launch.
        sent: names of this process's environment variables that the processes get.
        kept: names of secret variables that the processes do not get.
    """

    launcher: str
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    run: str
    sent: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Replicas:
    """The processes or threads that torch_xla starts within a machine's single worker, one for each device.

    Attributes:
        function: the program's function to call for each device; "" if the program is a function itself.
        count: requested replicas on all machines together; None takes every device.
    """

    function: str
    count: int | None


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One complete launch on this machine. Nothing is looked up or decided afterwards.

    Attributes:
        document: the configuration for the workers.
        settings: the document's launch part. Supervision, logs and restarts follow it directly.
        local_processes: workers that this machine starts.
        local_processes_reason: the reason for that number, empty if the user configured it.
        machines: machines in the run, including this one.
        environment: variables added for the workers, by name.
        deepspeed_config: for scripts that read a DeepSpeed JSON, a file while the run lasts; None without ZeRO.
        cores: the cores that each local rank is bound to; empty for no binding.
        cores_reason: the reason for these cores, or for no binding although one was requested.
        hosts: the machines that DeepSpeed's launcher starts instead of torchrun; `local_processes` then counts the
            first host's. None on one machine, or if torchrun starts on each machine.
        replicas: the replicas on a TPU's devices; `local_processes` is then 1. None without a TPU.
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
        """The value of torchrun's `--tee`: as configured, otherwise all streams if a log folder is configured."""
        return self.settings.tee or ("3" if self.settings.log_dir else "0")


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as requested.

    Attributes:
        document: checked.
        settings: the document's launch part.
        program: what every worker runs.
        environ: this process's environment. The user's variables are kept.
        endpoint: `host:port` where machines meet, instead of the main process's address; None if not given.
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
        """Return the place where a launch key was written, in readable form."""
        entry = self.document.launch.get(key)
        return str(entry.origin) if entry else "launch"

    def problem(self, key: str, message: str, fix: str, value: str = "") -> Problem:
        """Build a problem with a launch key, located where the key was written."""
        return Problem(self.where(key), key, message, fix, value)

    def common_environment(self, processes: int | None = None) -> dict[str, Setting]:
        """Return the variables for workers of every kind of launch: the configuration, and its settings as variables.

        Args:
            processes: workers on all machines, if known.
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
        """Resolve the document before a run, or raise all problems of the launch.

        Args:
            problems: the problems found so far.
            accelerator: the device type of the workers.
            processes: workers on all machines.
            bf16: whether the device computes in bf16.

        Raises:
            ConfigError: `problems` and the configuration's problems on these workers, in one error.
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


# ---- problems --------------------------------------------------------------------------------------------------------


def find_problems(request: Request, machine: Machine, gpus: int) -> Iterator[Problem]:
    """Yield all problems that prevent this launch on this machine.

    Args:
        request: the launch.
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
        message = "a run of notebook copies cannot continue after losing a machine"
        yield request.problem("min_machines", message, "Delete it, or start a script with `zero-plugin launch`.")
    yield from _rendezvous(request)
    yield from find_log_problems(request)
    yield from _nvme_folders(request)


def find_program_problems(program: Program) -> Iterator[Problem]:
    """Yield a problem for a removed working folder, a script that is not a file, or a program that is not found."""
    try:
        Path.cwd()
    except FileNotFoundError:  # libraries that torch loads would end the worker
        yield Problem("command line", "", "the working folder has been removed", "Change into an existing one: cd.")
    if program.kind == "script" and not Path(program.name).is_file():
        yield Problem("command line", "", f"{program.name} is not a file", nearest_file(Path(program.name)))
    if program.kind == "executable" and shutil.which(program.name) is None:
        yield Problem("command line", "", f"{program.name} is not an executable here", "Name one that is on the PATH.")


def _gpus(request: Request, machine: Machine) -> Iterator[Problem]:
    kind, ids = request.document.launch.get("distributed_type"), request.settings.gpu_ids
    none_here = "there is no GPU here that torch can use"
    if not machine.gpus and kind is not None and kind.value == "MULTI_GPU" and kind.origin.kind == "flag":
        yield request.problem("distributed_type", none_here, "Give --cpu instead.")
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
    """Yield a problem if the log folder cannot be created or written."""
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
    """Return the path that blocks creating `folder`: its closest existing parent. None if that is writable."""
    path = Path(folder)
    existing = next((parent for parent in (path, *path.parents) if os.access(parent, os.F_OK)), Path())
    return None if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK) else existing


def _rendezvous(request: Request) -> Iterator[Problem]:
    """Yield problems with the meeting point. All machines must know it, and its port must be free on machine 0."""
    settings = request.settings
    if settings.num_machines == 1:
        port = settings.main_process_port
        if port and not port_is_free(port):
            fix = "Leave it out: the launcher then takes a free port."
            yield request.problem("main_process_port", f"port {port} is taken on this machine", fix)
        return
    static = settings.rdzv_backend == "static"
    if not request.endpoint and not settings.main_process_ip:
        fix = "Give --main_process_ip, machine 0's address, the same on each machine."
        yield request.problem("main_process_ip", "missing for several machines", fix)
    if not request.endpoint and settings.main_process_port == 0:
        fix = "Give one port to all machines. The default is 29500."
        yield request.problem("main_process_port", "0, but all machines must know it", fix)
    if static and request.document.launch.value("machine_rank") in (None, AUTO):
        fix = f"Give --machine_rank, this machine's number, 0 to {settings.num_machines - 1}."
        yield request.problem("machine_rank", "missing for several machines", fix)
    port = settings.main_process_port or STATIC_PORT
    if static and not request.endpoint and not settings.machine_rank and not port_is_free(port):
        message = f"port {port} is taken on this machine, which is machine 0"
        yield request.problem("main_process_port", message, "Give another --main_process_port to all machines.")
