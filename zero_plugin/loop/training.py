"""`Training`: one prepared model with its configuration, session, optimizer, schedulers and accumulation window.

`start_training` creates a `Training`. The optimizer, the schedulers and the loader may come in the same `prepare` call
or in later ones; a later call resolves the configuration again. Checkpoints hold the `record` of each `Training`:
counters, parameter groups, loss scale.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from zero_plugin.config.keys import CLIPPING
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.resolve.facts import Facts, LoopFacts, Resolved, SchedulerFacts, SchedulerSection
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.run_files import keep_record
from zero_plugin.data.active import LoaderProgress
from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import DETAIL
from zero_plugin.errors import CheckpointError, ConfigError, LoopError
from zero_plugin.long_context.transformers_models import share_model
from zero_plugin.loop import memory_check
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.scheduler import AcceleratedScheduler, describe_counting, own_steps
from zero_plugin.loop.window import Window
from zero_plugin.plan.model_source import probe_model
from zero_plugin.plan.run_plan import local_processes, plan_open_fields, predict_memory
from zero_plugin.strategies import optimizer_states
from zero_plugin.strategies.base import Session, SessionRequest
from zero_plugin.strategies.torch_optimizers import CurveLR, build_scheduler, describe_optimizer
from zero_plugin.tensors.wrappers import without_wrappers

if TYPE_CHECKING:
    from zero_plugin.loop.run import Run

_log = logging.getLogger(__name__)


class Pair(NamedTuple):
    """A model, its optimizer (None if it is not trained), and the schedulers of that optimizer."""

    model: nn.Module
    optimizer: Optimizer | DummyOptim | None
    schedulers: tuple[Any, ...]


@dataclass
class Training:
    """One prepared model.

    Attributes:
        session: the session that runs the model.
        facts: the facts that the configuration was resolved from.
        resolved: the resolved configuration.
        window: counts the micro-batches.
        parameters: the trained parameters, listed once: iterating over a module takes time, and a loop may freeze a
            model temporarily for another model's loss.
        given_optimizer: the optimizer that was passed to `prepare`.
        optimizer: the prepared optimizer; None for a model that is not trained.
        ids: the ids of the parameters.
        looks: how many of its backwards `FirstSteps` has checked.
        reached: whether the model got a gradient since this attribute was last set to False; see `watch_gradients`.
        remove_scheduler: removes the configuration's scheduler, if that advances automatically.
        prediction: the memory that a plan predicts; None without a plan.
        reduces_each_batch: whether gradients are averaged over the processes in each micro-batch, not only in the last
            one of a window.
        stepped_apart: whether each process has stepped with its own gradients, as inside `LocalSGD`.
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
    remove_scheduler: Callable[[], None] | None = None
    prediction: memory_check.Prediction | None = None
    reduces_each_batch: bool = False
    stepped_apart: bool = False
    _watching: list[RemovableHandle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = frozenset(map(id, self.parameters))

    def is_of_model(self, model: Any) -> bool:
        """Return whether `model` is the prepared model or the user's own module."""
        return model is self.session.model or model is self.session.module

    def is_of_optimizer(self, optimizer: Any) -> bool:
        """Return whether `optimizer` is the given one, the prepared one, or the running torch optimizer."""
        known = (self.given_optimizer, self.optimizer, self.session.optimizer)
        return any(optimizer is candidate for candidate in known if candidate is not None)

    # ---- additions by later calls of `prepare` -----------------------------------------------------------------------

    def add_optimizer(self, run: Run, pair: Pair) -> None:
        """Add the pair's optimizer to the session of a model that was prepared without one.

        Raises:
            ConfigError: see `resolve`.
            LoopError: see `Strategy.add_optimizer`; or parameters that were frozen in `prepare` now require gradients.
        """
        if any(p.requires_grad and id(p) not in self.ids for p in pair.model.parameters()):
            raise LoopError(
                f"prepare() got the optimizer of the {type(pair.model).__name__} in a later call than the model, and "
                "some parameters were frozen in the model's call.\nPass both in one call, or set requires_grad of all "
                "parameters before the first call."
            )
        facts = _with_pair(self.facts, pair)
        self._use(run, facts, resolve(run.document, facts))
        self.session.left_out = _find_left_out(pair)
        run.strategy.add_optimizer(self.session, _request(pair, self.resolved))

    def wrap_optimizer(self, run: Run, pair: Pair, held: AcceleratedOptimizer | None) -> AcceleratedOptimizer:
        """Create the `AcceleratedOptimizer` of the session, which already runs the pair's optimizer.

        Args:
            run: the run.
            pair: the model with its optimizer and schedulers in this `prepare` call.
            held: the `AcceleratedOptimizer` that an earlier `prepare` returned for the optimizer, or None.
        """
        progress = LoaderProgress(ends_windows=run.options.accumulation.sync_with_dataloader)
        self.window = Window(self.resolved.accumulation, progress)
        assert self.session.optimizer is not None, "the session has just been given one"
        optimizer = AcceleratedOptimizer(self.session.optimizer) if held is None else held
        optimizer.run_in(self.window, self.session)
        self.session.follow_zero_grad(optimizer.zero_grad)
        self.given_optimizer, self.optimizer = pair.optimizer, optimizer
        self._follow(self.facts, self.resolved)
        if self.prediction is not None:
            memory_check.watch_memory(self.session, optimizer, self.prediction)
        for scheduler in optimizer.schedulers:  # schedulers of earlier `prepare` calls
            self._log_learning_rate(scheduler)
            self._warn_of_counting(scheduler)
        section = self.resolved.scheduler
        if section is not None and not pair.schedulers and not optimizer.schedulers:
            # The configuration has a scheduler section, but the script prepared no scheduler.
            self.remove_scheduler = _step_by_itself(section, optimizer)
            self._log_learning_rate(optimizer.schedulers[-1])
            _log.info(
                "the configuration's scheduler advances with each optimizer step, because no scheduler was prepared"
            )
        return optimizer

    def prepare_scheduler(self, run: Run, scheduler: Any, *, built_before: bool) -> AcceleratedScheduler:
        """Create the `AcceleratedScheduler` for a scheduler; for a placeholder, build the configuration's scheduler.

        Args:
            run: the run.
            scheduler: the scheduler or placeholder of the script, which drives this model's optimizer.
            built_before: whether the scheduler was built before the loader was prepared.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "the model was found by its optimizer"
        counted = self.facts.machine.counted if self._counts_processes and not self.facts.split_batches else 1
        self._join_scheduler(run, scheduler)
        times, typed = counted, None
        if isinstance(scheduler, DummyScheduler):
            times = 1
            if scheduler.lr_scheduler_callable is not None:
                scheduler = scheduler.lr_scheduler_callable(optimizer.optimizer)
            else:
                assert self.resolved.scheduler is not None, "resolution gives every placeholder a section"
                typed = counted if scheduler.total_num_steps is not None else 1  # a section counts optimizer steps
                scheduler = build_scheduler(self.resolved.scheduler, optimizer.optimizer)
        follows = run.options.step_scheduler_with_optimizer
        prepared = AcceleratedScheduler(scheduler, optimizer, follows, times=times, typed_per_step=typed)
        self._log_learning_rate(prepared)
        self._warn_of_counting(prepared, built_before=built_before)
        return prepared

    def join_loaders(self, run: Run, loop: LoopFacts, *, surely_trains: bool) -> None:
        """Check the configuration of a model that was prepared before its loader, now that the loader is known.

        Args:
            run: the run.
            loop: facts about the loaders.
            surely_trains: whether the loader is certainly not for evaluation; otherwise problems are only logged.

        Raises:
            ConfigError: the loader contradicts the configuration.
            LoopError: with the loader, the configuration results in another number of micro-batches per step.
        """
        if self.facts.loop != LoopFacts():
            return
        facts = replace(self.facts, loop=loop)
        unsure = "if this DataLoader is not for evaluation"
        try:
            resolved = resolve(run.document, facts)
            before, now = self.window.steps, resolved.accumulation
            if before != now:
                raise LoopError(
                    f"train_batch_size was resolved to gradient_accumulation_steps {before} before the DataLoader was "
                    f"prepared; with the loader, the number is {now}.\nPass the loader to prepare() with the model, or "
                    "before it; or write gradient_accumulation_steps."
                )
        except (ConfigError, LoopError) as error:
            if surely_trains:
                raise
            _log.info(f"{unsure}: {error}")
            return
        for line in resolved.logged:
            if line not in self.resolved.logged:
                _log.info(line if surely_trains else f"{unsure}: {line}")
        self._follow(facts, resolved)
        for scheduler in self.optimizer.schedulers if self.optimizer is not None else ():
            self._warn_of_counting(scheduler, built_before=True)

    def _join_scheduler(self, run: Run, scheduler: Any) -> None:
        """Resolve the configuration again if a scheduler is prepared in a later call than its optimizer.

        Raises:
            ConfigError: the configuration describes another scheduler.
            LoopError: the configuration's scheduler has already advanced.
        """
        assert self.optimizer is not None, "the model was found by its optimizer"
        placeholder = isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is None
        known = self.facts.scheduler
        if known is not None:
            if placeholder and known.placeholder and self.optimizer.schedulers:
                raise LoopError(
                    "prepare() got a second DummyScheduler of one optimizer; use the scheduler of the first call."
                )
            if known.placeholder or not placeholder:
                return
        facts = replace(self.facts, scheduler=scheduler.describe() if placeholder else SchedulerFacts())
        resolved = resolve(run.document, facts)
        if self.remove_scheduler is not None:
            if self.optimizer.applied_steps:
                raise LoopError(
                    f"prepare() got a {type(scheduler).__name__} after optimizer steps in which the configuration's "
                    "scheduler has already advanced; prepare it before the first step."
                )
            self.remove_scheduler()
            self.remove_scheduler = None
        self._use(run, facts, resolved)

    def _use(self, run: Run, facts: Facts, resolved: Resolved) -> None:
        before = self.resolved.logged
        self._follow(facts, resolved)
        _log_resolved(resolved, run, before)

    def _follow(self, facts: Facts, resolved: Resolved) -> None:
        self.facts, self.resolved = facts, resolved
        if self.optimizer is not None:  # the window of other models is not their own
            entry = resolved.tree.entries[CLIPPING.path]
            self.window.clipping = resolved.clipping or inf
            self.window.typed_clipping = entry.value if entry.origin.typed_by_user else None

    @property
    def _counts_processes(self) -> bool:
        return self.resolved.scheduler_counts == "processes"

    def _log_learning_rate(self, scheduler: AcceleratedScheduler) -> None:
        batches = self.facts.loop.batches_per_epoch
        epoch = None if batches is None else -(-batches // self.resolved.accumulation)
        line = scheduler.describe(self.resolved.scheduler, self.facts.scheduler, epoch)
        if line is not None:
            _log.info(line, extra=DETAIL)

    def _warn_of_counting(self, scheduler: AcceleratedScheduler, *, built_before: bool = False) -> None:
        """Warn if the length of the scheduler only fits the other value of `scheduler_counts`."""
        facts, real, by_process = self.facts, scheduler.scheduler, self._counts_processes
        name, length = type(real).__name__, own_steps(real)
        if isinstance(real, CurveLR):
            # The numbers of a section are optimizer steps. The numbers of a placeholder depend on `scheduler_counts`.
            name, length = "DummyScheduler", None if facts.scheduler is None else facts.scheduler.total_num_steps
        elif scheduler.times != (facts.machine.counted if by_process else 1):
            return  # built by `lr_scheduler_callable`, or counts calls: `scheduler_counts` has no effect
        if length is None or facts.split_batches:
            return
        accumulation = self.resolved.accumulation
        warning = describe_counting(name, length, facts, accumulation, by_process=by_process, built_before=built_before)
        if warning is not None:
            _log.info(warning)

    # ---- while it trains ---------------------------------------------------------------------------------------------

    @property
    def is_inside_window(self) -> bool:
        """Whether gradients are accumulating. Checkpoints do not include them."""
        return self.optimizer is not None and self.window.holds_gradients

    def describe_end(self) -> list[str]:
        """Return lines about schedulers that the loop did not run to their end."""
        schedulers = [] if self.optimizer is None else self.optimizer.schedulers
        return [line for scheduler in schedulers if (line := scheduler.describe_end()) is not None]

    def measure(self) -> dict[str, float]:
        """Return measurements of the last step; see `Accelerator.metrics`."""
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
        """Set `reached` whenever the model gets a gradient, from now on, to know which models a loss depends on."""
        if self._watching:
            return
        self.window.plans_ahead = False

        reference = weakref.ref(self)  # C++ holds the hooks: Python's GC could not break a cycle through them

        def note(_: Tensor) -> None:
            if (training := reference()) is not None:
                training.reached = True

        self._watching = [p.register_post_accumulate_grad_hook(note) for p in self.parameters]  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Release the model: remove hooks, marks and gradients, including gradients of an open window."""
        session = self.session
        if session.before_change is not None:
            session.before_change()
        log_dropped(self.window, type(session.module).__name__ if self.optimizer is not None else None)
        for hook in self._watching:
            hook.remove()
        session.model.__dict__.pop("_is_accelerate_prepared", None)
        session.close()
        for p in session.module.parameters():
            p.grad = None

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is not tensors; the same in every process."""
        session = self.session
        extra = {name: module.get_extra_state() for name, module in _with_extra_state(session.module)}
        record: dict[str, Any] = {"class": type(session.module).__name__, "extra_states": extra, "optimizer": None}
        if self.optimizer is None or session.optimizer is None:
            return record
        pieces = session.optimized_pieces()
        record["optimizer"] = {
            "algorithm": optimizer_states.algorithm_of(session.optimizer),
            "groups": optimizer_states.describe_groups(session.optimizer, pieces),
            "scalars": optimizer_states.state_scalars(pieces),
            "further_states": optimizer_states.further_states(session.optimizer, pieces),
            "loss_scale": session.scale_state(),
            "reduction": session.reduction_state(),
            "applied_steps": self.optimizer.applied_steps,
            "skipped_in_a_row": self.optimizer.skipped_in_a_row,
        }
        return record

    def refuse_other_optimizer(self, record: Mapping[str, Any]) -> None:
        """Refuse a checkpoint whose optimizer has another algorithm.

        Raises:
            CheckpointError: the algorithms differ.
        """
        saved, running = record["optimizer"], self.session.optimizer
        if saved is None or running is None or saved["algorithm"] is None:
            return  # the files of an imported checkpoint do not name the algorithm
        if saved["algorithm"] != (own := optimizer_states.algorithm_of(running)):
            raise CheckpointError(
                f"The checkpoint of the {record['class']} was saved with {saved['algorithm']}, but this run uses "
                f"{own}, which has different optimizer states.\n"
                "Use the same optimizer, or load_state(weights_only=True), which does not load optimizer states."
            )

    def restore(self, record: Mapping[str, Any]) -> list[str]:
        """Restore a record after its tensors were loaded; return phrases about parts that were not restored."""
        session, saved = self.session, record["optimizer"]
        for name, module in _with_extra_state(session.module):
            if name in record["extra_states"]:
                module.set_extra_state(record["extra_states"][name])
        if self.optimizer is None or session.optimizer is None:
            return []
        if saved is None:
            return [f"an optimizer of the {record['class']}: the saving run did not train it"]
        left: list[str] = []
        pieces = session.optimized_pieces()
        if not optimizer_states.restore_groups(session.optimizer, pieces, saved["groups"]):
            left.append("learning rates and other settings of the parameter groups, which hold other parameters here")
        further = saved.get("further_states")  # older checkpoints have none
        names = [] if further is None else optimizer_states.restore_further_states(session.optimizer, pieces, further)
        if names:
            left.append(f"states of {', '.join(names)} that belong to a complete parameter, which ZeRO has partitioned")
        session.restore_scale(saved["loss_scale"])
        self.optimizer.restore_counts(saved["applied_steps"], saved["skipped_in_a_row"])
        return left


def start_training(
    run: Run, facts: Facts, window: Window, pair: Pair, peek: Callable[[], Any], **how: bool
) -> Training:
    """Resolve the configuration for a model and build its session.

    Args:
        run: the run.
        facts: facts about the loop and the machine; facts about model, optimizer and schedulers are added here.
        window: the default accumulation window, for models without an optimizer.
        pair: the user's module, with its optimizer and schedulers.
        peek: returns an example batch, or None if no loader can give one.
        **how: `is_placed` and `only_evaluates` of `SessionRequest`.

    Raises:
        ConfigError: see `resolve` and `plan_open_fields`; or the model does not support that processes share samples,
            see `share_model`.
        MachineError, StrategyError: memory is not sufficient; see `check_memory` and `check_memory_without_zero`.
    """
    document, strategy, processes, model = run.document, run.strategy, run.processes, pair.model
    facts = _with_pair(replace(facts, model=probe_model(model)), pair)
    peak_before = memory_check.peak_bytes(processes.device)
    facts, activations = plan_open_fields(document, facts, model, peek, processes)
    resolved = resolve(document, facts)
    _log_resolved(resolved, run)
    stage = strategy.zero_stage(resolved)
    strategy.remove_leftover_files(resolved, processes)
    memory_check.check_memory(model, resolved, stage, facts, processes)
    predicted = None
    if stage is None:
        views = strategy.handlers.ddp is not None and strategy.handlers.ddp.gradient_as_bucket_view
        predicted = memory_check.check_memory_without_zero(
            document, model, resolved, facts, peek, processes, gradient_views=views
        )
    elif activations is not None:
        predicted = predict_memory(model, resolved, stage, facts, processes, activations)
    left_out = _find_left_out(pair)
    if processes.shared_by > 1:  # from here on, a forward of the model needs all processes of the group
        share_model(model, document)
    session = strategy.build_session(_request(pair, resolved, **how), processes)
    session.left_out = left_out
    parameters = tuple(p for p in session.module.parameters() if p.requires_grad)
    each_batch = run.options.accumulation.sync_each_batch
    training = Training(session, facts, resolved, window, parameters, reduces_each_batch=each_batch)
    if predicted is not None:
        before = peak_before if facts.loop.micro_batch else None  # None: the plan had to guess the micro-batch size
        training.prediction = memory_check.Prediction(predicted, local_processes(processes), processes.device, before)
    session.follow_window(lambda: training.reduces_each_batch or training.window.next_backward_ends)
    return training


def log_dropped(window: Window, of: str | None) -> None:
    """Log that `free_memory` drops gradients, if the window holds some.

    Args:
        window: the accumulation window.
        of: the class of the window's model, or of an optimizer without a prepared model; None without both.
    """
    if of is not None and window.holds_gradients:
        times = "1 backward" if window.backwards == 1 else f"{window.backwards} backwards"
        announce(
            f"free_memory() drops the gradients of {times} of the {of}: the accumulation window was open, and "
            "optimizer.step() has not applied them"
        )


def optimized_parameters(optimizer: Optimizer | DummyOptim) -> list[Tensor]:
    """Return the parameters in the optimizer's groups."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        given = group["params"]
        parameters.extend([given] if isinstance(given, Tensor) else given)
    return parameters


def _with_pair(facts: Facts, pair: Pair) -> Facts:
    """Return the facts, with facts about the pair's optimizer and schedulers added."""
    optimizer, schedulers = pair.optimizer, pair.schedulers
    described = None
    if optimizer is not None:
        described = optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
    placeholder = next((s for s in schedulers if isinstance(s, DummyScheduler)), None)
    scheduler = placeholder.describe() if placeholder else SchedulerFacts() if schedulers else None
    return replace(facts, optimizer=described, scheduler=scheduler)


def _request(pair: Pair, resolved: Resolved, **how: bool) -> SessionRequest:
    real = tuple(s for s in pair.schedulers if isinstance(s, LRScheduler))
    return SessionRequest(without_wrappers(pair.model), pair.optimizer, resolved, real, **how)


def _log_resolved(resolved: Resolved, run: Run, logged: Sequence[str] = ()) -> None:
    """Log the resolved values that affect the training, and write the complete configuration to a file."""
    for line in resolved.logged:
        if line not in logged:
            _log.info(line, extra=DETAIL)
    if run.processes.rank == 0:
        log_dir = launch_settings(resolved.document).log_dir
        _log.info(keep_record(resolved.record, log_dir, os.environ))


def _find_left_out(pair: Pair) -> list[nn.Parameter]:
    """Return the trainable parameters that no optimizer holds, and log their number; see `Session.left_out`."""
    if pair.optimizer is None:
        return []
    held = {id(p) for p in optimized_parameters(pair.optimizer)}
    trainable = [p for p in pair.model.parameters() if p.requires_grad]
    left_out = [p for p in trainable if id(p) not in held]
    if left_out:
        _log.info(
            f"{len(left_out)} of the {len(trainable)} trainable parameters of the {type(pair.model).__name__} are in "
            "no optimizer: their gradients are computed, but never applied or clipped; requires_grad_(False) before "
            "prepare() avoids computing them"
        )
    return left_out


def _step_by_itself(section: SchedulerSection, optimizer: AcceleratedOptimizer) -> Callable[[], None]:
    """Advance the section's scheduler with each optimizer step; the returned function undoes everything."""
    settings = [{name: deepcopy(group[name]) for name in group if name != "params"} for group in optimizer.param_groups]
    scheduler = AcceleratedScheduler(build_scheduler(section, optimizer.optimizer), optimizer, times=1)
    optimizer.call_after_step(scheduler.step)

    def take_back() -> None:
        optimizer.stop_calling(scheduler.step)
        optimizer.schedulers.remove(scheduler)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)

    return take_back


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child
