"""What a checkpoint keeps of a training beside its tensors: counters, groups, loss scale; to and from containers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zero_plugin.errors import CheckpointError
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.scheduler import AcceleratedScheduler
from zero_plugin.strategies.optimizer_states import algorithm_of, describe_groups, restore_groups, state_scalars
from zero_plugin.training import Training

__all__ = [
    "describe_training",
    "is_inside_window",
    "refuse_other_optimizer",
    "restore_reductions",
    "restore_training",
    "schedules_of",
]


def describe_training(training: Training) -> dict[str, Any]:
    """The record of one prepared model; the same in every process."""
    session = training.session
    extra = {name: module.get_extra_state() for name, module in _with_extra_state(session.module)}
    record: dict[str, Any] = {"class": type(session.module).__name__, "extra_states": extra, "optimizer": None}
    if training.optimizer is None or session.optimizer is None:
        return record
    pieces = session.optimized_pieces()
    record["optimizer"] = {
        "algorithm": algorithm_of(session.optimizer),
        "groups": describe_groups(session.optimizer, pieces),
        "scalars": state_scalars(pieces),
        "loss_scale": session.scale_state(),
        "reduction": session.reduction_state(),
        "applied_steps": training.optimizer.applied_steps,
        "skipped_in_a_row": training.optimizer.skipped_in_a_row,
    }
    return record


def refuse_other_optimizer(training: Training, record: Mapping[str, Any]) -> None:
    """Raise where the states in a checkpoint mean something else to this run's optimizer.

    Raises:
        CheckpointError: see above.
    """
    saved, running = record["optimizer"], training.session.optimizer
    if saved is None or running is None or saved["algorithm"] in (None, algorithm_of(running)):
        return  # None: an imported one, of which the files do not tell
    raise CheckpointError(
        f"the {record['class']} of the checkpoint was trained with {saved['algorithm']}, here it has "
        f"{algorithm_of(running)}, whose states are others.\n"
        "Use the same optimizer, or load_state(weights_only=True) and let it begin anew."
    )


def restore_training(training: Training, record: Mapping[str, Any]) -> list[str]:
    """Go on from a record, whose tensors are read already; what was not restored."""
    session, saved = training.session, record["optimizer"]
    for name, module in _with_extra_state(session.module):
        if name in record["extra_states"]:
            module.set_extra_state(record["extra_states"][name])
    if training.optimizer is None or session.optimizer is None:
        return []
    if saved is None:
        return [f"an optimizer of the {record['class']}: it was not trained there"]
    left: list[str] = []
    if not restore_groups(session.optimizer, session.optimized_pieces(), saved["groups"]):
        left.append("learning rates and other settings of the parameter groups, which are of other parameters here")
    session.restore_scale(saved["loss_scale"])
    training.optimizer.applied_steps = saved["applied_steps"]
    training.optimizer.skipped_in_a_row = saved["skipped_in_a_row"]
    return left


def restore_reductions(trainings: Sequence[Training], records: Sequence[Mapping[str, Any]]) -> None:
    """Sum gradients as in the records' run; collective, so that no process may have failed before."""
    for training, record in zip(trainings, records, strict=True):
        if training.optimizer is not None and record["optimizer"] is not None:
            training.session.restore_reduction(record["optimizer"].get("reduction", []))


def is_inside_window(training: Training) -> bool:
    """Whether gradients wait for the window's step: they are in no checkpoint."""
    return training.optimizer is not None and training.window.holds_gradients


def schedules_of(trainings: Iterable[Training], waiting: Iterable[AcceleratedOptimizer]) -> list[AcceleratedScheduler]:
    """Every prepared schedule once, in the order of the optimizers that they drive."""
    optimizers = [*(training.optimizer for training in trainings if training.optimizer), *waiting]
    return list({id(schedule): schedule for optimizer in optimizers for schedule in optimizer.schedules}.values())


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child
