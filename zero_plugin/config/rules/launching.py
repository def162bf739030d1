"""Rules for launch keys: machines and devices, and keys that this kind of launch does not read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from zero_plugin.config.installed import NEWER_DEEPSPEED, refuse_deepspeed
from zero_plugin.config.keys import LAUNCHERS, MICRO_BATCH, PLACEMENT, UNTESTED_LAUNCHERS
from zero_plugin.config.launch_settings import COMPILER_PREFIX, asked_compiler
from zero_plugin.config.rules.training import Asked, is_count
from zero_plugin.config.tree import AUTO, did_you_mean, dotted, show
from zero_plugin.errors import Problem

_NOTHING: Final = (None, AUTO, "", "none")  # values that name no host and no file


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
        message = f"deepspeed_inclusion_filter is written too, at {asked.written('deepspeed_inclusion_filter')}"
        yield asked.error("deepspeed_exclusion_filter", message, "Keep one of the two.")
    yield from _launcher(asked)
    yield from _hosts(asked)


def _fewer_machines(asked: Asked, least: int, machines: int) -> Iterator[Problem]:
    """Check `min_machines`: agents continue with fewer machines only by a dynamic rendezvous, after a failure.

    A lost machine counts as a failure, so `max_restarts` has to allow one.
    """
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
    """Check the launcher's name. One that is not DeepSpeed's may be from a later release, or misspelled."""
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
    """Warn about hosts that nothing reads: torchrun reads no hostfile, and filters need a hostfile."""
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
    """Return the GPUs that `gpu_ids` names; none for `all` and for values that are not a list of GPUs."""
    if isinstance(ids, tuple):
        return [str(name) for name in ids]
    if isinstance(ids, int) and not isinstance(ids, bool):
        return [str(ids)]
    names = ids.replace(" ", "").split(",") if isinstance(ids, str) else []
    return names if all(name.isdigit() for name in names) else []


# ---- keys that say nothing to this kind of launch --------------------------------------------------------------------

_ON_TPU: Final = ("TPU", "XLA")
_OF_SEVERAL: Final = {
    "main_process_ip": _NOTHING,
    "rdzv_backend": (*_NOTHING, "static"),
    "rdzv_conf": _NOTHING,
    "deepspeed_multinode_launcher": (*_NOTHING, "standard"),
    "network": _NOTHING,
}
# Keys that a plan fills if they are open.
_PLANNED: Final = (
    *map(dotted, PLACEMENT),
    "zero_optimization.offload_optimizer.ratio",
    MICRO_BATCH.name,
)


def _writes_machines(asked: Asked) -> bool:
    return asked.entry("num_machines") is not None and asked.value("num_machines") is not AUTO


def _has_several_machines(asked: Asked) -> bool:
    several = _writes_machines(asked) and asked.value("num_machines") != 1
    return several or asked.value("deepspeed_hostfile") not in _NOTHING


def _of_several_machines(asked: Asked) -> Iterator[Problem]:
    """Check keys for several machines: the ones that a run on one machine does not read, and `same_network`."""
    written, several = _writes_machines(asked), _has_several_machines(asked)
    on_tpu = asked.value("distributed_type") in _ON_TPU
    if several and asked.value("same_network") not in _NOTHING:
        meeting = "the runtime of a TPU finds its machines" if on_tpu else "machines meet at main_process_ip"
        yield asked.no_effect("same_network", f"{meeting}, in one network or in several")
    launcher = "deepspeed_multinode_launcher"
    if on_tpu and asked.value(launcher) not in _OF_SEVERAL[launcher]:
        yield asked.no_effect(launcher, "the same command is started on every machine of a TPU")
    if several or on_tpu:  # the launch on a TPU itself refuses the other keys
        return
    for key, nothing in _OF_SEVERAL.items():
        if asked.value(key) in nothing:
            continue
        if written:
            yield asked.no_effect(key, f"num_machines is 1 at {asked.written('num_machines')}")
        else:  # a job of SLURM or MPI may fill it in
            yield asked.note(key, "counts with several machines, and num_machines is not written")


def _requests_zero(asked: Asked) -> bool:
    """Return whether a document requests ZeRO by its `distributed_type` or, if that is open, by a ZeRO section."""
    kind = asked.value("distributed_type")
    return kind == "DEEPSPEED" or (kind in (None, AUTO) and asked.has("zero_optimization"))


def _without_zero(asked: Asked, key: str, what: str) -> Problem:
    """Return a warning, or a note if a script's plugin may still request ZeRO."""
    if asked.value("distributed_type") in (None, AUTO):
        return asked.note(key, f"counts with {what}, and no ZeRO is requested here")
    return asked.no_effect(key, f"only {what} reads it, and the run is without ZeRO")


