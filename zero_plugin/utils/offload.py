"""Weights in files and mappings of them, under the names of `accelerate.utils.offload`."""

from zero_plugin.big_models.stored import OffloadedWeightsLoader as OffloadedWeightsLoader
from zero_plugin.big_models.stored import PrefixedDataset as PrefixedDataset
from zero_plugin.big_models.stored import extract_submodules_state_dict as extract_submodules_state_dict
from zero_plugin.big_models.stored import load_offloaded_weight as load_offloaded_weight
from zero_plugin.big_models.stored import offload_state_dict as offload_state_dict
from zero_plugin.big_models.stored import offload_weight as offload_weight
from zero_plugin.big_models.stored import save_offload_index as save_offload_index
