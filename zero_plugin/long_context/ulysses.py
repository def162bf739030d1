"""Causal attention over sequences of which each process has a part.

As DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): processes exchange parts of the sequence for parts of the heads
before the attention, and back after it. In between each process has complete sequences of some heads, and any attention
is possible. Here it is torch's `scaled_dot_product_attention`, which never holds a matrix of sequence × sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from zero_plugin.errors import LoopError
from zero_plugin.long_context.group import CURRENT, SequenceGroup

_ROWS = 1024  # queries that are computed at once where a mask is needed, so that it is small


@dataclass(frozen=True)
class Layout:
    """What may attend to what in the complete sequences, besides causality.

    Attributes:
        ends: for each row of the batch, where each of its documents ends; None if every row is one document.
        is_padding: of shape (batch, sequence), the positions to which nothing attends; None if there are none.
        window: how many positions, with its own, a position attends to; None for all before it.
    """

    ends: tuple[tuple[int, ...], ...] | None = None
    is_padding: Tensor | None = None
    window: int | None = None

    def __getattr__(self, name: str) -> Any:
        """A model that looks into the mask of its attention finds none.

        Raises:
            LoopError: the name is one of a tensor's.
        """
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise LoopError(
                "sequence_parallel_size: the model reads the mask of its attention by itself, which is not supported."
            )
        raise AttributeError(name)


def documents_of(position_ids: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Where documents end that are packed into rows: a position that does not follow the one before begins another.

    Args:
        position_ids: of shape (batch, sequence).

    Returns:
        For each row the ends; None if every row is one document.
    """
    begins = position_ids.diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    length = position_ids.shape[1]
    return tuple((*(i + 1 for i, is_begin in enumerate(row) if is_begin), length) for row in begins.tolist())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    position_ids: Tensor | None = None,
    is_padding: Tensor | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention, given this process's part of every sequence; collective in the group.

    Args:
        query: of shape (batch, heads, part of the sequence, size of a head).
        key, value: likewise; they may have fewer heads, each for as many heads of the query in a row, and heads of the
            value may have another size.
        position_ids: of shape (batch, complete sequence), or (1, complete sequence) for all rows alike; positions that
            begin anew begin another document, which is not attended to from the next one. None: each sequence is one
            document.
        is_padding: booleans, likewise: the positions to which nothing attends.
        window: how many positions, with its own, a position attends to; None: all before it.
        dropout: probability of leaving out a weight.
        scale: of the scores; None: 1 / sqrt(size of a head).

    Returns:
        Of the shape of `query`, with the size of the value's heads.

    Raises:
        LoopError: the heads cannot be divided among the processes of the group, or an argument is none of these.
    """
    _check_shapes(query, key, value, {"position_ids": position_ids, "is_padding": is_padding})
    if is_padding is not None and is_padding.dtype != torch.bool:
        raise LoopError(
            f"attention(): is_padding holds {is_padding.dtype}; give booleans, True for what nothing attends to: "
            "attention_mask == 0."
        )
    if window is not None and window < 1:
        raise LoopError(f"attention(): window={window}; give 1 or more, a position's own among them, or None for all.")
    ends = None if position_ids is None else documents_of(position_ids.expand(len(query), -1))
    layout = Layout(ends, is_padding, window)
    return attend(query, key, value, layout, dropout=dropout, scale=scale)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, of_whole: dict[str, Tensor | None]) -> None:
    """Check that parts of sequences fit each other, and what is said of complete ones fits their length.

    Raises:
        LoopError: they do not. Some would give an output of other rows or another length, which a sum broadcasts.
    """
    for name, part in {"query": query, "key": key, "value": value}.items():
        fits = part.ndim == query.ndim == 4 and (len(part), part.shape[2]) == (len(query), query.shape[2])
        if not fits or not part.shape[1] or query.shape[1] % part.shape[1]:
            raise LoopError(
                f"attention(): the {name} is of shape {tuple(part.shape)}, and the query of {tuple(query.shape)}; give "
                "(batch, heads, part of the sequence, size of a head), with heads of keys and values that divide those "
                "of the query."
            )
    group = CURRENT.find()
    length = query.shape[2] * (1 if group is None else group.size)
    for name, whole in of_whole.items():
        if whole is not None and tuple(whole.shape) not in ((len(query), length), (1, length)):
            raise LoopError(
                f"attention(): {name} is of shape {tuple(whole.shape)}; give ({len(query)}, {length}): the batch and "
                f"the complete sequence, of which this process has {query.shape[2]} positions."
            )


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """As `attention`, with the documents, the padding and the window as a `Layout`."""
    group = CURRENT.find()
    if group is None:
        return _attend_whole(query, key, value, layout, dropout, scale)
    if query.shape[1] % group.size:
        raise LoopError(
            f"the {query.shape[1]} heads of the attention do not divide among the {group.size} processes of "
            "sequence_parallel_size."
        )
    query, key, value = _exchange_for_heads(query, key, value, group)
    attended = _attend_whole(query, key, value, layout, dropout, scale)
    return _exchange_for_parts(attended, group)


def _exchange_for_heads(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> tuple[Tensor, ...]:
    """Complete sequences of this process's heads, from this process's parts of all heads."""
    key, value = (_repeat_heads(tensor, query.shape[1], group.size) for tensor in (key, value))
    if value.shape[-1] != query.shape[-1]:
        return (*_exchange_at_once((query, key), group), *_exchange_at_once((value,), group))
    return _exchange_at_once((query, key, value), group)


def _exchange_at_once(parts: tuple[Tensor, ...], group: SequenceGroup) -> tuple[Tensor, ...]:
    """The same of tensors whose heads have one size, in one exchange."""
    by_process = [_part(tensor, 1, group.size) for tensor in parts]
    received = group.exchange(torch.cat(by_process, 2).transpose(0, 1))  # (process, batch, heads, part, size)
    complete = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return torch.split(complete, [tensor.shape[2] for tensor in by_process], 1)


def _exchange_for_parts(attended: Tensor, group: SequenceGroup) -> Tensor:
    """This process's part of all heads, from complete sequences of this process's."""
    by_process = _part(attended, 2, group.size).permute(2, 0, 1, 3, 4)
    return group.exchange(by_process).transpose(0, 1).flatten(1, 2)


def _part(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """The tensor with its dimension `dim` in two: parts, and what is in each."""
    return tensor.reshape(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


def _repeat_heads(shared: Tensor, heads: int, processes: int) -> Tensor:
    """Keys or values of which each process gets as many heads; a head that several processes need is repeated."""
    own = shared.shape[1]
    if own % processes == 0:
        return shared
    return shared.repeat_interleave((processes if processes % own == 0 else heads) // own, 1)


def _attend_whole(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float, scale: float | None
) -> Tensor:
    """Attention over complete sequences."""
    if key.shape[1] != query.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    attend_to = partial(scaled_dot_product_attention, dropout_p=dropout, scale=scale)
    window = layout.window if layout.window is not None and layout.window < query.shape[2] else None
    if layout.is_padding is not None or window is not None:
        masks = _masks(layout, query.shape[0], query.shape[2], window, query.device)
        parts = [
            attend_to(query[:, :, rows], key[:, :, columns], value[:, :, columns], attn_mask=mask)
            for rows, columns, mask in masks
        ]
        return torch.cat(parts, 2)
    if layout.ends is None:
        return attend_to(query, key, value, is_causal=True)
    attended = []
    for row, ends in enumerate(layout.ends):
        of_row = [tensor[row : row + 1] for tensor in (query, key, value)]
        documents = [
            attend_to(*(tensor[:, :, begin:end] for tensor in of_row), is_causal=True)
            for begin, end in pairwise((0, *ends))
        ]
        attended.append(torch.cat(documents, 2))
    return torch.cat(attended)


def _masks(
    layout: Layout, batch: int, length: int, window: int | None, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of queries, the keys that they may need, and which of them each attends to."""
    documents = torch.zeros(batch, length, dtype=torch.int32, device=device)
    for row, ends in enumerate(layout.ends or ()):
        for end in ends[:-1]:
            documents[row, end:] += 1
    for begin in range(0, length, _ROWS):
        end = min(begin + _ROWS, length)
        first = 0 if window is None else max(0, begin - window + 1)
        queries = torch.arange(begin, end, device=device)[:, None]
        keys = torch.arange(first, end, device=device)[None]
        allowed = (keys <= queries)[None] & (documents[:, begin:end, None] == documents[:, None, first:end])
        if window is not None:
            allowed &= keys > queries - window
        if layout.is_padding is not None:
            allowed &= ~layout.is_padding[:, None, first:end]
        yield slice(begin, end), slice(first, end), allowed[:, None]


def with_filling(layout: Layout, length: int) -> Layout:
    """The layout of sequences that were filled up to `length` at their ends; causality keeps the filling out."""
    ends, padding = layout.ends, layout.is_padding
    return replace(
        layout,
        ends=None if ends is None else tuple((*row[:-1], length) for row in ends),
        is_padding=None if padding is None else pad(padding, (0, length - padding.shape[1]), value=True),
    )
