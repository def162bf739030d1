"""Make transformers' causal language models compute on this process's part of each sequence, and losses in chunks.

Two hooks surround the model's forward. The first replaces the complete arguments by this process's parts. The second
replaces the parts of the results by complete results. In between, the model calls this package's attention, which
is registered with transformers under its own name and set only in this model's configuration. The model also calls this
package's loss function, which adds up the losses of parts and of chunks. A forward with a cache of keys, as in
`generate`, stays unchanged.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zero_plugin.config.document import Document
from zero_plugin.config.parallelism import SEQUENCE_KEY, sequence_parallel_size
from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.long_context.chunks import Deferred, loss_in_chunks
from zero_plugin.long_context.group import CURRENT, SequenceGroup, own_random_numbers
from zero_plugin.long_context.supported import causal_models, is_tokenwise, strangers_in, takes_any, why_not
from zero_plugin.long_context.ulysses import Layout, attend, documents_of, with_filling

NAME = "zero_plugin_sequence_parallel"  # of the attention, in transformers' registry
_IGNORED = -100  # the label of tokens that are in no loss
# Values that pad sequences to a multiple of the group's size. Other arguments with a value per token are refused.
_FILLING = {"input_ids": 0, "inputs_embeds": 0, "token_type_ids": 0}
_OF_TOKENS = (*_FILLING, "labels", "shift_labels", "attention_mask", "position_ids")
_SHOWN = 3  # names in a warning


@dataclass
class _Settings:
    """A model's settings, stored on the model, so a copy of the model has them too.

    Attributes:
        shares: whether a group of processes shares the model's samples.
        chunks: the number of chunks of the loss.
    """

    shares: bool = False
    chunks: int = 1


_SETTINGS = "_zero_plugin_long_context"  # attribute of a model


@dataclass
class _Parts:
    """The state of a forward on parts.

    Attributes:
        group: the processes that share the samples.
        layout: the attention layout of complete sequences.
        length: the length of the complete sequences, without padding at the end.
        part: the length of a part.
        keeps: the number of last positions whose logits are requested; 0 for all.
        attended: the number of layers that have computed attention.
    """

    group: SequenceGroup
    layout: Layout
    length: int
    part: int
    keeps: int
    attended: int = 0


@dataclass
class _Forward:
    """A running forward.

    Attributes:
        module: the model.
        chunks: the number of chunks of the loss.
        has_labels: whether the model got labels and must compute a loss.
        has_loss: whether the model has computed the loss.
        parts: the state of a forward on parts; None for complete samples.
        head: the stand-in for the model's head, if the loss is computed in chunks; None otherwise.
        undo: the changes that the end of the forward undoes.
    """

    module: nn.Module
    chunks: int
    has_labels: bool
    has_loss: bool = False
    parts: _Parts | None = None
    head: Deferred | None = None
    undo: ExitStack = field(default_factory=ExitStack)


_RUNNING: list[_Forward] = []  # a stack, because one model may call another


# ---- preparing a model -----------------------------------------------------------------------------------------------


def share_model(module: nn.Module, document: Document) -> None:
    """Make a model that is being prepared compute on parts of sequences.

    Args:
        module: contains transformers models, or calls the functions of `zero_plugin.long_context` itself. The attribute
            `supports_sequence_parallel` of the module or of a submodule declares the latter.
        document: the configuration, whose `sequence_parallel_size` is above 1.

    Raises:
        ConfigError: the model cannot compute on parts of sequences.
    """
    where, size = document.place(("deepspeed", SEQUENCE_KEY)), sequence_parallel_size(document)
    models = list(causal_models(module))
    if not models and not any(getattr(part, "supports_sequence_parallel", False) for part in module.modules()):
        message = f"{size}, but it is not known how a {type(module).__name__} computes on parts of sequences"
        fix = (
            "Write 1; or call cut(), attention() and gather() of zero_plugin.long_context in its forward, and set "
            "supports_sequence_parallel = True in its class."
        )
        raise ConfigError([Problem(where, SEQUENCE_KEY, message, fix)])
    strangers: dict[str, str] = {}
    for model in models:
        if (reason := why_not(model, size)) is not None:
            message = f"{size}, but a {type(model).__name__} cannot compute on parts of sequences: {reason}"
            raise ConfigError([Problem(where, SEQUENCE_KEY, message, "Write 1, or train another model.")])
        if not _settings_of(model).shares:
            _attend_by_parts(model)
            _settings_of(model).shares = True
            strangers |= strangers_in(model)
    if strangers:
        more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
        announce(
            f"{SEQUENCE_KEY}: {', '.join(f'{name} ({place})' for name, place in [*strangers.items()][:_SHOWN])}{more} "
            "within the model get a part of each sequence. Code that computes each token independently is right. Code "
            "that uses other tokens, or the sequence's length, gives other numbers."
        )


def chunk_loss(model: nn.Module, chunks: int = 8) -> None:
    """Make a transformers causal language model compute the loss of its `labels` in chunks of tokens.

    In training, only one chunk's logits exist at a time, in the forward and again in the backward. The loss and its
    gradients are the same sums. The model's output has no `logits`. Evaluation does not change. Call this function
    before or after `prepare`, with or without ZeRO and sequence parallelism. A second call changes the number of
    chunks.

    Args:
        model: the model, prepared or not.
        chunks: the number of chunks of a micro-batch's tokens; 1 switches chunks off.

    Raises:
        LoopError: `model` holds no causal language model, or `chunks` is below 1.
    """
    found = [causal for causal in causal_models(model) if causal.base_model is not causal]
    if len(found) != 1 or not (is_tokenwise(found[0]) and takes_any(found[0])):
        kinds = ", ".join(type(one).__name__ for one in found) or "none in it"
        raise LoopError(
            f"chunk_loss(): it takes a causal language model of transformers; found {kinds}.\n"
            "Compute the loss of a model of your own with torch.nn.functional.linear_cross_entropy or with "
            "torch.utils.checkpoint."
        )
    if chunks < 1:
        raise LoopError(f"chunk_loss(): chunks={chunks}; give 1 or more.")
    _settings_of(found[0]).chunks = chunks


def _settings_of(model: Any) -> _Settings:
    """Return a model's mutable settings. The first call registers the hooks.

    Raises:
        LoopError: the script has set its own loss function.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    settings = getattr(model, _SETTINGS, None)
    if settings is None:
        if model.base_model is not model and model.loss_function is not ForCausalLMLoss:
            raise LoopError(
                f"the loss_function of the {type(model).__name__} is the script's own: it would get parts of samples.\n"
                "Compute the loss in the loop, from the logits that a forward without labels returns."
            )
        settings = _Settings()
        setattr(model, _SETTINGS, settings)
        if model.base_model is not model:
            model.loss_function = _loss
        model.register_forward_pre_hook(_begin, with_kwargs=True)
        model.register_forward_hook(_end, with_kwargs=True, always_call=True)
    return settings


