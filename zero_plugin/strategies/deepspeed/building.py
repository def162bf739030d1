"""Builds models partitioned from the start at ZeRO stage 3: `from_pretrained`, and anything inside `init_model`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, free_param
from torch import Tensor, nn

from zero_plugin.bigmodel.tensors import parameter_like
from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO
from zero_plugin.errors import CheckpointError
from zero_plugin.probe.machine import probe_machine
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import plain
from zero_plugin.strategies.allotting import replace_empty
from zero_plugin.strategies.deepspeed.partitions import give_partition
from zero_plugin.strategies.deepspeed.swap_folders import give_own_swap_folders
from zero_plugin.strategies.processes import Processes

__all__ = ["BuildConfig", "allot_partitions", "partition_at_birth", "partition_pretrained", "whole_pretrained"]

# What zero.Init reads of a configuration; the rest waits for the loop and the model.
_READ_BY_INIT = ("zero_optimization", "fp16", "bf16", "aio", "data_types")


class BuildConfig:
    """What transformers asks while it builds a model: whether to partition it, and with which DeepSpeed configuration.

    It stands for transformers' own HfDeepSpeedConfig, which needs accelerate.
    """

    def __init__(self, document: Document, processes: Processes) -> None:
        self._document = document
        self._processes = processes

    def is_zero3(self) -> bool:
        """Yes: it exists at stage 3 only."""
        return True

    @property
    def config(self) -> dict[str, Any]:
        """For one `zero.Init`: without open fields, with NVMe folders of its own. Collective at NVMe.

        Raises:
            ConfigError: the configuration cannot run, whatever the loop says.
        """
        machine = probe_machine("cuda" if self._processes.device.type == "cuda" else "cpu", self._processes.world_size)
        tree = resolve(self._document, Facts(machine=machine, complete=False)).tree
        tree = tree.where(lambda path, entry: path[0] in _READ_BY_INIT and entry.value is not AUTO)
        config: dict[str, Any] = {**plain(tree.nested()), "train_micro_batch_size_per_gpu": 1}
        give_own_swap_folders(config, self._processes)
        return config

    def counted_by_gpu(self) -> AbstractContextManager[None]:
        """See `Processes.counted_by_gpu`."""
        return self._processes.counted_by_gpu()

    def init(self) -> _Init:
        """A `zero.Init` with this configuration, on this process's device."""
        with self.counted_by_gpu():
            return _Init(self.config)


@contextmanager
def partition_pretrained(build: BuildConfig) -> Iterator[None]:
    """`from_pretrained` and `from_config` partition inside; resizing embeddings and generating know it too."""
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration.set_hf_deepspeed_config(build)
    try:
        with build.counted_by_gpu():
            yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


@contextmanager
def whole_pretrained() -> Iterator[None]:
    """`from_pretrained` and `from_config` build whole models inside."""
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


@contextmanager
def partition_at_birth(build: BuildConfig) -> Iterator[None]:
    """Each module's parameters are partitioned as soon as it is made; their values are those of a model built whole."""
    with _transformers_initializes_gathered(), build.init():
        yield


def allot_partitions(module: nn.Module, build: BuildConfig) -> None:
    """Partition parameters that are on the meta device: this process' part is memory without values, or not even that.

    A partition on NVMe has no file before it is filled. Collective.

    Raises:
        CheckpointError: frozen or all weights are to be quantized when they are partitioned.
    """
    init = build.init()
    if init.quantized_nontrainable_weights or init.quantized_initialization:
        raise CheckpointError(
            "partitions of quantized weights (zero_quantized_nontrainable_weights, weight_quantization_config) cannot "
            "be filled from files; load the model whole: from_pretrained(), and zero3_init_flag: false."
        )
    replace_empty(module, lambda tensor: _partition_of(tensor, init))
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    init._convert_to_zero_parameters(module.parameters())  # those with values


def _partition_of(tensor: Tensor, init: _Init) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=init.local_device)
    # DeepSpeed reads the shape off the whole parameter: here one that takes the memory of one element.
    whole = torch.empty((), dtype=init.dtype, device=init.local_device).expand(tensor.shape)
    parameter: Any = parameter_like(tensor, whole)
    init._convert_to_deepspeed_param(parameter)
    parameter.ds_numel_aligned = init._aligned_size(parameter)
    give_partition(parameter, init)
    free_param(parameter)
    return parameter  # type: ignore[no-any-return]


class _Init(zero.Init):  # type: ignore[misc]
    """zero.Init that converts parameters to the type of training when they are complete, and nothing else.

    DeepSpeed's own makes every floating tensor in that type from the start: buffers lose precision, and random values
    are drawn in it, so that the model is another one than outside.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.device])

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(self.dtype)
        super()._zero_init_param(param)


@contextmanager
def _transformers_initializes_gathered() -> Iterator[None]:
    """A transformers model initialises its modules once more when they are complete, and so partitioned by then."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    plain_initialize = modeling.PreTrainedModel._initialize_weights

    def initialize(self: Any, module: nn.Module, *args: Any) -> None:
        # A module's own function may touch the parameters of its direct children too. Every process draws the same
        # random numbers, so that none is ahead of the others afterwards; process 0's values count.
        reached = [p for part in (module, *module.children()) for p in part.parameters(recurse=False)]
        with zero.GatheredParameters(reached, modifier_rank=0):
            plain_initialize(self, module, *args)

    modeling.PreTrainedModel._initialize_weights = initialize
    try:
        yield
    finally:
        modeling.PreTrainedModel._initialize_weights = plain_initialize
