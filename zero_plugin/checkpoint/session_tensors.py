"""All tensors of a session as fragments: to be written, to be read into, or only described."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from zero_plugin.checkpoint.layout import Layout
from zero_plugin.errors import CheckpointError
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.fragments import WEIGHT, Fragment, with_masters
from zero_plugin.strategies.optimizer_states import OptimizedPiece, state_fragments

__all__ = ["ASK_TO_REPORT", "described_fragments", "placed_fragments", "session_fragments"]

ASK_TO_REPORT: Final = "This is a bug in zero_plugin; please report it with the configuration."


def session_fragments(
    session: Session, *, changing: bool = False, prepare: Callable[[list[OptimizedPiece]], None] = lambda _: None
) -> Iterator[Fragment]:
    """All tensors of a session, as they lie here; each may be used until the next is asked for.

    Args:
        session: of a model.
        changing: they are going to be changed, inside `session.reading()`.
        prepare: called with pieces that are in memory, before their fragments come.
    """
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    for pieces in session.blocks(changing=changing):
        prepare(pieces)
        yield from _join(weights, pieces)
    yield from session.fetched(weights.values(), changing=changing)


def described_fragments(session: Session) -> Iterator[Fragment]:
    """The same, without reading from a disk: of what lies there, all but the values is known."""
    weights = {fragment.name: fragment for fragment in session.weight_fragments()}
    yield from _join(weights, session.optimized_pieces())
    yield from weights.values()


def placed_fragments(fragments: Iterable[Fragment], layout: Layout) -> Iterator[Fragment]:
    """Those that have a place: all but the weights of a model that a hook has stored.

    Raises:
        CheckpointError: nobody planned for one.
    """
    for fragment in fragments:
        if (fragment.kind, fragment.name) in layout.places:
            yield fragment
        elif fragment.kind != WEIGHT:
            raise CheckpointError(f"{fragment.name} ({fragment.kind}) has no place in the checkpoint. {ASK_TO_REPORT}")


def _join(weights: dict[str, Fragment], pieces: list[OptimizedPiece]) -> Iterator[Fragment]:
    """What there is of the parameters that `pieces` are of, whose weights are taken out of `weights`."""
    trained = [weights.pop(piece.name) for piece in pieces if piece.name in weights]
    yield from with_masters(trained, (piece.weight() for piece in pieces))
    yield from state_fragments(pieces)