def _attend_by_parts(model: Any) -> None:
    """Set this package's attention in the configuration of this model only."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    before = model.config
    own = copy.deepcopy(before)  # another model may share the configuration object
    for part in model.modules():
        if getattr(part, "config", None) is before:
            part.config = own
    model.set_attn_implementation(NAME)


# ---- the forward -----------------------------------------------------------------------------------------------------


def _begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Prepare a forward: replace each argument by this process's part, and the head by its stand-in."""
    settings, group = getattr(module, _SETTINGS), CURRENT.find()
    given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}
    forward = _Forward(module, settings.chunks, has_labels=given.get("labels") is not None)
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    defers = settings.chunks > 1 and forward.has_labels and torch.is_grad_enabled()
    if defers and _wants_a_tuple(module, given):
        raise LoopError("chunk_loss(): return_dict=False is not supported: the output has no logits. Leave it out.")
    if settings.shares and group is not None and tokens is not None and not _caches(module, given):
        forward.parts = _cut_arguments(module, group, given, tokens)
        if module.training:
            forward.undo.enter_context(own_random_numbers())
    if defers:
        head = module.get_output_embeddings()
        forward.head = Deferred(head)
        module.set_output_embeddings(forward.head)
        forward.undo.callback(module.set_output_embeddings, head)
    _RUNNING.append(forward)
    return (), given


def _caches(module: Any, given: dict[str, Any]) -> bool:
    """Return whether a forward uses or creates a cache of keys, as in decoding. Each process computes it alone."""
    if given.get("past_key_values") is not None:
        return True
    if given.get("labels") is not None:
        return False
    asked = given.get("use_cache")
    return bool(asked) or (asked is None and not torch.is_grad_enabled() and getattr(module.config, "use_cache", False))


