"""`Prepared`: the models, optimizers, loaders and schedulers of a run, from one or several `prepare` calls.

`pair_models` matches the optimizers and schedulers of a call with its models, by their parameters. The `refuse_*`
functions reject objects that cannot be prepared.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin.big_models.module_hooks import has_offloaded_params
from zero_plugin.config.placeholders import DummyOptim, DummyScheduler
from zero_plugin.config.resolve.facts import Facts, LoopFacts, Resolved
from zero_plugin.config.run_files import OutOfMemoryReport
from zero_plugin.config.tree import AUTO
from zero_plugin.data.active import RUNNING, LoaderProgress
from zero_plugin.data.dispatch import SliceFunction
from zero_plugin.data.loader import DataLoaderAdapter
from zero_plugin.data.prepare import peek_batch, prepare_loader
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.messages import working
from zero_plugin.errors import LoopError
from zero_plugin.loop.first_steps import FirstSteps
from zero_plugin.loop.memory_check import peak_bytes
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.out_of_memory import FailedLoop, describe_out_of_memory
from zero_plugin.loop.run import Run
from zero_plugin.loop.same_everywhere import check_same_models
from zero_plugin.loop.scheduler import AcceleratedScheduler
from zero_plugin.loop.together import WindowOf
from zero_plugin.loop.training import Pair, Training, log_dropped, optimized_parameters, start_training
from zero_plugin.loop.window import Window
from zero_plugin.plan.run_plan import probe_loop, surely_train
from zero_plugin.strategies.base import Session


class Prepared:
    """The models, optimizers, loaders and schedulers of one run.

    Args:
        run: the run.

    Attributes:
        trainings: every prepared model, in the order of `prepare`.
        trained: the models that have an optimizer.
        untrained: the other models.
        waiting: optimizers whose models are not prepared yet.
        dataloaders: the prepared loaders.
        resolved: the resolved configuration of the last prepared model; None before the first one.
        default_window: counts the micro-batches while no model is prepared with its optimizer.
        window: the accumulation window of the current micro-batch, or of the last one.
        first_steps: checks the first backwards for mistakes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.trainings: list[Training] = []
        self.trained: list[Training] = []
        self.untrained: list[Training] = []
        self.waiting: list[AcceleratedOptimizer] = []
        self.dataloaders: list[DataLoaderAdapter] = []
        self.resolved: Resolved | None = None
        # Optimizers of the script that were only seen as a scheduler's: `prepare` has not returned them yet.
        self._unreturned: list[tuple[Any, AcceleratedOptimizer]] = []
        self._loop = LoopFacts()  # facts about the last prepared loaders
        self.window = self.default_window = self._new_window()
        self.first_steps = FirstSteps(self.trainings, RUNNING, run.processes.world_size)

    # ---- the prepared objects ----------------------------------------------------------------------------------------

    @property
    def models(self) -> list[nn.Module]:
        """The prepared models, which the script calls (e.g. the DDP wrapper or DeepSpeed engine)."""
        return [training.session.model for training in self.trainings]

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The optimizers of the trained models, then the optimizers without a prepared model."""
        return [*(t.optimizer for t in self.trained if t.optimizer is not None), *self.waiting]

    @property
    def schedulers(self) -> list[AcceleratedScheduler]:
        """Every scheduler once, in the order of their optimizers."""
        found = [scheduler for optimizer in self.optimizers for scheduler in optimizer.schedulers]
        return list({id(scheduler): scheduler for scheduler in found}.values())

    @property
    def windows(self) -> list[Window]:
        """All accumulation windows."""
        return [*(window for window, _ in self.waiting_windows), *(training.window for training in self.trained)]

    @property
    def waiting_windows(self) -> list[WindowOf]:
        """The default window, which only counts, then the windows of optimizers without a prepared model."""
        return [(self.default_window, None), *((held.window, held.session) for held in self.waiting)]

    def training_of(self, model: nn.Module) -> Training | None:
        """Return the entry of `model`, the prepared model or the user's own module; None if it is not prepared."""
        return next((training for training in self.trainings if training.is_of_model(model)), None)

    def session_of(self, model: nn.Module) -> Session | None:
        """Return the session that runs `model`; None if it is not prepared."""
        training = self.training_of(model)
        return None if training is None else training.session

    def measure(self) -> dict[str, float]:
        """Return measurements of the last steps; names of the second and later models end with the model's index."""
        return {
            f"{name}_{number}" if number else name: value
            for number, training in enumerate(self.trained)
            for name, value in training.measure().items()
        }

    def settle(self) -> None:
        """Count the last step of each optimizer; see `AcceleratedOptimizer.settle`."""
        for training in self.trained:
            if training.optimizer is not None:
                training.optimizer.settle()

    def free(self) -> None:
        """Release all prepared objects, and their memory."""
        self.settle()
        for training in self.trainings:
            training.close()
        for held in self.waiting:
            log_dropped(held.window, type(held.optimizer).__name__)
            if held.window.holds_gradients:
                held.session.drop_gradients(failed=False)
            held.session.close()
        everything: tuple[list[Any], ...] = (
            *(self.trainings, self.trained, self.untrained, self._run.leaving_files),
            *(self.waiting, self._unreturned, self.dataloaders),
        )
        for prepared in everything:
            prepared.clear()
        self._run.background.memory.release()
        self._loop = LoopFacts()
        self.first_steps.begin()
        self.window = self.default_window = self._new_window()
        self.resolved = None
        gc.collect()
        torch.cuda.empty_cache()  # does nothing if CUDA was not used

    def describe_out_of_memory(self, error: BaseException) -> OutOfMemoryReport:
        """Describe an out-of-memory error, and whether the launcher may restart the run."""
        run, training = self._run, self.trained[0] if self.trained else None
        micro_batch = run.document.deepspeed.get("train_micro_batch_size_per_gpu")
        loop = FailedLoop(
            trains=training is not None,
            micro_batch=self._loop.micro_batch,
            accumulation=1 if training is None else training.window.steps,
            cut=run.micro_batches_per_loader_batch,
            is_open=micro_batch is not None and (micro_batch.value is AUTO or not micro_batch.origin.typed_by_user),
            decides=training is not None and training.window.is_decided,
            savings=() if training is None else run.strategy.savings(training.resolved),
            run=None if training is None or training.prediction is None else training.prediction.run,
            taken=peak_bytes(run.device) or 0,
        )
        return describe_out_of_memory(error, loop, run.device, run.processes.rank)

    # ---- prepare -----------------------------------------------------------------------------------------------------

    @collective("prepare", waits_for_all=True)
    def prepare(self, objects: Sequence[Any], left: set[int], *, only_evaluates: bool = False) -> tuple[Any, ...]:
        """Prepare the objects, and return them in the given order; collective. See `Accelerator.prepare`.

        Args:
            objects: models, optimizers, loaders and schedulers; other objects are returned unchanged.
            left: ids of the models and loaders that are not moved to this process's device.
            only_evaluates: whether the models are never trained.
        """
        self._run.follow_configuration()
        call = _Call(left, only_evaluates)
        self._sort(objects, call)
        for optimizer in call.optimizers:
            refuse_other_steps(optimizer)
        for model in call.models:
            _refuse_uninitialized(model)
        if self._run.processes.world_size > 1:
            check_same_models(call.models, call.optimizers)
        # In this order: a model's configuration needs facts about the loaders, a scheduler its model's optimizer.
        self._prepare_loaders(call)
        self._prepare_models(call)
        for scheduler in call.schedulers:
            call.ready[id(scheduler)] = self._prepare_scheduler(scheduler, call)
        if self.resolved is not None and (call.models or call.schedulers):
            self._run.configurations.show(self.resolved.tree.nested(auto="auto"))
        for model in self.models:
            model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's mark; scripts look for it
        return tuple(call.ready.get(id(o), o) for o in objects)

    def _sort(self, objects: Sequence[Any], call: _Call) -> None:
        """Sort the objects by kind; prepared objects are ready."""
        kinds: tuple[tuple[Any, list[Any]], ...] = (
            (DataLoader, call.loaders),
            (nn.Module, call.models),
            (Optimizer | DummyOptim, call.optimizers),
            (LRScheduler | DummyScheduler, call.schedulers),
        )
        for position, o in enumerate(objects):
            if (held := self._not_returned(o)) is not None:
                call.ready[id(o)] = held
            elif self._is_prepared(o):
                may_follow = isinstance(o, AcceleratedOptimizer) and o.waits
                if may_follow and any(holds_any(o, training.session.module) for training in self.untrained):
                    call.optimizers.append(o.optimizer)
            elif (found := next((found for kind, found in kinds if isinstance(o, kind)), None)) is not None:
                if any(o is other for other in objects[:position]):
                    raise LoopError(f"prepare() got one {type(o).__name__} twice; pass each object once.")
                found.append(o)

    def _is_prepared(self, o: Any) -> bool:
        """Return whether the object is already prepared: then `prepare` returns it unchanged.

        Raises:
            LoopError: the object was prepared before, and its prepared form is another object; or the object is an
                optimizer of another `Accelerator`, or a closed one.
        """
        if isinstance(o, AcceleratedOptimizer):
            if o.waits and not any(o is held for held in self.waiting):  # the script constructed it
                self._hold(o)
            if not any(o is known for known in self.optimizers):
                raise LoopError(
                    "prepare() got an optimizer that another Accelerator has prepared, or whose training has ended "
                    "(end_training() or free_memory() was called).\nBuild model and optimizer again and prepare these, "
                    "or continue with the Accelerator that prepared them."
                )
            return True
        if isinstance(o, AcceleratedScheduler) or any(o is model for model in self.models):
            return True
        if isinstance(o, DataLoader):
            prepared = bool(getattr(o, "_is_accelerate_prepared", False))
            if prepared:
                self.prepare_loader(o)  # another Accelerator may have prepared it
            return prepared
        known = any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self.trainings)
        if known or any(o is scheduler.scheduler for scheduler in self.schedulers):
            raise LoopError(
                f"prepare() got a {type(o).__name__} that is already prepared; use the object that it returned."
            )
        return False

    # ---- loaders -----------------------------------------------------------------------------------------------------

    def prepare_loader(
        self, loader: Any, *, is_placed: bool | None = None, slice_function: SliceFunction | None = None
    ) -> DataLoaderAdapter:
        """Return a loader of this process's part of the data; see `Accelerator.prepare_data_loader`."""
        run, options = self._run, self._run.options
        loading = options.loading
        placed = options.device_placement if is_placed is None else is_placed
        prepared = prepare_loader(
            loader,
            rank=run.processes.data_parallel_rank,
            world_size=run.processes.data_parallel_size,
            shared_by=run.processes.shared_by,
            device=run.device if placed else None,
            even_batches=loading.even_batches,
            split_batches=loading.split_batches,
            shard_iterable=options.shard_iterable,
            dispatch_batches=loading.dispatch_batches,
            slice_fn=slice_function,
            use_seedable_sampler=loading.use_seedable_sampler,
            data_seed=loading.data_seed,
            non_blocking=loading.non_blocking,
            rng_types=options.rng_types,
            cut=run.micro_batches_per_loader_batch,
        )
        if not any(prepared is known for known in self.dataloaders):
            self.dataloaders.append(prepared)
        return prepared

    def _prepare_loaders(self, call: _Call) -> None:
        if not call.loaders:
            return
        prepared = [self.prepare_loader(loader, is_placed=id(loader) not in call.left) for loader in call.loaders]
        call.ready.update(zip(map(id, call.loaders), prepared, strict=True))
        self._loop = probe_loop(
            call.loaders,
            prepared,
            processes=self._run.processes.data_parallel_size,
            split_batches=self._run.options.loading.split_batches,
            cut=self._run.micro_batches_per_loader_batch,
        )
        for training in self.trained:
            is_shown = self.resolved is training.resolved
            training.join_loaders(self._run, self._loop, surely_trains=surely_train(call.loaders))
            if is_shown:
                self.resolved = training.resolved

    # ---- models with their optimizers --------------------------------------------------------------------------------

    def _prepare_models(self, call: _Call) -> None:
        run = self._run
        following = {id(o): t for o in call.optimizers for t in self.trainings if holds_any(o, t.session.module)}
        own = [o for o in call.optimizers if id(o) not in following]
        if not call.models:
            for optimizer in own:
                call.ready[id(optimizer)] = self._held(optimizer) or self._hold(optimizer)
            own = []
        own += [
            held.optimizer
            for held in self.waiting
            if not any(held.optimizer is o for o in own) and any(holds_any(held.optimizer, m) for m in call.models)
        ]
        split_batches, strategy = run.options.loading.split_batches, run.strategy.name
        facts = Facts(loop=self._loop, machine=run.machine_facts(), split_batches=split_batches, strategy=strategy)
        prepared_before = [training.session.module for training in self.trainings]
        for pair in pair_models(call.models, own, call.schedulers, prepared_before):
            pair, held = self._with_held(pair, call)
            with working(f"preparing the {type(pair.model).__name__}"):
                training = start_training(
                    run,
                    facts,
                    self.default_window,
                    pair,
                    lambda: peek_batch(self.dataloaders),
                    is_placed=id(pair.model) not in call.left,
                    only_evaluates=call.only_evaluates,
                )
            call.ready[id(pair.model)] = training.session.model
            self._add(training, pair, held, call)
        for optimizer in call.optimizers:
            if (follower := following.get(id(optimizer))) is not None:
                self._follow(follower, optimizer, call)

    def _follow(self, training: Training, optimizer: Any, call: _Call) -> None:
        """Add an optimizer to a model that was prepared in an earlier call."""
        if training.optimizer is not None:
            raise LoopError(
                f"prepare() got a second optimizer of the {type(training.session.module).__name__}: build one "
                "optimizer with two parameter groups."
            )
        (pair,) = pair_models([training.session.module], [optimizer], call.schedulers, [])
        pair, held = self._with_held(pair, call)
        training.add_optimizer(self._run, pair)
        self.untrained.remove(training)
        self.trainings.remove(training)
        self._add(training, pair, held, call)

    def _with_held(self, pair: Pair, call: _Call) -> tuple[Pair, AcceleratedOptimizer | None]:
        """Add the schedulers of an earlier call to the pair, if its optimizer was prepared before its model.

        Returns:
            The pair, and the optimizer's `AcceleratedOptimizer` from the earlier call or None.
        """
        held = self._held(pair.optimizer)
        if held is None:
            return pair, None
        self.waiting.remove(held)
        later = [scheduler for scheduler in call.schedulers if scheduler.optimizer is held]
        return pair._replace(schedulers=(*(s.scheduler for s in held.schedulers), *later, *pair.schedulers)), held

    def _add(self, training: Training, pair: Pair, held: AcceleratedOptimizer | None, call: _Call) -> None:
        self.trainings.append(training)
        if training.session.leaves_files:
            self._run.leaving_files.append(training.session)
        self.resolved = training.resolved
        if pair.optimizer is None:
            self.untrained.append(training)
            return
        call.ready[id(pair.optimizer)] = training.wrap_optimizer(self._run, pair, held)
        self.trained.append(training)
        self.window = training.window
        self.first_steps.begin()
        if len({trained.window.steps for trained in self.trained}) > 1:
            raise LoopError(
                "the trained models have different gradient_accumulation_steps; prepare the training loader with the "
                "first model, or write the number into the configuration."
            )
        if len(self.trained) > 1:
            for trained in self.trained:
                trained.watch_gradients()

    # ---- optimizers and schedulers without their models --------------------------------------------------------------

    def _hold(self, optimizer: Any) -> AcceleratedOptimizer:
        """Create the `AcceleratedOptimizer` of an optimizer whose model is not prepared yet."""
        if isinstance(optimizer, DummyOptim):
            raise LoopError("prepare() got a DummyOptim without its model; pass both in the same call.")
        held = optimizer if isinstance(optimizer, AcceleratedOptimizer) else AcceleratedOptimizer(optimizer)
        held.run_in(self._new_window(), self._run.strategy.hold_optimizer(held.optimizer))
        self.waiting.append(held)
        return held

    def _not_returned(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the `AcceleratedOptimizer` if the optimizer's scheduler and model were prepared before, or None."""
        for index, (given, held) in enumerate(self._unreturned):
            if given is optimizer and not held.waits:
                del self._unreturned[index]
                return held
        return None

    def _held(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the optimizer without a prepared model that is, or wraps, `optimizer`; None if none does."""
        return next((held for held in self.waiting if optimizer is held or optimizer is held.optimizer), None)

    def _prepare_scheduler(self, scheduler: Any, call: _Call) -> AcceleratedScheduler:
        """Prepare a scheduler. Alone in its call, a scheduler may come before its optimizer."""
        run, optimizer = self._run, scheduler.optimizer
        for training in self.trained:
            if training.is_of_optimizer(optimizer):
                # A scheduler that was built before the loader was prepared may depend on the loader's length then.
                prepared = training.prepare_scheduler(run, scheduler, built_before=bool(call.loaders))
                self.resolved = training.resolved
                return prepared
        held = self._held(optimizer)
        may_come_first = not (call.models or call.optimizers) and isinstance(optimizer, Optimizer)
        if isinstance(scheduler, DummyScheduler) or not (held or may_come_first):
            raise LoopError(
                f"prepare() got a {type(scheduler).__name__} whose optimizer was not prepared; pass model, optimizer "
                "and scheduler together."
            )
        if held is None:
            refuse_other_steps(optimizer)
            held = self._hold(optimizer)
            if held is not optimizer:
                self._unreturned.append((optimizer, held))
        once = run.document.launch.value("scheduler_counts") == "steps" or run.options.loading.split_batches
        times = 1 if once else run.machine_facts().counted
        return AcceleratedScheduler(scheduler, held, run.options.step_scheduler_with_optimizer, times=times)

    def _new_window(self) -> Window:
        """Return a window with the configured number of micro-batches, for training without a prepared model."""
        steps = self._run.document.deepspeed.value("gradient_accumulation_steps")
        progress = LoaderProgress(ends_windows=self._run.options.accumulation.sync_with_dataloader)
        return Window(steps if isinstance(steps, int) else 1, progress)


@dataclass
class _Call:
    """One call of `prepare`.

    Attributes:
        left: ids of the models and loaders that are not moved to this process's device.
        only_evaluates: whether the models are never trained.
        loaders, models, optimizers, schedulers: the objects to prepare.
        ready: the prepared objects, by the ids of the given objects.
    """

    left: set[int]
    only_evaluates: bool
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer | DummyOptim] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    ready: dict[int, Any] = field(default_factory=dict)


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
        LoopError: an optimizer has parameters of no model or of several, two optimizers have parameters of one model,
            models share parameters, or a model is distributed over devices.
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
    """Refuse an optimizer that evaluates the loss in its step, like LBFGS, or that steps within backward, like LOMO.

    Raises:
        LoopError: its `step` requires a closure, or it steps in `fused_backward`.
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
    """Refuse LOMO: it updates weights within backward, without averaging, accumulation or clipping.

    Args:
        what: the subject of the message: a call or an object of the script.

    Raises:
        LoopError: always.
    """
    raise LoopError(
        f"{what} changes weights within backward, which is not supported: only optimizer.step() changes weights.\n"
        "If optimizer states do not fit, use ZeRO with offload_optimizer."
    )


def holds_any(optimizer: Optimizer | DummyOptim, model: nn.Module) -> bool:
    """Return whether the optimizer has a parameter of the model."""
    held = {id(p) for p in optimized_parameters(optimizer)}
    return any(id(p) in held for p in model.parameters())


def _model_of(optimizer: Optimizer | DummyOptim, models: Sequence[nn.Module]) -> nn.Module:
    held = {id(p) for p in optimized_parameters(optimizer)}
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
        before, now = _places(optimized_parameters(optimizer)), _places(models[most].parameters())
        moved = f" They are on {before}, the model's on {now}: the model was moved after the optimizer was built."
        raise LoopError(
            f"prepare() got an optimizer with {foreign} parameters (of {len(held)}) that are not the model's."
            f"{moved if before != now else ''}\n"
            "Build the optimizer from model.parameters() of the model in the same call, after all changes to the model."
        )
    return models[most]


def _places(tensors: Iterable[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.device) for tensor in tensors}))


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
            "does not fit on one device, use ZeRO stage 3: from_pretrained() after Accelerator() then loads only this "
            "process's partition."
        )
    if any(hasattr(module, "_hf_hook") and has_offloaded_params(module) for module in model.modules()):
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose weights are on the device only during a forward "
            "(cpu_offload, disk_offload): they get no gradients.\nPrepare it without offload; if it does not fit, use "
            "ZeRO stage 3 with offload_param_device: cpu."
        )


def _refuse_uninitialized(model: nn.Module) -> None:
    """Refuse a model with lazy layers that no batch has initialized.

    Raises:
        LoopError: parameters or buffers have no values; the error lists them.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
        raise LoopError(
            f"prepare() got a {type(model).__name__} whose {', '.join(lazy)} are not initialized: its lazy layers do "
            "not know their sizes yet.\nRun the model once on a batch before prepare(), and then build the optimizer."
        )
