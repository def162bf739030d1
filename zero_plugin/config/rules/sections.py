"""Rules for other parallelism than data, sections that are off, keys that nothing reads, and keys that need others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from zero_plugin.config.keys import GLOBAL_BATCH, MICRO_BATCH
from zero_plugin.config.launch_settings import asked_compiler
from zero_plugin.config.parallelism import SEQUENCE_KEY
from zero_plugin.config.rules.training import Asked, is_count, needs_gpu
from zero_plugin.config.tree import show
from zero_plugin.errors import Problem

_LOSES: Final = "DeepSpeed's layers for it lose the other processes' part of a gradient that is not contiguous"
_OTHER_NAMES: Final = "DeepSpeed's layers for it have other parameters than the model's, which no checkpoint would hold"
_OTHER_DIMENSIONS: Final = {
    "tensor_parallel.autotp_size": _LOSES,
    "tensor_parallel.tp.tp_size": _LOSES,
    "pipeline.stages": "the engine of a PipelineModule has a loop of its own",
}


def _not_only_data(asked: Asked) -> Iterator[Problem]:
    """Refuse parallelism that shares a model: here each process would get samples of its own, and train differently."""
    for key, why in _OTHER_DIMENSIONS.items():
        size = asked.value(key)
        if is_count(size) and size > 1:
            fix = "Write 1, or delete it: only samples are shared among processes, by sequence_parallel_size."
            yield asked.error(key, f"{size} is not supported: {why}", fix)
    if asked.is_on("expert_parallel.enabled"):
        fix = "Write false, or delete it: ZeRO partitions experts as it does all other parameters."
        yield asked.error("expert_parallel.enabled", f"true is not supported: {_OTHER_NAMES}", fix)
    if asked.says_something("data_parallel_size"):
        yield asked.no_effect("data_parallel_size", "it follows from the number of processes")


def _sequences(asked: Asked) -> Iterator[Problem]:
    """Check sequence parallelism: the groups of processes that share each sample."""
    size, processes, kind = asked.value(SEQUENCE_KEY), asked.value("num_processes"), asked.value("distributed_type")
    if not is_count(size) or size == 1:
        return
    if kind in ("NO", "TPU", "XLA"):
        message = f"{size}, but distributed_type is {kind} at {asked.written('distributed_type')}"
        fix = "Write MULTI_GPU, MULTI_CPU or DEEPSPEED there, or 1 here."
        yield asked.error(SEQUENCE_KEY, message, fix)
    elif is_count(processes) and (found := unequal_sequence_groups(size, processes)):
        yield asked.error(SEQUENCE_KEY, *found)
    compiler = asked_compiler(asked.launch).get("backend")
    if compiler is not None and compiler.value not in ("no", None):
        message = f"{size}, but models are compiled, which the exchange among processes would break up"
        yield asked.error(SEQUENCE_KEY, message, "Write 1 here, or delete dynamo_config.")


def unequal_sequence_groups(size: int, processes: int) -> tuple[str, str] | None:
    """Return message and fix if processes cannot be divided into groups of `size`, which share their samples."""
    if processes % size == 0:
        return None
    return (
        f"{size} does not divide the {processes} processes",
        f"Write {_divisors(processes)}, or start another number of processes.",
    )


def unequal_heads(size: int, heads: int | None) -> tuple[str, str] | None:
    """Return message and fix if a model's attention heads, if known, cannot be divided among a group of `size`."""
    if heads is None or heads % size == 0:
        return None
    return f"{size} does not divide the model's {heads} attention heads", f"Write {_divisors(heads)}."


def _divisors(number: int) -> str:
    return " or ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)


PARALLELISM: Final = (_not_only_data, _sequences)  # rules for other parallelism than data


