"""`Training`: one prepared model with its session, optimizer, schedulers and accumulation window.

Also here: which optimizers and schedulers of a `prepare` call belong to which model, by their parameters, and the
record of a training in a checkpoint (counters, parameter groups, loss scale).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zero_plugin.big_models.module_hooks import has_offloaded_params
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.errors import CheckpointError, ConfigError, LoopError, Problem
from zero_plugin.loop.memory_check import Prediction
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.window import Window
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import (
    algorithm_of,
    describe_groups,
    further_states,
    restore_further_states,
    restore_groups,
    state_scalars,
)


@dataclass
class Training:
    """One prepared model.

    Attributes:
        session: the session that runs the model.
        facts: what the configuration was resolved from.
        resolved: the resolved configuration.
        window: counts the micro-batches.
        parameters: the trained parameters. They are listed once, since iterating over a module takes time, and since a
            loop may freeze a model temporarily for another model's loss.
        given_optimizer: the optimizer that was passed to `prepare`.
        optimizer: the prepared optimizer; None for a model that is not trained.
        ids: the ids of the parameters.
        looks: how many of its backwards `FirstSteps` has checked.
        reached: whether the model got a gradient since this was last set to False; see `watch_gradients`.
        remove_scheduler: removes the configuration's scheduler, if that advances by itself.
        prediction: the memory that a plan predicts; None if there was no plan.
        reduces_each_batch: whether gradients are averaged over the processes in each micro-batch, not only in the last
            one of a window.
    """

    session: Session
    facts: Facts
    resolved: Resolved
    window: Window
    parameters: tuple[nn.Parameter, ...]
    given_optimizer: Optimizer | DummyOptim | None = None
    optimizer: AcceleratedOptimizer | None = None
    ids: frozenset[int] = field(init=False)
    looks: int = 0
    reached: bool = False
    watches: bool = False
    remove_scheduler: Callable[[], None] | None = None
    prediction: Prediction | None = None
    reduces_each_batch: bool = False

    def __post_init__(self) -> None:
        self.ids = frozenset(map(id, self.parameters))

    def is_of_model(self, model: Any) -> bool:
        """Whether `model` is the prepared model or the user's own module."""
        return model is self.session.model or model is self.session.module

    def is_of_optimizer(self, optimizer: Any) -> bool:
        """Whether `optimizer` is the given one, the prepared one, or the torch optimizer that runs."""
        known = (self.given_optimizer, self.optimizer, self.session.optimizer)
        return any(optimizer is candidate for candidate in known if candidate is not None)

    def describe_end(self) -> list[str]:
        """Lines about schedulers that the loop did not run to their end."""
        schedulers = [] if self.optimizer is None else self.optimizer.schedulers
        return [line for scheduler in schedulers if (line := scheduler.describe_end()) is not None]

    def measure(self) -> dict[str, float]:
        """Measurements of the last step; see `Accelerator.metrics`."""
        optimizer = self.optimizer
        if optimizer is None:
            return {}
        values = {"lr": float(optimizer.param_groups[0]["lr"])}
        if self.session.last_norm is not None:
            values["grad_norm"] = float(self.session.last_norm)
        if self.resolved.precision == "fp16":
            values |= {"loss_scale": optimizer.loss_scale, "skipped_steps": optimizer.skipped_in_a_row}
        return values

    def watch_gradients(self) -> None:
        """From now on set `reached` when the model gets a gradient, to know which models a loss depends on."""
        if self.watches:
            return
        self.watches = True
        self.window.plans_ahead = False

        reference = weakref.ref(self)  # the hooks' references are in C++, where Python's GC cannot see them

        def note(_: Tensor) -> None:
            if (training := reference()) is not None:
                training.reached = True

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def clip(self, given: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the gradients of the next step; their norm before, see `Session.clip`.

        None if none of the `given` tensors is a trained parameter.

        Raises:
            ConfigError: the configuration's `gradient_clipping` is another number.
        """
        if self.optimizer is None:
            return None
        stepped: Sequence[nn.Parameter] = self.parameters
        if self.session.left_out:
            idle = set(map(id, self.session.left_out))
            stepped = [p for p in stepped if id(p) not in idle]
        only: list[Tensor] | None = None
        is_all = bool(given) and len(given) == len(stepped) and all(map(is_, given, stepped))  # model.parameters()
        if not is_all:
            ids = {id(p) for p in given}
            counted = sum(id(p) in ids for p in stepped)
            if not counted and not self.session.unpartitioned_gradients and self.session.optimizer is not None:
                groups = self.session.optimizer.param_groups  # of the optimizer's partitions
                stepped = [p for group in groups for p in group["params"]]
                counted = sum(id(p) in ids for p in stepped)
            if not counted:
                return None
            only = None if counted == len(stepped) else list(given)
        self._refuse_other_clipping(max_norm)
        return self.window.clip(max_norm, norm_type=norm_type, only=only)

    def _refuse_other_clipping(self, max_norm: float) -> None:
        entry = self.resolved.tree.get("gradient_clipping")
        if entry is None or not entry.origin.typed_by_user or max_norm in (float("inf"), entry.value):
            return
        where = f"clip_grad_norm_(max_norm={max_norm})"
        message = f"{max_norm} in code, but {entry.value} at {entry.origin.where}"
        fix = "Write the same value in both, or auto in the file."
        raise ConfigError([Problem(where, "gradient_clipping", message, fix)])


class Pair(NamedTuple):
    """A model, its optimizer (None if it is not trained), and the schedulers of that optimizer."""

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    schedulers: tuple[Any, ...]


def pair_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | DummyOptim],
    schedulers: Sequence[Any],
    prepared: Iterable[nn.Module],
) -> list[Pair]:
    """Match optimizers and schedulers with models: one pair for each of `models`, in their order.

    Args:
        models, optimizers, schedulers: the arguments of one `prepare` call.
        prepared: the user's modules from earlier calls.

    Raises:
        LoopError: an optimizer belongs to no model or to several, two optimizers belong to one model, models share
            parameters, or a model is distributed over devices.
    """
    _refuse_shared(models, prepared)
    for model in models:
        _refuse_device_map(model)
    owners: dict[int, Optimizer | DummyOptim] = {}
    for optimizer in optimizers:
        model = _model_of(optimizer, models)
        if id(model) in owners:
            raise LoopError(
                f"prepare() got two optimizers of the {type(model).__name__}: build one, with two parameter groups."
            )
        owners[id(model)] = optimizer
    return [
        Pair(model, optimizer, tuple(s for s in schedulers if optimizer is not None and s.optimizer is optimizer))
        for model in models
        for optimizer in (owners.get(id(model)),)
    ]


def refuse_other_steps(optimizer: Any) -> None:
    """Refuse an optimizer that evaluates the loss in its step, such as LBFGS, or that steps within backward, as LOMO.

    Raises:
        LoopError: its `step` requires a closure, or its `fused_backward` is what steps.
    """
    if hasattr(optimizer, "fused_backward"):
        refuse_lomo(f"prepare() got {type(optimizer).__name__}, which")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise LoopError(
            f"prepare() got a {type(optimizer).__name__}, whose step() requires a closure that computes the loss: "
            "gradients are computed by accelerator.backward(loss), once for each step.\nUse an optimizer that steps "
            "without a closure, such as AdamW; or train with plain PyTorch on one device, without prepare()."
        )


def refuse_lomo(what: str) -> NoReturn:
    """Refuse LOMO, which updates weights within backward, where nothing is averaged, accumulated or clipped.

    Args:
        what: what the script did, as the subject of the message.

    Raises:
        LoopError: always.
    """
    raise LoopError(
        f"{what} changes weights within backward: that is not supported, since here optimizer.step() changes them.\n"
        "Where optimizer states do not fit, use ZeRO with offload_optimizer."
    )


def holds_any(optimizer: Optimizer | DummyOptim, model: nn.Module) -> bool:
    """Whether the optimizer has a parameter of the model."""
    held = {id(p) for p in _parameters(optimizer)}
    return any(id(p) in held for p in model.parameters())


def parameters_left_out(optimizer: Optimizer | DummyOptim, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the model that require gradients and are not in the optimizer."""
    held = {id(p) for p in _parameters(optimizer)}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in held]


