"""Processes and how they work together; sections that are off, keys that nothing reads, and what needs another."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from zero_plugin.config.launch_settings import LAUNCHERS, UNTESTED_LAUNCHERS
from zero_plugin.config.rules.training import Asked, is_count
from zero_plugin.config.tree import AUTO, did_you_mean, show
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


EXPERT_GROUP: Final = "expert_parallel.autoep_size"


def unequal_expert_groups(value: Callable[..., Any], processes: int) -> tuple[str, str] | None:
    """Experts are divided among groups of processes of one size: message and fix where the processes do not divide.

    Args:
        value: the value of a dotted key, or the default that is given with it.
        processes: of the run.
    """
    size, tensor = value(EXPERT_GROUP, 1), value("expert_parallel.expert_tensor_parallel_size", 1)
    if not (is_count(size) and is_count(tensor)) or processes % (size * tensor) == 0:
        return None
    divisors = [str(divisor) for divisor in range(1, processes + 1) if processes % divisor == 0]
    times = "" if tensor == 1 else f" × expert_tensor_parallel_size {tensor} = {size * tensor}"
    return (
        f"{size}{times}, which does not divide the run's {processes} processes",
        f"Write a size of which this is {' or '.join(divisors)}, or start another number of processes.",
    )


def _experts(asked: Asked) -> Iterator[Problem]:
    if not asked.is_on("expert_parallel.enabled"):
        return
    processes = asked.value("num_processes")
    if is_count(processes) and (found := unequal_expert_groups(asked.value, processes)):
        yield asked.error(EXPERT_GROUP, *found)
    if asked.stage != 3:
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


# Sections that do nothing without `enabled: true`, which is not their default.
_SWITCHED: Final = (
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "comms_logger",
    "flops_profiler",
    "torch_autocast",
    "hybrid_engine",
    "expert_parallel",
    "autotuning",
    "data_efficiency.data_routing.random_ltd",
)
_NESTED: Final = (
    ("data_efficiency.data_routing.enabled", "data_efficiency.enabled"),
    ("data_efficiency.data_routing.random_ltd.enabled", "data_efficiency.data_routing.enabled"),
)
_COMET_MODES: Final = ("get", "create", "get_or_create")
_ENGINE_SAVES: Final = (
    "only the engine's own save_checkpoint() and load_checkpoint() read it, which transformers' Trainer calls; "
    "save_state() keeps checkpoints of its own"
)
_SAMPLING: Final = "data_efficiency.data_sampling"
_DROPPING: Final = "data_efficiency.data_routing.random_ltd"
# What DeepSpeed reads of it without a default.
_DROPPING_NEEDS: Final = (
    *("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule.min_value", "random_ltd_schedule.max_value"),
    *("random_ltd_schedule.schedule_type", "random_ltd_schedule.schedule_config.require_steps"),
    "random_ltd_schedule.schedule_config.seq_per_step",
)
# Keys by which DeepSpeed's logger gets lines of level info, which it does not show unless its level is changed.
_INFO_LINES: Final = ("steps_per_print", "dump_state", "comms_logger.verbose")
_NEVER_READ: Final = "DeepSpeed parses it and never reads it"
_DELETE: Final = "Delete it."
# A key, or all of a section: why it has no effect on a run of this package, and what to write.
_UNREAD: Final[Mapping[str, tuple[str, str]]] = {
    "dataloader_drop_last": ("the loop's own loader says what it drops", "Write drop_last in the script's DataLoader."),
    **dict.fromkeys(("disable_allgather", "zero_optimization.allgather_partitions"), (_NEVER_READ, _DELETE)),
    **dict.fromkeys(
        (
            "checkpoint",
            "datastates_ckpt",
            "zero_optimization.load_from_fp32_weights",
            "zero_optimization.elastic_checkpoint",
            "zero_optimization.pipeline_loading_checkpoint",
        ),
        (_ENGINE_SAVES, "Delete it; a checkpoint of save_state() is loaded at any stage, by any number of processes."),
    ),
    **dict.fromkeys(
        ("data_efficiency.seed", _SAMPLING),
        (
            "only the loader that DeepSpeed makes of training_data reads it, and the loop has one of its own",
            "Delete it, and choose samples and batch sizes in a sampler or batch_sampler of the script's DataLoader.",
        ),
    ),
    **{
        f"{_DROPPING}.{key}": (f"DeepSpeed writes {batch} over it", _DELETE)
        for key, batch in (
            ("global_batch_size", "train_batch_size"),
            ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        )
    },
    **{
        f"tensor_parallel.{key}": ("only tensor_parallel.autotp_size above 1 reads it, which is not supported", _DELETE)
        for key in (
            *("tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "preset_model"),
            *("injection_policy_tuple", "partition_config", "keep_module_on_host", "tp.tp_grain_size"),
            *("kernel_inject", "replace_with_kernel_inject"),
        )
    },
    "compile.autoep_non_moe": (
        "only the engine's own compile() reads it",
        "Delete it; call torch.compile in the script.",
    ),
    "seq_parallel_communication_data_type": (
        "only sequence_parallel_size above 1 reads it, which is not supported",
        "Delete it; communication_data_type is for all gradients.",
    ),
    **{
        f"weight_quantization.{key}": ("only DeepSpeed's inference reads it", _DELETE)
        for key in ("enabled", "num_bits", "q_type", "q_groups", "post_init_quant")
    },
    **{
        f"pipeline.{key}": ("only the engine of a PipelineModule reads it, and prepare() trains other models", _DELETE)
        for key in (
            *("partition", "seed_layers", "activation_checkpoint_interval"),
            *("pipe_partitioned", "grad_partitioned", "use_reentrant"),
        )
    },
}


def check_sections(asked: Asked) -> Iterator[Problem]:
    """Switches that were forgotten, activation checkpointing, compilation, monitors, unread keys."""
    yield from _forgotten_switches(asked)
    yield from _unseen_lines(asked)
    yield from _activation_checkpointing(asked)
    yield from _token_dropping(asked)
    yield from _engine(asked)
    quantized = "weight_quantization.quantized_initialization"
    if asked.stage in (0, 1, 2) and asked.below(quantized):
        yield asked.no_effect(quantized, f"only stage 3 reads it, and {asked.stage_said}")
    refused = list(_data_sampling(asked))
    yield from refused
    for key, (why, fix) in _UNREAD.items():
        if not (refused and key == _SAMPLING):
            yield from asked.idle([key], why, fix)


def _data_sampling(asked: Asked) -> Iterator[Problem]:
    """What DeepSpeed refuses to read, although nothing follows it here."""
    for part, needed in (("dynamic_batching", "max_tokens"), ("curriculum_learning", "curriculum_metrics")):
        if asked.is_on(f"{_SAMPLING}.{part}.enabled") and not asked.has(f"{_SAMPLING}.{part}.{needed}"):
            message = f"true without {needed}, which DeepSpeed refuses"
            yield asked.error(f"{_SAMPLING}.{part}.enabled", message, _UNREAD[_SAMPLING][1])


def _forgotten_switches(asked: Asked) -> Iterator[Problem]:
    for section in _SWITCHED:
        if asked.entry(f"{section}.enabled") is None:
            written = list(filter(asked.says_something, asked.below(section)))
            why = f"{section}.enabled is not written, and is false then"
            yield from asked.idle(written[:1], why, "Write enabled: true.")
    for inner, outer in _NESTED:
        if asked.is_on(inner) and asked.value(outer, default=False) is False:
            yield asked.no_effect(inner, f"{outer} is not true", f"Write {outer}: true.")
    for section in ("tensorboard", "csv_monitor"):
        if asked.is_on(f"{section}.enabled") and not asked.value(f"{section}.output_path"):
            yield asked.note(f"{section}.enabled", "without output_path it writes below the working directory")
    mode, experiment = asked.value("comet.mode"), asked.value("comet.experiment_key")
    if isinstance(mode, str) and mode not in _COMET_MODES:
        message = f"{show(mode)} is no mode of Comet's"
        yield asked.error("comet.mode", message, f"Write {', '.join(_COMET_MODES)}, or delete it.")
    if isinstance(experiment, str) and not re.fullmatch(r"[A-Za-z0-9]{32,50}", experiment):
        message = f"{show(experiment)} is no key of Comet's: 32 to 50 letters and digits"
        yield asked.error("comet.experiment_key", message, "Copy it from the experiment's address, or delete it.")
    if asked.value("comms_logger.prof_all", default=True) is True:
        why = "comms_logger.prof_all is true, as it is where nothing is written, and logs every operation"
        yield from asked.idle(["comms_logger.prof_ops"], why, "Write prof_all: false beside it, or delete it.")
    breakdown = "wall_clock_breakdown"
    if asked.is_on("flops_profiler.enabled") and asked.value(breakdown) is False:
        why = f"flops_profiler is on at {asked.written('flops_profiler.enabled')} and turns it on"
        yield asked.no_effect(breakdown, why)


def _unseen_lines(asked: Asked) -> Iterator[Problem]:
    """Lines that DeepSpeed writes to a logger which does not show them."""
    level = asked.value("log_level")
    if level in (None, "warning", "error", "critical"):
        where = f"at {asked.written('log_level')}" if level else "where none is written"
        why = f"its lines are of level info, and log_level is {level or 'warning'} {where}"
        keys = [key for key in _INFO_LINES if "." not in key or asked.is_on(f"{key.partition('.')[0]}.enabled")]
        yield from asked.idle(keys, why, "Write log_level: info beside it, or delete it.")


def _token_dropping(asked: Asked) -> Iterator[Problem]:
    """Random layerwise token dropping: what DeepSpeed needs and lacks, and that a script has to convert layers."""
    schedule = f"{_DROPPING}.layer_token_lr_schedule"
    if asked.is_on(f"{schedule}.enabled"):
        yield asked.error(f"{schedule}.enabled", "true, which DeepSpeed has not implemented", _DELETE)
    else:
        written = list(filter(asked.says_something, asked.below(schedule)))
        yield from asked.idle(written[:1], "DeepSpeed has not implemented the schedule")
    switch = f"{_DROPPING}.enabled"
    if not asked.is_on(switch):
        return
    if missing := [key for key in _DROPPING_NEEDS if not asked.has(f"{_DROPPING}.{key}")]:
        message = f"true without {', '.join(missing)}, which DeepSpeed refuses"
        yield asked.error(switch, message, "Write what is missing beside it, or delete it.")
    converts = "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd"
    yield asked.note(switch, f"counts for layers that the script converts by {converts} after prepare(), for no others")


def _activation_checkpointing(asked: Asked) -> Iterator[Problem]:
    section = "activation_checkpointing"
    key = f"{section}.contiguous_memory_optimization"
    if any(map(asked.says_something, asked.below(section))):
        counts = "counts where the model calls deepspeed.checkpointing.checkpoint, and nowhere else"
        yield asked.note(section, f"{counts}: torch.utils.checkpoint and transformers' models read none of it")
    if not asked.is_on(key):
        return
    if asked.value(f"{section}.partition_activations", default=False) is False:
        yield asked.error(key, "true needs partition_activations: true", "Write that beside it, or delete it.")
    if asked.value(f"{section}.number_checkpoints") is None:
        why = "true needs number_checkpoints, the number of checkpointed layers"
        yield asked.error(key, why, "Write that beside it, or delete it.")


def _engine(asked: Asked) -> Iterator[Problem]:
    if asked.is_on("autotuning.enabled"):
        message = "true, with which DeepSpeed's engine leaves the process after a few profiled steps"
        yield asked.error("autotuning.enabled", message, "Delete it: only `deepspeed --autotuning` starts a search.")
    if isinstance(asked.value("tensor_parallel.dtype"), str):
        fix = "Delete it: it follows from the precision."
        yield asked.error("tensor_parallel.dtype", "DeepSpeed takes no name here, but an object of Python", fix)
    key = "managed_gradient_accumulation"
    if asked.is_on(key):
        message = "true, but then DeepSpeed decides inside backward() when parameters change"
        yield asked.error(key, message, "Delete it or write false: optimizer.step() is the one place here.")
    if asked.is_on("compile.deepcompile"):
        message = "true, but DeepCompile decides inside backward() when parameters change"
        fix = "Delete it: optimizer.step() is the one place here. Call torch.compile in the script."
        yield asked.error("compile.deepcompile", message, fix)
        return
    others = [key for key in asked.below("compile") if key not in _UNREAD]
    yield from asked.idle(others, "only compile.deepcompile: true reads it")
