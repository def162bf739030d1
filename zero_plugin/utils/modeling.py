"""Names, sizes and places of a model's tensors, as `accelerate.utils.modeling` has them."""

from __future__ import annotations

import sys

from torch import nn

from zero_plugin.big_models.align import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from zero_plugin.big_models.load import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    load_checkpoint_in_model,
    load_state_dict,
)
from zero_plugin.big_models.placement import (
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from zero_plugin.big_models.stored import (
    calculate_maximum_sizes,
    compute_module_sizes,
    convert_file_size_to_int,
    get_max_layer_size,
    load_offloaded_weights,
)
from zero_plugin.checkpoint.objects import tensor_storage as id_tensor_storage
from zero_plugin.tensors.modules import (
    dtype_byte_size,
    find_tied_parameters,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from zero_plugin.tensors.wrappers import extract_model

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "id_tensor_storage",
    "infer_auto_device_map",
    "is_peft_model",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]


def is_peft_model(model: nn.Module) -> bool:
    """Whether the model, without what wraps it, is PEFT's."""
    peft = sys.modules.get("peft")  # a model of PEFT's has imported it
    return peft is not None and isinstance(extract_model(model), peft.PeftModel)
