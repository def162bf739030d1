"""Sections that are off, keys that nothing reads, and what one section needs of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from zero_plugin.config.rules.asked import Asked
from zero_plugin.errors import Problem

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
_ENGINE_SAVES: Final = (
    "only the engine's own save_checkpoint() and load_checkpoint() read it, which transformers' Trainer calls; "
    "save_state() keeps checkpoints of its own"
)
_SAMPLING: Final = "data_efficiency.data_sampling"
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
        f"data_efficiency.data_routing.random_ltd.{key}": (f"DeepSpeed writes {batch} over it", _DELETE)
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
    yield from _activation_checkpointing(asked)
    yield from _engine(asked)
    quantized = "weight_quantization.quantized_initialization"
    if asked.stage in (0, 1, 2) and asked.below(quantized):
        yield asked.no_effect(quantized, f"only stage 3 reads it, and {asked.stage_said}")
    schedule = "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule"
    if asked.is_on(f"{schedule}.enabled"):
        yield asked.error(f"{schedule}.enabled", "true, which DeepSpeed has not implemented", _DELETE)
    else:
        written = list(filter(asked.says_something, asked.below(schedule)))
        yield from asked.idle(written[:1], "DeepSpeed has not implemented the schedule")
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
    if asked.value("comms_logger.prof_all", default=True) is True:
        why = "comms_logger.prof_all is true, as it is where nothing is written, and logs every operation"
        yield from asked.idle(["comms_logger.prof_ops"], why, "Write prof_all: false beside it, or delete it.")
    breakdown = "wall_clock_breakdown"
    if asked.is_on("flops_profiler.enabled") and asked.value(breakdown) is False:
        why = f"flops_profiler is on at {asked.written('flops_profiler.enabled')} and turns it on"
        yield asked.no_effect(breakdown, why)


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
