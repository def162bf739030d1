"""What happens to losses and gradients between two optimizer steps: backward, accumulation, averaging, clipping."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from zero_plugin.config.tree import AUTO
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.loop.backward import run_backward, run_plain_backward
from zero_plugin.loop.fewer_processes import redistribute_steps
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.window import TogetherWindows

_NO_PARAMETERS = " It got none at all: at ZeRO stage 3 optimizer.param_groups hold none outside of the step."


class TrainingLoop:
    """The calls of a training loop, sent to the sessions of the models that they concern.

    Args:
        run: what the loop runs on.
        prepared: what it trains.
    """

    def __init__(self, run: Run, prepared: Prepared) -> None:
        self._run = run
        self._prepared = prepared

    # ---- accumulation ------------------------------------------------------------------------------------------------

    def resize_windows(self, steps: int) -> None:
        """Have windows of `steps` micro-batches; see `Accelerator.gradient_accumulation_steps`."""
        run = self._run
        key, call = "gradient_accumulation_steps", f"accelerator.gradient_accumulation_steps = {steps}"
        before = run.document.deepspeed.get(key)
        if before is not None and before.origin.kind in ("file", "flag") and before.value not in (AUTO, None, steps):
            message = f"{steps} in code, but {before.value} at {before.origin.where}"
            raise ConfigError([Problem(call, key, message, "Write auto in the file to set it in code.")])
        steps = redistribute_steps(steps * run.cut, run.accumulated_by, run.processes.world_size)
        if before is None or before.value != steps:
            path = ("deepspeed", key)
            run.overlay(lambda d: d.overlay({path: steps}, kind="code", where={path: call}))
        for window in self._prepared.windows:
            window.resize(steps)

    def decide_windows(self, ends: bool) -> None:
        """The script says whether the micro-batches from now on end their windows."""
        for window in self._prepared.windows:
            window.decide(ends)

    def accumulate(self, models: tuple[nn.Module, ...]) -> AbstractContextManager[None]:
        """One micro-batch of `models`; see `Accelerator.accumulate`."""
        prepared = self._prepared
        if not prepared.trained:
            prepared.window = prepared.default_window
            return prepared.default_window
        named = self._named(models)
        prepared.window = named[0].window
        return named[0].window if len(named) == 1 else TogetherWindows([training.window for training in named])

    def _named(self, models: tuple[nn.Module, ...]) -> list[Training]:
        """The trained ones among `models`; all if none is among them, or only one is trained."""
        trained = self._prepared.trained
        if len(trained) == 1:
            return trained
        for model in models:
            if self._prepared.training_of(model) is None:
                raise LoopError(f"accumulate() got a {type(model).__name__} that is not prepared.")
        return [training for training in trained if any(map(training.is_of_model, models))] or trained

    # ---- backward ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss`; see `Accelerator.backward`."""
        _check_loss(loss, has_gradient=any(kwargs.get(name) is not None for name in ("gradient", "grad_tensors")))
        if "gradient" in kwargs:  # torch.autograd.backward, which takes losses of any session, calls it otherwise
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        prepared, looks = self._prepared, self._prepared.first_steps
        if not prepared.trained and looks.allows_plain_backward(self._run.strategy, self._run.processes.world_size):
            prepared.window = prepared.default_window
            run_plain_backward(prepared.default_window, loss, counts=bool(prepared.waiting), **kwargs)
            return
        if looks.is_due():
            self._refuse_to_begin_anew()
            self._refuse_whole_batches()
            looks.check(loss, prepared.waiting)
        prepared.window = run_backward(prepared.trained, prepared.untrained, loss, **kwargs)[0].window

    def _refuse_to_begin_anew(self) -> None:
        if self._run.must_resume:
            raise LoopError(
                "auto_resume asks that the run goes on from its newest checkpoint, but this script trains without "
                "having loaded one.\nCall accelerator.resume() after prepare(), or leave auto_resume out."
            )

    def _refuse_whole_batches(self) -> None:
        loader, cut = RUNNING.current, self._run.cut
        if cut > 1 and isinstance(loader, DataLoaderAdapter) and loader.cut != cut:
            raise LoopError(
                f"memory ran out before, so that {cut} micro-batches are to be made of each of the loader's "
                f"batches, but those of this loader (batch_size={loader.batch_size}) cannot be cut so: the global "
                f"batch would be another one.\nGive it a batch_size that is a multiple of {cut}."
            )

    # ---- averaging over the processes --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module | None) -> Iterator[None]:
        """Backwards of `model`, or of all, stay local inside; see `Accelerator.no_sync`."""
        with ExitStack() as stack:
            for training in self._prepared.trainings:
                if model is None or model is training.session.model:
                    stack.enter_context(training.session.no_sync())
            yield

    def reduce_next_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """The next backward inside averages gradients; see `Accelerator.trigger_sync_in_backward`."""
        session = self._prepared.session_of(model)
        return nullcontext() if session is None else self._run.strategy.reduce_next_backward(session)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
        """Processes without batches follow the others' reductions inside; see `Accelerator.join_uneven_inputs`."""
        if self._run.processes.world_size == 1:
            yield
            return
        even = self._run.options.loading.even_batches if even_batches is None else even_batches
        joined = self._run.strategy.join([o for o in joinables if isinstance(o, Joinable)], enable=not even)
        if joined is None:
            warnings.warn("join_uneven_inputs has no effect: it is for DDP", stacklevel=3)
            yield
            return
        with self._with_even_batches(even_batches), joined:
            yield

    @contextmanager
    def _with_even_batches(self, even: bool | None) -> Iterator[None]:
        """Prepared loaders make batches `even` inside."""
        loaders = [] if even is None else self._prepared.dataloaders
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

    # ---- gradients of the coming step --------------------------------------------------------------------------------

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip the coming step's gradients; see `Accelerator.clip_grad_norm_`."""
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        prepared = self._prepared
        if len(prepared.trained) > 1:
            ids = {id(p) for p in given}
            owners = [training for training in prepared.trained if any(id(p) in ids for p in training.parameters)]
            if len(owners) > 1:
                raise LoopError(
                    f"clip_grad_norm_ got parameters of {len(owners)} prepared models; call it once for each."
                )
        for training in prepared.trained:
            norm = training.clip(given, max_norm, norm_type)
            if norm is not None:
                return norm
        if not prepared.trained and self._run.strategy.optimizer_may_follow:
            ends_here = prepared.default_window.ends_here
            return nn.utils.clip_grad_norm_(given, max_norm, norm_type) if ends_here else torch.tensor(float("nan"))
        raise LoopError(
            "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
            + ("" if given else _NO_PARAMETERS)
        )

    def clip_values(self, parameters: Any, clip_value: float) -> None:
        """Clamp each number of the coming step's gradients; see `Accelerator.clip_grad_value_`."""
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids, prepared = {id(p) for p in given}, self._prepared
        for training in prepared.trained:
            own: list[Tensor] = [p for p in training.parameters if id(p) in ids]
            if training.optimizer is not None and (own or not training.session.unpartitioned_gradients):
                training.optimizer.clip_values(own, clip_value)
        if not prepared.trained and self._run.strategy.optimizer_may_follow and prepared.default_window.ends_here:
            nn.utils.clip_grad_value_(given, clip_value)

    def unscale(self, optimizer: Any) -> None:
        """Take the loss scale out of the coming step's gradients; see `Accelerator.unscale_gradients`."""
        chosen = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for training in self._prepared.trained:
            if training.optimizer is not None and (optimizer is None or any(map(training.is_of_optimizer, chosen))):
                training.optimizer.unscale()


