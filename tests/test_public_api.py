"""Scripts may rely on the public names. Each loads on first use."""

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
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "Progress",
    "ProjectConfiguration",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "dummy_forward",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "is_rich_available",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "write_basic_config",
]

ACCELERATOR = """
    accumulate autocast autocast_handler backward broadcast check_trigger clear clip_grad_norm_ clip_grad_value_
    dataloader_config ddp_handler deepspeed_config deepspeed_plugin deepspeed_plugins device device_placement
    dispatch_batches distributed_type document end_training even_batches fp8_backend free_memory gather
    gather_for_metrics get_state_dict get_tracker gradient_accumulation_plugin gradient_accumulation_steps
    has_lomo_optimizer init_handler init_model init_trackers is_composable_parallelism_enabled is_fsdp2
    is_last_process is_local_main_process is_main_process join_uneven_inputs load_state load_weights
    local_main_process_first local_process_index log logging_dir lomo_backward main_process_first
    maybe_context_parallel metrics mixed_precision multi_device native_amp no_sync non_blocking num_processes
    on_last_process on_local_main_process on_local_process on_main_process on_process optimizer_step_was_skipped
    pad_across_processes parallelism_config prepare prepare_data_loader prepare_model prepare_optimizer
    prepare_scheduler print process_index profile profile_handler project_configuration project_dir reduce
    register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook resolved resume rng_types
    save save_iteration save_model save_state scaler scaler_handler set_trigger should_save_model skip_first_batches
    split_batches split_between_processes step_scheduler_with_optimizer stop_requested sync_gradients
    torch_device_mesh trackers trigger_sync_in_backward unscale_gradients unwrap_model use_distributed
    use_seedable_sampler use_stateful_dataloader verify_device_map wait_for_everyone wait_for_save whole_weights
"""


def test_the_public_names() -> None:
    """Adding a name there means adding it here. No name is removed from either."""
    assert sorted(zero_plugin.__all__) == NAMES
    assert set(NAMES) <= set(dir(zero_plugin))
    for name in NAMES:
        assert getattr(zero_plugin, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Accelerater'"):
        _ = zero_plugin.Accelerater


def test_all_that_accelerates_import_gives() -> None:
    """`import zero_plugin as accelerate` has its names and its modules, except those of its commands and files."""
    accelerate = pytest.importorskip("accelerate")
    code = "import sys, accelerate; print(*(name for name in vars(accelerate) if name[0] != '_'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    missing = {name for name in run.stdout.split() if not hasattr(zero_plugin, name)}
    assert missing <= {"commands", "checkpointing", "inference"}, missing
    assert accelerate.tracking.GeneralTracker.__name__ == zero_plugin.tracking.GeneralTracker.__name__


def test_the_accelerators_names() -> None:
    """A loop may call all of these."""
    assert {name for name in dir(zero_plugin.Accelerator) if not name.startswith("_")} == set(ACCELERATOR.split())


def test_importing_is_lazy() -> None:
    """`import zero_plugin` loads neither torch nor DeepSpeed, and a placeholder does not load `Accelerator`."""
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
