"""The states that an optimizer was given before `prepare`, brought to where an engine keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.errors import LoopError
from zero_plugin.strategies.optimizer_states import (
    OptimizedPiece,
    Scalars,
    create_states,
    is_scalar,
    names_of_states,
    state_fragments,
)

__all__ = ["GivenStates", "describe_states", "fill_states", "take_states"]

_ELSEWHERE = "Or train it at stage 0 or under DDP, where each parameter has states of its own."


@dataclass(frozen=True, slots=True)
class GivenStates:
    """States by parameter, of one that has any.

    Attributes:
        tensors: parameter → state → the whole tensor.
        scalars: parameter → state → number.
    """

    tensors: dict[str, dict[str, Tensor]]
    scalars: Scalars

    def keys_of(self, name: str) -> set[str]:
        """The states of a parameter."""
        return {*self.tensors.get(name, ()), *self.scalars.get(name, ())}


def take_states(optimizer: Optimizer, module: nn.Module, *, joins_groups: bool) -> GivenStates | None:
    """The states of the module's parameters that are trained; None where there are none. Nothing is changed.

    Args:
        optimizer: as the script has made it.
        module: whose parameters it steps; they may be partitioned already.
        joins_groups: whether the parameters of each group are going to be stepped as one flat tensor.

    Raises:
        LoopError: states that one flat tensor cannot have: another shape than the parameter's, no tensors and no
            numbers, missing ones, or numbers that differ within a group.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    own_names = names_of_states(optimizer)
    given = GivenStates({}, {})
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad and id(p) in names]
        for p in trained:
            name, shape = names[id(p)], tuple(getattr(p, "ds_shape", p.shape))
            for key, value in _states_of(optimizer, p).items():
                kind = own_names.get(key, key)
                if isinstance(value, Tensor) and not is_scalar(key, value, shape):
                    if joins_groups and tuple(value.shape) != shape:
                        raise _unfitting(name, f"{kind!r} of shape {list(value.shape)}, and it has {list(shape)}")
                    given.tensors.setdefault(name, {})[kind] = value.detach()
                elif isinstance(value, Tensor | int | float):
                    given.scalars.setdefault(name, {})[kind] = float(value) if isinstance(value, Tensor) else value
                else:
                    raise _unfitting(name, f"{kind!r}, a {type(value).__name__}")
        if joins_groups:
            _refuse_unequal([names[id(p)] for p in trained], given)
    return given if given.tensors or given.scalars else None


def fill_states(blocks: Iterable[list[OptimizedPiece]], given: GivenStates) -> None:
    """Write them into partitions, as a checkpoint is read; inside `Session.reading`.

    Args:
        blocks: of `Session.blocks(changing=True)`.
        given: see `take_states`.

    Raises:
        LoopError: states that one flat tensor cannot have.
    """
    shapes = {
        name: {kind: (tuple(value.shape), value.dtype) for kind, value in states.items()}
        for name, states in given.tensors.items()
    }
    with torch.no_grad():
        for pieces in blocks:
            joined: dict[int, list[str]] = {}
            for piece in pieces:
                joined.setdefault(id(piece.stepped), []).append(piece.name)
            for together in joined.values():
                _refuse_unequal(together, given)
            create_states(pieces, shapes, given.scalars)
            for fragment in state_fragments(pieces):
                source, values = given.tensors[fragment.name][fragment.kind], fragment.values
                if source.shape != values.shape:
                    source = source.reshape(-1)[fragment.start : fragment.start + values.numel()]
                values.copy_(source)


def describe_states(optimizer: Optimizer) -> str:
    """Of how many parameters it has states, and after which steps."""
    states = [state for group in optimizer.param_groups for p in group["params"] if (state := _states_of(optimizer, p))]
    steps = sorted({float(state["step"]) for state in states if isinstance(state.get("step"), Tensor | int | float)})
    return f"of {len(states)} parameters" + (f" at step {', '.join(f'{s:g}' for s in steps)}" if steps else "")


def _states_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Those that steps have made; None stands for one that is not used, and Adagrad's constructor makes some."""
    kept = getattr(optimizer, "state", {})  # a wrapper of another library may have none
    states = {key: value for key, value in kept.get(parameter, {}).items() if value is not None}
    begun = not isinstance(optimizer, torch.optim.Adagrad) or bool(states.get("step", 1))
    return states if begun else {}


def _refuse_unequal(names: Sequence[str], given: GivenStates) -> None:
    """Raise where parameters that one flat tensor joins have other states, or other numbers."""
    if not names:
        return
    first = names[0]
    for name in names[1:]:
        here, there = given.keys_of(first), given.keys_of(name)
        if here != there:
            lacks, has, kinds = (name, first, here - there) if here - there else (first, name, there - here)
            what = "no state" if not given.keys_of(lacks) else f"no {', '.join(sorted(kinds))}"
            raise _unequal(f"{lacks} has {what}, and {has} of the same parameter group has {', '.join(sorted(kinds))}")
        numbers, others = given.scalars.get(first, {}), given.scalars.get(name, {})
        for kind, number in numbers.items():
            if number != others[kind]:
                raise _unequal(
                    f"{kind!r} is {number:g} for {first} and {others[kind]:g} for {name} of the same parameter group"
                )


def _unequal(what: str) -> LoopError:
    return LoopError(
        f"prepare() got an optimizer with a state that ZeRO cannot go on from: {what}. ZeRO steps the parameters of a "
        f"group as one tensor, with one state.\nGive such parameters groups of their own. {_ELSEWHERE}"
    )


def _unfitting(name: str, what: str) -> LoopError:
    return LoopError(
        f"prepare() got an optimizer with a state that ZeRO cannot partition: {name} has {what}.\n"
        f"Only numbers, and tensors of the parameter's shape, can be. {_ELSEWHERE}"
    )
