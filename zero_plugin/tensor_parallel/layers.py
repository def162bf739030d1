"""Make a model's own layers compute with a part of their weights. Classes, names and parameter objects are kept.

Each function cuts the weights of one layer in place, so an optimizer that holds the parameters needs no change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from zero_plugin.distributed.tensor_group import TensorGroup
from zero_plugin.tensor_parallel.exchange import enter, total
from zero_plugin.tensor_parallel.plan import Section, UnsplittableError
from zero_plugin.tensors.cuts import Cut

_GROUP: Final = "_zero_plugin_tensor_group"  # attributes of a split layer
_STARTS_ITSELF: Final = "_zero_plugin_enters"
_WORDS: Final = "_zero_plugin_words"


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of an embedding or head that this process has: `count` from `start` on; then filler."""

    start: int
    count: int


class Cutter:
    """Cuts the parameters of one model, each once.

    Args:
        group: the processes that share the model's layers.

    Attributes:
        cuts: this process's cut of each parameter, by id.
        everyones: the cuts of all processes of the group, by the parameter's id.
        partial: the parameters that are not cut, but whose gradients are a part of a sum over the group.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.group = group
        self.cuts: dict[int, Cut] = {}
        self.everyones: dict[int, list[Cut]] = {}
        self.partial: list[nn.Parameter] = []

    def cut(self, parameter: nn.Parameter | None, dim: int, sections: Sequence[Section]) -> None:
        """Replace the values of a parameter by this process's part, cut along `dim`."""
        if parameter is None or id(parameter) in self.cuts:
            return
        shape, size = tuple(parameter.shape), self.group.size
        self._apply(parameter, [find_cut(shape, dim, sections, rank, size) for rank in range(size)])

    def cut_words(self, parameter: nn.Parameter, length: int) -> None:
        """Cut an embedding or a head along the words, and fill up the last part to `length` words."""
        if id(parameter) in self.cuts:
            return
        shape, words = tuple(parameter.shape), parameter.shape[0]
        starts = [min(rank * length, words) for rank in range(self.group.size)]
        ranges = [(start, min(length, words - start)) for start in starts]
        self._apply(parameter, [Cut(shape, 0, (one,), filler=length - one[1]) for one in ranges])

    def _apply(self, parameter: nn.Parameter, cuts: list[Cut]) -> None:
        cut = cuts[self.group.rank]
        if cut.copies > 1:
            self.group.make_copies_group(cut.copies)
        parameter.data = cut.take(parameter.data)
        parameter.grad = None
        self.cuts[id(parameter)] = cut
        self.everyones[id(parameter)] = cuts


