"""One prepared model with its optimizer and schedulers, and what a checkpoint keeps of them.

One prepared model: its session, its configuration, its window and its optimizer.

Which optimizer and which schedulers of one `prepare` call belong to which model, told by the parameters they hold.

What a checkpoint keeps of a training beside its tensors: counters, groups, loss scale; to and from containers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.big_models.align import has_offloaded_params
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.resolve.facts import Facts, Resolved
from zero_plugin.errors import CheckpointError, ConfigError, LoopError, Problem
from zero_plugin.loop.memory_check import Prediction
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_states import algorithm_of, describe_groups, restore_groups, state_scalars
from zero_plugin.strategies.window import AccumulationWindow


@dataclass(slots=True)
class Training:
    """One prepared model.

    Attributes:
        session: runs it.
        facts: what it was resolved from.
        resolved: its configuration.
        window: counts its micro-batches.
        parameters: those of the module that are trained, listed once: walking a module takes longer than clipping a
            small one, and a loop may freeze a model for another model's loss.
        given_optimizer: what the user passed to `prepare`.
        optimizer: what the user got for it; None for a model that is not trained.
        ids: of the parameters.
        looks: how many of its backwards `FirstSteps` has looked at.
        reached: whether a gradient has come since it was last set to False; see `watch_gradients`.
        remove_scheduler: undoes the scheduler that the configuration describes and that steps by itself.
        prediction: what a plan says that it takes; None where none was made.
        reduces_each_batch: whether gradients are averaged over the processes in each micro-batch, not in the last one
            of a window.
    """

    session: Session
    facts: Facts
    resolved: Resolved
    window: AccumulationWindow
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
        """Whether `model` is this one, prepared or the user's own module."""
        return model is self.session.model or model is self.session.module

    def is_of_optimizer(self, optimizer: Any) -> bool:
        """Whether `optimizer` is this one: as given, as prepared, or the torch object that runs."""
        known = (self.given_optimizer, self.optimizer, self.session.optimizer)
        return any(optimizer is candidate for candidate in known if candidate is not None)

    def describe_end(self) -> list[str]:
        """Lines on schedulers that the loop has not taken to their end."""
        schedulers = [] if self.optimizer is None else self.optimizer.schedulers
        return [line for scheduler in schedulers if (line := scheduler.describe_end()) is not None]

    def measure(self) -> dict[str, float]:
        """What the last step tells of itself; see `TrackingCalls.metrics`."""
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
        """Note in `reached` from now on when gradients come, so that a loss needs not say which models it is of."""
        if self.watches:
            return
        self.watches = True
        self.window.plans_ahead = False

        def note(_: Tensor) -> None:
            self.reached = True

        for p in self.parameters:
            p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def clip(self, given: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
        """Clip the coming step; None if none of the `given` tensors is trained here. See `Session.clip`.

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
        if not given or len(given) != len(stepped) or not all(map(is_, given, stepped)):  # else model.parameters()
            ids = {id(p) for p in given}
            counted = sum(id(p) in ids for p in stepped)
            if not counted and not self.session.unpartitioned_gradients and self.session.optimizer is not None:
                stepped = [p for group in self.session.optimizer.param_groups for p in group["params"]]  # partitions
                counted = sum(id(p) in ids for p in stepped)
            if not counted:
                return None
            only = None if counted == len(stepped) else list(given)
        self._refuse_other_clipping(max_norm)
        return self.optimizer.clip(max_norm, norm_type=norm_type, only=only)

    def _refuse_other_clipping(self, max_norm: float) -> None:
        entry = self.resolved.tree.get("gradient_clipping")
        if entry is None or not entry.origin.typed_by_user or max_norm in (float("inf"), entry.value):
            return
        where = f"clip_grad_norm_(max_norm={max_norm})"
        message = f"{max_norm} in code, but {entry.value} at {entry.origin.where}"
        fix = "Write the same value in both, or auto in the file."
        raise ConfigError([Problem(where, "gradient_clipping", message, fix)])


class Pair(NamedTuple):
    """A model, its optimizer if it is to be trained, and the schedulers built on that optimizer."""

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    schedulers: tuple[Any, ...]


def pair_models(
    models: Sequence[nn.Module],
    optimizers: Sequence[Optimizer | DummyOptim],
    schedulers: Sequence[Any],
    prepared: Iterable[nn.Module],
) -> list[Pair]:
    """One pair for each of `models`, in their order.

    Args:
        models, optimizers, schedulers: those of one `prepare` call.
        prepared: the users' modules of earlier calls.

    Raises:
        LoopError: an optimizer of no model or of several, two optimizers for one model, models that share parameters,
            a model spread over devices.
    """
    _refuse_shared(models, prepared)
    for model in models:
        _refuse_device_map(model)
    owners: dict[int, Optimizer | DummyOptim] = {}
    for optimizer in optimizers:
        model = _model_of(optimizer, models)
        if id(model) in owners:
            raise LoopError(
                f"prepare() got two optimizers of the {type(model).__name__}; build one, with parameter groups."
            )
        owners[id(model)] = optimizer
    return [
        Pair(model, optimizer, tuple(s for s in schedulers if optimizer is not None and s.optimizer is optimizer))
        for model in models
        for optimizer in (owners.get(id(model)),)
    ]


def refuse_closure(optimizer: Any) -> None:
    """Refuse an optimizer that computes losses within its step, such as LBFGS.

    Raises:
        LoopError: its step cannot be called without a closure.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise LoopError(
            f"prepare() got a {type(optimizer).__name__}, whose step() computes the loss itself, several times, in a "
            "closure: here gradients come from accelerator.backward(loss), once for each step.\nUse an optimizer that "
            "steps without a closure, such as AdamW; or train by plain torch on one device, without prepare()."
        )


def holds_any(optimizer: Optimizer | DummyOptim, model: nn.Module) -> bool:
    """Whether the optimizer holds a parameter of the model."""
    held = {id(p) for p in _parameters(optimizer)}
    return any(id(p) in held for p in model.parameters())


def parameters_left_out(optimizer: Optimizer | DummyOptim, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the model that get gradients, and that the optimizer does not hold."""
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
                "that."
            )
        before, now = _places(_parameters(optimizer)), _places(models[most].parameters())
        moved = f" They are on {before} and its own on {now}: it was moved after they were taken."
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
                    "which is prepared too.\nPrepare one module that holds both."
                )


def _refuse_device_map(model: nn.Module) -> None:
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise LoopError(
            f"prepare() got a {type(model).__name__} that was loaded with device_map: its layers lie on "
            f"{', '.join(sorted(places))}, and every process trains on one device.\nLoad it without device_map. Where "
            "it does not fit on one device, use ZeRO stage 3: from_pretrained() after Accelerator() then loads only "
            "this process' part."
        )
    if any(has_offloaded_params(module) for module in model.modules()):
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose weights are on its device in a forward only (cpu_offload, "
            "disk_offload): they get no gradients.\nPrepare it without; where it does not fit, use ZeRO stage 3 with "
            "offload_param_device: cpu."
        )


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


def schedulers_of(trainings: Iterable[Training], waiting: Iterable[AcceleratedOptimizer]) -> list[AcceleratedScheduler]:
    """Every prepared scheduler once, in the order of the optimizers that they drive."""
    optimizers = [*(training.optimizer for training in trainings if training.optimizer), *waiting]
    return list({id(scheduler): scheduler for optimizer in optimizers for scheduler in optimizer.schedulers}.values())


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child
