"""Processes and how they work together: machines, devices, and the parallel dimensions beside data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from zero_plugin.config.launch_settings import LAUNCHERS, UNTESTED_LAUNCHERS
from zero_plugin.config.rules.asked import Asked, is_count
from zero_plugin.config.tree import AUTO, Entry
from zero_plugin.config.validation import did_you_mean, show
from zero_plugin.errors import Problem

_OTHER_DIMENSIONS: Final = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "sequence_parallel_size",
    "pipeline.stages",
)


def check_parallel(asked: Asked) -> Iterator[Problem]:
    """Ranks and machines, GPUs and CPU, parallelism of other kinds than data."""
    yield from _machines(asked)
    yield from _devices(asked)
    yield from _not_only_data(asked)
    yield from _experts(asked)


def _machines(asked: Asked) -> Iterator[Problem]:
    launch = asked.launch
    machines = launch.value("num_machines", default=1)
    rank, processes = launch.get("machine_rank"), launch.get("num_processes")
    counted = launch.get("num_machines") is not None or launch.value("deepspeed_hostfile") in (None, AUTO, "", "none")
    if counted and is_count(machines) and rank is not None and isinstance(rank.value, int) and rank.value >= machines:
        message = f"{rank.value}, but num_machines is {machines} and ranks count from 0"
        yield Problem(rank.origin.where, "machine_rank", message, f"Write at most {machines - 1}.")
    backend = launch.get("rdzv_backend")
    if rank is not None and rank.value and backend is not None and backend.value in ("c10d", "etcd", "etcd-v2"):
        why = f"has no effect: {backend.value} at {backend.origin.where} numbers machines as they arrive"
        fix = "Delete it, or write rdzv_backend: static."
        yield Problem(rank.origin.where, "machine_rank", why, fix, show(rank.value), "warning")
    if processes is not None and is_count(machines) and is_count(processes.value) and processes.value % machines:
        message = f"{processes.value} processes do not divide among {machines} machines"
        yield Problem(processes.origin.where, "num_processes", message, f"Write a multiple of {machines}.")
    if (least := launch.get("min_machines")) is not None and is_count(least.value) and is_count(machines):
        yield from _fewer_machines(least, machines, asked)
    if launch.value("distributed_type") == "NO":
        yield from _alone(processes, launch.get("num_machines"))
    inclusion, exclusion = (launch.get(f"deepspeed_{way}_filter") for way in ("inclusion", "exclusion"))
    if inclusion is not None and exclusion is not None and inclusion.value and exclusion.value:
        message = f"stands beside deepspeed_inclusion_filter at {inclusion.origin.where}"
        yield Problem(exclusion.origin.where, "deepspeed_exclusion_filter", message, "Keep one of the two.")
    yield from _launcher(launch.get("deepspeed_multinode_launcher"))
    yield from _hosts(asked)


def _fewer_machines(least: Entry, machines: int, asked: Asked) -> Iterator[Problem]:
    """Only agents that can meet anew go on without the others, and only after a failure, which a lost machine is."""
    launch, where, key = asked.launch, least.origin.where, "min_machines"
    if least.value > machines:
        message = f"{least.value}, but num_machines is {machines}"
        yield Problem(where, key, message, f"Write at most {machines}.")
    elif least.value < machines and launch.value("rdzv_backend") in (None, AUTO, "static"):
        message = f"{least.value} of {machines}, but the machines of a static rendezvous meet once"
        yield Problem(where, key, message, "Write rdzv_backend: c10d, with --rdzv_endpoint or main_process_ip.")
    elif least.value < machines and not launch.value("max_restarts"):
        message = f"{least.value} of {machines}, but max_restarts is 0, and a lost machine is a failure"
        yield Problem(where, key, message, "Write max_restarts, how often machines may be lost, on each.")


def _launcher(typed: Entry | None) -> Iterator[Problem]:
    """A name that is none of DeepSpeed's may be of a later release, or misspelt."""
    if typed is None or not isinstance(typed.value, str) or typed.value in LAUNCHERS:
        return
    key, known = "deepspeed_multinode_launcher", (*LAUNCHERS, *UNTESTED_LAUNCHERS)
    if typed.value not in known and (near := did_you_mean(typed.value, known)):
        fix = f"Did you mean {near}? Write {', '.join(known)}, or a name that DeepSpeed's launcher knows."
        yield Problem(typed.origin.where, key, f"{show(typed.value)} is not legal here", fix)
    else:
        message = f"{typed.value} is untested: it is passed on to DeepSpeed's launcher as it is"
        yield Problem(typed.origin.where, key, message, "", severity="note")


