"""Writes transformers and PEFT models with what `from_pretrained` needs beside, or instead of, the weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.save_model import write_model_folder
from zero_plugin.strategies.named_tensors import persistent_tensors, shared_names

__all__ = ["adapter_names", "has_adapters", "write_configuration", "write_pretrained"]


def has_adapters(module: nn.Module) -> bool:
    """Whether PEFT adapters are trained on it: a PeftModel, or a transformers model with `add_adapter`."""
    return "peft" in sys.modules and bool(getattr(module, "peft_config", None))


def adapter_names(module: Any) -> frozenset[str]:
    """Names of the tensors that PEFT stores for all adapters of `module`, and of all others that are trained.

    PEFT itself is asked, with stand-ins that hold no data, so that nothing is gathered. It may ask the Hub for the base
    model's configuration: two processes need not get the same answer.
    """
    from peft import get_peft_model_state_dict

    names = [*(name for name, _ in persistent_tensors(module)), *shared_names(module)]
    stand_ins = {name: torch.empty(0, device="meta") for name in names}
    stored = {
        id(tensor)
        for adapter in module.peft_config
        for tensor in get_peft_model_state_dict(module, state_dict=dict(stand_ins), adapter_name=adapter).values()
    }
    trained = {name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    return frozenset(name for name, stand_in in stand_ins.items() if id(stand_in) in stored or name in trained)


def write_pretrained(
    module: Any,
    tensors: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    max_shard_size: int | str,
    tied: Mapping[str, str],
) -> None:
    """Write a model so that its own `from_pretrained`, or any reader of safetensors, reads it. One process calls it.

    * With adapters: they alone, in PEFT's layout (`adapter_model.safetensors`, `adapter_config.json`).
    * Of transformers: weights, `config.json`, and `generation_config.json` where it generates.
    * Any other module: weights.

    Args:
        module: the user's own, whose parameters may be partitioned.
        tensors: its tensors by name, whole; of a model with adapters, those that `adapter_names` tells.
        folder: made if it is missing.
        max_shard_size: bytes of one file, see `write_model_folder`.
        tied: name → the name whose tensor it shares.
    """
    if has_adapters(module):
        state = {name: tensor.to("cpu", copy=True) for name, tensor in tensors}
        module.save_pretrained(folder, state_dict=state)
        return
    unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()  # transformers' positions that a model computes
    kept = ((name, tensor) for name, tensor in tensors if name not in unsaved)
    write_model_folder(kept, folder, max_shard_size=max_shard_size, tied=tied)
    write_configuration(module, folder)


def write_configuration(module: Any, folder: str | Path) -> None:
    """Write the configuration files of a transformers model; nothing for any other module."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