# Sections that do nothing without `enabled: true`. All are off by default.
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
# Keys of token dropping that DeepSpeed reads without a default.
_DROPPING_NEEDS: Final = (
    *("total_layer_num", "random_ltd_layer_num", "random_ltd_schedule.min_value", "random_ltd_schedule.max_value"),
    *("random_ltd_schedule.schedule_type", "random_ltd_schedule.schedule_config.require_steps"),
    "random_ltd_schedule.schedule_config.seq_per_step",
)
# Keys whose lines go to DeepSpeed's logger at level info. The logger hides them unless its level is changed.
_INFO_LINES: Final = ("steps_per_print", "dump_state", "comms_logger.verbose")
_NEVER_READ: Final = "DeepSpeed parses it and never reads it"
_DELETE: Final = "Delete it."
_GATHERED_AT_ONCE: Final = "zero_optimization.allgather_bucket_size"
# A key or a complete section: why it has no effect in a run of this package, and the fix.
_UNREAD: Final[Mapping[str, tuple[str, str]]] = {
    "dataloader_drop_last": (
        "the loop's own loader decides what it drops",
        "Write drop_last in the script's DataLoader.",
    ),
    **dict.fromkeys(("disable_allgather", "zero_optimization.allgather_partitions"), (_NEVER_READ, _DELETE)),
    # DeepSpeed 0.19.8 reads it in ZenFlow, which is refused, and where torch has no all_gather_into_tensor.
    _GATHERED_AT_ONCE: ("DeepSpeed gathers all updated parameters of a group together, in place", _DELETE),
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
            ("global_batch_size", GLOBAL_BATCH.name),
            ("micro_batch_size", MICRO_BATCH.name),
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
        "gradients of the processes that share samples are averaged with all others",
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


# Keys that only DeepSpeed's engine reads, in addition to the sections with a switch.
_OF_THE_ENGINE: Final = (
    *("communication_data_type", "prescale_gradients", "gradient_predivide_factor", "vocabulary_size"),
    *("steps_per_print", "dump_state", "wall_clock_breakdown", "memory_breakdown", "log_level", "disable_python_gc"),
    *("activation_checkpointing", "timers", "fp16.auto_cast", "use_data_before_expert_parallelism"),
)
_WITHOUT_ENGINE: Final = ("NO", "MULTI_CPU", "MULTI_GPU", "TPU", "XLA")


def check_without_engine(asked: Asked) -> Iterator[Problem]:
    """Report settings that a run without DeepSpeed loses. The run itself checks this if the type is open."""
    kind = asked.value("distributed_type")
    if kind in _WITHOUT_ENGINE:
        where = f"distributed_type is {kind} at {asked.written('distributed_type')}"
        yield from keys_of_the_engine(asked, where, alone=kind == "NO")


def keys_of_the_engine(asked: Asked, where: str, *, alone: bool) -> Iterator[Problem]:
    """Report keys that only DeepSpeed's engine reads. A key that would change training is an error.

    Args:
        asked: the document of a run without DeepSpeed.
        where: why the run is without DeepSpeed, with the place, for the message.
        alone: whether one process trains.
    """
    why, other = f"only DeepSpeed's engine reads it, and {where}", "or write distributed_type: DEEPSPEED."
    if asked.value("gradient_allreduce_op") == "sum" and not alone:
        yield asked.error("gradient_allreduce_op", f"sum, but {where}, and DDP averages", f"Write mean, {other}")
    if asked.is_on("torch_autocast.enabled"):
        message = f"true, but {why}"
        yield asked.error("torch_autocast.enabled", message, f"Write mixed_precision: bf16 instead, {other}")
    # Keys and whether to report them here; another rule reports them otherwise.
    others = {
        "data_types.buffer_dtype": asked.precision != "no",
        "data_types.keep_in_fp32_modules": asked.precision != "no",
        "data_types.param_dtype": asked.precision is None,
        "data_types.grad_accum_dtype": asked.precision is None or asked.stage != 0,
        "bf16.immediate_grad_update": asked.stage == 1,
        "weight_quantization.quantized_initialization": asked.stage == 3,
        **{key: asked.is_on(f"{key}.enabled") for key in _SWITCHED if key not in ("torch_autocast", "autotuning")},
    }
    unread = [key for key in (*_OF_THE_ENGINE, *others) if others.get(key, True)]
    yield from asked.idle(unread, why, f"Delete it, {other}")


def check_sections(asked: Asked) -> Iterator[Problem]:
    """Check forgotten switches, activation checkpointing, compilation, monitors, and keys that nothing reads."""
    yield from _forgotten_switches(asked)
    yield from _unseen_lines(asked)
    yield from _activation_checkpointing(asked)
    yield from _token_dropping(asked)
    yield from _engine(asked)
    quantized = "weight_quantization.quantized_initialization"
    if asked.stage in (0, 1, 2) and asked.below(quantized):
        yield asked.no_effect(quantized, f"only stage 3 reads it, and {asked.stage_said}")
    refused = list(_refused_though_unread(asked))
    yield from refused
    for key, (why, fix) in _UNREAD.items():
        if not any(f"{problem.key}.".startswith(f"{key}.") for problem in refused):
            yield from asked.idle([key], why, fix)


def _refused_though_unread(asked: Asked) -> Iterator[Problem]:
    """Yield errors for values that DeepSpeed refuses, in keys that have no effect here."""
    size = asked.value(_GATHERED_AT_ONCE)
    if asked.stage in (1, 2) and is_count(size) and size % 2:
        yield asked.error(_GATHERED_AT_ONCE, f"{size} is odd, which DeepSpeed refuses at stage {asked.stage}", _DELETE)
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
        yield from asked.idle(["comms_logger.prof_ops"], why, "Write prof_all: false too, or delete it.")
    breakdown = "wall_clock_breakdown"
    if asked.is_on("flops_profiler.enabled") and asked.value(breakdown) is False:
        why = f"flops_profiler is on at {asked.written('flops_profiler.enabled')} and turns it on"
        yield asked.no_effect(breakdown, why)


def _unseen_lines(asked: Asked) -> Iterator[Problem]:
    """Warn about lines that DeepSpeed writes to its logger at a level that the logger does not show."""
    level = asked.value("log_level")
    if level in (None, "warning", "error", "critical") and asked.value("distributed_type") not in _WITHOUT_ENGINE:
        where = f"at {asked.written('log_level')}" if level else "where none is written"
        why = f"its lines are of level info, and log_level is {level or 'warning'} {where}"
        keys = [key for key in _INFO_LINES if "." not in key or asked.is_on(f"{key.partition('.')[0]}.enabled")]
        yield from asked.idle(keys, why, "Write log_level: info too, or delete it.")


def _token_dropping(asked: Asked) -> Iterator[Problem]:
    """Check random layerwise token dropping: required keys, missing features, and layers for the script to convert."""
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
        yield asked.error(switch, message, "Write the missing keys too, or delete it.")
    if all(asked.is_on(outer) for _, outer in _NESTED):
        size = asked.value(SEQUENCE_KEY)
        yield from needs_gpu(asked, switch)
        if is_count(size) and size > 1:
            where = asked.written(SEQUENCE_KEY)
            message = (
                f"true, but {SEQUENCE_KEY} is {size} at {where}, and layers would drop tokens of each part separately"
            )
            yield asked.error(switch, message, "Keep one of the two.")
    converts = "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd"
    yield asked.note(switch, f"counts for layers that the script converts by {converts} after prepare(), for no others")


def _activation_checkpointing(asked: Asked) -> Iterator[Problem]:
    section = "activation_checkpointing"
    key = f"{section}.contiguous_memory_optimization"
    if any(map(asked.says_something, asked.below(section))):
        counts = "counts only where the model calls deepspeed.checkpointing.checkpoint"
        yield asked.note(section, f"{counts}: torch.utils.checkpoint and transformers' models read none of it")
    if not asked.is_on(key):
        return
    missing = []
    if asked.value(f"{section}.partition_activations", default=False) is False:
        missing.append("partition_activations: true")
    if asked.value(f"{section}.number_checkpoints") is None:
        missing.append("number_checkpoints, the number of checkpointed layers")
    if missing:
        yield asked.error(key, f"true needs {' and '.join(missing)}", "Write all of them, or delete this.")


def _engine(asked: Asked) -> Iterator[Problem]:
    if asked.is_on("autotuning.enabled"):
        message = "true, with which DeepSpeed's engine exits the process after a few profiled steps"
        yield asked.error("autotuning.enabled", message, "Delete it: only `deepspeed --autotuning` starts a search.")
    generates = "hybrid_engine.enabled"
    if asked.is_on(generates) and asked.value("distributed_type") not in _WITHOUT_ENGINE:
        yield from needs_gpu(asked, generates, "Delete one of the two.")
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
