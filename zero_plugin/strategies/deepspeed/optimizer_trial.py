"""Try on a copy of the user's optimizer whether steps on flat partitions equal steps on unpartitioned parameters.

ZeRO steps flat tensors, each a piece of several joined parameters. The trial joins and cuts small parameters as ZeRO
does. It misses a rule that begins after more steps, or above larger sizes and norms, than the trial has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.strategies.optimizer_only import StepInParts, has_step_hooks
from zero_plugin.strategies.torch_optimizers import Lion

# torch's own, which the tests train under ZeRO. DeepSpeed's list of optimizers without a trial has three others.
_ELEMENTWISE: Final = frozenset(
    {getattr(torch.optim, name) for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")}
    | {Lion}
)
_SCALES: Final = (1e-3, 1.0, 1e3)  # of gradients: some optimizers limit their norm.
_STEPS: Final = 8  # at each scale: some optimizers change their rule after a warm-up.
_LONGEST_SIDES: Final = {1: 128, 2: 128}  # some optimizers treat large matrices differently.
_LONGEST_SIDE: Final = 16  # of tensors with more dimensions
_MOST_KINDS: Final = 24


class _Group(NamedTuple):
    """A tried parameter group.

    Attributes:
        place: the index of the group in the optimizer.
        parameters: the tried ones of the user's parameters, one of each kind.
        shapes: the tried shapes.
        start: the first values, joined.
        gradients: the gradients of successive steps, joined.
    """

    place: int
    parameters: list[Tensor]
    shapes: list[tuple[int, ...]]
    start: Tensor
    gradients: list[Tensor]

    def cut(self, joined: Tensor) -> list[Tensor]:
        """Split a joined tensor into the tried parameters' pieces."""
        pieces = torch.split(joined, [torch.Size(shape).numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def why_not_elementwise(optimizer: Optimizer, model: nn.Module, stage: int) -> str | None:
    """Return the reason why the optimizer cannot step flat partitions; None if it can.

    Args:
        optimizer: the user's optimizer; it does not change.
        model: the model that the optimizer trains.
        stage: the ZeRO stage.
    """
    if type(optimizer) in _ELEMENTWISE:
        return None
    try:
        if (why := _why_not_tried(optimizer)) is not None:
            return why
        same = _updates_elementwise(optimizer, model, stage)
    except Exception as error:  # noqa: BLE001 - any optimizer may raise here; the message shows it
        return f"it could not be tried on a flat tensor ({type(error).__name__}: {error})"
    if same:
        return None
    return (
        "its update depends on the shape, the norm or an attribute of unpartitioned tensors, or on the number of calls "
        "of step(), and ZeRO updates flat partitions, one group after another"
    )


def _why_not_tried(optimizer: Optimizer) -> str | None:
    if not has_step_hooks(optimizer):
        return "it does not call the constructor of torch.optim.Optimizer, so ZeRO cannot replace its parameters"
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            return f"its attribute {name} is another optimizer, whose states ZeRO would neither partition nor save"
        if _contains(value, ids):
            return f"its attribute {name} keeps id() of parameters, but ZeRO updates flat partitions instead of them"
    return None


def _contains(value: Any, numbers: set[int]) -> bool:
    """Return whether a value, or a collection at any depth, contains one of the numbers."""
    if isinstance(value, dict):
        return any(_contains(item, numbers) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_contains(item, numbers) for item in value)
    return type(value) is int and value in numbers


def _updates_elementwise(optimizer: Optimizer, model: nn.Module, stage: int) -> bool:
    groups = _tried_groups(optimizer)
    unpartitioned = _train_whole(optimizer, model, groups)
    # Each half has its own optimizer, as each process has: this also finds statistics over all tensors.
    halves = [_train_part(optimizer, model, groups, rank, stage) for rank in range(2)]
    for group, *values in zip(groups, unpartitioned, *halves, strict=True):
        before = group.start
        for whole, *pieces in zip(*values, strict=True):
            wanted, got = whole - before, torch.cat(pieces) - before
            tolerance = 1e-5 * float(wanted.abs().nanmedian())
            if not torch.allclose(got, wanted, rtol=1e-5, atol=tolerance, equal_nan=True):
                return False
            before = whole
    return True


def _tried_groups(optimizer: Optimizer) -> list[_Group]:
    """Return the groups to try, with one parameter of each kind; groups that differ only in fractions become two."""
    generator = torch.Generator().manual_seed(0)
    alike: dict[str, list[tuple[int, list[Tensor]]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        others = {k: v for k, v in group.items() if k not in ("params", "param_names", "lr", "initial_lr")}
        options = {k: bool(v) if isinstance(v, float) else v for k, v in others.items()}
        members = alike.setdefault(repr(options), [])
        if len(members) < 2:
            members.append((index, list(group["params"])))
        else:
            members[-1][1].extend(group["params"])
    tried = []
    chosen = [pair for pairs in alike.values() for pair in pairs]
    for index, given in sorted(chosen, key=lambda pair: pair[0]):
        if not (parameters := _one_of_each_kind(given)):
            continue
        shapes = [_tried_shape(p) for p in parameters]
        count = sum(torch.Size(shape).numel() for shape in shapes)
        start, *gradients = torch.randn((5, count), generator=generator, dtype=torch.float64)
        tried.append(_Group(index, parameters, shapes, start, gradients))
    return tried


def _one_of_each_kind(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the largest of each kind of parameters. A kind has similar shapes and equal attributes."""
    kinds: dict[Any, Tensor] = {}
    for p in sorted(parameters, key=lambda p: -torch.Size(_tried_shape(p)).numel()):
        marks = {k: v for k, v in vars(p).items() if isinstance(v, int | float | str) and not k.startswith("ds_")}
        kinds.setdefault((tuple(size.bit_length() for size in _tried_shape(p)), repr(sorted(marks.items()))), p)
    return list(kinds.values())[:_MOST_KINDS]


def _tried_shape(parameter: Tensor) -> tuple[int, ...]:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    longest = _LONGEST_SIDES.get(len(shape), _LONGEST_SIDE)
    return tuple(min(size, longest) for size in shape)


def _train_whole(optimizer: Optimizer, model: nn.Module, groups: list[_Group]) -> list[list[Tensor]]:
    """Return each group's joined values after the steps at each scale, on unpartitioned parameters."""
    parameters = [[nn.Parameter(start) for start in group.cut(group.start.clone())] for group in groups]
    states = [_tried_states(optimizer, group) for group in groups]
    memo = _emptied(optimizer, model)
    for group, members, own in zip(groups, parameters, states, strict=True):
        for given, tried, state in zip(group.parameters, members, own, strict=True):
            vars(tried).update(vars(given))
            memo[id(given)] = tried
            if given in optimizer.state:
                memo[id(optimizer.state[given])] = state
    trial = _copy(optimizer, memo)
    _place(trial, groups, parameters)
    trial.param_groups = [options for options in trial.param_groups if options["params"]]
    values: list[list[Tensor]] = [[] for _ in groups]
    for scale in _SCALES:
        for step in range(_STEPS):
            for group, members in zip(groups, parameters, strict=True):
                for p, gradient in zip(members, group.cut(group.gradients[step % 4]), strict=True):
                    p.grad = gradient * scale
            trial.step()
        for members, seen in zip(parameters, values, strict=True):
            seen.append(torch.cat([p.detach().flatten() for p in members]))
    return values


def _train_part(
    optimizer: Optimizer, model: nn.Module, groups: list[_Group], rank: int, stage: int
) -> list[list[Tensor]]:
    """Return the values of `_train_whole` for one of two halves, which ZeRO steps group after group.

    At stage 3, ZeRO also steps the sub-groups of a group one after the other.
    """
    trial = _copy(optimizer, _emptied(optimizer, model))
    for unpartitioned in [key for key in trial.state if isinstance(key, Tensor)]:
        del trial.state[unpartitioned]
    count = 2 if stage == 3 else 1

    def own(joined: Tensor) -> list[Tensor]:
        half = joined.tensor_split(2)[rank]
        return list(half.tensor_split(count))

    parameters = [[nn.Parameter(part.clone()) for part in own(group.start)] for group in groups]
    for group, members in zip(groups, parameters, strict=True):
        states = _tried_states(optimizer, group)
        for key, example in states[0].items():
            joins = isinstance(example, Tensor) and tuple(example.shape) == group.shapes[0]
            values = own(torch.cat([state[key].flatten() for state in states])) if joins else [example] * count
            for p, value in zip(members, values, strict=True):
                trial.state[p][key] = copy.deepcopy(value)
    _place(trial, groups, parameters)
    in_parts, all_groups = StepInParts(trial), trial.param_groups
    seen: list[list[Tensor]] = [[] for _ in groups]
    for scale in _SCALES:
        for step in range(_STEPS):
            in_parts.begin()
            for group, members in zip(groups, parameters, strict=True):
                for p, gradient in zip(members, own(group.gradients[step % 4]), strict=True):
                    p.grad = gradient * scale
                    for other in all_groups:
                        other["params"] = [p] if other is all_groups[group.place] else []
                    trial.step()
        for members, values in zip(parameters, seen, strict=True):
            values.append(torch.cat([p.detach() for p in members]))
    return seen


def _place(trial: Any, groups: list[_Group], parameters: list[list[nn.Parameter]]) -> None:
    """Make the copy step only these parameters."""
    tried = {group.place: members for group, members in zip(groups, parameters, strict=True)}
    for index, options in enumerate(trial.param_groups):
        options["params"] = tried.get(index, [])
    if callable(train := getattr(trial, "train", None)):
        train()  # a schedule-free optimizer steps only in train mode


def _tried_states(optimizer: Optimizer, group: _Group) -> list[dict[str, Any]]:
    """Create states for the tried parameters if the user's have states: some constructors create them."""
    generator = torch.Generator().manual_seed(1)
    tried = []
    for p, shape in zip(group.parameters, group.shapes, strict=True):
        state = {}
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape in (p.shape, getattr(p, "ds_shape", p.shape)) and value.ndim:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
                state[key] = drawn if value.is_floating_point() else drawn.to(value.dtype)
            else:
                state[key] = copy.deepcopy(value)
        tried.append(state)
    return tried


def _emptied(optimizer: Optimizer, model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` that empties the model's tensors and all states of parameters."""
    given = [p for group in optimizer.param_groups for p in group["params"]]
    memo: dict[int, Any] = {id(t): nn.Parameter(torch.empty(0)) for t in (*given, *model.parameters())}
    memo |= {id(buffer): torch.empty(0) for buffer in model.buffers()}
    return memo | {id(state): {} for key, state in optimizer.state.items() if isinstance(key, Tensor)}


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """Copy the optimizer with all attributes and options, without others' hooks. The copy takes large steps."""
    trial: Any = object.__new__(type(optimizer))
    memo[id(optimizer)] = trial
    for name, value in vars(optimizer).items():
        if name == "step":
            continue  # a patch of a scheduler or the script, which would step the optimizer itself
        try:
            vars(trial)[name] = copy.deepcopy(value, memo)
        except Exception:
            if name in ("param_groups", "state", "defaults"):
                raise
            vars(trial)[name] = value  # e.g. a process group cannot be copied
    for hooks in (trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is not trial]:
            del hooks[key]
    for group in trial.param_groups:
        if "lr" in group:
            group["lr"] = 0.1  # a large step shows every difference; a scheduler may have set 0
        if "capturable" in group:
            group["capturable"] = False  # only for CUDA graphs; torch refuses it for tensors on the CPU
    return trial