def _end(module: Any, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG001 - a hook's arguments
    """Finish a forward: return complete results, without logits if they are missing or differ between processes."""
    if not _RUNNING or _RUNNING[-1].module is not module:
        return None
    forward = _RUNNING.pop()
    forward.undo.close()
    if output is None:
        return None  # the forward has raised
    if forward.has_labels and not forward.has_loss and (forward.parts or forward.head):
        raise _refusal(module, "it computes its own loss")
    if forward.parts is not None:
        return _complete_results(
            module, forward.parts, output, leaves_out=forward.has_labels and torch.is_grad_enabled()
        )
    if forward.head is not None:
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return None


def _cut_arguments(module: nn.Module, group: SequenceGroup, given: dict[str, Any], tokens: Tensor) -> _Parts:
    """Replace the complete arguments by this process's parts."""
    _refuse_arguments(module, given, tokens)
    _check_same_batch(group, given, tokens)
    _check_words(module, given)
    batch, length = tokens.shape[:2]
    filled = -(-length // group.size) * group.size
    mask, positions = given.pop("attention_mask", None), given.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    layout = Layout(
        documents_of(positions.expand(batch, -1)) if mask is None else None,
        None if mask is None or bool(mask.all()) else mask == 0,
    )
    after = positions[:, -1:].expand(-1, filled - length)  # repeat the last one: a position table may end here
    given["position_ids"] = group.part_of(torch.cat([positions, after], 1), 1)
    ignored = given.get("ignore_index", _IGNORED)
    if given.get("labels") is not None:
        _shift(given, ignored)
    for name, filling in {**_FILLING, "labels": ignored, "shift_labels": ignored}.items():
        value = given.get(name)
        if isinstance(value, Tensor):
            padding = (0, 0) * (value.ndim - 2) + (0, filled - length)
            given[name] = group.part_of(pad(value, padding, value=filling), 1)
    given["use_cache"] = False
    keeps = given.pop("logits_to_keep", 0)
    if not isinstance(keeps, int):
        raise _refusal(module, f"logits_to_keep is a {type(keeps).__name__}; give a number of tokens from the end")
    return _Parts(group, with_filling(layout, filled), length, filled // group.size, keeps)


def _wants_a_tuple(module: Any, given: dict[str, Any]) -> bool:
    return False in (given.get("return_dict"), getattr(module.config, "return_dict", True))


def _complete_results(module: Any, parts: _Parts, output: Any, *, leaves_out: bool) -> Any:
    """Return the results with parts replaced by complete tensors.

    Args:
        module: the model.
        parts: the state of the forward.
        output: the forward's result.
        leaves_out: whether to leave out tensors of parts: in training, the model has computed its loss from them.
    """
    layers = getattr(module.config, "num_hidden_layers", parts.attended)
    if parts.attended != layers:
        raise _refusal(
            module, f"{parts.attended} of its {layers} layers use transformers' attention interface; the others do not"
        )
    results = {}
    for name, value in output.items():
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == parts.part:
            if leaves_out:
                continue
            value = parts.group.gather(value, 1)[:, : parts.length]
            if name == "logits" and parts.keeps:
                value = value[:, -parts.keeps :]
        elif name != "loss" and isinstance(value, Tensor | tuple | list):
            raise _refusal(module, f"its {name} would cover only a part")
        results[name] = value
    return type(output)(**results)


def _refuse_arguments(module: Any, given: dict[str, Any], tokens: Any) -> None:
    config = module.config
    kinds = {name: ndim for name, ndim in (("input_ids", 2), ("inputs_embeds", 3)) if given.get(name) is not None}
    if len(kinds) > 1:
        raise _refusal(module, "it got both input_ids and inputs_embeds; give one of them")
    for name, ndim in kinds.items():
        if not isinstance(tokens, Tensor) or tokens.ndim != ndim:
            shape = "(batch, sequence)" if ndim == 2 else "(batch, sequence, hidden size)"
            raise _refusal(module, f"{name} have to be a tensor of shape {shape}")
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if given.get(name, getattr(config, name, False)):
            raise _refusal(module, f"{name}: each process has only a part of them; leave it out")
    if _wants_a_tuple(module, given):
        raise _refusal(module, "return_dict=False: only a dict has complete results; leave it out")
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):
        raise _refusal(module, "attention_mask has to be of shape (batch, sequence), with 0 for padding")
    if positions is not None and positions.ndim != 2:
        raise _refusal(module, "position_ids have to be of shape (batch, sequence)")
    for name, value in given.items():
        if name not in _OF_TOKENS and isinstance(value, Tensor) and value.ndim > 1:
            raise _refusal(module, f"{name} of shape {tuple(value.shape)}: its layout is not known; leave it out")
    for name in _OF_TOKENS:
        value = given.get(name)
        if isinstance(value, Tensor) and value.shape[1] != tokens.shape[1]:
            raise _refusal(module, f"{name} has {value.shape[1]} positions, and the sequences have {tokens.shape[1]}")


def _check_same_batch(group: SequenceGroup, given: dict[str, Any], tokens: Tensor) -> None:
    """Check that the processes of the group have the same samples; collective in the group."""
    digests = [torch.tensor(tokens.shape[:2], device=tokens.device)]
    if given.get("inputs_embeds") is not None and not group.is_same(_digest_of_floats(tokens)):
        digests.append(torch.tensor([group.rank], device=tokens.device))
    for name in ("input_ids", "labels", "attention_mask", "position_ids"):
        value = given.get(name)
        digest = tokens.new_zeros((), dtype=torch.int64) if value is None else _digest(value)
        digests.append(digest.reshape(1))
    if not group.is_same(torch.cat(digests)):
        raise LoopError(
            f"the {group.size} processes that share their samples (sequence_parallel_size) got different samples, or "
            "only some of them run a forward.\nTake batches from a prepared loader. If the dataset draws random "
            "numbers, call set_seed() with the same seed on all processes. Evaluate on all processes, not under"
            " `if accelerator.is_main_process:`."
        )


def _check_words(module: Any, given: dict[str, Any]) -> None:
    """Check all token ids on all processes. Otherwise only the process whose part has the wrong id would raise."""
    rows = getattr(module.get_input_embeddings(), "num_embeddings", None)
    wanted = {"input_ids": rows, "labels": getattr(module.config, "vocab_size", rows)}
    for name, words in wanted.items():
        value = given.get(name)
        if value is None or words is None or not value.numel():
            continue
        ignored = given.get("ignore_index", _IGNORED) if name == "labels" else None
        counted = value if ignored is None else value.masked_fill(value == ignored, 0)
        least, most = torch.stack([counted.min(), counted.max()]).tolist()
        if least < 0 or most >= words:
            raise _refusal(module, f"{name} are from {least} to {most}, and it has {words} words")


def _digest_of_floats(embedded: Tensor) -> Tensor:
    """Return two positive numbers that differ for different embeddings, and are close for nearly equal embeddings."""
    lengths, sums = embedded.detach().norm(1, -1, dtype=torch.float32), embedded.detach().float().sum(-1)
    weights = torch.linspace(1, 2, lengths.numel(), device=embedded.device).reshape(lengths.shape)
    return torch.stack([(lengths * weights).sum(), ((lengths + sums) * weights).sum()])


def _digest(numbers: Tensor) -> Tensor:
    """Return a checksum of integers that depends on their order."""
    flat = numbers.reshape(-1).to(torch.int64)
    weights = torch.arange(1, len(flat) + 1, device=flat.device) * 0x9E3779B1 % 0xFFFFFFFB
    return ((flat + 1) * weights).sum() % 0x7FFFFFFF


def _shift(given: dict[str, Any], ignored: int) -> None:
    """Add the arguments that the loss of a part needs: `shift_labels`, each token's next label, and their number."""
    if given.get("shift_labels") is None:
        given["shift_labels"] = pad(given["labels"][:, 1:], (0, 1), value=ignored)
    if given.get("num_items_in_batch") is None:
        given["num_items_in_batch"] = (given["shift_labels"] != ignored).sum()


# ---- what the model calls --------------------------------------------------------------------------------------------


def _mask(*args: Any, **kwargs: Any) -> Any:
    """Return the attention layout instead of a mask in a forward on parts. Registered with transformers."""
    from transformers.masking_utils import sdpa_mask

    if (parts := _running_parts()) is None:
        return sdpa_mask(*args, **kwargs)
    return replace(parts.layout, window=kwargs.get("local_size"))


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
    """Compute a layer's attention, on parts if the mask is a `Layout`. Registered with transformers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    parts = _running_parts()
    if not isinstance(attention_mask, Layout):
        if parts is not None:
            raise _refusal(_RUNNING[-1].module, "it makes its own attention masks")
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise LoopError(f"sequence_parallel_size: {name} of a {type(module).__name__} is not supported.")
    if parts is not None:  # None if a checkpointed layer is computed again in the backward
        parts.attended += 1
    attended = attend(query, key, value, attention_mask, dropout=dropout, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def _running_parts() -> _Parts | None:
    return _RUNNING[-1].parts if _RUNNING else None


def _loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the mean loss over the tokens of complete sequences, as transformers does, from parts and in chunks."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    forward = _RUNNING[-1] if _RUNNING else None
    if forward is not None:
        forward.has_loss = True
        if forward.parts is not None and (shift_labels is None or num_items_in_batch is None):
            raise _refusal(forward.module, "it does not pass shift_labels on to its loss")
    if forward is None or forward.head is None:
        counted = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size, shift_labels=shift_labels, **counted, **kwargs)
    else:
        if logits is not forward.head.given:
            raise LoopError(
                f"chunk_loss(): a {type(forward.module).__name__} changes its logits before the loss, so they cannot "
                "be computed in chunks."
            )
        if shift_labels is None:
            assert labels is not None, "a model calls this for its labels"
            shift_labels = pad(labels[..., 1:], (0, 1), value=ignore_index)
        tokens = (shift_labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss_in_chunks(forward.head.head, logits, shift_labels, tokens, forward.chunks, ignore_index)
    return loss if forward is None or forward.parts is None else forward.parts.group.total(loss)


def _refusal(module: nn.Module, why: str) -> LoopError:
    return LoopError(
        f"sequence_parallel_size: the {type(module).__name__} cannot compute on parts of sequences: {why}."
    )
