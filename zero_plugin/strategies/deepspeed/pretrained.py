"""Construct transformers and PEFT models under ZeRO stage 3, and adapt their methods that read weights."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from deepspeed import zero
from torch import nn

from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError, StrategyError
from zero_plugin.strategies.deepspeed.partitioned_models import SHOWS_WEIGHTS, BuildConfig, own_partitioned
from zero_plugin.strategies.deepspeed.patches import Patches, replaced
from zero_plugin.tensors.modules import reading_names


@contextmanager
def building_pretrained(build: BuildConfig | None) -> Iterator[None]:
    """Partition transformers models that are constructed inside (zero.Init); None leaves them unpartitioned.

    transformers also gathers partitioned parameters when it resizes embeddings or generates. Before 5.3, transformers
    does not gather to initialize, in `from_config`, and in 4.57 for parameters that a file lacks.
    """
    from transformers.integrations import deepspeed as integration

    with replaced(integration, "_hf_deepspeed_config_weak_ref", None):
        if build is None:
            yield
            return
        integration.set_hf_deepspeed_config(build)
        gathers = hasattr(integration, "initialize_weights_zero3")
        initializing = nullcontext() if gathers else _initializing_gathered()
        with build.counted_by_gpu(), initializing, _drawing_as_unpartitioned(build):
            yield


def _drawing_as_unpartitioned(build: BuildConfig) -> AbstractContextManager[None]:
    """Make `from_config` of a transformers model draw the same random values as unpartitioned.

    transformers leaves out the values that torch's own layers draw, and draws only on rank 0. The model then has other
    values than below stage 3, and the processes' generators are no longer in step.
    """
    from transformers import modeling_utils as modeling
    from transformers.integrations import deepspeed as integration

    plain_from_config = inspect.getattr_static(modeling.PreTrainedModel, "_from_config").__func__

    def from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Only if transformers itself would partition: not in `from_pretrained`, `init_model` or another from_config.
        partitions = integration.is_deepspeed_zero3_enabled() and not modeling._is_quantized
        inside: AbstractContextManager[None] = nullcontext()
        if partitions and not modeling._is_ds_init_called:
            inside = partition_when_built(build)
        with inside:
            return plain_from_config(cls, *args, **kwargs)

    return replaced(modeling.PreTrainedModel, "_from_config", classmethod(from_config))


@contextmanager
def partition_when_built(build: BuildConfig) -> Iterator[None]:
    """Partition the parameters of modules that are constructed inside, with the usual initial values."""
    with _transformers_initializes_gathered(), build.init():
        yield


@contextmanager
def _transformers_initializes_gathered() -> Iterator[None]:
    """Make transformers gather partitioned modules for its second initialization, after construction."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    # Without this flag, from_config itself would partition, and initialize only on rank 0.
    with _initializing_gathered(), replaced(modeling, "_is_ds_init_called", True):
        yield


def _initializing_gathered() -> AbstractContextManager[None]:
    """Gather a module of a transformers model while transformers initializes it."""
    from transformers.modeling_utils import PreTrainedModel

    plain_initialize = PreTrainedModel._initialize_weights

    def initialize(self: Any, module: nn.Module, *args: Any) -> None:
        # A module's own function may also initialize the parameters of its direct children. Every process draws the
        # same random numbers, so the generators stay in step; rank 0's values are kept. from_pretrained has already
        # gathered the parameters that its files lack.
        reached = [p for part in (module, *module.children()) for p in own_partitioned(part)]
        with zero.GatheredParameters(reached, modifier_rank=0):
            plain_initialize(self, module, *args)

    return replaced(PreTrainedModel, "_initialize_weights", initialize)


def adapt_pretrained_methods(model: nn.Module, processes: Processes) -> None:
    """Adapt `generate`, `save_pretrained` and PEFT's `merge`, of the model and of inner models, to partitioned weights.

    * `generate`: processes that are done continue until all are, because each has a partition of every weight.
    * `save_pretrained`: writes the given `state_dict`. Without one, it raises on the main process and does nothing on
      the others, where `accelerator.get_state_dict` returns None.
    * `merge` and `unmerge` of layers with adapters: raise if their weights are not gathered. PEFT would add an empty
      product to an empty weight, and then leave the adapters out of the forward.
    Raises:
        StrategyError: PEFT saves the adapters without using a state dict.
    """
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            raise StrategyError(
                f"PEFT reads the prompts of {adapter.peft_type.value} from the model. At ZeRO stage 3 they are "
                "partitioned there, so they could not be saved.\n"
                "Use stage 2, or adapters of another kind, e.g. LoRA."
            )
    generation, patches = sys.modules.get("transformers.generation.utils"), Patches()
    parts: list[Any] = list(model.modules())
    for part in parts:
        if generation is not None and isinstance(part, generation.GenerationMixin) and processes.world_size > 1:
            patches.replace(part, "generate", _around(part.generate, _generate_together))
        if callable(getattr(type(part), "save_pretrained", None)):
            patches.replace(part, "save_pretrained", _around(part.save_pretrained, _save_whole, processes.rank, part))
        if all(hasattr(type(part), name) for name in ("merge", "unmerge")):  # a layer with adapters of PEFT
            patches.replace(part, "merge", _around(part.merge, _merge_whole, part))
            patches.replace(part, "unmerge", _around(part.unmerge, _merge_whole, part))


def _around(own: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Return a call of `function` with the method `own`, or `own` itself if an earlier `prepare` has replaced it."""
    is_replaced = getattr(own, "func", None) is function
    return own if is_replaced else functools.partial(function, *args, own)


def _generate_together(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return generate(*args, **{"synced_gpus": True, **kwargs})


def _save_whole(rank: int, module: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(save).bind_partial(*args, **kwargs)
    if SHOWS_WEIGHTS.get() or not any(map(own_partitioned, module.modules())):
        return save(*args, **kwargs)
    if {**given.kwargs, **given.arguments}.get("state_dict") is not None:
        # PEFT takes the values from the given dict. From modules that it saves alongside adapters it reads the names.
        with reading_names() if getattr(module, "peft_config", None) else nullcontext():
            return save(*args, **kwargs)
    if rank == 0:
        raise LoopError(
            "save_pretrained() of a model that is partitioned by ZeRO stage 3: no process has all of its weights.\n"
            "Call accelerator.save_model(model, folder), or pass state_dict=accelerator.get_state_dict(model), which "
            "all processes call."
        )
    return None


def _merge_whole(module: nn.Module, merge: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if any(map(own_partitioned, module.modules())):
        raise LoopError(
            f"merging or unmerging adapters of a {type(module).__name__} whose weights ZeRO stage 3 has partitioned: "
            "nothing would be added to them.\nCall merge_adapter(), unmerge_adapter() and merge_and_unload() inside "
            "`with accelerator.whole_weights(model):`, on every process."
        )
    return merge(*args, **kwargs)
