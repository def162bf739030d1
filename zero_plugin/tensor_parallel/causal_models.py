"""Causal language models of transformers whose vocabulary is divided: the loss of parts, or complete logits.

In a training forward with labels, the model's loss function gets the logits of this process's words, and no process
has complete logits. Then the output has no `logits`. Every other forward returns complete logits.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zero_plugin.distributed.tensor_group import TensorGroup
from zero_plugin.tensor_parallel.exchange import gather
from zero_plugin.tensor_parallel.layers import words_of
from zero_plugin.tensor_parallel.vocabulary import summed_cross_entropy

_IGNORED = -100  # the label of tokens that are in no loss


@dataclass
class _Logits:
    """The output of a model's head: complete logits, or a part.

    Attributes:
        group: the processes that share the vocabulary.
        head: the head.
        words: number of words of the complete vocabulary.
        stays_apart: whether the running forward computes its loss from the logits of this process's words.
    """

    group: TensorGroup
    head: nn.Module
    words: int
    stays_apart: bool = False

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide at the start of a forward; a pre-hook of the model."""
        given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
        has_own_loss = getattr(model, "loss_function", None) != self.loss
        self.stays_apart = given.get("labels") is not None and torch.is_grad_enabled() and not has_own_loss

    def finish(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        """Join the logits unless the loss takes the parts; a hook of the head."""
        return output if self.stays_apart else gather(output, self.group)[..., : self.words]

    def end(self, _: nn.Module, __: Any, ___: Any, output: Any) -> Any:
        """Leave the parts of logits out of the output; a hook of the model, also if its forward has raised."""
        was_apart, self.stays_apart = self.stays_apart, False
        if not was_apart or output is None:
            return None
        if isinstance(output, tuple):
            return output[:1] + output[2:]
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean loss over tokens as transformers' `ForCausalLMLoss`, from complete logits or from parts."""
        if not self.stays_apart:
            from transformers.loss.loss_utils import ForCausalLMLoss

            found: Tensor = ForCausalLMLoss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
            return found
        if shift_labels is None:
            assert labels is not None, "a model calls this for its labels"
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        labels = shift_labels.reshape(-1).to(logits.device)
        parts = logits.float().view(-1, logits.shape[-1])
        summed = summed_cross_entropy(parts, labels, *words_of(self.head), self.group, ignore_index)
        return summed / ((labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def keep_logits_apart(model: nn.Module, head: nn.Module, words: int, group: TensorGroup) -> None:
    """Make the owner of a split head compute its loss from parts of the logits, and return complete logits otherwise.

    Args:
        model: contains the transformers model.
        head: computes logits of this process's words.
        words: number of words of the complete vocabulary.
        group: the processes.
    """
    logits = _Logits(group, head, words)
    head.register_forward_hook(logits.finish)
    owner = _owner_of(model, head)
    if owner is None:
        return
    from transformers.loss.loss_utils import ForCausalLMLoss

    if owner.loss_function is ForCausalLMLoss:
        owner.loss_function = logits.loss
    owner.register_forward_pre_hook(logits.begin, with_kwargs=True)
    owner.register_forward_hook(logits.end, with_kwargs=True, always_call=True)


def _owner_of(model: nn.Module, head: nn.Module) -> Any:
    """Return the transformers model that calls `head`, or None."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if callable(find) and hasattr(module, "loss_function") and find() is head:
            return module
    return None