def _of_zero(asked: Asked) -> Iterator[Problem]:
    partitioned, experts = "zero3_init_flag", "deepspeed_moe_layer_cls_names"
    if _requests_zero(asked):
        if asked.is_on(partitioned) and asked.stage in (0, 1, 2):
            yield asked.no_effect(partitioned, f"only stage 3 reads it, and {asked.stage_said}")
        return
    for key, nothing in ((partitioned, (None, AUTO, False)), (experts, (*_NOTHING, (), []))):
        if asked.value(key) not in nothing:
            yield _without_zero(asked, key, "ZeRO")


def _of_deepspeed(asked: Asked) -> Iterator[Problem]:
    """Refuse a DeepSpeed that is too old if the document requests ZeRO."""
    if _requests_zero(asked) and (refusal := refuse_deepspeed()):
        key = "distributed_type" if asked.value("distributed_type") == "DEEPSPEED" else "zero_optimization"
        yield asked.error(key, refusal, f"{NEWER_DEEPSPEED}, or request no ZeRO.")


def _of_a_plan(asked: Asked) -> Iterator[Problem]:
    """Warn about facts for a plan if no plan reads them.

    `gpu_memory` is also read if `distributed_type` drops ZeRO, because the complete model then has to fit.
    """
    zero, fills = _requests_zero(asked), any(asked.value(key) is AUTO for key in _PLANNED)
    dropped = asked.stage != 0 or any(asked.offload(what) not in (None, "none") for what in ("optimizer", "param"))
    why = "only a plan reads it, and none of what a plan fills is auto: stage, offload devices, ratio, micro-batch"
    counted = {"gpu_memory": fills if zero else dropped, "host_memory": fills and zero}
    if _has_several_machines(asked):
        counted["network"] = fills and zero
    for key, read in counted.items():
        if asked.value(key) not in _NOTHING and not read:
            yield asked.no_effect(key, why) if zero else _without_zero(asked, key, "a plan of ZeRO")


def _of_a_tpu(asked: Asked) -> Iterator[Problem]:
    key, kind = "main_training_function", asked.value("distributed_type")
    if kind in _ON_TPU or asked.value(key) in (*_NOTHING, "main"):
        return
    if kind in (None, AUTO) and not asked.on_cpu:
        yield asked.note(key, "counts on a TPU: any other launch runs the script as it is")
    else:
        yield asked.no_effect(key, "only a launch on a TPU calls it, and this one runs the script as it is")


def _of_a_compiler(asked: Asked) -> Iterator[Problem]:
    compiler = asked_compiler(asked.launch)
    backend = compiler.pop("backend", None)
    if backend is not None and backend.value != "no":
        return
    why = "has no effect without dynamo_backend" if backend is None else "has no effect: dynamo_backend is no"
    for name, entry in compiler.items():
        if entry.value not in (False, "default"):
            fix = "Write dynamo_backend: INDUCTOR, or delete it."
            yield Problem(entry.origin.where, COMPILER_PREFIX + name, why, fix, show(entry.value), "warning")


# All rules of this file: ranks and machines, GPUs and CPU, keys without effect in this kind of launch.
LAUNCHING: Final = (
    _machines,
    _devices,
    _of_several_machines,
    _of_zero,
    _of_deepspeed,
    _of_a_plan,
    _of_a_tpu,
    _of_a_compiler,
)
