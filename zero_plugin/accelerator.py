"""The facade: reads the configuration, prepares what the loop uses, and forwards every call to the session."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin import collectives
from zero_plugin.accumulation import AccumulationWindow
from zero_plugin.checkpoint.save_model import write_model_folder
from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.handover import from_environment
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.config.overlay import overlay_code
from zero_plugin.config.read import document_from_mapping, read_document
from zero_plugin.config.tree import Path as KeyPath
from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import prepare_loader
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.optimizers import describe_optimizer
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.probe.loop import probe_loop
from zero_plugin.probe.machine import probe_machine
from zero_plugin.probe.model import probe_model
from zero_plugin.resolve.facts import Facts, LoopFacts, SchedulerFacts
from zero_plugin.resolve.resolve import resolve
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.schedules import build_schedule, preview_schedule
from zero_plugin.strategies.base import Session, SessionRequest, shared_names
from zero_plugin.strategies.processes import start_processes
from zero_plugin.strategies.select import select_strategy

__all__ = ["Accelerator"]

_SECTION_SCHEDULE = "the configuration's scheduler section"


@dataclass(slots=True)
class _Training:
    """One prepared model."""

    session: Session
    facts: Facts
    resolved: Resolved
    given_optimizer: Any
    parameters: tuple[nn.Parameter, ...]  # listed once: walking a module takes longer than clipping a small one
    optimizer: PreparedOptimizer | None = None


class Accelerator:
    """Trains a model on ZeRO 0-3, DDP or one device, as the configuration says, with one and the same loop.

    The configuration comes from the launcher, from `config`, or is empty. Arguments in code fill what it leaves open;
    an argument that differs from an explicit value is an error.

    Args:
        config: path of a launch YAML or a DeepSpeed JSON, or a dict with either content.
        mixed_precision: `no`, `fp16`, `bf16`, or `auto` for what the device computes best.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even where there is a GPU.
        split_batches: the loaders' batch size is that of all processes together.
        even_batches: complete the last step of an epoch with its first samples, so that every process has a full batch.

    Attributes:
        document: what was asked for, with every value's origin.
        resolved: the configuration of the model prepared last, without open fields; None before.
        device: where this process computes.

    Raises:
        ConfigError: everything that is wrong with the configuration.
        LaunchError: the environment does not describe a whole process group.
        StrategyError: what was asked for cannot run here.
    """

    def __init__(
        self,
        *,
        config: str | Path | Mapping[str, Any] | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        arguments: dict[KeyPath, tuple[str, Any]] = {
            ("mixed_precision",): ("mixed_precision", mixed_precision),
            ("deepspeed", "gradient_accumulation_steps"): ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("use_cpu",): ("cpu", cpu),
        }
        given = {path: (name, value) for path, (name, value) in arguments.items() if value is not None}
        self.document = overlay_code(
            _find_document(config),
            {path: value for path, (_, value) in given.items()},
            {path: f"Accelerator({name}={value!r})" for path, (name, value) in given.items()},
        )
        check_document(self.document)
        settings = launch_settings(self.document)
        self._processes = start_processes(cpu=bool(settings.use_cpu) or settings.distributed_type == "MULTI_CPU")
        selection = select_strategy(self.document, settings, self._processes)
        self._strategy = selection.strategy
        self.device = self._processes.device
        self.resolved: Resolved | None = None
        self.split_batches = split_batches
        self._even_batches = even_batches
        self._loaders = ActiveLoaders()
        asked_steps = self.document.deepspeed.value("gradient_accumulation_steps")
        self._window = AccumulationWindow(
            asked_steps if isinstance(asked_steps, int) else 1, lambda: self._loaders.current
        )
        self._trainings: list[_Training] = []
        self._ended = False
        for line in (selection.reason, *self.document.notes):
            self._say(line)
        atexit.register(self._end_at_exit)

    # ---- processes -------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._processes.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._processes.rank

    @property
    def local_process_index(self) -> int:
        """This process on its machine, from 0."""
        return self._processes.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._processes.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's process 0."""
        return self._processes.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self._processes.rank == self._processes.world_size - 1

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._processes.barrier()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """`print`, on the main process only."""
        if self.is_main_process:
            print(*values, **kwargs)  # noqa: T201 - what it is for

    def gather(self, tree: Any) -> Any:
        """Tensors of all processes, joined along their first dimension; containers keep their shape."""
        return collectives.gather(tree)

    def reduce(self, tree: Any, reduction: str = "sum") -> Any:
        """Tensors summed or averaged (`mean`) over all processes."""
        if reduction not in ("sum", "mean"):
            raise LoopError(f"reduce(reduction={reduction!r}): write 'sum' or 'mean'.")
        return collectives.reduce(tree, "sum" if reduction == "sum" else "mean")

    def pad_across_processes(self, tree: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest among the processes."""
        return collectives.pad_across_processes(tree, dim, pad_index, pad_first)

    def gather_for_metrics(self, tree: Any, use_gather_object: bool = False) -> Any:
        """Like `gather` in a loop over a prepared loader, without the samples repeated to make batches even."""
        return gather_for_metrics(tree, self._loaders.current, use_gather_object)

    # ---- preparing -------------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedules, ready for the loop, in the order given.

        A model and its optimizer (or `DummyOptim`) come in one call. Anything else passes unchanged.

        Raises:
            ConfigError: open fields that cannot be filled, and contradictions between the configuration and the loop.
            LoopError: an optimizer without its model, a second model in one call, or an object prepared twice.
        """
        loaders = [o for o in objects if isinstance(o, DataLoader)]
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer | DummyOptim)]
        schedules = [o for o in objects if isinstance(o, LRScheduler | DummyScheduler)]
        self._refuse_prepared(objects)
        if len(models) > 1 or len(optimizers) > 1:
            raise LoopError("prepare() takes one model and its optimizer per call; call it once for each model.")
        if optimizers and not models:
            raise LoopError("prepare() got an optimizer without its model; pass both in the same call.")
        if models and optimizers and isinstance(optimizers[0], Optimizer):
            _refuse_foreign_parameters(models[0], optimizers[0])

        ready: dict[int, Any] = {}
        facts = Facts(
            loop=probe_loop(loaders, processes=self.num_processes, split_batches=self.split_batches),
            machine=probe_machine(_kind(self.device), self.num_processes),
            split_batches=self.split_batches,
            strategy=self._strategy.name,
        )
        for loader in loaders:
            ready[id(loader)] = self.prepare_data_loader(loader)
        if models:
            training = self._train(models[0], optimizers[0] if optimizers else None, schedules, facts)
            ready[id(models[0])] = training.session.model
            if optimizers:
                ready[id(optimizers[0])] = training.optimizer
        for schedule in schedules:
            ready[id(schedule)] = self._prepare_schedule(schedule)
        prepared = tuple(ready.get(id(o), o) for o in objects)
        return prepared if len(prepared) != 1 else prepared[0]

    def prepare_data_loader(self, loader: Any) -> ShardedLoader:
        """This process's part of a DataLoader, with batches on this process's device."""
        return prepare_loader(
            loader,
            rank=self.process_index,
            world_size=self.num_processes,
            device=self.device,
            even_batches=self._even_batches,
            split_batches=self.split_batches,
            active=self._loaders,
        )

    def _train(self, model: nn.Module, optimizer: Any, schedules: list[Any], facts: Facts) -> _Training:
        placeholder = next((s for s in schedules if isinstance(s, DummyScheduler)), None)
        facts = replace(
            facts,
            model=probe_model(model),
            optimizer=None if optimizer is None else _describe(optimizer),
            scheduler=placeholder.describe() if placeholder else SchedulerFacts() if schedules else None,
        )
        resolved = self.resolved = resolve(self.document, facts)
        real = tuple(s for s in schedules if isinstance(s, LRScheduler))
        session = self._strategy.build_session(SessionRequest(model, optimizer, resolved, real), self._processes)
        session.follow_window(lambda: self._window.next_backward_ends)
        self._window.steps = resolved.accumulation
        self._window.restart()
        training = _Training(session, facts, resolved, optimizer, tuple(session.module.parameters()))
        self._trainings.append(training)
        if optimizer is not None:
            training.optimizer = PreparedOptimizer(session, self._window)
            if not schedules and resolved.scheduler is not None:
                # A section whose schedule the loop never asked for still is what the user wrote.
                steps_itself = build_schedule(resolved.scheduler, training.optimizer.optimizer)
                training.optimizer.call_after_step(steps_itself.step)
                self._say(f"{_SECTION_SCHEDULE} steps by itself, since no scheduler was prepared")
        for line in resolved.said_aloud:
            self._say(line)
        self._say_schedule(training, facts.loop)
        return training

    def _prepare_schedule(self, schedule: Any) -> PreparedScheduler:
        training = self._training_of(schedule.optimizer)
        optimizer = training.optimizer
        assert optimizer is not None
        if isinstance(schedule, DummyScheduler):
            if schedule.lr_scheduler_callable is not None:
                real = schedule.lr_scheduler_callable(optimizer.optimizer)
            else:
                if training.facts.scheduler is None or not training.facts.scheduler.placeholder:  # after its model
                    facts = replace(training.facts, scheduler=schedule.describe())
                    training.resolved = self.resolved = resolve(self.document, facts)
                assert training.resolved.scheduler is not None, "resolution gives every placeholder a section"
                real = build_schedule(training.resolved.scheduler, optimizer.optimizer)
            return PreparedScheduler(real, optimizer, times=1)
        by_process = training.resolved.scheduler_counts == "processes" and not self.split_batches
        return PreparedScheduler(schedule, optimizer, times=self.num_processes if by_process else 1)

    def _training_of(self, optimizer: Any) -> _Training:
        for training in self._trainings:
            known = (training.given_optimizer, training.optimizer, training.session.optimizer)
            if any(optimizer is candidate for candidate in known if candidate is not None):
                return training
        raise LoopError(
            "prepare() got a scheduler whose optimizer was not prepared; pass model, optimizer and scheduler together."
        )

    def _refuse_prepared(self, objects: tuple[Any, ...]) -> None:
        sessions = [training.session for training in self._trainings]
        for o in objects:
            if isinstance(o, ShardedLoader | PreparedOptimizer | PreparedScheduler) or any(
                o is session.model or o is session.module for session in sessions
            ):
                raise LoopError(f"prepare() got a {type(o).__name__} that is prepared already; prepare each once.")

    # ---- the loop --------------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._window.steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that `optimizer.step()` acts."""
        return self._window.ends_here

    @property
    def mixed_precision(self) -> str:
        """`no`, `fp16` or `bf16`; before `prepare`, what the configuration says."""
        if self.resolved is not None:
            return self.resolved.precision
        return str(self.document.launch.value("mixed_precision", default="no"))

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped."""
        return any(t.optimizer is not None and t.optimizer.step_was_skipped for t in self._trainings)

    def backward(self, loss: Tensor, *, model: nn.Module | None = None, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the size of the accumulation window. It never steps.

        Args:
            loss: scalar.
            model: whose session runs it; needed only where several trained models are prepared.
            **kwargs: for `Tensor.backward`, e.g. `retain_graph`.
        """
        session = self._trained(model).session
        self._window.count_backward()
        session.backward(loss if self._window.divisor == 1 else loss / self._window.divisor, **kwargs)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:  # noqa: ARG002 - Accelerate's signature
        """One micro-batch: gradients add up, and `step()` acts in the window's last one only.

        Args:
            *models: accepted as Accelerate's; all prepared models accumulate together.
        """
        self._window.enter_batch()
        try:
            yield
        finally:
            self._window.leave_batch()

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backwards inside stay local where the strategy can; harmless where it cannot."""
        with ExitStack() as stack:
            for training in self._trainings:
                if model is None or model is training.session.model:
                    stack.enter_context(training.session.no_sync())
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the coming step's gradients and return their norm before clipping (scalar, fp32), at once.

        Called inside a window, where the step's gradients are not complete, it does nothing and returns nan.

        Args:
            parameters: of one prepared model.
            max_norm: largest norm; `inf` only measures.
            norm_type: 2, or under DDP and on one device any other.

        Raises:
            ConfigError: the configuration's `gradient_clipping` is another number.
            LoopError: the parameters are not a prepared model's, or under ZeRO a part of them or another norm.
        """
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in given}
        for training in self._trainings:
            if training.optimizer is None:
                continue
            trained = [p for p in training.parameters if p.requires_grad]
            if any(id(p) in ids for p in trained):
                _refuse_other_clipping(training.resolved, max_norm)
                partial = any(id(p) not in ids for p in trained)
                return training.optimizer.clip(
                    float(max_norm), norm_type=float(norm_type), only=given if partial else None
                )
        raise LoopError(
            "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
        )

    def _trained(self, model: nn.Module | None) -> _Training:
        trained = [t for t in self._trainings if t.optimizer is not None]
        if model is not None:
            trained = [t for t in trained if model is t.session.model or model is t.session.module]
        if len(trained) == 1:
            return trained[0]
        if not trained:
            raise LoopError("no trained model is prepared; call prepare(model, optimizer, …) before backward().")
        raise LoopError(f"{len(trained)} trained models are prepared; say whose loss: backward(loss, model=model).")

    # ---- weights ---------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The user's own module inside a prepared model."""
        session = self._session_of(model)
        return model if session is None else session.module

    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Whole weights and buffers in host memory, in the type they are trained in; collective.

        Returns:
            The dict on the main process, None on the others, whatever the strategy.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors(model):
            if self.is_main_process:
                state[name] = tensor.to("cpu", copy=True)
        if not self.is_main_process:
            return None
        return state | {alias: state[name] for alias, name in self._shared_names(model).items()}

    def save_model(self, model: nn.Module, save_directory: str | Path, max_shard_size: int | str = "10GB") -> None:
        """Write the weights as a Hugging Face-style folder of safetensors; collective, streaming.

        Args:
            model: a prepared model.
            save_directory: made if it is missing.
            max_shard_size: largest size of one file, e.g. `5GB`.
        """
        tensors = self._named_tensors(model)
        error: list[Any] = [None]
        if self.is_main_process:
            try:
                write_model_folder(
                    tensors, save_directory, max_shard_size=max_shard_size, tied=self._shared_names(model)
                )
            except Exception as caught:  # noqa: BLE001 - raised below, when no process waits for this one any more
                error = [caught]
        for _ in tensors:  # the other processes take part in gathering; the main one too, after an error
            pass
        collectives.broadcast_object_list(error)
        if error[0] is not None:
            raise error[0]

    def _named_tensors(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        session = self._session_of(model)
        if session is None:
            raise LoopError(f"the {type(model).__name__} is not prepared; pass the model that prepare() returned.")
        return session.named_tensors()

    def _shared_names(self, model: nn.Module) -> dict[str, str]:
        return shared_names(self.unwrap_model(model))

    def _session_of(self, model: nn.Module) -> Session | None:
        sessions = [training.session for training in self._trainings]
        return next((s for s in sessions if model is s.model or model is s.module), None)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Close every session and the process group; collective. It also runs at the end of the process."""
        if self._ended:
            return
        self._ended = True
        for training in self._trainings:
            training.session.close()
        self._processes.stop()

    def _end_at_exit(self) -> None:
        # After an error the other processes will not come to a barrier; they are ended by the launcher.
        if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
            self.end_training()

    def _say(self, line: str) -> None:
        if self.is_main_process:
            print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up

    def _say_schedule(self, training: _Training, loop: LoopFacts) -> None:
        per_epoch = None
        if loop.batches_per_epoch is not None:
            per_epoch = -(-loop.batches_per_epoch // training.resolved.accumulation)
        section = training.resolved.scheduler
        if section is None or training.optimizer is None:
            return
        lrs = [float(group["lr"]) for group in training.optimizer.param_groups]
        points = preview_schedule(section, lrs, per_epoch)
        if points:
            shown = ", ".join(f"{point.lr:.3g} {point.label} (step {point.step})" for point in points)
            epoch = "" if per_epoch is None else f"; one epoch is {per_epoch} optimizer steps"
            self._say(f"{section.type}: learning rate {shown}{epoch}")


def _find_document(config: str | Path | Mapping[str, Any] | None) -> Document:
    launched = from_environment(os.environ)
    if config is None:
        return launched or Document()
    if isinstance(config, Mapping):
        own = document_from_mapping(config, "Accelerator(config=…)")
    else:
        own = read_document(config)
    if launched is None:
        return own
    entries = dict(own.launch.entries) | {("deepspeed", *path): entry for path, entry in own.deepspeed.entries.items()}
    return overlay_code(
        launched,
        {path: entry.value for path, entry in entries.items()},
        {path: f"{entry.origin.where}, named in code" for path, entry in entries.items()},
    )


def _refuse_foreign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    own = {id(p) for p in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in own for p in held)
    if foreign:
        raise LoopError(
            f"prepare() got an optimizer of which {foreign} of {len(held)} parameters are not the model's.\n"
            "Build the optimizer from model.parameters() of the model in the same call, after every change to it."
        )


def _describe(optimizer: Any) -> Any:
    return optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)


def _kind(device: torch.device) -> Any:
    return device.type


def _refuse_other_clipping(resolved: Resolved, max_norm: float) -> None:
    entry = resolved.tree.get("gradient_clipping")
    if entry is None or not entry.origin.typed_by_user or max_norm in (float("inf"), entry.value):
        return
    raise ConfigError(
        [
            Problem(
                f"clip_grad_norm_(max_norm={max_norm})",
                "gradient_clipping",
                f"{max_norm} in code, but {entry.value} at {entry.origin.where}",
                "Write the same value in both, or auto in the file.",
            )
        ]
    )
