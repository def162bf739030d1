"""Decide a launch: from the checked document, the program and this machine to the complete spec."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zero_plugin.config.document import Document
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, to_environment
from zero_plugin.config.launch_settings import LaunchSettings, launch_settings
from zero_plugin.errors import ConfigError, Problem
from zero_plugin.launch.machine import Machine, port_is_free
from zero_plugin.launch.spec import LaunchSpec, Program, Rendezvous, Setting

__all__ = ["build_spec"]

_STATIC_PORT: Final = 29500  # torch.distributed's own default: all machines must know it before they can talk
_REMOTE_LAUNCHERS: Final = ("pdsh", "openmpi", "mvapich", "mpich", "nossh", "slurm")


def build_spec(
    document: Document,
    program: Program,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    rendezvous_endpoint: str | None = None,
) -> LaunchSpec:
    """Decide everything about a launch on this machine.

    Args:
        document: checked.
        machine: what the workers will see.
        environ: this process's environment; a variable that the user set there is kept.
        rendezvous_endpoint: `host:port` where machines meet, in place of the main process's address.

    Raises:
        ConfigError: everything about the launch that cannot run here, at once.
    """
    return _Builder(document, launch_settings(document), machine).build(program, environ, rendezvous_endpoint)


@dataclass(frozen=True, slots=True)
class _Builder:
    document: Document
    settings: LaunchSettings
    machine: Machine

    def build(self, program: Program, environ: Mapping[str, str], endpoint: str | None) -> LaunchSpec:
        processes, reason = self._local_processes()
        problems = [*_program_problems(program), *self._unsupported(), *self._process_problems(processes)]
        problems += self._meeting_problems(endpoint)
        if problems:
            raise ConfigError(problems)
        return LaunchSpec(
            program=program,
            document=self.document,
            local_processes=processes,
            local_processes_reason=reason,
            machines=self.settings.num_machines,
            rendezvous=self._rendezvous(endpoint),
            environment=self._environment(processes, environ),
            max_restarts=self.settings.max_restarts,
            monitor_interval=self.settings.monitor_interval,
            log_dir=self.settings.log_dir,
            debug=self.settings.debug,
        )

    @property
    def _on_cpu(self) -> bool:
        return self.settings.use_cpu or self.settings.distributed_type == "MULTI_CPU" or not self.machine.gpus

    @property
    def _usable_gpus(self) -> int:
        chosen = self.settings.gpu_ids
        return self.machine.gpus if chosen == "all" else len(chosen.split(","))

    def _local_processes(self) -> tuple[int, str]:
        wanted, machines = self.settings.num_processes, self.settings.num_machines
        if wanted is not None:
            return wanted // machines, f"{wanted} over {machines} machines" if machines > 1 else ""
        if self.settings.distributed_type == "NO":
            return 1, "distributed_type is NO"
        if self._on_cpu:
            return 1, "one on a CPU, for num_processes is not given"
        return self._usable_gpus, "one for each GPU, for num_processes is not given"

    def _process_problems(self, processes: int) -> list[Problem]:
        wanted, machines = self.settings.num_processes, self.settings.num_machines
        if wanted is not None and wanted % machines:
            return [
                self._problem("num_processes", f"{wanted} over {machines} machines", "Write a multiple of machines.")
            ]
        if self.settings.distributed_type == "NO" and processes > 1:
            fix = "Write num_processes: 1, or a distributed_type that has several (MULTI_GPU, MULTI_CPU, DEEPSPEED)."
            return [self._problem("num_processes", f"{wanted}, but distributed_type NO is one process", fix)]
        if not self._on_cpu and processes > self._usable_gpus:
            message = f"{processes} processes on this machine, which has {self._usable_gpus} usable GPUs"
            fix = f"Write at most {self._usable_gpus * machines}: each process has a GPU of its own. Or add --cpu."
            return [self._problem("num_processes", message, fix)]
        return []

    def _unsupported(self) -> list[Problem]:
        settings = self.settings
        problems = []
        if settings.distributed_type in ("TPU", "XLA"):
            fix = "Write DEEPSPEED, MULTI_GPU, MULTI_CPU or NO."
            problems.append(
                self._problem("distributed_type", f"{settings.distributed_type} cannot be launched yet", fix)
            )
        if settings.num_machines > 1 and settings.deepspeed_multinode_launcher in _REMOTE_LAUNCHERS:
            fix = "Write standard, and start the same command on every machine with its own machine_rank."
            message = f"{settings.deepspeed_multinode_launcher} cannot start other machines yet"
            problems.append(self._problem("deepspeed_multinode_launcher", message, fix))
        if settings.enable_cpu_affinity:
            problems.append(self._problem("enable_cpu_affinity", "not supported yet", "Write false."))
        return problems

    def _meeting_problems(self, endpoint: str | None) -> list[Problem]:
        settings, problems = self.settings, []
        if settings.num_machines == 1:
            if settings.main_process_port and not port_is_free(settings.main_process_port):
                message = f"port {settings.main_process_port} is taken on this machine"
                problems.append(self._problem("main_process_port", message, "Leave it out: a free one is taken."))
            return problems
        if not endpoint and not settings.main_process_ip:
            fix = "Write the address of machine 0, the same on every machine."
            problems.append(self._problem("main_process_ip", "missing for several machines", fix))
        if settings.main_process_port == 0:
            fix = "Write one port, the same on every machine."
            problems.append(self._problem("main_process_port", "0, but the machines must know it beforehand", fix))
        if settings.rdzv_backend == "static" and not self.document.launch.get("machine_rank"):
            fix = f"Write this machine's number, 0 to {settings.num_machines - 1}, another on every machine."
            problems.append(self._problem("machine_rank", "missing for several machines", fix))
        if settings.machine_rank >= settings.num_machines:
            message = f"{settings.machine_rank} of {settings.num_machines} machines"
            problems.append(self._problem("machine_rank", message, f"Write 0 to {settings.num_machines - 1}."))
        return problems

    def _rendezvous(self, endpoint: str | None) -> Rendezvous:
        settings = self.settings
        options: dict[str, str | int] = dict(
            part.strip().partition("=")[::2] for part in settings.rdzv_conf.split(",") if part.strip()
        )
        if settings.num_machines == 1:
            # Nobody else has to find this machine, so the store takes a free port and workers reach it by `localhost`.
            options["is_host"] = "true"
            return Rendezvous(
                "c10d", f"localhost:{settings.main_process_port or 0}", uuid.uuid4().hex, options, "localhost"
            )
        if settings.rdzv_backend == "static":
            options["rank"] = settings.machine_rank
        where = endpoint or f"{settings.main_process_ip}:{settings.main_process_port or _STATIC_PORT}"
        return Rendezvous(settings.rdzv_backend, where, "zero_plugin", options)

    def _environment(self, processes: int, environ: Mapping[str, str]) -> dict[str, Setting]:
        settings = self.settings
        added = {ENVIRONMENT_VARIABLE: Setting(to_environment(self.document), "the configuration, for the workers")}
        if settings.num_cpu_threads_per_process is not None:
            added["OMP_NUM_THREADS"] = Setting(
                str(settings.num_cpu_threads_per_process), self._where("num_cpu_threads_per_process")
            )
        elif "OMP_NUM_THREADS" not in environ:
            threads = max(1, self.machine.cores // processes)
            added["OMP_NUM_THREADS"] = Setting(str(threads), f"{self.machine.cores} cores for {processes} processes")
        if self._on_cpu and "DS_ACCELERATOR" not in environ:
            why = "this machine has no GPU" if not self.machine.gpus else "the run is on the CPU"
            added["DS_ACCELERATOR"] = Setting("cpu", f"for DeepSpeed: {why}")
        if settings.gpu_ids != "all":
            added["CUDA_VISIBLE_DEVICES"] = Setting(settings.gpu_ids, self._where("gpu_ids"))
        return added

    def _problem(self, key: str, message: str, fix: str) -> Problem:
        return Problem(self._where(key), key, message, fix)

    def _where(self, key: str) -> str:
        entry = self.document.launch.get(key)
        return str(entry.origin) if entry else "launch"


def _program_problems(program: Program) -> list[Problem]:
    if program.kind == "script" and not Path(program.name).is_file():
        return [Problem("command line", "", f"{program.name} is not a file", "Name the script to run.")]
    if program.kind == "executable" and shutil.which(program.name) is None:
        return [Problem("command line", "", f"{program.name} is not an executable here", "Name one on the PATH.")]
    return []
