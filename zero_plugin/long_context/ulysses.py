"""Compute causal attention over sequences when each process has a part of every sequence.

The method is DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509). Before the attention, the processes exchange parts
of the sequence for parts of the heads; after the attention, they exchange them back. In between, each process has
complete sequences of some heads, so any attention works. This module uses torch's `scaled_dot_product_attention`, which
never holds a matrix of sequence × sequence.
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

_ROWS = 1024  # queries in one block if a mask is needed: the mask of one block stays small


@dataclass(frozen=True)
class Layout:
    """The limits of attention in complete sequences, in addition to causality.

    Attributes:
        ends: for each row of the batch, the end of each document; None if every row is one document.
        is_padding: booleans of shape (batch, sequence). No position attends to a True one. None without padding.
        window: the number of positions to which a position attends, including itself; None for all earlier ones.
    """

    ends: tuple[tuple[int, ...], ...] | None = None
    is_padding: Tensor | None = None
    window: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Refuse a model that reads its attention mask as a tensor.

        Raises:
            LoopError: tensors have an attribute of this name.
        """
        if hasattr(Tensor, name) and not name.startswith("_"):
            raise LoopError(
                "sequence_parallel_size: the model reads the mask of its attention, which is not supported."
            )
        raise AttributeError(name)


def documents_of(position_ids: Tensor) -> tuple[tuple[int, ...], ...] | None:
    """Find the ends of documents that are packed into rows. A position that is not one more begins a document.

    Args:
        position_ids: of shape (batch, sequence).

    Returns:
        The ends for each row; None if every row is one document.
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
    """Compute causal attention from this process's part of every sequence; collective in the group.

    Args:
        query: of shape (batch, heads, part of the sequence, size of a head).
        key, value: the same shape. They may have fewer heads, each for an equal number of consecutive query heads. The
            value's heads may have another size.
        position_ids: of shape (batch, complete sequence), or (1, complete sequence) for all rows. Positions that start
            again begin a new document. Documents do not attend to each other. None: each sequence is one document.
        is_padding: booleans of the same shape. No position attends to a True one.
        window: the number of positions to which a position attends, including itself; None: all earlier ones.
        dropout: probability of leaving out a weight.
        scale: the factor on the scores; None: 1 / sqrt(size of a head).

    Returns:
        A tensor of the shape of `query`, with the size of the value's heads.

    Raises:
        LoopError: the heads cannot be divided among the processes of the group, or an argument has a wrong shape, dtype
            or value.
    """
    _check_shapes(query, key, value, {"position_ids": position_ids, "is_padding": is_padding})
    if is_padding is not None and is_padding.dtype != torch.bool:
        raise LoopError(
            f"attention(): is_padding holds {is_padding.dtype}; give booleans, True for padding: attention_mask == 0."
        )
    if window is not None and window < 1:
        raise LoopError(f"attention(): window={window}; give 1 or more (a position counts itself), or None for all.")
    ends = None if position_ids is None else documents_of(position_ids.expand(len(query), -1))
    layout = Layout(ends, is_padding, window)
    return attend(query, key, value, layout, dropout=dropout, scale=scale)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, of_whole: dict[str, Tensor | None]) -> None:
    """Check that the parts fit each other, and that arguments of complete sequences have their length.

    Raises:
        LoopError: the shapes do not fit. Some would silently give an output of another shape, which a later sum
            broadcasts.
    """
    for name, part in {"query": query, "key": key, "value": value}.items():
        fits = part.ndim == query.ndim == 4 and (len(part), part.shape[2]) == (len(query), query.shape[2])
        if not fits or not part.shape[1] or query.shape[1] % part.shape[1]:
            raise LoopError(
                f"attention(): the {name} is of shape {tuple(part.shape)}, and the query of {tuple(query.shape)}; give "
                "(batch, heads, part of the sequence, size of a head). The number of heads of keys and values must "
                "divide the query's."
            )
    group = CURRENT.find()
    length = query.shape[2] * (1 if group is None else group.size)
    for name, whole in of_whole.items():
        if whole is not None and tuple(whole.shape) not in ((len(query), length), (1, length)):
            raise LoopError(
                f"attention(): {name} is of shape {tuple(whole.shape)}; give ({len(query)}, {length}): the batch and "
                f"the complete sequence. This process has {query.shape[2]} positions of it."
            )


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Compute `attention`, with documents, padding and window as a `Layout`."""
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
    """Exchange this process's parts of all heads for complete sequences of this process's heads."""
    key, value = (_repeat_heads(tensor, query.shape[1], group.size) for tensor in (key, value))
    if value.shape[-1] != query.shape[-1]:
        return (*_exchange_at_once((query, key), group), *_exchange_at_once((value,), group))
    return _exchange_at_once((query, key, value), group)


def _exchange_at_once(parts: tuple[Tensor, ...], group: SequenceGroup) -> tuple[Tensor, ...]:
    """Exchange several tensors whose heads have the same size in one collective call."""
    by_process = [_part(tensor, 1, group.size) for tensor in parts]
    received = group.exchange(torch.cat(by_process, 2).transpose(0, 1))  # (process, batch, heads, part, size)
    complete = received.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return torch.split(complete, [tensor.shape[2] for tensor in by_process], 1)


def _exchange_for_parts(attended: Tensor, group: SequenceGroup) -> Tensor:
    """Exchange complete sequences of this process's heads for this process's parts of all heads."""
    by_process = _part(attended, 2, group.size).permute(2, 0, 1, 3, 4)
    return group.exchange(by_process).transpose(0, 1).flatten(1, 2)


def _part(tensor: Tensor, dim: int, parts: int) -> Tensor:
    """Split the dimension `dim` in two: the part, and the position in the part."""
    return tensor.reshape(*tensor.shape[:dim], parts, -1, *tensor.shape[dim + 1 :])


def _repeat_heads(shared: Tensor, heads: int, processes: int) -> Tensor:
    """Repeat heads of keys or values that several processes need, so each process gets the same number of heads."""
    own = shared.shape[1]
    if own % processes == 0:
        return shared
    return shared.repeat_interleave((processes if processes % own == 0 else heads) // own, 1)


def _attend_whole(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float, scale: float | None
) -> Tensor:
    """Compute attention over complete sequences."""
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
    """Iterate over blocks of queries, with the range of keys that they may need and the mask."""
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
    """Return the layout of sequences that were padded to `length` at the end; causality hides this padding."""
    ends, padding = layout.ends, layout.is_padding
    return replace(
        layout,
        ends=None if ends is None else tuple((*row[:-1], length) for row in ends),
        is_padding=None if padding is None else pad(padding, (0, length - padding.shape[1]), value=True),
    )
