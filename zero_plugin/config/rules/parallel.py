"""Processes and how they work together: machines, devices, and the parallel dimensions beside data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from zero_plugin.config.launch_settings import LAUNCHERS, UNTESTED_LAUNCHERS
from zero_plugin.config.rules.asked import Asked, is_count
from zero_plugin.config.tree import AUTO
from zero_plugin.config.validation import did_you_mean, show
from zero_plugin.errors import Problem

_OTHER_DIMENSIONS: Final = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "sequence_parallel_size",
    "pipeline.stages",
)
_NOTHING: Final = (None, AUTO, "", "none")  # what a host or a file is where none is named


def check_parallel(asked: Asked) -> Iterator[Problem]:
    """Ranks and machines, GPUs and CPU, parallelism of other kinds than data."""
    yield from _machines(asked)
    yield from _devices(asked)
    yield from _not_only_data(asked)
    yield from _experts(asked)


def _machines(asked: Asked) -> Iterator[Problem]:
    machines, processes = asked.value("num_machines", default=1), asked.value("num_processes")
    rank, backend = asked.value("machine_rank"), asked.value("rdzv_backend")
    counted = asked.entry("num_machines") is not None or asked.value("deepspeed_hostfile") in _NOTHING
    if counted and is_count(machines) and isinstance(rank, int) and rank >= machines:
        message = f"{rank}, but num_machines is {machines} and ranks count from 0"
        yield asked.error("machine_rank", message, f"Write at most {machines - 1}.")
    if rank and backend in ("c10d", "etcd", "etcd-v2"):
        why = f"{backend} at {asked.written('rdzv_backend')} numbers machines as they arrive"
        yield asked.no_effect("machine_rank", why, "Delete it, or write rdzv_backend: static.")
    if is_count(machines) and is_count(processes) and processes % machines:
        message = f"{processes} processes do not divide among {machines} machines"
        yield asked.error("num_processes", message, f"Write a multiple of {machines}.")
    if is_count(least := asked.value("min_machines")) and is_count(machines):
        yield from _fewer_machines(asked, least, machines)
    if asked.value("distributed_type") == "NO":
        yield from _alone(asked)
    if asked.value("deepspeed_inclusion_filter") and asked.value("deepspeed_exclusion_filter"):
        message = f"is written beside deepspeed_inclusion_filter at {asked.written('deepspeed_inclusion_filter')}"
        yield asked.error("deepspeed_exclusion_filter", message, "Keep one of the two.")
    yield from _launcher(asked)
    yield from _hosts(asked)


def _fewer_machines(asked: Asked, least: int, machines: int) -> Iterator[Problem]:
    """Only agents that can meet anew go on without the others, and only after a failure, which a lost machine is."""
    key, of_them = "min_machines", f"{least} of {machines}"
    if least > machines:
        yield asked.error(key, f"{least}, but num_machines is {machines}", f"Write at most {machines}.")
    elif least < machines and asked.value("rdzv_backend") in (None, AUTO, "static"):
        message = f"{of_them}, but the machines of a static rendezvous meet once"
        yield asked.error(key, message, "Write rdzv_backend: c10d, with --rdzv_endpoint or main_process_ip.")
    elif least < machines and not asked.value("max_restarts"):
        message = f"{of_them}, but max_restarts is 0, and a lost machine is a failure"
        yield asked.error(key, message, "Write max_restarts, how often machines may be lost, on each.")


def _launcher(asked: Asked) -> Iterator[Problem]:
    """A name that is none of DeepSpeed's may be of a later release, or misspelt."""
    key, known = "deepspeed_multinode_launcher", (*LAUNCHERS, *UNTESTED_LAUNCHERS)
    name = asked.value(key)
    if not isinstance(name, str) or name in LAUNCHERS:
        return
    if name not in known and (near := did_you_mean(name, known)):
        fix = f"Did you mean {near}? Write {', '.join(known)}, or a name that DeepSpeed's launcher knows."
        yield asked.error(key, f"{show(name)} is not legal here", fix)
    else:
        yield asked.note(key, f"{name} is untested: it is passed on to DeepSpeed's launcher as it is")


def _hosts(asked: Asked) -> Iterator[Problem]:
    """Hosts that are named to nobody: torchrun reads no hostfile, and filters filter one."""
    names = [f"deepspeed_{what}" for what in ("hostfile", "inclusion_filter", "exclusion_filter")]
    named = [name for name in names if asked.value(name) not in _NOTHING]
    if asked.value("deepspeed_multinode_launcher") == "standard":
        why = "has no effect: standard is torchrun, which you start on every machine"
    elif len(named) == 1 and "deepspeed_hostfile" not in named:
        why = "has no effect without deepspeed_hostfile"
    else:
        return
    for name in named:
        yield asked.warning(name, why, "Delete it.")


def _alone(asked: Asked) -> Iterator[Problem]:
    for name in ("num_processes", "num_machines"):
        entry = asked.entry(name)
        if entry is None or not is_count(entry.value) or entry.value == 1:
            continue
        message = f"{entry.value}, but distributed_type NO is one process"
        fix = f"Write {name}: 1, or a distributed_type that has several (MULTI_GPU, MULTI_CPU, DEEPSPEED)."
        if entry.origin.kind == "flag":
            yield asked.error(name, message, f"Give --{name} 1, or one of --multi_gpu, --cpu and --use_deepspeed.")
        elif name == "num_processes":  # in published files for one GPU; Accelerate runs one process too
            yield asked.no_effect(name, message, fix)
        else:
            yield asked.error(name, message, fix)


def _devices(asked: Asked) -> Iterator[Problem]:
    kind, processes = asked.value("distributed_type"), asked.value("num_processes")
    if kind == "MULTI_GPU" and asked.on_cpu:
        message = f"true, but distributed_type is MULTI_GPU at {asked.written('distributed_type')}"
        yield asked.error("use_cpu", message, "Write false, or distributed_type: MULTI_CPU.")
    names = _gpu_names(asked.value("gpu_ids"))
    if names and (kind == "MULTI_CPU" or asked.on_cpu):
        why = "has no effect: the run is on the CPU"
        yield Problem(asked.written("gpu_ids"), "gpu_ids", why, "Delete it.", ",".join(names), "warning")
    elif names and is_count(processes) and asked.value("num_machines", default=1) == 1 and processes > len(names):
        message = f"{processes}, but gpu_ids names {len(names)} GPUs, and each process has one of its own"
        yield asked.error("num_processes", message, f"Write at most {len(names)}.")


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
