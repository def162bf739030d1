"""What transformers and PEFT models need for `from_pretrained` beside, or instead of, their weights."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_plugin.strategies.named_tensors import persistent_tensors, shared_names

__all__ = ["adapter_names", "has_adapters", "write_configuration"]


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


def write_configuration(module: Any, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write the configuration files of a transformers model; nothing for any other module.

    Args:
        module: the user's own.
        folder: where its weights are.
        dtype: that they are stored in; None for the model's own.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    config.dtype = str(dtype or module.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)
