"""The states of optimizers under the names of their parameters, given before `prepare` or loaded.

The states of an optimizer under the names of the parameters that they belong to, whatever tensors it steps.

The states that an optimizer was given before `prepare`, brought to where an engine keeps them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.strategies.torch_optimizers import describe_optimizer
from zero_plugin.tensors.fragments import WEIGHT, Fragment, share_of

# DeepSpeed's CPU kernel has torch's Adagrad under another name.
_STATE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {"DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}}
# How a machine computes the update, not what it is: each run's own.
_IMPLEMENTATION: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable", "bias_correction"})

StoredStates = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
Scalars = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class OptimizedPiece:
    """The piece of one trained parameter in a tensor that the optimizer steps.

    That tensor is the parameter itself, or a flat buffer with pieces of many (ZeRO).

    Attributes:
        name: of the parameter.
        shape: of the whole parameter.
        group: index of its parameter group.
        start: where the piece begins in the flattened parameter.
        count: its elements; 0 where this process has none of it.
        stepped: what the optimizer steps.
        offset: where the piece begins in the flattened `stepped`.
        written: the range of the piece that this process writes.
        optimizer: steps it.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    start: int
    count: int
    stepped: Tensor
    offset: int
    written: tuple[int, int]
    optimizer: Optimizer

    def weight(self) -> Fragment:
        """The parameter's own values, as stepped."""
        return self.of(WEIGHT, self.stepped)

    def of(self, kind: str, tensor: Tensor) -> Fragment:
        """The same piece of a tensor beside `stepped`, such as a state; no values while that is swapped out."""
        if self.is_whole:
            return Fragment(kind, self.name, tuple(tensor.shape), 0, tensor.detach(), self.written)
        values = tensor.detach().view(-1)[self.offset : self.offset + self.count]
        return Fragment(kind, self.name, self.shape, self.start, values, self.written)

    @property
    def is_whole(self) -> bool:
        """Whether the optimizer steps the parameter as it is."""
        return tuple(self.stepped.shape) == self.shape and self.count == self.stepped.numel()


def unpartitioned_pieces(optimizer: Optimizer, module: nn.Module, rank: int, world_size: int) -> list[OptimizedPiece]:
    """Of an optimizer that steps the module's parameters as they are, the same in every process.

    A tensor that it trains beside the module's (a weight between losses, say) is named by its place in the groups.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    pieces: list[OptimizedPiece] = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            name = names.get(id(p), f"optimizer.{group_index}.{index}")
            share = share_of(p.numel(), rank, world_size)
            pieces.append(OptimizedPiece(name, tuple(p.shape), group_index, 0, p.numel(), p, 0, share, optimizer))
    return pieces


def state_fragments(pieces: Iterable[OptimizedPiece]) -> Iterator[Fragment]:
    """All states that are tensors, under the names that torch gives them."""
    for piece in pieces:
        renamed = names_of_states(piece.optimizer)
        for key, value in sorted(piece.optimizer.state.get(piece.stepped, {}).items()):
            if not isinstance(value, Tensor) or is_scalar(key, value, piece.stepped.shape):
                continue
            if not piece.is_whole and value.numel() != piece.stepped.numel():
                raise CheckpointError(
                    f"{type(piece.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a flat buffer "
                    f"of {piece.stepped.numel()} elements, so nobody can tell what of it belongs to {piece.name}; such "
                    "an optimizer is stored from stage 0 or DDP only."
                )
            yield piece.of(renamed.get(key, key), value)


def state_scalars(pieces: Iterable[OptimizedPiece]) -> Scalars:
    """The states that are numbers (`step`), by parameter; the same in every process."""
    scalars: Scalars = {}
    for piece in pieces:
        for key, value in piece.optimizer.state.get(piece.stepped, {}).items():
            if isinstance(value, Tensor) and is_scalar(key, value, piece.stepped.shape):
                scalars.setdefault(piece.name, {})[key] = value.item()
            elif isinstance(value, int | float):
                scalars.setdefault(piece.name, {})[key] = value
    return scalars


def create_states(pieces: Iterable[OptimizedPiece], stored: StoredStates, scalars: Scalars) -> None:
    """Give the optimizer the states that a checkpoint has, so that they can be read into.

    Optimizers make them at their first step. Tensors are zero at first, numbers are those of the checkpoint, each of
    the type that this optimizer works with. Of parameters that one flat buffer joins, the largest number holds for all:
    they differ where some got no gradient for a while in a run that stepped them apart.

    Args:
        pieces: of one optimizer, or of an optimizer and its understudy on another device.
        stored: parameter → state → shape and type of the whole tensor.
        scalars: see `state_scalars`.
    """
    joined: dict[int, list[OptimizedPiece]] = {}
    for piece in pieces:
        joined.setdefault(id(piece.stepped), []).append(piece)
    for together in joined.values():
        stepped, optimizer = together[0].stepped, together[0].optimizer
        present = optimizer.state.pop(stepped, {})
        shapes = {key: found for piece in together for key, found in stored.get(piece.name, {}).items()}
        numbers: dict[str, float] = {}
        for piece in together:
            for key, number in scalars.get(piece.name, {}).items():
                numbers[key] = max(number, numbers.get(key, number))
        if not shapes and not numbers:
            continue
        example = present or _try_out(optimizer, together[0].group, stepped)
        state: dict[str, Any] = {key: _as_in(example.get(key), number) for key, number in numbers.items()}
        own_names = {name: own for own, name in names_of_states(optimizer).items()}
        for name, (shape, dtype) in shapes.items():
            key = own_names.get(name, name)
            size = shape if together[0].is_whole else tuple(stepped.shape)
            state[key] = _tensor_like(present.get(key), example.get(key), stepped, size, dtype)
        for key, value in example.items():  # DeepSpeed's Lion counts steps, which its update does not ask for
            if key not in state and isinstance(value, int | float):
                state[key] = value
        optimizer.state[stepped] = state


def describe_groups(optimizer: Optimizer, pieces: Iterable[OptimizedPiece]) -> list[dict[str, Any]]:
    """The parameter groups: names of their parameters, and every plain setting (`lr`, `betas`, …)."""
    members: dict[int, list[str]] = {}
    for piece in pieces:
        members.setdefault(piece.group, []).append(piece.name)
    return [
        {
            "params": members.get(index, []),
            "settings": {key: value for key, value in group.items() if is_setting(key, value)},
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def restore_groups(optimizer: Optimizer, pieces: Iterable[OptimizedPiece], saved: Sequence[Mapping[str, Any]]) -> bool:
    """Give the groups their saved settings; False, and nothing done, where the groups are of other parameters."""
    present = describe_groups(optimizer, pieces)
    if [sorted(group["params"]) for group in present] != [sorted(group["params"]) for group in saved]:
        return False
    for group, record in zip(optimizer.param_groups, saved, strict=True):
        for key, value in record["settings"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key in group or key == "initial_lr":
                group[key] = value
    return True


def algorithm_of(optimizer: Optimizer) -> str:
    """The algorithm's name, the same for each implementation of it."""
    return describe_optimizer(optimizer).name.removeprefix("flat")


