"""What `save_model` writes of a model: which tensors, of which type, and where in this process they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from zero_plugin import collectives
from zero_plugin.checkpoint.layout import Description, describe
from zero_plugin.errors import CheckpointError, ConfigError, LoopError, Problem
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import WEIGHT, Fragment
from zero_plugin.strategies.named_tensors import persistent_tensors

__all__ = ["SavedWeights", "names_to_save", "parse_dtype", "weights_of_module", "weights_of_session"]

_CONVERTED: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NAMED: Final[Mapping[object, torch.dtype]] = {
    **dict.fromkeys(("fp32", "float32", torch.float32), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", torch.bfloat16), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", torch.float16), torch.float16),
}


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """The tensors of one model that are saved.

    Attributes:
        descriptions: of the whole tensors, in the types that they are stored in.
        fragments: gives what of them this process writes, each usable until the next is asked for. Their own types may
            be others.
        in_ranges: whether each process gives what lies in it, and has the same descriptions; else the main process
            gives all, and the others go along where that is collective.
    """

    descriptions: list[Description]
    fragments: Callable[[], Iterator[Fragment]]
    in_ranges: bool

    def whole(self) -> Iterator[Fragment]:
        """The fragments, each a whole tensor that the main process writes; one at a time. Collective."""
        is_main = collectives.process_index() == 0
        for fragment in self.fragments():
            if not self.in_ranges:
                yield fragment
                continue
            begin, end = fragment.written
            values = collectives.gather(fragment.values.reshape(-1)[begin:end])  # their order is that of the ranges
            yield replace(fragment, start=0, values=values, written=(0, values.numel() if is_main else 0))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating type that `save_model(dtype=…)` names.

    Raises:
        ConfigError: it names none.
    """
    if dtype is not None and dtype not in _NAMED:
        fix = 'write "fp32", "bf16", "fp16" or torch\'s own, or leave it out for the type that is trained in'
        raise ConfigError(
            [Problem(f"save_model(dtype={dtype!r})", "dtype", "not a type that weights are saved in", fix)]
        )
    return None if dtype is None else _NAMED[dtype]


def names_to_save(module: nn.Module, *, trainable_only: bool) -> frozenset[str]:
    """The model's tensors that are saved, each shared one by its first name.

    Args:
        module: the user's own, whose parameters may be partitioned.
        trainable_only: parameters with `requires_grad`, and nothing else.

    Raises:
        LoopError: there is none.
    """
    unsaved = getattr(module, "_keys_to_ignore_on_save", None) or ()  # transformers' positions that a model computes
    names = frozenset(
        name
        for name, tensor in persistent_tensors(module)
        if name not in unsaved and (tensor.requires_grad or not trainable_only)
    )
    if not names:
        which = "parameter that is trained" if trainable_only else "weight"
        raise LoopError(f"save_model: the {type(module).__name__} has no {which}.")
    return names


def weights_of_session(session: Session, names: Collection[str], dtype: torch.dtype | None) -> SavedWeights:
    """Those of a prepared model, in ranges; whole where they cannot be told apart by ranges.

    A parameter that is converted, or is not in memory, is taken from what the optimizer steps.

    Args:
        session: of the model.
        names: of the tensors.
        dtype: of the floating parameters; None for the type that each is trained in.

    Raises:
        CheckpointError: masters are wanted that cannot be reached.
    """
    try:
        present = [fragment for fragment in session.weight_fragments() if fragment.name in names]
    except CheckpointError as error:
        if dtype == torch.float32 and any(p.requires_grad and p.dtype != dtype for p in session.module.parameters()):
            raise CheckpointError(f"save_model(dtype={dtype}) takes the optimizer's masters. {error}") from error
        return weights_of_module(session.module, lambda: session.named_tensors(names), dtype)
    types = _stored_types(session.module, describe(present), dtype)

    def fragments() -> Iterator[Fragment]:
        left = {fragment.name: fragment for fragment in session.weight_fragments() if fragment.name in types}
        stepped = {n for n, f in left.items() if f.is_elsewhere or f.values.dtype != types[n].dtype}
        for pieces in session.blocks(changing=False) if stepped else ():
            for piece in pieces:
                if piece.name in stepped:
                    del left[piece.name]
                    yield piece.weight()
        yield from session.fetched(left.values(), changing=False)

    return SavedWeights(list(types.values()), fragments, in_ranges=True)


def weights_of_module(
    module: nn.Module, tensors: Callable[[], Iterable[tuple[str, Tensor]]], dtype: torch.dtype | None
) -> SavedWeights:
    """Whole tensors, which the main process writes.

    Args:
        module: theirs.
        tensors: gives name and tensor, one at a time, as often as it is called; it may be collective.
        dtype: as above.
    """

    def fragments() -> Iterator[Fragment]:
        is_main = collectives.process_index() == 0
        for name, tensor in tensors():
            written = (0, tensor.numel() if is_main else 0)
            yield Fragment(WEIGHT, name, tuple(tensor.shape), 0, tensor.detach(), written)

    types = _stored_types(module, describe(fragments()), dtype)
    return SavedWeights(list(types.values()), fragments, in_ranges=False)


def _stored_types(
    module: nn.Module, descriptions: Iterable[Description], dtype: torch.dtype | None
) -> dict[str, Description]:
    """By name, as they are stored: buffers (running statistics, say) keep their type, and so do quantized weights."""
    parameters = {name for name, _ in module.named_parameters()}
    return {
        d.name: replace(d, dtype=dtype) if dtype is not None and d.dtype in _CONVERTED and d.name in parameters else d
        for d in descriptions
    }
