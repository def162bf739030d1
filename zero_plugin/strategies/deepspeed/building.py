"""Builds models partitioned from the start at ZeRO stage 3: `from_pretrained`, and anything inside `init_model`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed import zero
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride
from torch import nn

from zero_plugin.config.document import Document
from zero_plugin.config.tree import AUTO
from zero_plugin.probe.machine import probe_machine
from zero_plugin.resolve.facts import Facts
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import plain
from zero_plugin.strategies.deepspeed.swap_folders import give_own_swap_folders
from zero_plugin.strategies.processes import Processes

__all__ = ["BuildConfig", "partition_at_birth", "partition_pretrained", "whole_pretrained"]

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


@contextmanager
def partition_pretrained(build: BuildConfig) -> Iterator[None]:
    """`from_pretrained` and `from_config` partition inside; resizing embeddings and generating know it too."""
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration.set_hf_deepspeed_config(build)
    try:
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
    with _transformers_initializes_gathered(), _Init(build.config):
        yield


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
