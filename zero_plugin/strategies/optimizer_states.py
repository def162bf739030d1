"""Optimizer states by parameter name, independent of the tensors that the optimizer steps.

Checkpoints read and write states through these functions. They also move states that an optimizer had before `prepare`
to the partitions of an engine.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.errors import CheckpointError, LoopError
from zero_plugin.strategies.torch_optimizers import describe_optimizer
from zero_plugin.tensors.modules import WEIGHT, Fragment, partition_of
from zero_plugin.tensors.nested import map_leaves

# DeepSpeed's CPU kernel uses another name for the state of torch's Adagrad.
_STATE_NAMES: Final[Mapping[str, Mapping[str, str]]] = {"DeepSpeedCPUAdagrad": {"exp_avg_sq": "sum"}}
# Options that select an implementation, not an algorithm: they are not saved.
_IMPLEMENTATION: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable", "bias_correction"})

StoredStates = Mapping[str, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
Scalars = dict[str, dict[str, float]]
FurtherStates = dict[str, dict[Any, Any]]  # "named": name → value; "of_parameters": parameter → state → value


@dataclass(frozen=True, slots=True)
class OptimizedPiece:
    """The piece of one trained parameter in a tensor that the optimizer steps.

    The stepped tensor is the parameter itself, or a flat buffer with pieces of many parameters (ZeRO).

    Attributes:
        name: the name of the parameter.
        shape: the shape of the unpartitioned parameter.
        group: the index of its parameter group.
        start: the index of the piece's first element in the flattened parameter.
        count: the number of elements; 0 if this process holds no part of the parameter.
        stepped: the tensor that the optimizer steps.
        offset: the index of the piece's first element in the flattened `stepped`.
        written: the range of the piece that this process writes into checkpoints.
        optimizer: the optimizer that steps the piece.
        whole_at: the index at which the unpartitioned parameter begins in a state. Set if states hold it although the
            process steps only a piece: DeepSpeed's Muon needs complete matrices at stages 1 and 2.
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
    whole_at: int | None = None

    def weight(self) -> Fragment:
        """Return the fragment of the parameter's stepped values."""
        return self.of(WEIGHT, self.stepped)

    def of(self, kind: str, tensor: Tensor) -> Fragment:
        """Return the fragment of the same piece in another tensor, e.g. a state; empty while that is swapped out."""
        if self.is_whole:
            own, size = self.stepped.numel(), tensor.numel()  # a state may have another size, e.g. Adafactor's
            begin, end = self.written if size == own else (edge * size // max(own, 1) for edge in self.written)
            return Fragment(kind, self.name, tuple(tensor.shape), 0, tensor.detach(), (begin, end))
        values = tensor.detach().view(-1)[self.offset : self.offset + self.count]
        return Fragment(kind, self.name, self.shape, self.start, values, self.written)

    def of_state(self, kind: str, tensor: Tensor) -> Fragment:
        """Return the fragment of the parameter in a state."""
        if self.whole_at is None:
            return self.of(kind, tensor)
        values = tensor.detach().view(-1)[self.whole_at : self.whole_at + self._whole_count]
        begin, end = (self.start + edge for edge in self.written) if self.count else (0, 0)
        return Fragment(kind, self.name, self.shape, 0, values, (begin, end))

    @property
    def _whole_count(self) -> int:
        return math.prod(self.shape) if self.count else 0

    @property
    def is_whole(self) -> bool:
        """Whether the optimizer steps the unpartitioned parameter itself."""
        return tuple(self.stepped.shape) == self.shape and self.count == self.stepped.numel()


def unpartitioned_pieces(optimizer: Optimizer, module: nn.Module, rank: int, world_size: int) -> list[OptimizedPiece]:
    """List the pieces of an optimizer that steps the unpartitioned parameters themselves, in every process.

    A tensor that is no parameter of the module (e.g. a loss weight) gets its index in the groups as its name.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    pieces: list[OptimizedPiece] = []
    for group_index, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            name = names.get(id(p), f"optimizer.{group_index}.{index}")
            written = partition_of(p.numel(), rank, world_size)
            pieces.append(OptimizedPiece(name, tuple(p.shape), group_index, 0, p.numel(), p, 0, written, optimizer))
    return pieces


def state_fragments(pieces: Iterable[OptimizedPiece]) -> Iterator[Fragment]:
    """Iterate over all states that are tensors, by their names in torch."""
    for piece in pieces:
        renamed = names_of_states(piece.optimizer)
        for key, value in sorted(piece.optimizer.state.get(piece.stepped, {}).items()):
            if not isinstance(value, Tensor) or is_scalar(key, value, piece.stepped.shape):
                continue
            if not piece.is_whole and piece.whole_at is None and value.numel() != piece.stepped.numel():
                raise CheckpointError(
                    f"{type(piece.optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a flat buffer "
                    f"of {piece.stepped.numel()} elements, so it is unknown which part belongs to {piece.name}. "
                    "This optimizer can be saved only at stage 0 or under DDP."
                )
            yield piece.of_state(renamed.get(key, key), value)


def state_scalars(pieces: Iterable[OptimizedPiece]) -> Scalars:
    """Return the states that are numbers (`step`), by parameter; the same in every process."""
    scalars: Scalars = {}
    for piece in pieces:
        for key, value in piece.optimizer.state.get(piece.stepped, {}).items():
            if isinstance(value, Tensor) and is_scalar(key, value, piece.stepped.shape):
                scalars.setdefault(piece.name, {})[key] = value.item()
            elif isinstance(value, int | float):
                scalars.setdefault(piece.name, {})[key] = value
    return scalars


def further_states(optimizer: Optimizer, pieces: Sequence[OptimizedPiece]) -> FurtherStates:
    """Return the states that are neither tensors nor numbers of a parameter.

    Raises:
        CheckpointError: the optimizer steps partitions, and a state is neither number nor text: each process has
            another value.
    """
    held: Mapping[Any, Any] = optimizer.state
    named = {key: value for key, value in held.items() if not isinstance(key, Tensor)}
    found: FurtherStates = {"named": named, "of_parameters": {}}
    for piece in pieces:
        for key, value in piece.optimizer.state.get(piece.stepped, {}).items():
            if not isinstance(value, Tensor | int | float | None):
                found["of_parameters"].setdefault(piece.name, {})[key] = value
    if not all(piece.is_whole for piece in pieces):
        for owner, states in (("", found["named"]), *found["of_parameters"].items()):
            for key, value in states.items():
                is_number = isinstance(value, Tensor) and value.ndim == 0
                if owner or not (is_number or isinstance(value, int | float | str | None)):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r}, a {type(value).__name__}, for "
                        f"{owner or 'all parameters'} in its state. Under ZeRO each process has another value. This "
                        "optimizer can be saved only at stage 0 or under DDP."
                    )
    return found


def restore_further_states(optimizer: Optimizer, pieces: Sequence[OptimizedPiece], saved: FurtherStates) -> list[str]:
    """Restore `further_states`. Return the parameters whose states a flat buffer cannot have."""
    for own in {id(one): one for one in (optimizer, *(piece.optimizer for piece in pieces))}.values():
        held: dict[Any, Any] = own.state
        for key in [key for key in held if not isinstance(key, Tensor) and key not in saved["named"]]:
            del held[key]
        held.update(copy.deepcopy(saved["named"]))
    left = []
    for piece in pieces:
        states = saved["of_parameters"].get(piece.name)
        if states and piece.is_whole:
            moved = map_leaves(partial(_on_device, piece.stepped.device), states)
            piece.optimizer.state.setdefault(piece.stepped, {}).update(moved)
        elif states:
            left.append(piece.name)
    return left


def _on_device(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf


def create_states(pieces: Iterable[OptimizedPiece], stored: StoredStates, scalars: Scalars) -> list[str]:
    """Create the states of a checkpoint in the optimizer, which would otherwise create them in its first step.

    Tensors are zeros, and the caller must load them afterwards. Numbers come from the checkpoint. Each state has this
    optimizer's dtype. Parameters in one flat buffer get their largest number. Numbers can differ if the saved run
    stepped parameters separately, and some of them got no gradients for a while.
    Args:
        pieces: the pieces of one optimizer, or also of the optimizer for parameters that are not offloaded.
        stored: parameter → state → shape and dtype of the unpartitioned tensor.
        scalars: see `state_scalars`.

    Returns:
        Descriptions of the numbers that differ from the checkpoint.
    """
    changed: list[str] = []
    for together in _by_stepped(pieces):
        stepped, optimizer = together[0].stepped, together[0].optimizer
        present = optimizer.state.pop(stepped, {})
        shapes = {key: found for piece in together for key, found in stored.get(piece.name, {}).items()}
        numbers: dict[str, float] = {}
        for piece in together:
            for key, number in scalars.get(piece.name, {}).items():
                numbers[key] = max(number, numbers.get(key, number))
        for piece in together:
            for key, number in numbers.items():
                if (own := scalars.get(piece.name, {}).get(key)) != number:
                    had = "had none" if own is None else f"was {own:g}"
                    changed.append(
                        f"{key} of {piece.name}, which {had}, is now {number:g}, as for the parameters in the same "
                        "flat buffer"
                    )
        if not shapes and not numbers:
            continue
        example = present or _try_out(optimizer, together[0].group, stepped)
        state: dict[str, Any] = {key: _as_in(example.get(key), number) for key, number in numbers.items()}
        own_names = {name: own for own, name in names_of_states(optimizer).items()}
        for name, (shape, dtype) in shapes.items():
            key = own_names.get(name, name)
            size = shape if together[0].is_whole else _size_of_states(together)
            state[key] = _tensor_like(present.get(key), example.get(key), stepped, size, dtype)
        for key, value in example.items():  # DeepSpeed's Lion has a step count, which its update does not use
            if key not in state and isinstance(value, int | float):
                state[key] = value
        optimizer.state[stepped] = state
    return changed


def _size_of_states(together: Sequence[OptimizedPiece]) -> tuple[int, ...]:
    """Return the shape of the states of pieces in one flat buffer."""
    if together[0].whole_at is None:
        return tuple(together[0].stepped.shape)
    return (sum(piece._whole_count for piece in together),)


def _by_stepped(pieces: Iterable[OptimizedPiece]) -> Iterable[list[OptimizedPiece]]:
    """Group the pieces by the tensor that the optimizer steps."""
    joined: dict[int, list[OptimizedPiece]] = {}
    for piece in pieces:
        joined.setdefault(id(piece.stepped), []).append(piece)
    return joined.values()


def describe_groups(optimizer: Optimizer, pieces: Iterable[OptimizedPiece]) -> list[dict[str, Any]]:
    """Describe the parameter groups: the names of their parameters, and every plain option (`lr`, `betas`, …)."""
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
    """Restore the saved options of the groups. Change nothing and return False if they have other parameters."""
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
    """Return the name of the algorithm, the same for all implementations."""
    return describe_optimizer(optimizer).name.removeprefix("flat")


def names_of_states(optimizer: Optimizer) -> Mapping[str, str]:
    """Return the state names in which this class differs from torch: its own → torch's."""
    return _STATE_NAMES.get(type(optimizer).__name__, {})


def is_scalar(key: str, value: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor state is a number, and not the state of a parameter of shape `shape` with one element."""
    return value.ndim == 0 and (len(shape) > 0 or key == "step")


def is_setting(key: str, value: Any) -> bool:
    """Return whether an entry of a parameter group is a plain option of the algorithm, such as `lr`."""
    if key in _IMPLEMENTATION or key.startswith("_"):
        return False
    if isinstance(value, tuple | list):
        return all(isinstance(item, int | float) for item in value)
    return value is None or isinstance(value, int | float | str | Tensor)


def _try_out(optimizer: Optimizer, group: int, stepped: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer creates for one element, to learn its dtypes. Empty if this fails."""
    trial = torch.zeros(1, dtype=stepped.dtype, device=stepped.device, requires_grad=True)
    trial.grad = torch.zeros_like(trial)
    meanwhile = {
        "param_groups": [{**optimizer.param_groups[group], "params": [trial]}],
        "state": defaultdict(dict),
        "_optimizer_step_pre_hooks": OrderedDict(),  # hide this step from the script's hooks
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    # Restore all attributes afterwards: an attribute may count steps. An inner optimizer, e.g. the Adam of DeepSpeed's
    # Muon, gets the trial, and would step only the trial from then on.
    within = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    before = [(one, dict(vars(one))) for one in (optimizer, *within)]
    if any(vars(optimizer).get(name) is None for name in meanwhile):
        return {}  # a wrapper around an optimizer: another object would step
    optimizer.__dict__.update(meanwhile)
    try:
        type(optimizer).step(optimizer)
        return dict(optimizer.state[trial])
    except Exception:  # noqa: BLE001 - any optimizer may fail here; its dtypes are then guessed
        return {}
    finally:
        for one, attributes in before:
            one.__dict__.clear()
            one.__dict__.update(attributes)


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


_ELSEWHERE = "Or train at stage 0 or under DDP, where each parameter has its own states."


@dataclass(frozen=True, slots=True)
class GivenStates:
    """The states that an optimizer had before `prepare`, by parameter.

    Attributes:
        tensors: parameter → state → the unpartitioned tensor.
        scalars: parameter → state → number.
    """

    tensors: dict[str, dict[str, Tensor]]
    scalars: Scalars

    def keys_of(self, name: str) -> set[str]:
        """Return the names of the states of a parameter."""
        return {*self.tensors.get(name, ()), *self.scalars.get(name, ())}


def take_states(optimizer: Optimizer, module: nn.Module, *, joins_groups: bool) -> GivenStates | None:
    """Read the states of a module's trained parameters; None without states. Nothing is changed.

    Args:
        optimizer: the optimizer of the script.
        module: the module whose parameters the optimizer steps; they may already be partitioned.
        joins_groups: whether the parameters of each group will be stepped as one flat tensor.

    Raises:
        LoopError: a flat tensor cannot have these states: one has another shape than its parameter, is neither a tensor
            nor a number, is missing for some parameters, or is a number that differs within a group.
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
    """Write states into the partitions, as loading a checkpoint does; inside `Session.loading`.

    Args:
        blocks: from `Session.blocks(changing=True)`.
        given: see `take_states`.

    Raises:
        LoopError: a flat tensor cannot have these states.
    """
    shapes = {
        name: {kind: (tuple(value.shape), value.dtype) for kind, value in states.items()}
        for name, states in given.tensors.items()
    }
    with torch.no_grad():
        for pieces in blocks:
            for together in _by_stepped(pieces):
                _refuse_unequal([piece.name for piece in together], given)
            create_states(pieces, shapes, given.scalars)
            for fragment in state_fragments(pieces):
                source, values = given.tensors[fragment.name][fragment.kind], fragment.values
                if source.shape != values.shape:
                    source = source.reshape(-1)[fragment.start : fragment.start + values.numel()]
                values.copy_(source)


def describe_states(optimizer: Optimizer) -> str:
    """Describe how many parameters have states, and after which steps."""
    states = [state for group in optimizer.param_groups for p in group["params"] if (state := _states_of(optimizer, p))]
    steps = sorted({float(state["step"]) for state in states if isinstance(state.get("step"), Tensor | int | float)})
    return f"of {len(states)} parameters" + (f" at step {', '.join(f'{s:g}' for s in steps)}" if steps else "")


def _states_of(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the states that steps have created, without unused ones (None) and those of Adagrad's constructor."""
    kept = getattr(optimizer, "state", {})  # a wrapper of another library may have none
    states = {key: value for key, value in kept.get(parameter, {}).items() if value is not None}
    begun = not isinstance(optimizer, torch.optim.Adagrad) or bool(states.get("step", 1))
    return states if begun else {}


def _refuse_unequal(names: Sequence[str], given: GivenStates) -> None:
    """Raise if parameters in one flat tensor have different states, or different numbers."""
    if not names:
        return
    first = names[0]
    for name in names[1:]:
        here, there = given.keys_of(first), given.keys_of(name)
        numbers, others = given.scalars.get(first, {}), given.scalars.get(name, {})
        unequal = [kind for kind in numbers if here == there and numbers[kind] != others[kind]]
        if here != there:
            lacks, has, kinds = (name, first, here - there) if here - there else (first, name, there - here)
            missing = ", ".join(sorted(kinds))
            none = missing if given.keys_of(lacks) else "state"
            what = f"{lacks} has no {none}, and {has} of the same parameter group has {missing}"
        elif unequal:
            values = f"{numbers[unequal[0]]:g} for {first} and {others[unequal[0]]:g} for {name}"
            what = f"{unequal[0]!r} is {values} of the same parameter group"
        else:
            continue
        raise LoopError(
            f"prepare() got an optimizer with a state that ZeRO cannot continue from: {what}. ZeRO steps the "
            "parameters of a group as one tensor, with one state.\nGive such parameters groups of their own. "
            f"{_ELSEWHERE}"
        )


def _unfitting(name: str, what: str) -> LoopError:
    return LoopError(
        f"prepare() got an optimizer with a state that ZeRO cannot partition: {name} has {what}.\n"
        f"Only numbers, and tensors of the parameter's shape, can be partitioned. {_ELSEWHERE}"
    )