def _hosts(asked: Asked) -> Iterator[Problem]:
    """Hosts that are named to nobody: torchrun reads no hostfile, and filters filter one."""
    launch = asked.launch
    names = [f"deepspeed_{what}" for what in ("hostfile", "inclusion_filter", "exclusion_filter")]
    named = {
        name: entry for name in names if (entry := launch.get(name)) and entry.value not in (None, AUTO, "", "none")
    }
    if launch.value("deepspeed_multinode_launcher") == "standard":
        why = "has no effect: standard is torchrun, which you start on every machine"
    elif len(named) == 1 and "deepspeed_hostfile" not in named:
        why = "has no effect without deepspeed_hostfile"
    else:
        return
    for name, entry in named.items():
        yield Problem(entry.origin.where, name, why, "Delete it.", show(entry.value), "warning")


def _alone(processes: Entry | None, machines: Entry | None) -> Iterator[Problem]:
    for name, entry in {"num_processes": processes, "num_machines": machines}.items():
        if entry is None or not is_count(entry.value) or entry.value == 1:
            continue
        message = f"{entry.value}, but distributed_type NO is one process"
        fix = f"Write {name}: 1, or a distributed_type that has several (MULTI_GPU, MULTI_CPU, DEEPSPEED)."
        if entry.origin.kind == "flag":
            fix = f"Give --{name} 1, or one of --multi_gpu, --cpu and --use_deepspeed."
            yield Problem(entry.origin.where, name, message, fix)
        elif name == "num_processes":  # in published files for one GPU; Accelerate runs one process too
            yield Problem(entry.origin.where, name, f"has no effect: {message}", fix, severity="warning")
        else:
            yield Problem(entry.origin.where, name, message, fix)


def _devices(asked: Asked) -> Iterator[Problem]:
    launch = asked.launch
    kind, on_cpu, ids = (launch.get(name) for name in ("distributed_type", "use_cpu", "gpu_ids"))
    if kind is not None and on_cpu is not None and on_cpu.value is True and kind.value == "MULTI_GPU":
        message = f"true, but distributed_type is MULTI_GPU at {kind.origin.where}"
        yield Problem(on_cpu.origin.where, "use_cpu", message, "Write false, or distributed_type: MULTI_CPU.")
    asks_for_cpu = (kind is not None and kind.value == "MULTI_CPU") or (on_cpu is not None and on_cpu.value is True)
    names = _gpu_names(ids.value) if ids is not None else []
    if ids is not None and names and asks_for_cpu:
        why = "has no effect: the run is on the CPU"
        yield Problem(ids.origin.where, "gpu_ids", why, "Delete it.", ",".join(names), "warning")
    processes = launch.get("num_processes")
    alone = launch.value("num_machines", default=1) == 1
    if processes is None or not is_count(processes.value) or not names or asks_for_cpu or not alone:
        return
    if processes.value > len(names):
        message = f"{processes.value}, but gpu_ids names {len(names)} GPUs, and each process has one of its own"
        yield Problem(processes.origin.where, "num_processes", message, f"Write at most {len(names)}.")


def _gpu_names(ids: Any) -> list[str]:
    """The GPUs that `gpu_ids` names; none for `all` and for what is no list of them."""
    if isinstance(ids, tuple):
        return [str(name) for name in ids]
    if isinstance(ids, int) and not isinstance(ids, bool):
        return [str(ids)]
    names = ids.replace(" ", "").split(",") if isinstance(ids, str) else []
    return names if all(name.isdigit() for name in names) else []


def _not_only_data(asked: Asked) -> Iterator[Problem]:
    """Processes that share a sample: each would get samples of its own here, and train on something else."""
    for key in _OTHER_DIMENSIONS:
        size = asked.value(key)
        if is_count(size) and size > 1:
            fix = "Only data parallelism is supported: write 1, or delete it."
            yield asked.error(key, f"{size} is not supported", fix)
    if asked.says_something("data_parallel_size") and not asked.has("sequence_parallel_size"):
        yield asked.no_effect("data_parallel_size", "DeepSpeed reads it beside sequence_parallel_size only")


def _experts(asked: Asked) -> Iterator[Problem]:
    if not asked.is_on("expert_parallel.enabled") or asked.stage != 3:
        return
    for key, harmless in (
        ("sequence_parallel_size", 1),
        ("zero_optimization.zero_quantized_gradients", False),
        ("zero_optimization.zero_hpz_partition_size", 1),
        ("expert_parallel.expert_tensor_parallel_size", 1),
    ):
        value = asked.value(key, default=harmless)
        if isinstance(value, int) and value != harmless:
            message = f"does not go with expert_parallel at ZeRO stage 3, and {asked.stage_said}"
            yield asked.error(key, message, f"Write {str(harmless).lower()}, or stage 1 or 2.")
