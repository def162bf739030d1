"""Makes transformers' causal language models compute on this process's part of each sequence.

Two hooks around the model's forward do it: before it the complete arguments become this process's part of them, and
after it the parts of the results become complete ones. In between, the model calls an attention function of this
package, which is registered with transformers under its own name and set in this model's configuration alone. A forward
with a cache of keys, as `generate` has, is left as it is.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zero_plugin.config.document import Document
from zero_plugin.config.parallelism import SEQUENCE_KEY, sequence_parallel_size
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.sequence_parallel.attention import Layout, attend, documents_of, with_filling
from zero_plugin.sequence_parallel.group import CURRENT, SequenceGroup

NAME = "zero_plugin_sequence_parallel"  # of the attention, in transformers' registry
_IGNORED = -100  # the label of tokens that are in no loss
# What fills sequences up to a multiple of the group's size; other arguments of a value for each token are not known.
_FILLING = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0, "labels": _IGNORED, "shift_labels": _IGNORED}
_LAYERS = ("full_attention", "sliding_attention")
_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position of a forward


@dataclass
class _Forward:
    """A forward of a model that runs on parts.

    Attributes:
        module: the model.
        group: the processes that share it.
        layout: what may attend to what, in complete sequences.
        length: of the complete sequences, without what fills them up.
        part: the length of a part.
        tokens: how many tokens the loss is the mean of; None without labels.
        keeps: how many logits are wanted, from the end; 0 for all.
        attended: how many layers have computed attention.
        lost: whether the loss was computed.
        random: restores the state of the random numbers.
    """

    module: nn.Module
    group: SequenceGroup
    layout: Layout
    length: int
    part: int
    tokens: Tensor | None
    keeps: int
    attended: int = 0
    lost: bool = False
    random: AbstractContextManager[Any] = field(default_factory=nullcontext)


_RUNNING: list[_Forward] = []  # a model may be called by another


# ---- which models, and what they need --------------------------------------------------------------------------------


def causal_models(module: nn.Module) -> Iterator[Any]:
    """The outermost models of transformers in `module`, which may be one itself."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    if isinstance(module, modeling.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from causal_models(child)


