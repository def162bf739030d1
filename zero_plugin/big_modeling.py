"""Models that no single device holds, under Accelerate's name for their module."""

from zero_plugin.big_models.dispatch import cpu_offload as cpu_offload
from zero_plugin.big_models.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
from zero_plugin.big_models.dispatch import disk_offload as disk_offload
from zero_plugin.big_models.dispatch import dispatch_model as dispatch_model
from zero_plugin.big_models.load import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from zero_plugin.big_models.module_hooks import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from zero_plugin.tensors.empty import init_empty_weights as init_empty_weights
from zero_plugin.tensors.empty import init_on_device as init_on_device
