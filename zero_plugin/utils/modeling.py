"""Names, sizes and devices of a model's tensors, under the names of `accelerate.utils.modeling`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from zero_plugin.big_models.load import check_tied_parameters_in_config as check_tied_parameters_in_config
from zero_plugin.big_models.load import check_tied_parameters_on_same_device as check_tied_parameters_on_same_device
from zero_plugin.big_models.load import load_checkpoint_in_model as load_checkpoint_in_model
from zero_plugin.big_models.load import load_state_dict as load_state_dict
from zero_plugin.big_models.module_hooks import align_module_device as align_module_device
from zero_plugin.big_models.module_hooks import get_state_dict_from_offload as get_state_dict_from_offload
from zero_plugin.big_models.module_hooks import get_state_dict_offloaded_model as get_state_dict_offloaded_model
from zero_plugin.big_models.module_hooks import has_offloaded_params as has_offloaded_params
from zero_plugin.big_models.placement import calculate_maximum_sizes as calculate_maximum_sizes
from zero_plugin.big_models.placement import check_device_map as check_device_map
from zero_plugin.big_models.placement import clean_device_map as clean_device_map
from zero_plugin.big_models.placement import compute_module_sizes as compute_module_sizes
from zero_plugin.big_models.placement import convert_file_size_to_int as convert_file_size_to_int
from zero_plugin.big_models.placement import get_balanced_memory as get_balanced_memory
from zero_plugin.big_models.placement import get_max_layer_size as get_max_layer_size
from zero_plugin.big_models.placement import get_max_memory as get_max_memory
from zero_plugin.big_models.placement import infer_auto_device_map as infer_auto_device_map
from zero_plugin.big_models.stored import load_offloaded_weights as load_offloaded_weights
from zero_plugin.checkpoint.objects import tensor_storage
from zero_plugin.tensors.modules import dtype_byte_size as dtype_byte_size
from zero_plugin.tensors.modules import find_tied_parameters as find_tied_parameters
from zero_plugin.tensors.modules import named_module_tensors as named_module_tensors
from zero_plugin.tensors.modules import retie_parameters as retie_parameters
from zero_plugin.tensors.modules import set_module_tensor_to_device as set_module_tensor_to_device
from zero_plugin.tensors.wrappers import extract_model
from zero_plugin.utils.lazy import stand_in

id_tensor_storage = tensor_storage


def is_peft_model(model: nn.Module) -> bool:
    """Return whether the model inside its wrappers is PEFT's."""
    peft = sys.modules.get("peft")  # a PEFT model exists only if peft was imported
    return peft is not None and isinstance(extract_model(model), peft.PeftModel)


def __getattr__(name: str) -> Any:
    return stand_in(__name__, name)
