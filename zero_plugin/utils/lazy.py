"""Names that are loaded on first use, and stand-ins for names of Accelerate that this package does not have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

# Names of Accelerate that this package does not have -> the reason, with a replacement.
LEFT_OUT: Final[dict[str, str]] = {
    name: reason
    for reason, names in (
        (
            "is FSDP's; zero_plugin trains by ZeRO or DDP: use a DeepSpeed stage 3 config",
            """FullyShardedDataParallelPlugin disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
            compile_regions_fsdp2 ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names
            fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
            get_module_children_bottom_up load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model
            save_fsdp_optimizer""",
        ),
        (
            "is Megatron-LM's; zero_plugin trains by ZeRO or DDP: use a DeepSpeed stage 3 config",
            """MegatronLMPlugin add_model_config_to_megatron_parser AbstractTrainStep BertTrainStep GPTTrainStep
            T5TrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronEngine MegatronLMOptimizerWrapper
            MegatronLMSchedulerWrapper avg_losses_across_data_parallel_group gather_across_data_parallel_groups
            megatron_lm_initialize megatron_lm_prepare_data_loader megatron_lm_prepare_model_optimizer_scheduler
            megatron_lm_prepare_optimizer megatron_lm_prepare_scheduler""",
        ),
        (
            "is for fp8; zero_plugin computes in fp32, bf16 or fp16: write mixed_precision='bf16'",
            """AORecipeKwargs FP8BackendType FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs apply_fp8_autowrap
            check_cuda_fp8_capability contextual_fp8_autocast convert_model convert_model_to_fp8_ao
            filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers
            is_transformer_engine_mxfp8_available torchao_required""",
        ),
        (
            "is for quantized weights; load the model with transformers' quantization_config, and prepare() it",
            "BnbQuantizationConfig CustomDtype has_4bit_bnb_layers load_and_quantize_model",
        ),
        (
            "splits a model over processes; zero_plugin divides data and sequences: use a DeepSpeed stage 3 config",
            """TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin get_model_tp_size
            is_pippy_available model_has_dtensor prepare_pippy""",
        ),
        (
            "is SageMaker's; start the script with `zero-plugin launch` on the machines themselves",
            "SageMakerDistributedType prepare_sagemager_args_inputs",
        ),
        (
            "is a part of Accelerate's launcher; use `zero-plugin launch` or zero_plugin.notebook_launcher",
            """PrepareForLaunch TORCH_LAUNCH_PARAMS check_os_kernel convert_dict_to_env_variables
            get_current_device_type prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_simple_launcher_cmd_env
            prepare_tpu""",
        ),
        (
            "is a part of Accelerate's own preparation; Accelerator.prepare replaces it",
            """DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper compile_regions_deepspeed
            deepspeed_required get_grad_scaler get_mixed_precision_context_manager map_pytorch_optim_to_deepspeed""",
        ),
        (
            "is about Accelerate's own backends; zero_plugin runs on CUDA, CPU or TPU",
            """MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DISTRIBUTED_OPERATION_TYPES
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION is_habana_gaudi1""",
        ),
        (
            "is a part of Accelerate's pipelines; use broadcast, or pad_across_processes",
            "copy_tensor_to_devices pad_input_tensors",
        ),
        (
            "binds a process to cores; `zero-plugin launch --enable_cpu_affinity` does that",
            "override_numa_affinity set_numa_affinity",
        ),
        (
            "is a class of Accelerate's; name the tracker in Accelerator(log_with=…)",
            "AimTracker ClearMLTracker CometMLTracker DVCLiveTracker SwanLabTracker TrackioTracker",
        ),
        ("selects trackers; Accelerator(log_with=…) does that", "filter_trackers"),
        ("is gone; torch_xla is installed with `pip install 'zero-plugin[tpu]'`", "install_xla"),
    )
    for name in names.split()
}


def lazy_names(
    module: str, homes: Mapping[str, str], submodules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a module whose names are loaded on first use.

    So torch is not needed to import the package, to run the command line, or to read the environment.

    Args:
        module: the name of the module.
        homes: module -> the names that it defines, separated by blanks.
        submodules: modules that become attributes without their own import, as in Accelerate.
    """
    inside = frozenset(submodules.split())
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name in inside:
            return importlib.import_module(f"{module}.{name}")
        if name not in home_of:
            return stand_in(module, name)
        # Import here: the package itself must import nothing.
        from zero_plugin.config.installed import garbage_collection_paused

        with garbage_collection_paused():
            return getattr(importlib.import_module(home_of[name]), name)

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of})

    return load, list_names, sorted(home_of)


class _LeftOut(type):
    """The type of a stand-in: a class, because scripts use it in `isinstance`; any other use raises the reason."""

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__} {LEFT_OUT[cls.__name__]}.")

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{cls.__name__} {LEFT_OUT[cls.__name__]}.")


_stand_ins: dict[str, _LeftOut] = {}  # one per name: two imports must return the same object


def stand_in(module: str, name: str) -> Any:
    """Return the stand-in for a name of Accelerate that a module does not have; for a module's `__getattr__`.

    A script may import a name for a case that never happens (an FSDP plugin behind a flag), so the import succeeds.

    Returns:
        A class without instances. Calling the class, or reading an attribute, raises NotImplementedError or
        AttributeError with a replacement.

    Raises:
        AttributeError: Accelerate does not have this name either.
    """
    if name not in LEFT_OUT:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _stand_ins.setdefault(name, _LeftOut(name, (), {"__module__": __name__}))
