"""What `accelerate.utils` has and this package has not, with what to use instead."""

from __future__ import annotations

from typing import Final

__all__ = ["LEFT_OUT", "missing_name"]

LEFT_OUT: Final[dict[str, str]] = {
    name: reason
    for reason, names in (
        (
            "is FSDP's; zero_plugin trains by ZeRO, DDP or TPU: use a DeepSpeed stage 3 config",
            """FullyShardedDataParallelPlugin disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading
            compile_regions_fsdp2 ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names
            fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler
            get_module_children_bottom_up load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model
            save_fsdp_optimizer""",
        ),
        (
            "is Megatron-LM's; zero_plugin trains by ZeRO, DDP or TPU: use a DeepSpeed stage 3 config",
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
            "is for quantized weights; load the model by transformers' quantization_config, and prepare() that",
            "BnbQuantizationConfig CustomDtype has_4bit_bnb_layers load_and_quantize_model",
        ),
        (
            "splits a model or a sequence over processes; zero_plugin divides data: use a DeepSpeed stage 3 config",
            """DeepSpeedSequenceParallelConfig ParallelismConfig TorchContextParallelConfig TorchTensorParallelConfig
            TorchTensorParallelPlugin get_model_tp_size is_pippy_available model_has_dtensor prepare_pippy""",
        ),
        (
            "is SageMaker's; start the script with `zero-plugin launch` on the machines themselves",
            "SageMakerDistributedType prepare_sagemager_args_inputs",
        ),
        (
            "is a part of Accelerate's launcher; use `zero-plugin launch` or zero_plugin.notebook_launcher",
            """PrepareForLaunch TORCH_LAUNCH_PARAMS get_current_device_type prepare_deepspeed_cmd_env
            prepare_multi_gpu_env prepare_simple_launcher_cmd_env prepare_tpu""",
        ),
        (
            "is a part of Accelerate's own preparation; Accelerator.prepare does what it is for",
            """DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper compile_regions_deepspeed
            deepspeed_required get_grad_scaler get_mixed_precision_context_manager map_pytorch_optim_to_deepspeed""",
        ),
        (
            "names a file of Accelerate's checkpoints; Accelerator.load_state reads ours",
            "OPTIMIZER_NAME RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME",
        ),
        (
            "is about back ends of Accelerate's own; zero_plugin runs on CUDA, CPU or TPU",
            """MITA_PROFILING_AVAILABLE_PYTORCH_VERSION TORCH_DISTRIBUTED_OPERATION_TYPES
            XPU_PROFILING_AVAILABLE_PYTORCH_VERSION is_habana_gaudi1""",
        ),
        ("is gone; torch_xla is installed with `pip install torch_xla[tpu]`", "install_xla"),
    )
    for name in names.split()
}


def missing_name(module: str, name: str) -> Exception:
    """What a module's `__getattr__` raises for a name that it does not have.

    Returns:
        An ImportError where Accelerate has the name, with what to use instead. (Of an AttributeError, `from … import`
        would show no more than that the name is missing.) Else an AttributeError.
    """
    if name in LEFT_OUT:
        return ImportError(f"{name} {LEFT_OUT[name]}.")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