def names_of_states(optimizer: Optimizer) -> Mapping[str, str]:
    """Where this class has other names for states than torch: its own → torch's."""
    return _STATE_NAMES.get(type(optimizer).__name__, {})


def is_scalar(key: str, value: Tensor, shape: Sequence[int]) -> bool:
    """Whether a state that is a tensor is a number, and not one element of a parameter of that shape."""
    return value.ndim == 0 and (len(shape) > 0 or key == "step")


def is_setting(key: str, value: Any) -> bool:
    """Whether an entry of a parameter group is a plain setting of the algorithm, such as `lr`."""
    if key in _IMPLEMENTATION or key.startswith("_"):
        return False
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, int | float | str | Tensor)


def _try_out(optimizer: Optimizer, group: int, stepped: Tensor) -> dict[str, Any]:
    """The state that the optimizer makes for a tensor of one element: which types it works with. Empty if it fails."""
    trial = torch.zeros(1, dtype=stepped.dtype, device=stepped.device, requires_grad=True)
    trial.grad = torch.zeros_like(trial)
    meanwhile = {
        "param_groups": [{**optimizer.param_groups[group], "params": [trial]}],
        "state": defaultdict(dict),
        "_optimizer_step_pre_hooks": OrderedDict(),  # this is no step that anybody watches
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    before = {name: held for name in meanwhile if (held := optimizer.__dict__.get(name)) is not None}
    if len(before) < len(meanwhile):
        return {}  # a wrapper around an optimizer: what would step is another object
    optimizer.__dict__.update(meanwhile)
    try:
        type(optimizer).step(optimizer)
        return dict(optimizer.state[trial])
    except Exception:  # noqa: BLE001 - any optimizer may come here, and its own types are only the better guess
        return {}
    finally:
        optimizer.__dict__.update(before)


def _as_in(example: Any, number: float) -> Any:
    if isinstance(example, Tensor):
        return torch.tensor(number, dtype=example.dtype, device=example.device)
    return type(example)(number) if isinstance(example, int | float) else number


def _tensor_like(present: Any, example: Any, stepped: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if isinstance(present, Tensor) and tuple(present.shape) == shape:
        return present
    if isinstance(example, Tensor):
        stepped, dtype = stepped.to(example.device), example.dtype
    if tuple(stepped.shape) == shape:
        return torch.zeros_like(stepped, dtype=dtype, requires_grad=False)  # in its memory format
    return torch.zeros(shape, dtype=dtype, device=stepped.device)


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
