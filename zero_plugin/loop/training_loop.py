"""What a loop does between two optimizer steps: backward, accumulation, averaging and clipping of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable

from zero_plugin.config.tree import AUTO
from zero_plugin.data.active import RUNNING
from zero_plugin.data.loader import DataLoaderAdapter
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run, redistribute_steps
from zero_plugin.loop.training import Training
from zero_plugin.loop.window import TogetherWindows, Window, share_divisor
from zero_plugin.strategies.base import Session

_NO_PARAMETERS = " It got no parameters: at ZeRO stage 3 optimizer.param_groups are empty outside of the step."


class TrainingLoop:
    """Forwards the calls of a training loop to the sessions of the models.

    Args:
        run: the run.
        prepared: what is prepared.
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
            fix = f"Leave the flag out, or give {steps}." if is_flag else "Write auto in the file to set it in code."
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
        """One micro-batch of `models`; see `Accelerator.accumulate`."""
        prepared = self._prepared
        if not prepared.trained:
            windows = prepared.untrained_windows
        else:
            windows = [training.window for training in self._named(models)]
        prepared.window = windows[-1] if not prepared.trained else windows[0]
        return windows[0] if len(windows) == 1 else TogetherWindows(windows)

    def _named(self, models: tuple[nn.Module, ...]) -> list[Training]:
        """The trained models among `models`; all if there are none among them, or only one model is trained."""
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
        if "gradient" in kwargs:  # its name in torch.autograd.backward
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        _check_loss(loss, has_gradient=kwargs.get("grad_tensors") is not None)
        prepared, first_steps = self._prepared, self._prepared.first_steps
        if not prepared.trained and first_steps.allows_plain_backward(
            self._run.strategy, self._run.processes.world_size
        ):
            prepared.window = prepared.untrained_windows[-1]
            run_plain_backward(prepared.untrained_windows, loss, **kwargs)
            return
        if self._run.strategy.checks != "off" and first_steps.is_due():
            self._refuse_other_start()
            first_steps.check(loss, prepared.waiting)
        if self._run.sequence is not None:
            self._run.sequence.check_same_loss(loss)
        if len(prepared.trained) == 1 and not prepared.untrained:
            prepared.window = prepared.trained[0].window
            prepared.window.backward(loss, **kwargs)
        else:
            prepared.window = run_backward(prepared.trained, prepared.untrained, loss, **kwargs)[0].window

    def _refuse_other_start(self) -> None:
        """Refuse to train from another state, or on other micro-batches, than the run that continues here."""
        if self._run.must_resume:
            raise LoopError(
                "auto_resume is configured, but this script trains without having loaded a checkpoint.\n"
                "Call accelerator.resume() after prepare(), or remove auto_resume."
            )
        loader, cut = RUNNING.current, self._run.micro_batches_per_loader_batch
        if cut > 1 and isinstance(loader, DataLoaderAdapter) and loader.cut != cut:
            raise LoopError(
                f"memory ran out before, so that each batch of a loader is split into {cut} micro-batches, but those "
                f"of this loader (batch_size={loader.batch_size}) cannot be split: the global batch would change.\n"
                f"Use a batch_size that is a multiple of {cut}."
            )

    # ---- averaging over the processes --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module | None) -> Iterator[None]:
        """Inside, backwards of `model`, or of all models, do not average gradients; see `Accelerator.no_sync`."""
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
        """Inside, processes without batches join the others' collectives; see `Accelerator.join_uneven_inputs`."""
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
        """Inside, prepared loaders have this value of `even_batches`."""
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

    # ---- gradients of the next step ----------------------------------------------------------------------------------

    def clip_norm(self, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
        """Clip the next step's gradients by norm; see `Accelerator.clip_grad_norm_`."""
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
            if not self._complete_untrained_windows():
                return torch.tensor(float("nan"))
            return nn.utils.clip_grad_norm_(given, max_norm, norm_type)
        raise LoopError(
            "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
            + ("" if given else _NO_PARAMETERS)
        )

    def _complete_untrained_windows(self) -> bool:
        """Complete the gradients of all optimizers without a prepared model, if this micro-batch ends their window.

        Returns:
            Whether it does.
        """
        windows = self._prepared.untrained_windows
        if not windows[-1].ends_here:
            return False
        for window in windows:
            window.complete()
        return True

    def clip_values(self, parameters: Any, clip_value: float) -> None:
        """Clamp each element of the next step's gradients; see `Accelerator.clip_grad_value_`."""
        given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids, prepared = {id(p) for p in given}, self._prepared
        for training in prepared.trained:
            own: list[Tensor] = [p for p in training.parameters if id(p) in ids]
            if training.optimizer is not None and (own or not training.session.unpartitioned_gradients):
                training.optimizer.clip_values(own, clip_value)
        others = [p for p in given if not any(id(p) in training.ids for training in prepared.trained)]
        if prepared.trained and any(p.grad is not None for p in others):  # of models that the script trains itself
            nn.utils.clip_grad_value_(others, clip_value)
        may_follow = not prepared.trained and self._run.strategy.optimizer_may_follow
        if may_follow and self._complete_untrained_windows():
            nn.utils.clip_grad_value_(given, clip_value)

    def unscale(self, optimizer: Any, *, call: str = "unscale_gradients()") -> None:
        """Divide the next step's gradients by the loss scale; see `Accelerator.unscale_gradients`.

        Args:
            optimizer: as there.
            call: what the script has called, for messages.
        """
        chosen = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for training in self._prepared.trained:
            if training.optimizer is not None and (optimizer is None or any(map(training.is_of_optimizer, chosen))):
                training.optimizer.unscale(call)


class LossScaler:
    """The loss scale of fp16 with the methods of `torch.amp.GradScaler`, except `scale`, `step` and `update`.

    `Accelerator.backward` and the optimizer's `step` scale the loss, unscale the gradients and update the scale.

    Args:
        prepared: what is prepared.
        loop: unscales the gradients of an optimizer.
    """

    def __init__(self, prepared: Prepared, loop: TrainingLoop) -> None:
        self._prepared, self._loop = prepared, loop

    def unscale_(self, optimizer: Any) -> None:
        """Divide the next step's gradients of a prepared optimizer by the loss scale."""
        self._loop.unscale(optimizer, call="accelerator.scaler.unscale_()")

    def is_enabled(self) -> bool:
        """Always True: without fp16 there is no scaler."""
        return True

    def get_scale(self) -> float:
        """The factor on the loss.

        Raises:
            LoopError: no model is prepared with an optimizer.
        """
        return self._first().loss_scale

    def state_dict(self) -> dict[str, float]:
        """The state of the loss scale; `save_state` saves it too.

        Raises:
            LoopError: no model is prepared with an optimizer.
        """
        return self._first().scale_state()

    def load_state_dict(self, state_dict: Mapping[str, float]) -> None:
        """Load a `state_dict` into every prepared model."""
        for training in self._prepared.trained:
            training.session.restore_scale(state_dict)

    def _first(self) -> Session:
        if not self._prepared.trained:
            raise LoopError(
                "accelerator.scaler: there is no loss scale before a model with an optimizer is prepared. Call "
                "prepare(model, optimizer) first."
            )
        return self._prepared.trained[0].session


def _check_loss(loss: Any, *, has_gradient: bool) -> None:
    """Refuse a loss that cannot be differentiated; the error says what to pass instead.

    Args:
        loss: the argument of `backward`.
        has_gradient: whether `gradient` is given, which a loss of several elements needs.
    """
    kind = type(loss).__name__
    if not isinstance(loss, Tensor):
        fix = "the tensor itself, without item() or float()"
        if isinstance(loss, Mapping):
            fix = "its loss, e.g. backward(output.loss)" if hasattr(loss, "loss") else 'its loss, e.g. output["loss"]'
        elif isinstance(loss, list | tuple):
            fix = "one tensor: the element that is the loss, or the sum of several losses"
        raise LoopError(f"backward() got a {kind}, but it takes the loss as a tensor.\nPass {fix}.")
    if loss.numel() != 1 and not has_gradient:
        raise LoopError(
            f"backward() got a loss of shape {tuple(loss.shape)}, but it takes a scalar.\n"
            "Pass loss.mean() or loss.sum(), or backward(loss, gradient=…) with a tensor of the loss's shape."
        )
    if not loss.requires_grad:
        raise LoopError(
            f"backward() got a loss ({loss.dtype}) without a graph: no parameter that requires gradients is in it.\n"
            "Compute it outside torch.no_grad(), without detach() or item(), from a model whose parameters "
            "require gradients, in a floating dtype."
        )


def run_backward(
    trainings: Sequence[Training], untrained: Sequence[Training], loss: Tensor, **kwargs: Any
) -> Sequence[Training]:
    """Accumulate the gradients of `loss` in every model that it depends on, and count the micro-batch in their windows.

    Args:
        trainings: all models with an optimizer. If there are several, each watches for its gradients.
        untrained: the models without an optimizer, through which gradients may pass.
        loss: a scalar.
        **kwargs: for `torch.autograd.backward`.

    Returns:
        The models of `trainings` that the loss depends on.

    Raises:
        LoopError: see `Window.backward`; or it is ambiguous which model the micro-batch belongs to.
    """
    if len(trainings) == 1:
        trainings[0].window.backward(loss, **kwargs)
        reached = trainings
    else:
        reached = _run_through_several(trainings, loss, **kwargs)
    for training in untrained:
        training.session.close_backward(reached=False)
    return reached


def run_plain_backward(windows: Sequence[Window], loss: Tensor, **kwargs: Any) -> None:
    """Torch's own backward, where no model was prepared with its optimizer.

    Args:
        windows: the default window and those of the waiting optimizers. The loss is divided by the micro-batches of the
            last one. If there are no waiting optimizers, backwards outside `accumulate()` are not counted.
        loss: a scalar.
        **kwargs: for `torch.autograd.backward`.
    """
    # Without accumulate() only those windows count which an optimizer steps.
    counted = [window for window in windows if window.steps_an_optimizer or window.in_context]
    for window in counted:
        window.refuse_failed()
    for window in counted:
        window.count_backward()
    divisor = share_divisor(counted or windows[-1:])
    torch.autograd.backward(loss if divisor == 1 else loss / divisor, **kwargs)
    for window in windows:
        window.note_backward()


def _run_through_several(trainings: Sequence[Training], loss: Tensor, **kwargs: Any) -> Sequence[Training]:
    _share_loss_scale(trainings)
    named = [training.window for training in trainings if training.window.in_context]
    divisor = share_divisor(named or [training.window for training in trainings])
    for training in trainings:
        training.reached = False
        training.window.open_backward(loss, ends_window=training.window.next_backward_ends)
    try:
        scaled = trainings[0].session.scale_loss(loss)
        torch.autograd.backward(scaled if divisor == 1 else scaled / divisor, **kwargs)
    except BaseException as error:
        for training in trainings:
            training.window.abandon_backward(reached=training.reached)
        for training in trainings:
            if (explained := training.session.explain(error)) is not None:
                raise explained from error
        raise
    for training in trainings:
        training.window.close_backward(reached=training.reached)
    reached = [training for training in trainings if training.reached]
    _count(reached, named, trainings[0].window.steps)
    return reached


def _count(reached: Sequence[Training], named: Sequence[Window], steps: int) -> None:
    if not reached:
        raise LoopError("the loss of this backward() depends on no parameter of the prepared models that are trained.")
    if not named and steps > 1 and len(reached) > 1:
        raise LoopError(
            f"the loss of this backward() reaches {_names(reached)}, and gradient_accumulation_steps is {steps}: "
            "without accumulate() it is ambiguous which model the micro-batch belongs to.\n"
            "If gradients only pass through a model, freeze it: model.requires_grad_(False) before the forward. If the "
            "loss trains all of them, wrap each micro-batch in `with accelerator.accumulate(one, other):`."
        )
    ends = all(window.ends_here for window in named)
    for training in reached:
        if not named or training.window.in_context:
            training.window.count_backward()
        else:
            training.window.count_foreign_backward(ends=ends, windows=named)


def _share_loss_scale(trainings: Sequence[Training]) -> None:
    """Under fp16, set the loss scale of all models to the smallest one: a loss is multiplied by one scale only."""
    if trainings[0].resolved.precision != "fp16":
        return
    scales = [training.session.loss_scale for training in trainings]
    for training, scale in zip(trainings, scales, strict=True):
        if scale != min(scales):
            training.window.set_loss_scale(min(scales))


def _names(trainings: Sequence[Training]) -> str:
    names = [type(training.session.module).__name__ for training in trainings]
    return f"{', '.join(names[:-1])} and {names[-1]}"
