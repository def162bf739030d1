"""Makes transformers' own methods of a partitioned model do what they do on a whole one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from zero_plugin.errors import LoopError, StrategyError
from zero_plugin.strategies.processes import Processes

__all__ = ["adapt_pretrained_methods", "is_pretrained"]


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
