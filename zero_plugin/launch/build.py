"""Decide a launch: from the checked document, the program and this machine to the complete spec."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from zero_plugin.config.document import Document
from zero_plugin.config.handover import ENVIRONMENT_VARIABLE, to_environment
from zero_plugin.config.launch_settings import (
    LaunchSettings,
    asks_for_cpu,
    asks_for_deepspeed,
    asks_for_tpu,
    launch_settings,
)
from zero_plugin.config.tree import AUTO
from zero_plugin.launch.affinity import Binding, choose_cores, find_gpus
from zero_plugin.launch.build_hosts import asked_launcher, build_hosts_spec
from zero_plugin.launch.build_tpu import build_tpu_spec, choose_tpu
from zero_plugin.launch.foreign import foreign_variables
from zero_plugin.launch.machine import Machine, port_is_free
from zero_plugin.launch.problems import STATIC_PORT, find_problems, where
from zero_plugin.launch.request import Request
from zero_plugin.launch.spec import LOOPBACK, LaunchSpec, Program, Rendezvous, Setting
from zero_plugin.probe.network import (
    OWN_ADDRESS,
    address_towards,
    host_of,
    interface_towards,
    is_loopback,
    is_own_address,
)
from zero_plugin.resolve.foreign import config_for_scripts

__all__ = ["build_spec"]


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
        program: what every worker runs.
        machine: what the workers will see.
        environ: this process's environment; a variable that the user set there is kept.
        rendezvous_endpoint: `host:port` where machines meet, in place of the main process's address.

    Raises:
        ConfigError: everything about the launch that cannot run here, at once.
    """
    document = choose_tpu(document, launch_settings(document), machine)
    settings = launch_settings(document)
    request = Request(document, settings, program, environ, rendezvous_endpoint)
    if asks_for_tpu(settings):
        return build_tpu_spec(request, machine)
    if asked_launcher(settings) != "standard":
        return build_hosts_spec(request)
    on_cpu = asks_for_cpu(settings) or not machine.gpus
    gpus = 0 if on_cpu else machine.gpus if settings.gpu_ids == "all" else len(settings.gpu_ids.split(","))
    processes, reason = _local_processes(settings, gpus)
    accelerator: Literal["cpu", "cuda"] = "cuda" if gpus else "cpu"
    resolved = request.resolve(
        find_problems(document, settings, program, machine, gpus=gpus, endpoint=rendezvous_endpoint),
        accelerator=accelerator,
        processes=processes * settings.num_machines,
        bf16=_has_bf16(document, accelerator),
    )
    rendezvous = _rendezvous(settings, rendezvous_endpoint)
    environment = {
        **_environment(document, settings, machine, processes, on_cpu=on_cpu, environ=environ),
        **_interfaces(rendezvous, environ, on_cpu=on_cpu),
        **foreign_variables(document, settings, resolved, environ, on_cpu=on_cpu),
    }
    seen = {**environ, **{name: setting.value for name, setting in environment.items()}}
    binding = Binding((), "")
    if settings.enable_cpu_affinity:
        binding = choose_cores(processes, find_gpus(processes, seen) if gpus else ())
    return replace(
        request.spec(processes, settings.num_machines, rendezvous, environment),
        local_processes_reason=reason,
        min_machines=settings.min_machines,
        deepspeed_config=config_for_scripts(document, resolved) if request.on_deepspeed else None,
        cores=binding.cores,
        cores_reason=binding.reason,
    )


def _local_processes(settings: LaunchSettings, gpus: int) -> tuple[int, str]:
    wanted, machines = settings.num_processes, settings.num_machines
    if wanted is not None:
        return wanted // machines, f"{wanted} over {machines} machines" if machines > 1 else ""
    if settings.distributed_type == "NO":
        return 1, "distributed_type is NO"
    return (
        (gpus, "one for each GPU") if gpus else (1, "one, since the run is on the CPU and num_processes is not given")
    )


def _has_bf16(document: Document, accelerator: Literal["cpu", "cuda"]) -> bool:
    """Whether the workers compute in bf16: asked for `mixed_precision: auto` alone, since the answer imports torch."""
    if document.launch.value("mixed_precision") is not AUTO:
        return True
    from zero_plugin.probe.machine import probe_machine

    return probe_machine(accelerator).bf16