def why_not(model: Any, processes: int) -> str | None:
    """Why a model of transformers cannot compute on parts of sequences; None if it can.

    Args:
        model: the model.
        processes: the number of processes that share its sequences.
    """
    config, name = model.config, type(model).__name__
    heads, layers = getattr(config, "num_attention_heads", 0), getattr(config, "layer_types", None) or ()
    other = sorted({str(kind) for kind in layers} - {*_LAYERS})
    ropes = sorted({kind for kind in _rope_types(config) if kind in _OF_LENGTH})
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv1d)]
    both_ways = [part for part in model.modules() if getattr(part, "is_causal", True) is False]
    reasons = {
        f"a {name} computes its attention by itself": not getattr(model, "_supports_attention_backend", False),
        f"a {name} has an encoder and a decoder": getattr(config, "is_encoder_decoder", False),
        f"a {name} has another model beside that of text": config.get_text_config() is not config,
        f"its {heads} attention heads do not divide among {processes} processes": heads % processes,
        f"it has layers of {', '.join(other)}": other,
        f"its {', '.join(ropes)} position embeddings depend on the length of a part": ropes,
        f"{name} convolves along the sequence": convolutions,
        f"a {name} attends to what comes later": both_ways or not getattr(config, "is_causal", True),
        "it attends in chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None),
        "it caps its attention's scores (attn_logit_softcapping)": getattr(config, "attn_logit_softcapping", None),
        f"the attention of a {name} has sinks": any(hasattr(part, "sinks") for part in model.modules()),
        "it attends to another model (add_cross_attention)": getattr(config, "add_cross_attention", False),
        "the loss of its router (output_router_logits) would be that of a part": getattr(
            config, "output_router_logits", False
        ),
        f"a {name} is neither a causal language model nor its base": not _is_tokenwise(model),
        f"the forward of a {name} passes no shift_labels on to its loss": not _takes_any(model),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _rope_types(config: Any) -> Iterator[str]:
    """The kinds of rotary position embeddings that a configuration names, in the forms that transformers has had."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None) or {}
        for one in (found, *(inner for inner in found.values() if isinstance(inner, dict))):
            yield str(one.get("rope_type", one.get("type", "")))


def _is_tokenwise(model: Any) -> bool:
    """Whether what follows the attention is computed for each token by itself: by a head for words, or not at all."""
    if model.base_model is model:
        return True
    kind = getattr(model, "loss_type", None)
    return kind in (None, "ForCausalLM") and model.get_output_embeddings() is not None


def _takes_any(model: Any) -> bool:
    """Whether the forward takes further keywords; a base model has no loss to pass them to."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    return model.base_model is model or inspect.Parameter.VAR_KEYWORD in kinds


def share_model(module: nn.Module, document: Document) -> None:
    """Make a model that is being prepared compute on parts of sequences.

    Args:
        module: holds models of transformers, or calls the functions of `zero_plugin.sequence_parallel` by itself, which
            an attribute `supports_sequence_parallel` of it, or of one of its parts, says.
        document: the configuration, whose `sequence_parallel_size` is above 1.

    Raises:
        ConfigError: it cannot.
    """
    where, size = document.place(("deepspeed", SEQUENCE_KEY)), sequence_parallel_size(document)
    models = list(causal_models(module))
    if not models and not any(getattr(part, "supports_sequence_parallel", False) for part in module.modules()):
        message = f"{size}, but it is not known how a {type(module).__name__} computes on parts of sequences"
        fix = (
            "Write 1; or call cut(), attention() and gather() of zero_plugin.sequence_parallel in its forward, and set "
            "supports_sequence_parallel = True in its class."
        )
        raise ConfigError([Problem(where, SEQUENCE_KEY, message, fix)])
    for model in models:
        if (reason := why_not(model, size)) is not None:
            message = f"{size}, but a {type(model).__name__} cannot compute on parts of sequences: {reason}"
            raise ConfigError([Problem(where, SEQUENCE_KEY, message, "Write 1, or train another model.")])
        if model not in _SHARED:
            _share(model)
            _SHARED.add(model)


_SHARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _share(model: Any) -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config
    own = copy.deepcopy(before)  # another model may have the same object
    for part in model.modules():
        if getattr(part, "config", None) is before:
            part.config = own
    model.set_attn_implementation(NAME)
    if model.base_model is not model:
        model.loss_function = _loss_of_group
    model.register_forward_pre_hook(_take_part, with_kwargs=True)
    model.register_forward_hook(_give_whole, with_kwargs=True, always_call=True)


# ---- the forward -----------------------------------------------------------------------------------------------------


def _take_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a forward: this process's part of each argument."""
    group = CURRENT.find()
    given = _named(module, args, kwargs)
    if group is None or given.get("past_key_values") is not None:
        return None
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None  # the model says what it needs
    _refuse_arguments(module, given, tokens)
    _check_same_batch(group, given, tokens)
    batch, length = tokens.shape[:2]
    filled = -(-length // group.size) * group.size
    mask, positions = given.pop("attention_mask", None), given.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    layout = Layout(
        documents_of(positions.expand(batch, -1)) if mask is None else None,
        None if mask is None or bool(mask.all()) else mask == 0,
    )
    after = positions[:, -1:] + torch.arange(1, filled - length + 1, device=positions.device)
    given["position_ids"] = group.part_of(torch.cat([positions, after], 1), 1)
    counted = None
    if given.get("labels") is not None:
        counted = _shift(given, length)
    for name, filling in _FILLING.items():
        value = given.get(name)
        if isinstance(value, Tensor):
            padding = (0, 0) * (value.ndim - 2) + (0, filled - length)
            given[name] = group.part_of(pad(value, padding, value=filling), 1)
    given["use_cache"] = False
    keeps = given.pop("logits_to_keep", 0)
    if not isinstance(keeps, int):
        raise _refusal(module, f"logits_to_keep is a {type(keeps).__name__}; give a number of tokens from the end")
    forward = _Forward(module, group, with_filling(layout, filled), length, filled // group.size, counted, keeps)
    if module.training and _drops(module):
        forward.random = _own_random_numbers(group, tokens.device)
        forward.random.__enter__()
    _RUNNING.append(forward)
    return (), given


def _give_whole(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG001 - a hook's arguments
    """After a forward: the complete results."""
    if not _RUNNING or _RUNNING[-1].module is not module:
        return None
    forward = _RUNNING.pop()
    forward.random.__exit__(None, None, None)
    if output is None:
        return None  # the forward has raised
    layers = getattr(module.config, "num_hidden_layers", forward.attended)
    if forward.attended != layers:
        raise _refusal(
            module, f"{forward.attended} of its {layers} layers attend by transformers' interface; the others do not"
        )
    if forward.tokens is not None and not forward.lost:
        raise _refusal(module, "it computes its loss by itself, which would be that of a part")
    is_left_out = forward.tokens is not None and torch.is_grad_enabled()
    results = {}
    for name, value in output.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == forward.part:
            if is_left_out:
                continue
            value = forward.group.gather(value, 1)[:, : forward.length]
            if name == "logits" and forward.keeps:
                value = value[:, -forward.keeps :]
        results[name] = value
    return type(output)(**results)


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    names = list(inspect.signature(module.forward).parameters)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _refuse_arguments(module: nn.Module, given: dict[str, Any], tokens: Tensor) -> None:
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if given.get(name):
            raise _refusal(module, f"{name}: each process has a part of them only; leave it out")
    if given.get("return_dict") is False:
        raise _refusal(module, "return_dict=False: the results are complete in a dict only; leave it out")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise _refusal(module, "attention_mask has to be of shape (batch, sequence), with 0 for padding")
    if positions is not None and positions.ndim != 2:
        raise _refusal(module, "position_ids have to be of shape (batch, sequence)")
    known = {*_FILLING, "attention_mask", "position_ids"}
    for name, value in given.items():
        if name not in known and isinstance(value, Tensor) and value.ndim > 1:
            raise _refusal(module, f"{name} of shape {tuple(value.shape)}: how it is cut is not known; leave it out")
    for name in known:
        value = given.get(name)
        if isinstance(value, Tensor) and value.shape[1] != tokens.shape[1]:
            raise _refusal(module, f"{name} has {value.shape[1]} positions, and the sequences have {tokens.shape[1]}")


def _check_same_batch(group: SequenceGroup, given: dict[str, Any], tokens: Tensor) -> None:
    """Check that the processes of the group have the same samples; collective in the group."""
    digests = [torch.tensor(tokens.shape[:2], device=tokens.device)]
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        value = given.get(name)
        digest = tokens.new_zeros((), dtype=torch.int64) if value is None else _digest(value)
        digests.append(digest.reshape(1))
    if not group.is_same(torch.cat(digests)):
        raise LoopError(
            f"the {group.size} processes that share their samples (sequence_parallel_size) got different ones.\nTake "
            "batches from a prepared loader. If the dataset draws random numbers, call set_seed() with one seed on all "
            "processes."
        )


def _digest(numbers: Tensor) -> Tensor:
    """A number that is another one, very probably, for other integers or another order of them."""
    flat = numbers.reshape(-1).to(torch.int64)
    weights = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1 % 0xFFFFFFFB
    return ((flat + 1) * weights).sum() % 0x7FFFFFFF


def _shift(given: dict[str, Any], length: int) -> Tensor:
    """Add `shift_labels`, the label of each token's next one, which the loss of a part needs; return their number."""
    if given.get("shift_labels") is None:
        given["shift_labels"] = pad(given["labels"][:, 1:], (0, 1), value=_IGNORED)
    counted = given.get("num_items_in_batch")
    if counted is None:
        counted = (given["shift_labels"][:, :length] != _IGNORED).sum()
        given["num_items_in_batch"] = counted
    return torch.as_tensor(counted)


def _drops(module: nn.Module) -> bool:
    """Whether the model draws random numbers in training."""
    return any(
        (isinstance(part, nn.Dropout) and part.p > 0) or bool(getattr(part, "attention_dropout", 0))
        for part in module.modules()
    )


def _own_random_numbers(group: SequenceGroup, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, other random numbers than those of the processes that share the samples, whose parts are others."""
    seed = int(torch.randint(2**62, ()))  # the same on all of them, if they were seeded alike
    return _Fork(seed + group.rank, device)


class _Fork(AbstractContextManager[None]):
    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._fork = torch.random.fork_rng([device] if device.type == "cuda" else [])

    def __enter__(self) -> None:
        self._fork.__enter__()
        torch.manual_seed(self._seed)

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(None, None, None)


# ---- what the model calls --------------------------------------------------------------------------------------------


def _mask(*args: Any, **kwargs: Any) -> Any:
    """In place of a mask: the layout of complete sequences, in a forward on parts. Registered with transformers."""
    from transformers.masking_utils import sdpa_mask

    if not _RUNNING:
        return sdpa_mask(*args, **kwargs)
    return replace(_RUNNING[-1].layout, window=kwargs.get("local_size"))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, registered with transformers; on parts where the mask is a layout."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, Layout):
        if _RUNNING:
            raise _refusal(_RUNNING[-1].module, "it makes the masks of its attention by itself")
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise LoopError(f"sequence_parallel_size: {name} of a {type(module).__name__} is not supported.")
    if _RUNNING:  # else a layer is computed again for its backward
        _RUNNING[-1].attended += 1
    attended = attend(query, key, value, attention_mask, dropout=dropout, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _loss_of_group(*args: Any, **kwargs: Any) -> Tensor:
    """The mean over the tokens of complete sequences: transformers' own loss of each part, and the sum of the parts."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: Tensor = ForCausalLMLoss(*args, **kwargs)
    if not _RUNNING or _RUNNING[-1].tokens is None:
        return loss
    forward = _RUNNING[-1]
    if kwargs.get("shift_labels") is None or kwargs.get("num_items_in_batch") is None:
        raise _refusal(forward.module, "it does not pass shift_labels on to its loss")
    forward.lost = True
    return forward.group.total(loss)


def _refusal(module: nn.Module, why: str) -> LoopError:
    return LoopError(
        f"sequence_parallel_size: the {type(module).__name__} cannot compute on parts of sequences: {why}."
    )
