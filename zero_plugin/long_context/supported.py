"""Decide whether a transformers model can compute on parts of sequences, and give the reason if it cannot."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

_LAYERS = ("full_attention", "sliding_attention")
_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position of a forward
# Without rotary embeddings, a model may derive positions from padding or add an offset. These models count from 0.
_FROM_ZERO = ("gpt2", "gpt_bigcode", "gpt_neo", "ctrl")
# These models have rotary embeddings, but packed documents attend to each other on one process.
_NOT_TOLD_APART = ("afmoe",)

# Packages whose modules and hooks treat a part like a complete sequence, except NEFTune: its noise depends on the
# length.
_KNOWN = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes", "zero_plugin")
_NOISE = "neftune"


def causal_models(module: nn.Module) -> Iterator[Any]:
    """Find the outermost transformers models in `module`; this may be `module` itself.

    A class that a script has derived does not count, because its forward may do anything with hidden states. The search
    continues inside of it.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    if isinstance(module, modeling.PreTrainedModel) and type(module).__module__.startswith("transformers."):
        yield module
        return
    for child in module.children():
        yield from causal_models(child)


def why_not(model: Any, processes: int) -> str | None:
    """Return the reason why a transformers model cannot compute on parts of sequences; None if it can.

    Args:
        model: the model.
        processes: the number of processes that share its sequences.
    """
    config, name = model.config, type(model).__name__
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "layer_types", None) or ()
    other = sorted({str(kind) for kind in layers} - {*_LAYERS})
    ropes = sorted({kind for kind in _rope_types(config) if kind in _OF_LENGTH})
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv1d)]
    rotates = any(getattr(config, known, None) for known in ("rope_parameters", "rope_scaling", "rope_theta"))
    both_ways = [part for part in model.modules() if getattr(part, "is_causal", True) is False]
    reasons = {
        f"a {name} implements its own attention": not getattr(model, "_supports_attention_backend", False),
        f"a {name} has an encoder and a decoder": getattr(config, "is_encoder_decoder", False),
        f"a {name} has another model in addition to its text model": config.get_text_config() is not config,
        f"its {heads} attention heads do not divide among {processes} processes": heads % processes,
        f"it has layers of {', '.join(other)}": other,
        f"its {', '.join(ropes)} position embeddings depend on the length of a part": ropes,
        f"it is not known how a {name} numbers positions": not rotates and config.model_type not in _FROM_ZERO,
        f"a {name} does not separate packed documents": config.model_type in _NOT_TOLD_APART,
        f"{name} convolves along the sequence": convolutions,
        f"a {name} attends to later tokens": both_ways or not getattr(config, "is_causal", True),
        "it attends in chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None),
        "it caps its attention's scores (attn_logit_softcapping)": getattr(config, "attn_logit_softcapping", None),
        f"the attention of a {name} has sinks": any(hasattr(part, "sinks") for part in model.modules()),
        "it attends to another model (add_cross_attention)": getattr(config, "add_cross_attention", False),
        "the loss of its router (output_router_logits) would cover only a part": getattr(
            config, "output_router_logits", False
        ),
        f"a {name} is neither a causal language model nor its base": not is_tokenwise(model),
        f"the forward of a {name} passes no shift_labels on to its loss": not takes_any(model),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def strangers_in(model: Any) -> dict[str, str]:
    """Return the modules and hooks of a transformers model that may mix tokens: each name, with one place."""
    found: dict[str, str] = {}
    for place, part in model.named_modules():
        if part is model:
            continue  # hooks of the model itself get complete samples and complete results
        for one in (type(part), *part._forward_hooks.values(), *part._forward_pre_hooks.values()):
            while isinstance(one, partial):
                one = one.func
            named = one if hasattr(one, "__name__") else type(one)  # a hook may be a callable object
            if str(named.__module__).split(".")[0] not in _KNOWN or _NOISE in named.__name__:
                found.setdefault(named.__name__, place)
    return found


def _rope_types(config: Any) -> Iterator[str]:
    """List the kinds of rotary position embeddings in a configuration, in the formats of all transformers versions."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None) or {}
        for one in (found, *(inner for inner in found.values() if isinstance(inner, dict))):
            yield str(one.get("rope_type", one.get("type", "")))


def is_tokenwise(model: Any) -> bool:
    """Return whether each token is independent after the attention: the model has a language head, or no head."""
    has_head = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    return model.base_model is model or (has_head and model.get_output_embeddings() is not None)


def takes_any(model: Any) -> bool:
    """Return whether the forward takes any keywords, or is a base model's, which has no loss to pass them to."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return model.base_model is model or inspect.Parameter.VAR_KEYWORD in kinds