def _rendezvous(settings: LaunchSettings, endpoint: str | None) -> Rendezvous:
    pairs = (part.strip().partition("=") for part in settings.rdzv_conf.split(",") if part.strip())
    options: dict[str, str | int] = {key.strip(): value.strip() for key, _, value in pairs}
    if settings.num_machines == 1:
        return Rendezvous(LOOPBACK, f"{OWN_ADDRESS}:{settings.main_process_port or 0}", uuid.uuid4().hex)
    there = endpoint or f"{settings.main_process_ip}:{settings.main_process_port or STATIC_PORT}"
    if settings.rdzv_backend == "static":
        return Rendezvous("static", there, "zero_plugin", options | {"rank": settings.machine_rank})
    # torch compares with the addresses of this machine's name alone, and would name itself to the others by that name.
    host, typed_port = host_of(there), there.rpartition(":")[2]
    if settings.rdzv_backend == "c10d" and "is_host" not in options and is_own_address(host):
        alone_here = typed_port.isdigit() and port_is_free(
            int(typed_port)
        )  # else another launcher of this machine has it
        options |= {"is_host": "true"} if alone_here and not is_loopback(host) else {}
    return Rendezvous(settings.rdzv_backend, there, "zero_plugin", options, local_address=address_towards(host))


def _interfaces(meeting: Rendezvous, environ: Mapping[str, str], *, on_cpu: bool) -> dict[str, Setting]:
    """The network that leads to the meeting point, where the user names none: on one machine, loopback. Libraries take
    the one of this machine's name, which on many systems leads nowhere, and on one machine would let others in."""
    host = host_of(meeting.endpoint)
    interface = interface_towards(host)
    reason = f"this machine reaches {host} by it"
    if meeting.backend == LOOPBACK:
        reason = "the run is on this machine alone: nothing listens where others could reach it"
    names = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    if interface is not None and not on_cpu:
        names["NCCL_SOCKET_IFNAME"] = f"={interface}"  # NCCL takes a name without = for the start of one
    return {name: Setting(to, reason) for name, to in names.items() if name not in environ}


def _environment(
    document: Document,
    settings: LaunchSettings,
    machine: Machine,
    processes: int,
    *,
    on_cpu: bool,
    environ: Mapping[str, str],
) -> dict[str, Setting]:
    handed_over = to_environment(document, processes * settings.num_machines)
    added = {ENVIRONMENT_VARIABLE: Setting(handed_over, "the configuration, for the workers")}
    if settings.num_cpu_threads_per_process is not None:
        threads = settings.num_cpu_threads_per_process
        added["OMP_NUM_THREADS"] = Setting(str(threads), where(document, "num_cpu_threads_per_process"))
    elif "OMP_NUM_THREADS" not in environ:
        threads = max(1, machine.cores // processes)
        added["OMP_NUM_THREADS"] = Setting(str(threads), f"{machine.cores} cores over {processes} processes")
    if on_cpu and "DS_ACCELERATOR" not in environ:
        why = "the run is on the CPU" if machine.gpus else "this machine has no GPU"
        added["DS_ACCELERATOR"] = Setting("cpu", f"for DeepSpeed: {why}")
    if on_cpu and machine.gpus and asks_for_deepspeed(document, settings):
        added["CUDA_VISIBLE_DEVICES"] = Setting("", "ZeRO on the CPU: Accelerate would take a GPU that it sees")
    if settings.gpu_ids != "all" and not on_cpu:
        ids = _visible_ids(settings.gpu_ids, environ.get("CUDA_VISIBLE_DEVICES"))
        added["CUDA_VISIBLE_DEVICES"] = Setting(ids, where(document, "gpu_ids"))
    return added


def _visible_ids(wanted: str, seen: str | None) -> str:
    """`gpu_ids`, which count the GPUs that this process sees, as the driver names them: the others are other jobs'."""
    if not seen:
        return wanted
    names = [name.strip() for name in seen.split(",")]
    return ",".join(names[int(number)] for number in wanted.split(","))