def _model_of(optimizer: Optimizer | DummyOptim, models: Sequence[nn.Module]) -> nn.Module:
    held = {id(p) for p in _parameters(optimizer)}
    counts = [sum(id(p) in held for p in model.parameters()) for model in models]
    most = max(range(len(models)), key=counts.__getitem__)
    if foreign := len(held) - counts[most]:
        others = [type(models[i]).__name__ for i, count in enumerate(counts) if count and i != most]
        if others:
            names = " and ".join([type(models[most]).__name__, *others])
            raise LoopError(
                f"prepare() got one optimizer for the parameters of several models ({names}).\n"
                "Build an optimizer for each, or put the models into one module, e.g. torch.nn.ModuleList, and prepare "
                "that module."
            )
        before, now = _places(_parameters(optimizer)), _places(models[most].parameters())
        moved = f" They are on {before}, the model's on {now}: it was moved after the optimizer was built."
        raise LoopError(
            f"prepare() got an optimizer of which {foreign} of {len(held)} parameters are not the model's."
            f"{moved if before != now else ''}\n"
            "Build the optimizer from model.parameters() of the model in the same call, after every change to it."
        )
    return models[most]


def _places(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.device) for tensor in tensors}))


def _parameters(optimizer: Optimizer | DummyOptim) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        given = group["params"]
        parameters.extend([given] if isinstance(given, Tensor) else given)
    return parameters


