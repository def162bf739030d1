"""The facade: reads the configuration, prepares what the loop uses, and forwards every call to the session."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from zero_plugin import collectives
from zero_plugin.accumulation import AccumulationWindow, TogetherWindows
from zero_plugin.agreement import collective
from zero_plugin.backward import run_backward
from zero_plugin.checkpoint.pretrained import adapter_names, has_adapters, write_pretrained
from zero_plugin.config.check import check_document
from zero_plugin.config.find import find_document
from zero_plugin.config.launch_settings import asks_for_cpu, launch_settings
from zero_plugin.config.overlay import overlay_code
from zero_plugin.config.tree import Path as KeyPath
from zero_plugin.data.loader import ActiveLoaders, ShardedLoader
from zero_plugin.data.metrics import gather_for_metrics
from zero_plugin.data.prepare import ShardIterable, prepare_loader
from zero_plugin.errors import LoopError
from zero_plugin.first_steps import FirstSteps
from zero_plugin.pairing import pair_models
from zero_plugin.placeholders import DummyOptim, DummyScheduler
from zero_plugin.prepared import PreparedOptimizer, PreparedScheduler
from zero_plugin.probe.loop import probe_loop
from zero_plugin.probe.machine import probe_machine
from zero_plugin.resolve.facts import Facts, LoopFacts
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.run_record import describe_run, write_record
from zero_plugin.strategies.base import Session, shared_names
from zero_plugin.strategies.processes import start_processes
from zero_plugin.strategies.select import select_strategy
from zero_plugin.training import Training, prepare_schedule, start_training

__all__ = ["Accelerator"]


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
        shard_iterable: `never` takes iterable data sets to give each process and worker its own samples; `auto` shares
            those out that are not known to.

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
        shard_iterable: ShardIterable = "auto",
    ) -> None:
        arguments: dict[KeyPath, tuple[str, Any]] = {
            ("mixed_precision",): ("mixed_precision", mixed_precision),
            ("deepspeed", "gradient_accumulation_steps"): ("gradient_accumulation_steps", gradient_accumulation_steps),
            ("use_cpu",): ("cpu", cpu),
        }
        given = {path: (name, value) for path, (name, value) in arguments.items() if value is not None}
        self.document = overlay_code(
            find_document(config, os.environ),
            {path: value for path, (_, value) in given.items()},
            {path: f"Accelerator({name}={value!r})" for path, (name, value) in given.items()},
        )
        self.document = replace(self.document, notes=check_document(self.document))
        settings = launch_settings(self.document)
        self._processes = start_processes(cpu=asks_for_cpu(settings))
        selection = select_strategy(self.document, settings, self._processes)
        self._strategy = selection.strategy
        self.device = self._processes.device
        self.resolved: Resolved | None = None
        self.split_batches = split_batches
        self._even_batches = even_batches
        self._shard_iterable: ShardIterable = shard_iterable
        self._loaders = ActiveLoaders()
        self._loop = LoopFacts()  # of the loaders prepared last
        self._trainings: list[Training] = []
        self._trained: list[Training] = []  # those with an optimizer
        self._untrained: list[Training] = []
        self._window: AccumulationWindow | None = None  # of the model whose micro-batch runs, or ran last
        self._first_steps = FirstSteps(self._trainings, lambda: self._loaders.current, self._say)
        self._ended = False
        for line in (selection.reason, *(note.headline for note in self.document.notes)):
            self._say(line)
        self._loading = ExitStack()
        self._loading.enter_context(self._strategy.load_pretrained())
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

    def init_model(self) -> AbstractContextManager[None]:
        """A model made inside is never whole in any process, where the strategy partitions parameters (ZeRO stage 3).

        Its values are those that it would have outside. transformers' `from_pretrained` and `from_config` need no such
        context after `Accelerator()`, unless the configuration says `zero3_init_flag: false`.
        """
        return self._strategy.init_model()

    @collective("prepare", meets=True)
    def prepare(self, *objects: Any) -> Any:
        """Models, optimizers, loaders and schedules, ready for the loop, in the order given.

        A model and its optimizer (or `DummyOptim`) come in one call; several models may come in one call or in several.
        A model without an optimizer is not trained. Anything else passes unchanged.

        Raises:
            ConfigError: open fields that cannot be filled, and contradictions between the configuration and the loop.
            LoopError: an object prepared twice, a model loaded with `device_map`, models that share parameters, an
                optimizer without its model, of another model or of several.
        """
        loaders = [o for o in objects if isinstance(o, DataLoader)]
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer | DummyOptim)]
        schedules = [o for o in objects if isinstance(o, LRScheduler | DummyScheduler)]
        self._refuse_prepared(objects)
        pairs = pair_models(models, optimizers, schedules, [training.session.module for training in self._trainings])
        ready: dict[int, Any] = {id(loader): self.prepare_data_loader(loader) for loader in loaders}
        if loaders:
            self._loop = probe_loop(
                loaders,
                [ready[id(loader)] for loader in loaders],
                processes=self.num_processes,
                split_batches=self.split_batches,
            )
        facts = Facts(
            loop=self._loop,
            machine=probe_machine("cuda" if self.device.type == "cuda" else "cpu", self.num_processes),
            split_batches=self.split_batches,
            strategy=self._strategy.name,
        )
        for pair in pairs:
            training = start_training(
                self.document, facts, self._strategy, self._processes, lambda: self._loaders.current, pair, self._say
            )
            ready[id(pair.model)] = training.session.model
            if pair.optimizer is not None:
                ready[id(pair.optimizer)] = training.optimizer
            self._add(training)
        for schedule in schedules:
            training = self._training_of(schedule.optimizer)
            ready[id(schedule)] = prepare_schedule(training, schedule, self.document, self._processes, self._say)
            self.resolved = training.resolved
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
            shard_iterable=self._shard_iterable,
            active=self._loaders,
        )

    def _add(self, training: Training) -> None:
        self._trainings.append(training)
        self.resolved = training.resolved
        if training.optimizer is None:
            self._untrained.append(training)
            return
        self._trained.append(training)
        self._window = training.window
        self._first_steps.pending = True
        if len({trained.window.steps for trained in self._trained}) > 1:
            raise LoopError(
                "the trained models came out with different gradient_accumulation_steps; prepare the training loader "
                "with the first of them, or write the number into the configuration."
            )
        if len(self._trained) > 1:
            for trained in self._trained:
                trained.watch_gradients()

    def _training_of(self, optimizer: Any) -> Training:
        for training in self._trainings:
            if training.is_of_optimizer(optimizer):
                return training
        raise LoopError(
            "prepare() got a scheduler whose optimizer was not prepared; pass model, optimizer and scheduler together."
        )

    def _refuse_prepared(self, objects: tuple[Any, ...]) -> None:
        for position, o in enumerate(objects):
            if (
                isinstance(o, ShardedLoader | PreparedOptimizer | PreparedScheduler)
                or any(training.is_of_model(o) or training.is_of_optimizer(o) for training in self._trainings)
                or (isinstance(o, nn.Module | Optimizer | DummyOptim) and any(o is p for p in objects[:position]))
            ):
                raise LoopError(f"prepare() got a {type(o).__name__} that is prepared already; prepare each once.")

    # ---- the loop --------------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        if self._window is not None:
            return self._window.steps
        asked = self.document.deepspeed.value("gradient_accumulation_steps")
        return asked if isinstance(asked, int) else 1

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that `optimizer.step()` acts.

        Of several models, it is said of the one whose micro-batch this is: named in `accumulate`, or reached by the
        last `backward`.
        """
        return self._window is not None and self._window.ends_here

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

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the size of the accumulation window. It never steps.

        Every prepared model whose trained parameters the loss depends on gets its gradients, and keeps them until its
        optimizer's `step` or `zero_grad`, as in plain torch.

        Args:
            loss: scalar.
            **kwargs: for `Tensor.backward`, e.g. `retain_graph`.

        Raises:
            LoopError: gradients came from elsewhere; the loss reaches a module that was not prepared, or no prepared
                one; with accumulation and without `accumulate`, it reaches several models.
        """
        if self._first_steps.pending:
            self._first_steps.look_at(loss)
        self._window = run_backward(self._trained, self._untrained, loss, **kwargs)[0].window

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients add up, and `step()` acts in the window's last one only.

        Args:
            *models: whose micro-batch it is; all that are trained where none is named. Models that are not trained may
                be named too.

        Raises:
            LoopError: of several trained models, one is named that is not prepared.
        """
        trained = self._named(models)
        self._window = trained[0].window
        return trained[0].window if len(trained) == 1 else TogetherWindows([t.window for t in trained])

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
        if len(self._trained) > 1:
            ids = {id(p) for p in given}
            owners = [training for training in self._trained if any(id(p) in ids for p in training.parameters)]
            if len(owners) > 1:
                raise LoopError(
                    f"clip_grad_norm_ got parameters of {len(owners)} prepared models; call it once for each."
                )
        for training in self._trained:
            norm = training.clip(given, float(max_norm), float(norm_type))
            if norm is not None:
                return norm
        raise LoopError(
            "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
        )

    def _named(self, models: tuple[nn.Module, ...]) -> list[Training]:
        """The trained ones among `models`; all if none is among them, or only one is trained."""
        if not self._trained:
            raise LoopError("no trained model is prepared; call prepare(model, optimizer, …) first.")
        if len(self._trained) == 1:
            return self._trained
        for model in models:
            if not any(training.is_of_model(model) for training in self._trainings):
                raise LoopError(f"accumulate() got a {type(model).__name__} that is not prepared.")
        named = [training for training in self._trained if any(map(training.is_of_model, models))]
        return named or self._trained

    # ---- weights ---------------------------------------------------------------------------------------------------

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """The user's own module inside a prepared model."""
        session = self._session_of(model)
        return model if session is None else session.module

    @collective("get_state_dict", meets=True)
    def get_state_dict(self, model: nn.Module) -> dict[str, Tensor] | None:
        """Whole weights and buffers in host memory, in the type they are trained in; collective.

        Of a model with PEFT adapters, only the adapters' and what else is trained: the frozen base is not gathered.

        Returns:
            The dict on the main process, None on the others, whatever the strategy.
        """
        state: dict[str, Tensor] = {}
        for name, tensor in self._named_tensors(model):
            if self.is_main_process:
                state[name] = tensor.to("cpu", copy=True)
        if not self.is_main_process:
            return None
        return state | {alias: state[name] for alias, name in self._shared_names(model).items() if name in state}

    @collective("save_model", meets=True)
    def save_model(self, model: nn.Module, save_directory: str | Path, max_shard_size: int | str = "10GB") -> None:
        """Write the weights as a Hugging Face-style folder of safetensors; collective, streaming.

        A transformers model's folder loads with `from_pretrained`; of a model with PEFT adapters only they are written,
        in PEFT's own layout. Beside them, `resolved_config.json` says how the model was trained: every value and where
        it came from.

        Args:
            model: a prepared model.
            save_directory: made if it is missing.
            max_shard_size: largest size of one file, e.g. `5GB`.
        """
        tensors = self._named_tensors(model)
        error: list[Any] = [None]
        if self.is_main_process:
            try:
                write_pretrained(
                    self.unwrap_model(model),
                    tensors,
                    save_directory,
                    max_shard_size=max_shard_size,
                    tied=self._shared_names(model),
                )
                training = next(training for training in self._trainings if training.is_of_model(model))
                write_record(describe_run(self.document, training.resolved, training.facts), save_directory)
            except Exception as caught:  # noqa: BLE001 - raised below, when no process waits for this one any more
                error = [caught]
        for _ in tensors:  # the other processes take part in gathering; the main one too, after an error
            pass
        collectives.broadcast_object_list(error)
        if error[0] is not None:
            raise error[0]

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """`torch.save` on the main process only.

        Args:
            obj: what to save.
            f: path, or file opened for writing.
            safe_serialization: write `obj`, a dict of tensors, as safetensors to the path `f`.
        """
        if not self.is_main_process:
            return
        if safe_serialization:
            save_file(obj, f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def _named_tensors(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        session = self._session_of(model)
        if session is None:
            raise LoopError(f"the {type(model).__name__} is not prepared; pass the model that prepare() returned.")
        return session.named_tensors(self._saved_names(session.module))

    def _saved_names(self, module: nn.Module) -> Collection[str] | None:
        """The tensors of a model that are saved, as the main process sees it; None for all."""
        if not has_adapters(module):
            return None
        names: list[Any] = [adapter_names(module) if self.is_main_process else None]
        collectives.broadcast_object_list(names)
        saved: Collection[str] = names[0]
        return saved

    def _shared_names(self, model: nn.Module) -> dict[str, str]:
        return shared_names(self.unwrap_model(model))

    def _session_of(self, model: nn.Module) -> Session | None:
        return next((training.session for training in self._trainings if training.is_of_model(model)), None)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Close every session and the process group; collective. It also runs at the end of the process."""
        if not self._ended:
            self._ended = True
            self._first_steps.say_if_none()
            self._close()

    @collective("end_training", meets=True)
    def _close(self) -> None:
        self._loading.close()
        for training in self._trained:
            for line in training.describe_end():
                self._say(line)
        for training in self._trainings:
            training.session.close()
        self._processes.stop(self._strategy.destroy_process_group)

    def _end_at_exit(self) -> None:
        # After an error the other processes will not come to a barrier; they are ended by the launcher.
        if getattr(sys, "last_exc", None) is None and getattr(sys, "last_value", None) is None:
            try:
                self.end_training()
            except LoopError as error:  # another process is not at its end; Python would exit with 0
                print(f"zero_plugin: error: {error}", file=sys.stderr, flush=True)  # noqa: T201
                os._exit(1)

    def _say(self, line: str) -> None:
        if self.is_main_process:
            print(f"zero_plugin: {line}", file=sys.stderr, flush=True)  # noqa: T201 - before any logging is set up
