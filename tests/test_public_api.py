"""The public names are what a script may rely on; each arrives when it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import zero_plugin

NAMES = [
    "Accelerator",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DummyOptim",
    "DummyScheduler",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PartialState",
    "ProfileKwargs",
    "Progress",
    "ProjectConfiguration",
    "debug_launcher",
    "find_executable_batch_size",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "write_basic_config",
]

ACCELERATOR = {
    *("dispatch_batches", "even_batches", "non_blocking", "skip_first_batches", "split_batches"),
    *("use_seedable_sampler", "use_stateful_dataloader"),
    *("autocast", "autocast_handler", "ddp_handler", "deepspeed_plugin", "deepspeed_plugins", "init_handler"),
    *("logging_dir", "profile", "profile_handler", "project_dir", "save_iteration", "scaler_handler"),
    *("accumulate", "backward", "clip_grad_norm_", "end_training", "gather", "gather_for_metrics", "get_state_dict"),
    *("gradient_accumulation_steps", "init_model", "is_last_process", "is_local_main_process"),
    *(
        "is_main_process",
        "local_process_index",
        "mixed_precision",
        "no_sync",
        "num_processes",
        "optimizer_step_was_skipped",
    ),
    *("pad_across_processes", "prepare", "prepare_data_loader", "print", "process_index", "reduce"),
    *("save", "save_model", "sync_gradients", "unwrap_model", "wait_for_everyone"),
    *("clear", "clip_grad_value_", "free_memory", "join_uneven_inputs", "lomo_backward", "prepare_model"),
    *("prepare_optimizer", "prepare_scheduler", "trigger_sync_in_backward", "unscale_gradients", "verify_device_map"),
    *("broadcast", "check_trigger", "multi_device", "set_trigger", "split_between_processes"),
    "use_distributed",
    *("local_main_process_first", "main_process_first"),
    *("on_last_process", "on_local_main_process", "on_local_process", "on_main_process", "on_process"),
}


def test_the_public_names() -> None:
    """A name is added here when it is added there, and removed from neither."""
    assert sorted(zero_plugin.__all__) == NAMES
    assert set(NAMES) <= set(dir(zero_plugin))
    for name in NAMES:
        assert getattr(zero_plugin, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Accelerater'"):
        _ = zero_plugin.Accelerater
    with pytest.raises(ImportError, match=r"FSDP's; .* use a DeepSpeed stage 3 config"):
        from zero_plugin import FullyShardedDataParallelPlugin  # noqa: F401


def test_the_accelerators_names() -> None:
    """What a loop may call."""
    assert {name for name in dir(zero_plugin.Accelerator) if not name.startswith("_")} == ACCELERATOR


def test_importing_is_lazy() -> None:
    """`import zero_plugin` loads neither torch nor DeepSpeed, and a placeholder does not load the facade."""
    code = """
import sys, zero_plugin
heavy = [m for m in ("torch", "deepspeed", "numpy", "pydantic", "rich", "yaml") if m in sys.modules]
assert not heavy, heavy
zero_plugin.DummyOptim
assert "torch" not in sys.modules
zero_plugin.Accelerator
assert "torch" in sys.modules
assert "deepspeed" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
