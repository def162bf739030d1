"""Models that ZeRO-3 partitions: built, gathered, loaded and broadcast.

Builds models partitioned from the start at ZeRO stage 3: `from_pretrained`, and anything inside `init_model`.

Makes transformers' own methods of a partitioned model do what they do on a whole one.

Parameters that ZeRO-3 has partitioned, whole for a while.

Lets stage 3 run modules whose parameters have no elements.

Lets DeepSpeed send parameters of any shape and memory format from the first process to the others.

It sends their bytes as `p.data.view(torch.uint8)`, which fails for a parameter of no dimension, such as CLIP's
`logit_scale`, and for one that is not contiguous, such as a convolution's in channels_last.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine, zero
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, ZeroParamStatus, free_param
from torch import Tensor, nn

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Facts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import CheckpointError, LoopError, StrategyError
from zero_plugin.plan.run_facts import probe_machine
from zero_plugin.strategies.deepspeed.nvme import give_own_swap_folders
from zero_plugin.strategies.deepspeed.states import give_partition
from zero_plugin.tensors.modules import parameter_like, replace_empty

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
        config: dict[str, Any] = {**tree.nested(auto="auto"), "train_micro_batch_size_per_gpu": 1}
        give_own_swap_folders(config, self._processes)
        return config

    def counted_by_gpu(self) -> AbstractContextManager[None]:
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
def unpartitioned_pretrained() -> Iterator[None]:
    """`from_pretrained` and `from_config` build whole models inside."""
    from transformers.integrations import deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before


@contextmanager
def partition_when_built(build: BuildConfig) -> Iterator[None]:
    """Each module's parameters are partitioned as soon as it is made; their values are those of a model built whole."""
    with _transformers_initializes_gathered(), build.init():
        yield


def allocate_partitions(module: nn.Module, build: BuildConfig) -> None:
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


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a transformers model; transformers is not imported to know."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def adapt_pretrained_methods(model: nn.Module, processes: Processes) -> None:
    """Let `generate` and `save_pretrained`, of the model and those inside it, know that the weights are partitioned.

    * `generate`: processes that are done go on until all are, since each has a part of every weight.
    * `save_pretrained`: writes the `state_dict` that it is given; without one it writes nothing on the processes for
      which `accelerator.get_state_dict` has none, and refuses on the main process, where it would write empty tensors.

    Raises:
        StrategyError: PEFT saves the model's adapters past the state dict.
    """
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise StrategyError(
                f"PEFT reads the prompts of {adapter.peft_type.value} from the model, where ZeRO stage 3 leaves no "
                "whole weights: they could not be saved.\nUse stage 2, or adapters of another kind, e.g. LoRA."
            )
    generation = sys.modules.get("transformers.generation.utils")
    for module in model.modules():
        if generation is not None and isinstance(module, generation.GenerationMixin) and processes.world_size > 1:
            _replace(module, "generate", _generate_together)
        if callable(getattr(type(module), "save_pretrained", None)):
            _replace(module, "save_pretrained", functools.partial(_save_whole, processes.rank))


def _replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, functools.partial(function, getattr(module, name)))


def _generate_together(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return generate(*args, **{"synced_gpus": True, **kwargs})


def _save_whole(rank: int, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(save).bind_partial(*args, **kwargs)
    if {**given.kwargs, **given.arguments}.get("state_dict") is not None:
        return save(*args, **kwargs)
    if rank == 0:
        raise LoopError(
            "save_pretrained() of a model that is partitioned by ZeRO stage 3: no process has its weights.\n"
            "Call accelerator.save_model(model, folder), or pass state_dict=accelerator.get_state_dict(model), which "
            "all processes call."
        )
    return None


def gathered_parameters(
    parameters: Iterable[Tensor], modifier_rank: int | None, forward_of: nn.Module | None
) -> AbstractContextManager[Any]:
    """Inside, the parameters are whole on every process; collective.

    Args:
        parameters: may hold some that are not partitioned.
        modifier_rank: the process whose changes stay; None where none changes them.
        forward_of: the module whose forward this happens in, if it does: they are then gathered with its own.
    """
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    context: AbstractContextManager[Any] = zero.GatheredParameters(partitioned, modifier_rank, forward_of)
    return context


def fetch_empty(engine: Any) -> None:
    """Have parameters without elements be there whenever a module's are to be.

    DeepSpeed gathers nothing for a module of whose parameters no element is missing, and then asserts that all of them
    were gathered.
    """
    empty: list[Any] = [p for p in engine.module.parameters() if getattr(p, "ds_numel", None) == 0]
    if not empty:
        return
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_with_empty(*args: Any, **kwargs: Any) -> None:
        for p in empty:
            if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                p.data = p.data.new_empty(p.ds_shape)
                p.ds_status = ZeroParamStatus.AVAILABLE
        fetch(*args, **kwargs)

    coordinator.fetch_sub_module = fetch_with_empty


@contextmanager
def broadcasting_any_shape() -> Iterator[None]:
    """Inside, an engine that is made sends them. Weights become contiguous: the layout that partitions keep them in."""
    own = DeepSpeedEngine._broadcast_model
    DeepSpeedEngine._broadcast_model = _wrapped(own, lambda engine: engine.module.parameters())
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model = own


@functools.cache  # once in a process
def partition_any_shape() -> None:
    """From now on `zero.Init` and `zero.GatheredParameters` do.

    For the whole process, since transformers makes and loads models through these very classes. It changes what they do
    with tensors of such shapes only, for which they would raise.
    """
    zero.GatheredParameters.__exit__ = _wrapped(zero.GatheredParameters.__exit__, _to_send)
    partition = zero.Init._zero_init_param

    @functools.wraps(partition)
    def partition_any(init: Any, parameter: Any) -> None:
        shape = parameter.shape
        with _sendable([parameter]):
            partition(init, parameter)
        parameter.ds_shape = shape  # what it is gathered to

    zero.Init._zero_init_param = partition_any


def _wrapped(own: Callable[..., Any], parameters_of: Callable[[Any], Iterable[nn.Parameter]]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: Any, *args: Any) -> Any:
        with _sendable(parameters_of(self)):
            return own(self, *args)

    return call


def _to_send(gathered: Any) -> Iterable[nn.Parameter]:
    parameters: Iterable[nn.Parameter] = gathered.params if gathered.enabled and gathered.src_rank is not None else ()
    return parameters


@contextmanager
def _sendable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    scalars = []
    for p in parameters:
        if p.data.dim() == 0:
            scalars.append(p)
            p.data = p.data.view(1)
        elif not p.data.is_contiguous():
            p.data = p.data.contiguous()
    yield
    for p in scalars:
        if p.data.shape == torch.Size([1]):  # else it was partitioned meanwhile
            p.data = p.data.view(())
