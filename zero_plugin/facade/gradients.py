"""What a script does to gradients: when they are averaged over processes, unscaled, clipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from zero_plugin.config.plugins import DataLoaderConfiguration
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.window import AccumulationWindow

_EMPTY = " It got none at all: at ZeRO stage 3 optimizer.param_groups hold none outside of the step."


class GradientCalls:
    """The calls of the facade that concern gradients after, or beside, `backward`."""

    dataloader_config: DataLoaderConfiguration
    _dataloaders: list[DataLoaderAdapter]
    _loose: AccumulationWindow
    _processes: Processes
    _strategy: Strategy
    _trained: list[Training]
    _trainings: list[Training]

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Backwards inside stay local where the strategy can; harmless where it cannot."""
        with ExitStack() as stack:
            for training in self._trainings:
                if model is None or model is training.session.model:
                    stack.enter_context(training.session.no_sync())
            yield

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward inside averages gradients over the processes, though the forward ran inside `no_sync`.

        Args:
            model: a prepared one.
        """
        training = next((training for training in self._trainings if training.is_of_model(model)), None)
        return nullcontext() if training is None else self._strategy.reduce_next_backward(training.session)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Under DDP, let processes that run out of batches follow the others' reductions, until the last is through.

        Prepared loaders end together by themselves: what this serves is loaders that were not prepared. Where nothing
        is uneven, it changes nothing; where it has no effect, as under ZeRO, it warns.

        Args:
            joinables: prepared models.
            even_batches: for the prepared loaders, inside; None leaves them as they are.
        """
        if self._processes.world_size == 1:
            yield
            return
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        joined = self._strategy.join([o for o in joinables if isinstance(o, Joinable)], enable=not even)
        if joined is None:
            warnings.warn("join_uneven_inputs has no effect: it is for DDP", stacklevel=3)
            yield
            return
        with self._with_even_batches(even_batches), joined:
            yield

    @contextmanager
    def _with_even_batches(self, even: bool | None) -> Iterator[None]:
        """Prepared loaders make batches `even` inside."""
        loaders = [] if even is None else self._dataloaders
        samplers: list[Any] = [loader.batch_sampler for loader in loaders]
        shards = [(shard, shard.even_batches) for shard in samplers if hasattr(shard, "even_batches")]
        if len(shards) < len(samplers):
            warnings.warn(
                "join_uneven_inputs: even_batches is only supported for map-style datasets; streams stay as they are",
                stacklevel=5,
            )
        for shard, _ in shards:
            shard.even_batches = even
        try:
            yield
        finally:
            for shard, before in shards:
                shard.even_batches = before

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
        if not self._trained and self._strategy.optimizer_may_follow:
            here = self._loose.ends_here
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type) if here else torch.tensor(float("nan"))
        raise LoopError(
            "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
            + ("" if given else _EMPTY)
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp each number of the coming step's gradients to ±`clip_value`; inside a window, nothing happens.

        Args:
            parameters: of prepared models.
            clip_value: the largest magnitude.

        Raises:
            LoopError: under ZeRO, whose gradients are partitioned.
        """
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(p) for p in given}
        for training in self._trained:
            own: list[Tensor] = [p for p in training.parameters if id(p) in ids]
            if training.optimizer is not None and (own or not training.session.whole_gradients):
                training.optimizer.clip_values(own, clip_value)
        if not self._trained and self._strategy.optimizer_may_follow and self._loose.ends_here:
            torch.nn.utils.clip_grad_value_(given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Under fp16, take the loss scale out of the coming step's gradients, before the script looks at them.

        `clip_grad_norm_` and `clip_grad_value_` do so by themselves. Without a loss scale, and under ZeRO, where the
        gradients cannot be seen, nothing happens.

        Args:
            optimizer: a prepared optimizer, or several; None for all.
        """
        chosen = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for training in self._trained:
            if training.optimizer is not None and (optimizer is None or any(map(training.is_of_optimizer, chosen))):
                training.optimizer.unscale()