def find_cut(shape: tuple[int, ...], dim: int, sections: Sequence[Section], rank: int, processes: int) -> Cut:
    """Return the part of process `rank` of a tensor that is cut along `dim`.

    Raises:
        UnsplittableError: the units of a section do not divide among the processes.
    """
    sections = sections or (Section(shape[dim]),)
    if (total := sum(section.size for section in sections)) != shape[dim]:
        raise UnsplittableError(f"a weight of shape {shape} has {shape[dim]} features, but its plan counts {total}")
    ranges, copies, at = [], set(), 0
    for section in sections:
        units = section.size // section.unit
        repeats = section.may_repeat and units < processes and processes % units == 0
        if units % processes and not repeats:
            raise UnsplittableError(f"its {units} {section.what} do not divide among {processes} processes")
        each = max(1, units // processes)
        index = rank * units // processes if repeats else rank * each
        copies.add(processes // units if repeats else 1)
        ranges.append((at + index * section.unit, each * section.unit))
        at += section.size
    if len(copies) > 1:
        raise UnsplittableError("its fused weight has fewer key heads than processes")
    (repeated,) = copies
    return Cut(shape, dim, tuple(ranges), copies=repeated, is_first_copy=rank % repeated == 0)


def _base(layer: Any) -> Any:
    """Return the layer that PEFT has wrapped, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def _factors(layer: Any, name: str) -> Iterator[Any]:
    """Yield the factors of PEFT's LoRA: `lora_A`, from the inputs to the rank, or `lora_B`, to the outputs.

    Raises:
        UnsplittableError: the layer has an adapter other than LoRA on linear layers.
    """
    if getattr(layer, "base_layer", None) is None:
        return
    own = {key for key, child in layer.named_children() if any(True for _ in child.parameters())}
    own |= {key for key, _ in layer.named_parameters(recurse=False)}
    if others := own - {"base_layer", "lora_A", "lora_B"}:
        raise UnsplittableError(f"its adapter has {', '.join(sorted(others))}; only LoRA on linear layers can be split")
    yield from getattr(layer, name).values()


def _features_at(layer: Any) -> tuple[int, int]:
    """Return the dimensions of the outputs and of the inputs in a layer's weight.

    Raises:
        UnsplittableError: the layer is not linear.
    """
    if type(layer) is nn.Linear:
        return 0, 1
    if type(layer).__name__ == "Conv1D" and hasattr(layer, "nf"):
        return 1, 0
    raise UnsplittableError(f"a {type(layer).__name__} is neither torch's Linear nor transformers' Conv1D")


def _set_size(layer: Any, name: str, value: int) -> None:
    if hasattr(layer, name):
        setattr(layer, name, value)


# ---- columns ---------------------------------------------------------------------------------------------------------


def split_column(layer: Any, sections: Sequence[Section], cutter: Cutter, *, in_region: bool) -> None:
    """Make a layer compute a part of its outputs.

    Args:
        layer: a linear layer, or PEFT's LoRA around one.
        sections: of its outputs.
        cutter: cuts the weights.
        in_region: whether a module around the layer enters its input; otherwise the layer does.
    """
    base = _base(layer)
    outputs, _ = _features_at(base)
    cutter.cut(base.weight, outputs, sections)
    cutter.cut(base.bias, 0, sections)
    for name in ("out_features", "nf"):
        _set_size(base, name, base.weight.shape[outputs])
    for factor in _factors(layer, "lora_B"):
        cutter.cut(factor.weight, 0, sections)
        cutter.cut(factor.bias, 0, sections)
        factor.out_features = factor.weight.shape[0]
        if not in_region:
            _enter_inputs(factor, cutter.group)
    if in_region:
        cutter.partial += [factor.weight for factor in _factors(layer, "lora_A")]
    else:
        _enter_inputs(base, cutter.group)


def enter_region(module: nn.Module, group: TensorGroup) -> None:
    """Make a module enter its differentiable inputs, for all column layers in it."""
    _enter_inputs(module, group)


def _enter_inputs(module: nn.Module, group: TensorGroup) -> None:
    module.register_forward_pre_hook(_Entering(group), with_kwargs=True)


@dataclass(frozen=True, slots=True)
class _Entering:
    """A forward pre-hook that enters each differentiable tensor among the arguments."""

    group: TensorGroup

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not torch.is_grad_enabled():
            return args, kwargs
        return tuple(map(self._enter, args)), {name: self._enter(value) for name, value in kwargs.items()}

    def _enter(self, value: Any) -> Any:
        return enter(value, self.group) if isinstance(value, Tensor) and value.requires_grad else value


# ---- rows ------------------------------------------------------------------------------------------------------------


def split_row(layer: Any, sections: Sequence[Section], cutter: Cutter) -> None:
    """Make a layer compute with a part of its inputs, and sum its outputs. Its bias stays whole, and is added once."""
    base = _base(layer)
    _, inputs = _features_at(base)
    cutter.cut(base.weight, inputs, sections)
    for name in ("in_features", "nx"):
        _set_size(base, name, base.weight.shape[inputs])
    _replace_forward(base, cutter.group)
    for factor in _factors(layer, "lora_A"):
        cutter.cut(factor.weight, 1, sections)
        factor.in_features = factor.weight.shape[1]
        _replace_forward(factor, cutter.group)


def _replace_forward(layer: Any, group: TensorGroup) -> None:
    setattr(layer, _GROUP, group)
    layer.forward = MethodType(forward, layer)  # a method, so a deep copy of the layer gets its own


def forward(layer: Any, features: Tensor) -> Tensor:
    """Compute a row layer. The name must be `forward`: pickle looks up a bound method by name."""
    weight = layer.weight if type(layer) is nn.Linear else layer.weight.t()
    flat = features.reshape(-1, features.shape[-1])
    summed = total(linear(flat, weight), getattr(layer, _GROUP))
    if layer.bias is not None:
        summed = summed + layer.bias
    return summed.view(*features.shape[:-1], summed.shape[-1])


# ---- words -----------------------------------------------------------------------------------------------------------


def split_words(layer: Any, cutter: Cutter) -> None:
    """Cut an embedding or a head along the words.

    An embedding gives complete vectors. A head computes the logits of this process's words; see `causal_models`.

    Raises:
        UnsplittableError: the layer is neither an embedding nor linear, or scales its rows in the forward.
    """
    group = cutter.group
    words = layer.weight.shape[0] if id(layer.weight) not in cutter.cuts else cutter.cuts[id(layer.weight)].shape[0]
    length = -(-words // group.size)
    start = group.rank * length
    cutter.cut_words(layer.weight, length)
    setattr(layer, _GROUP, group)
    setattr(layer, _WORDS, _Words(start, max(0, min(length, words - start))))
    if isinstance(layer, nn.Embedding):
        if layer.max_norm is not None:
            raise UnsplittableError("its embedding has max_norm, which scales rows in the forward")
        layer.num_embeddings = length
        if layer.padding_idx is not None:
            own = layer.padding_idx - start
            layer.padding_idx = own if 0 <= own < length else None
        layer.forward = MethodType(_embed, layer)  # type: ignore[method-assign]
        return
    if type(layer) is not nn.Linear:
        raise UnsplittableError(f"a {type(layer).__name__} is neither an embedding nor linear")
    if layer.bias is not None:
        cutter.cut_words(layer.bias, length)
    layer.out_features = length
    _enter_inputs(layer, group)


def _embed(layer: Any, tokens: Tensor) -> Tensor:
    """Look up the vectors of this process's words, and sum over the processes: one of them has each word."""
    words: _Words = getattr(layer, _WORDS)
    own = tokens - words.start
    elsewhere = (own < 0) | (own >= words.count)
    vectors: Tensor = type(layer).forward(layer, own.masked_fill(elsewhere, 0))
    return total(vectors.masked_fill(elsewhere.unsqueeze(-1), 0.0), getattr(layer, _GROUP))


def words_of(head: Any) -> tuple[int, int]:
    """Return the first word of a split head on this process, and the number of its words."""
    words: _Words = getattr(head, _WORDS)
    return words.start, words.count


# ---- initial values --------------------------------------------------------------------------------------------------


def share_initial_values(model: nn.Module, group: TensorGroup) -> None:
    """Give all processes of the group the weights and buffers of its first process, before they are cut."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), group.first, group.group)