class LossScaler:
    """The loss scale of fp16 under the names of torch's `GradScaler`; `backward` and `step` do what that one's do.

    Args:
        prepared: what trains, as it stands at each call.
        loop: takes the scale out of an optimizer's gradients.
    """

    def __init__(self, prepared: Prepared, loop: TrainingLoop) -> None:
        self._prepared = prepared
        self.unscale_ = loop.unscale

    def is_enabled(self) -> bool:
        """True: without fp16 there is no scaler."""
        return True

    def get_scale(self) -> float:
        """The factor on the loss.

        Raises:
            LoopError: nothing is prepared that has one.
        """
        return self._first().loss_scale

    def state_dict(self) -> dict[str, float]:
        """Where the scale stands; `save_state` keeps it too.

        Raises:
            LoopError: nothing is prepared that has one.
        """
        return self._first().scale_state()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Go on from a `state_dict`, with every prepared model."""
        for training in self._prepared.trained:
            training.session.restore_scale(state_dict)

    def _first(self) -> Session:
        if not self._prepared.trained:
            raise LoopError("accelerator.scaler: a loss scale comes with the model; call prepare(model, optimizer).")
        return self._prepared.trained[0].session


def refuse_lomo() -> NoReturn:
    """Refuse LOMO, which updates weights within backward, where nothing is averaged, accumulated or clipped.

    Raises:
        LoopError: always.
    """
    raise LoopError(
        "lomo_backward() is not supported: LOMO changes weights within backward, and here optimizer.step() does.\n"
        "Where optimizer states do not fit, use ZeRO with offload_optimizer."
    )


def _check_loss(loss: Any, *, has_gradient: bool) -> None:
    """Refuse what has no gradient, with what to pass in its place.

    Args:
        loss: what `backward` was given.
        has_gradient: whether the script says what to multiply it by, which a loss of several elements needs.
    """
    kind = type(loss).__name__
    if not isinstance(loss, Tensor):
        fix = "the tensor itself, before item() or float() is taken of it"
        if isinstance(loss, Mapping):
            fix = "its loss, e.g. backward(output.loss)" if hasattr(loss, "loss") else 'its loss, e.g. output["loss"]'
        elif isinstance(loss, list | tuple):
            fix = "one tensor: the element that is the loss, or the sum of several losses"
        raise LoopError(f"backward() got a {kind}, where it takes the loss as a tensor.\nPass {fix}.")
    if loss.numel() != 1 and not has_gradient:
        raise LoopError(
            f"backward() got a loss of shape {tuple(loss.shape)}, where it takes one number: a mean and a sum differ.\n"
            "Pass loss.mean() or loss.sum(), or backward(loss, gradient=…) with a tensor of the loss's shape."
        )
    if not loss.requires_grad:
        raise LoopError(
            f"backward() got a loss ({loss.dtype}) without a graph: no parameter that requires gradients has led to "
            "it.\nCompute it outside torch.no_grad(), without detach() or item(), from a model whose parameters "
            "require gradients, in a floating dtype."
        )
