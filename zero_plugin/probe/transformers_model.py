"""Builds a transformers model from its configuration without memory for weights, and makes inputs for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zero_plugin.errors import ConfigError, Problem

__all__ = ["build_model", "example_inputs"]

_ONE_LABEL: Final = ("ForSequenceClassification", "ForImageClassification", "ForMultipleChoice")
_LABEL_PER_TOKEN: Final = (
    *("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification"),
)


def build_model(config: Path) -> nn.Module:
    """The model of a `config.json`, of the class that it names, else a causal one, on the meta device.

    Raises:
        ConfigError: transformers does not know it.
    """
    import transformers

    try:
        settings = transformers.AutoConfig.from_pretrained(config)
        named = (settings.architectures or [""])[0]
        if settings.problem_type is None and settings.num_labels > 1:
            settings.problem_type = "single_label_classification"  # what it takes integer labels for, by their values
        with torch.device("meta"):
            if hasattr(transformers, named):
                return getattr(transformers, named)(settings)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(settings)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        message = f"transformers builds no model from {config}: {reason}"
        fix = "Give a function that builds it, as module:function, or --params, --hidden_size and --layers."
        raise ConfigError([Problem("plan", "", message, fix)]) from error


def example_inputs(model: Any, sequence_length: int) -> Callable[[int], dict[str, torch.Tensor]]:
    """A function from a number of samples to a training batch for a transformers model, with labels; shapes only.

    Args:
        model: any transformers model for text or images.
        sequence_length: tokens of one sample, of an encoder's and of a decoder's.

    Raises:
        ConfigError: it is none, or takes other inputs.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    main = getattr(model, "main_input_name", "what its code says")
    if config is None or main not in ("input_ids", "pixel_values"):
        fix = "Give a function that returns the model and example inputs, as module:function."
        raise ConfigError([Problem("plan", "", f"{name} takes {main}, for which there is no example", fix)])

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def make(samples: int) -> dict[str, torch.Tensor]:
        tokens = integers(samples, sequence_length)
        batch = {main: tokens}
        if main == "pixel_values":
            size = getattr(config, "image_size", None) or 224  # ImageNet's, as most of these models were trained on
            height, width = size if isinstance(size, list | tuple) else (size, size)
            batch[main] = torch.empty(samples, getattr(config, "num_channels", 3), height, width, device="meta")
        elif getattr(config, "is_encoder_decoder", False):
            batch["decoder_input_ids"] = tokens
        if name.endswith(_LABEL_PER_TOKEN):
            batch["labels"] = tokens
        elif name.endswith(_ONE_LABEL):
            batch["labels"] = integers(samples)
        elif name.endswith("ForQuestionAnswering"):
            batch |= {"start_positions": integers(samples), "end_positions": integers(samples)}
        return batch

    return make