def _refuse_shared(models: Sequence[nn.Module], prepared: Iterable[nn.Module]) -> None:
    owner: dict[int, nn.Module] = {}
    for model in (*prepared, *models):
        for p in model.parameters():
            other = owner.setdefault(id(p), model)
            if other is not model:
                raise LoopError(
                    f"prepare() got a {type(model).__name__} that shares parameters with a {type(other).__name__}, "
                    "which is prepared too.\nPrepare one module that contains both."
                )


def _refuse_device_map(model: nn.Module) -> None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise LoopError(
            f"prepare() got a {type(model).__name__} that was loaded with device_map: its layers are on "
            f"{', '.join(sorted(places))}, and every process trains on one device.\nLoad it without device_map. If it "
            "does not fit on one device, use ZeRO stage 3: from_pretrained() after Accelerator() then loads only the "
            "partition of this process."
        )
    if any(hasattr(module, "_hf_hook") and has_offloaded_params(module) for module in model.modules()):
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose weights are on the device only during a forward "
            "(cpu_offload, disk_offload): they get no gradients.\nPrepare it without offload; if it does not fit, use "
            "ZeRO stage 3 with offload_param_device: cpu."
        )


def refuse_uninitialized(model: nn.Module) -> None:
    """Refuse a model with lazy layers that have had no batch yet.

    Raises:
        LoopError: which parameters and buffers have no values.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose {', '.join(lazy)} are not initialized: its lazy layers do "
            "not know their sizes yet.\nRun the model once on a batch before prepare(), and then build the optimizer."
        )


def describe_training(training: Training) -> dict[str, Any]:
    """The record of one prepared model in a checkpoint, without its tensors; the same in every process."""
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
        "further_states": further_states(session.optimizer, pieces),
        "loss_scale": session.scale_state(),
        "reduction": session.reduction_state(),
        "applied_steps": training.optimizer.applied_steps,
        "skipped_in_a_row": training.optimizer.skipped_in_a_row,
    }
    return record


def refuse_other_optimizer(training: Training, record: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose optimizer has another algorithm.

    Raises:
        CheckpointError: the algorithms differ.
    """
    saved, running = record["optimizer"], training.session.optimizer
    if saved is None or running is None or saved["algorithm"] in (None, algorithm_of(running)):
        return  # None: an imported checkpoint, whose files do not name it
    raise CheckpointError(
        f"The checkpoint of the {record['class']} was saved with {saved['algorithm']}, but this run uses "
        f"{algorithm_of(running)}, which has different optimizer states.\n"
        "Use the same optimizer, or load_state(weights_only=True), which does not load optimizer states."
    )


def restore_training(training: Training, record: Mapping[str, Any]) -> list[str]:
    """Restore a record, whose tensors are loaded already; returns what was not restored."""
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
    if "further_states" in saved:  # older checkpoints have none
        pieces = session.optimized_pieces()
        if names := restore_further_states(session.optimizer, pieces, saved["further_states"]):
            left.append(f"states of {', '.join(names)} that belong to the whole parameter, which ZeRO has partitioned")
    session.restore_scale(saved["loss_scale"])
    training.optimizer.restore_counts(saved["applied_steps"], saved["skipped_in_a_row"])
    return left


def restore_reductions(trainings: Sequence[Training], records: Sequence[Mapping[str, Any]]) -> None:
    """Sum gradients in the same buckets as the saved run; collective, so that no process may have failed before."""
    for training, record in zip(trainings, records, strict=True):
        if training.optimizer is not None and record["optimizer"] is not None:
            training.session.restore_reduction(record["optimizer"].get("reduction", []))


def is_inside_window(training: Training) -> bool:
    """Whether there are accumulated gradients, which are in no checkpoint."""
    return training.optimizer is not None and training.window.holds_gradients


def schedulers_of(trainings: Iterable[Training], waiting: Iterable[AcceleratedOptimizer]) -> list[AcceleratedScheduler]:
    """Every prepared scheduler once, in the order of the optimizers that they drive."""
    optimizers = [*(training.optimizer for training in trainings if training.optimizer), *waiting]
    return list({id(scheduler): scheduler for optimizer in optimizers for scheduler in optimizer.schedulers}.values())


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child
