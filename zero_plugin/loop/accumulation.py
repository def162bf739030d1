"""`Accumulation`: which micro-batches make up a step, and in which of them gradients are averaged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable

from zero_plugin.config.tree import AUTO
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run, redistribute_steps
from zero_plugin.loop.together import TogetherWindows
from zero_plugin.loop.training import Training


class Accumulation:
    """The decisions which micro-batches make up a step, and in which of them the processes average gradients.

    Args:
        run: the run.
        prepared: the prepared objects.
    """

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self._run = run
        self._prepared = prepared

    # ---- accumulation ------------------------------------------------------------------------------------------------

    def resize_windows(self, steps: int) -> None:
        """Set the number of micro-batches per window; see `Accelerator.gradient_accumulation_steps`."""
        run = self._run
        key, call = "gradient_accumulation_steps", f"accelerator.gradient_accumulation_steps = {steps}"
        before = run.document.deepspeed.get(key)
        if before is not None and before.origin.kind in ("file", "flag") and before.value not in (AUTO, None, steps):
            message = f"{steps} in code, but {before.value} at {before.origin.where}"
            is_flag = before.origin.kind == "flag"
            fix = f"Remove the flag, or pass {steps}." if is_flag else "Write auto in the file to set it in code."
            raise ConfigError([Problem(call, key, message, fix)])
        steps = redistribute_steps(
            steps * run.micro_batches_per_loader_batch, run.accumulated_by, run.processes.world_size
        )
        if before is None or before.value != steps:
            path = ("deepspeed", key)
            run.overlay(lambda d: d.overlay("code", {path: (call, steps)}))
        for window in self._prepared.windows:
            window.resize(steps)

    def decide_windows(self, ends: bool) -> None:
        """Set whether the micro-batches from now on end their windows; see `Accelerator.sync_gradients`."""
        for window in self._prepared.windows:
            window.decide(ends)

    def accumulate(self, models: tuple[nn.Module, ...]) -> AbstractContextManager[None]:
        """Return the context of one micro-batch of `models`; see `Accelerator.accumulate`."""
        prepared = self._prepared
        if not prepared.trained:
            windows = [window for window, _ in prepared.waiting_windows]
        else:
            windows = [training.window for training in self._named(models)]
        prepared.window = windows[-1] if not prepared.trained else windows[0]
        return windows[0] if len(windows) == 1 else TogetherWindows(windows)

    def _named(self, models: tuple[nn.Module, ...]) -> list[Training]:
        """Return the trained models among `models`; all trained models if none is among them, or only one exists."""
        trained = self._prepared.trained
        if len(trained) == 1:
            return trained
        for model in models:
            if self._prepared.training_of(model) is None:
                raise LoopError(f"accumulate() got a {type(model).__name__} that is not prepared.")
        return [training for training in trained if any(map(training.is_of_model, models))] or trained

    # ---- averaging over the processes --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module | None) -> Iterator[None]:
        """Do not average gradients in backwards of `model`, or of all models; see `Accelerator.no_sync`."""
        with ExitStack() as stack:
            for training in self._prepared.trainings:
                if model is None or model is training.session.model:
                    stack.enter_context(training.session.no_sync())
            yield

    def reduce_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context whose next backward averages gradients; see `Accelerator.trigger_sync_in_backward`."""
        session = self._prepared.session_of(model)
        return nullcontext() if session is None else self._run.strategy.reduce_next_backward(session)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
        """Let processes without batches join the others' collectives; see `Accelerator.join_uneven_inputs`."""
        if self._run.processes.world_size == 1:
            yield
            return
        even = self._run.options.loading.even_batches if even_batches is None else even_batches
        joined = self._run.strategy.join([o for o in joinables if isinstance(o, Joinable)], enable=not even)
        if joined is None:
            warnings.warn("join_uneven_inputs has no effect: only DDP supports it", stacklevel=3)
            yield
            return
        with self._with_even_batches(even_batches), joined:
            yield

    @contextmanager
    def _with_even_batches(self, even: bool | None) -> Iterator[None]:
        """Set `even_batches` of the prepared loaders inside the context; None leaves it unchanged."""
        loaders = [] if even is None else self._prepared.dataloaders
        samplers: list[Any] = [loader.batch_sampler for loader in loaders]
        shards = [(shard, shard.even_batches) for shard in samplers if hasattr(shard, "even_batches")]
        if len(shards) < len(samplers):
            warnings.warn(
                "join_uneven_inputs: even_batches is only supported for map-style datasets, not iterable ones",
                stacklevel=5,
            )
        for shard, _ in shards:
            shard.even_batches = even
        try:
            yield
        finally:
            for shard, before in shards:
                shard.even_batches = before
