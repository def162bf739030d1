"""Whether weights that should be one are one, and in one place."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from zero_plugin.bigmodel.placement import lookup
from zero_plugin.bigmodel.tensors import find_tied_parameters

__all__ = ["check_tied_parameters_in_config", "check_tied_parameters_on_same_device", "warn_of_ties"]

_logger = logging.getLogger(__name__)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether a transformers model says that some of its weights are tied; false for any other."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    held: Any = model
    config = held.config
    text = config.get_text_config(decoder=True)
    embeddings = getattr(text, "tie_word_embeddings", False) and held.get_output_embeddings() is not None
    both = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    return bool(embeddings or both)


def check_tied_parameters_on_same_device(tied_params: list[list[str]], device_map: Mapping[str, Any]) -> None:
    """Warn of each group of names, from `find_tied_parameters`, whose weight a map sends to several places."""
    for group in tied_params:
        places = {name: lookup(device_map, name) for name in group}
        if len(set(places.values())) > 1:
            _logger.warning(
                f"Tied parameters are on different devices: {places}. Each device gets a copy of the weight."
            )


def warn_of_ties(model: nn.Module, device_map: Mapping[str, Any] | None) -> None:
    """Warn of weights that should be tied and are not, and of those that a map sends to several places."""
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        _logger.warning(f"The weights of {type(model).__name__} are not tied; call its tie_weights() first.")
    if device_map is not None:
        check_tied_parameters_on_same_device(tied, device_map)
