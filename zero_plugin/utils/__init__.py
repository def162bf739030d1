"""The names that scripts import from `accelerate.utils`; each is loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero_plugin.utils.lazy import lazy_names

# Import this now: a later import of the module `tqdm` would replace the function of that name here.
from zero_plugin.utils.tqdm import tqdm as tqdm

if TYPE_CHECKING:  # each module's public names, for editors and type checkers
    from zero_plugin.utils.constants import *  # noqa: F403
    from zero_plugin.utils.dataclasses import *  # noqa: F403
    from zero_plugin.utils.deepspeed import *  # noqa: F403
    from zero_plugin.utils.environment import *  # noqa: F403
    from zero_plugin.utils.imports import *  # noqa: F403
    from zero_plugin.utils.memory import *  # noqa: F403
    from zero_plugin.utils.modeling import *  # noqa: F403
    from zero_plugin.utils.offload import *  # noqa: F403
    from zero_plugin.utils.operations import *  # noqa: F403
    from zero_plugin.utils.other import *  # noqa: F403
    from zero_plugin.utils.random import *  # noqa: F403
    from zero_plugin.utils.versions import *  # noqa: F403

_NAMES = {
    "constants": """MODEL_NAME OPTIMIZER_NAME PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME
        SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME
        STR_OPERATION_TO_FUNC TORCH_DYNAMO_MODES WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME""",
    "dataclasses": """AutocastKwargs BaseEnum ComputeEnvironment DDPCommunicationHookType DataLoaderConfiguration
        DeepSpeedPlugin DeepSpeedSequenceParallelConfig DistributedDataParallelKwargs DistributedType DynamoBackend
        EnumWithContains GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
        ParallelismConfig PrecisionType ProfileKwargs ProjectConfiguration RNGType TensorInformation
        TorchDynamoPlugin""",
    "deepspeed": "DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
    "environment": """CPUInformation are_libraries_initialized check_cuda_p2p_ib_support clear_environment
        get_cpu_distributed_information get_driver_version get_gpu_info get_int_from_env
        parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment str_to_bool""",
    "memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    "modeling": """align_module_device calculate_maximum_sizes check_device_map check_tied_parameters_in_config
        check_tied_parameters_on_same_device clean_device_map compute_module_sizes convert_file_size_to_int
        dtype_byte_size find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
        get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params id_tensor_storage
        infer_auto_device_map is_peft_model load_checkpoint_in_model load_offloaded_weights load_state_dict
        named_module_tensors retie_parameters set_module_tensor_to_device""",
    "offload": """OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight
        offload_state_dict offload_weight save_offload_index""",
    "operations": """CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException GatheredParameters
        broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 find_batch_size
        find_device gather gather_object get_data_structure get_shape honor_type ignorant_find_batch_size
        initialize_tensors is_namedtuple is_tensor_information is_torch_tensor listify pad_across_processes
        recursively_apply reduce send_to_device slice_tensors""",
    "other": """clean_state_dict_for_safetensors compile_regions convert_bytes extract_model_from_parallel
        get_pretty_name has_compiled_regions is_compiled_module is_port_in_use load merge_dicts recursive_getattr save
        wait_for_everyone write_basic_config""",
    "random": "set_seed synchronize_rng_state synchronize_rng_states",
    "versions": "compare_versions is_torch_version",
}
_load, __dir__, _listed = lazy_names(__name__, {f"{__name__}.{module}": names for module, names in _NAMES.items()})

__all__ = [*_listed, "tqdm"]


def __getattr__(name: str) -> Any:
    # One rule for all functions `is_…_available`: `imports` makes them for any package.
    if name.startswith("is_") and name.endswith("_available"):
        from zero_plugin.utils import imports

        return getattr(imports, name)
    return _load(name)
