"""What a script calls in its loop: backward and accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import Tensor, nn

from zero_plugin.config.deepspeed_plugin import Configurations
from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.config.tree import AUTO
from zero_plugin.data.active import RUNNING
from zero_plugin.data.adapter import DataLoaderAdapter
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.loop.backward import FirstSteps, run_backward, run_loose_backward
from zero_plugin.loop.fewer_processes import share_out_steps
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.window import AccumulationWindow, TogetherWindows


class LoopCalls:
    """The calls of the facade that make up the training loop."""

    document: Document
    resolved: Resolved | None
    _configurations: Configurations
    _accumulated_by: int  # processes that the accumulation is meant for; those that there are have more of it each
    _cut: int
    _first_steps: FirstSteps
    _loose: AccumulationWindow
    _must_resume: bool
    _processes: Processes
    _say: Callable[[str], None]
    _strategy: Strategy
    _trained: list[Training]
    _trainings: list[Training]
    _untrained: list[Training]
    _waiting: list[AcceleratedOptimizer]
    _window: AccumulationWindow

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; settable, from the next window on, in the loader's own batches.

        Where memory ran out before, each of the loader's batches comes as several micro-batches, and the number is as
        many times what was set.

        Raises:
            ConfigError: it is set to another number than file or flag say.
            LaunchError: fewer processes are left than were meant, and cannot share out the number that is set.
        """
        return self._window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        key, call = "gradient_accumulation_steps", f"accelerator.gradient_accumulation_steps = {steps}"
        before = self.document.deepspeed.get(key)
        if before is not None and before.origin.kind in ("file", "flag") and before.value not in (AUTO, None, steps):
            message = f"{steps} in code, but {before.value} at {before.origin.where}"
            raise ConfigError([Problem(call, key, message, "Write auto in the file to set it in code.")])
        steps = share_out_steps(steps * self._cut, self._accumulated_by, self._processes.world_size)
        if before is None or before.value != steps:
            path = ("deepspeed", key)
            self._configurations.overlay(lambda d: d.overlay({path: steps}, kind="code", where={path: call}))
            self.document = self._configurations.document
        for window in self._windows():
            window.resize(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that `optimizer.step()` acts.

        Of several models, it is said of the one whose micro-batch this is: named in `accumulate`, or reached by the
        last `backward`.

        A loop may set it, instead of calling `accumulate`: False before a micro-batch that does not end the window, and
        True before the one that does.
        """
        return self._window.ends_here

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        for window in self._windows():
            window.decide(ends)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was skipped."""
        return any(t.optimizer is not None and t.optimizer.step_was_skipped for t in self._trained)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of `loss`, divided by the size of the accumulation window. It never steps.

        Every prepared model whose trained parameters the loss depends on gets its gradients, and keeps them until its
        optimizer's `step` or `zero_grad`, as in plain torch. Where none was prepared with its optimizer, this is
        torch's own backward, said once.

        Args:
            loss: scalar, or with `gradient` of its shape.
            **kwargs: as for `Tensor.backward`: `gradient`, `retain_graph`, `create_graph`, `inputs`.

        Raises:
            LoopError: it is no tensor, has several elements or no graph; gradients came from elsewhere; the loss
                reaches a module that was not prepared, or no prepared one; with accumulation and without `accumulate`,
                it reaches several models.
        """
        _expect_loss(loss, has_gradient=any(kwargs.get(name) is not None for name in ("gradient", "grad_tensors")))
        if "gradient" in kwargs:  # torch.autograd.backward, which takes losses of any session, calls it otherwise
            kwargs["grad_tensors"] = kwargs.pop("gradient")
        looks = self._first_steps
        if not self._trained and looks.may_run_loose(self._strategy, self._processes.world_size):
            self._window = self._loose
            run_loose_backward(self._loose, loss, counts=bool(self._waiting), **kwargs)
            return
        if looks.is_due():
            self._refuse_to_begin_anew()
            self._refuse_whole_batches()
            looks.look_at(loss, self._waiting)
        self._window = run_backward(self._trained, self._untrained, loss, **kwargs)[0].window

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch: gradients add up, and `step()` acts in the window's last one only.

        Args:
            *models: whose micro-batch it is; all that are trained where none is named. Models that are not trained may
                be named too.

        Raises:
            LoopError: of several trained models, one is named that is not prepared.
        """
        if not self._trained:
            self._window = self._loose
            return self._loose
        trained = self._named(models)
        self._window = trained[0].window
        return trained[0].window if len(trained) == 1 else TogetherWindows([t.window for t in trained])

    def _refuse_to_begin_anew(self) -> None:
        if self._must_resume:
            raise LoopError(
                "auto_resume asks that the run goes on from its newest checkpoint, but this script trains without "
                "having loaded one.\nCall accelerator.resume() after prepare(), or leave auto_resume out."
            )

    def _refuse_whole_batches(self) -> None:
        loader = RUNNING.current
        if self._cut > 1 and isinstance(loader, DataLoaderAdapter) and loader.cut != self._cut:
            raise LoopError(
                f"memory ran out before, so that {self._cut} micro-batches are to be made of each of the loader's "
                f"batches, but those of this loader (batch_size={loader.batch_size}) cannot be cut so: the global "
                f"batch would be another one.\nGive it a batch_size that is a multiple of {self._cut}."
            )

    def lomo_backward(self, loss: Tensor, learning_rate: float) -> NoReturn:  # noqa: ARG002
        """Refuse: LOMO updates weights within backward, where nothing is averaged, accumulated or clipped.

        Raises:
            LoopError: always.
        """
        raise LoopError(
            "lomo_backward() is not supported: LOMO changes weights within backward, and here optimizer.step() does.\n"
            "Where optimizer states do not fit, use ZeRO with offload_optimizer."
        )

    def _windows(self) -> list[AccumulationWindow]:
        return [self._loose, *(training.window for training in self._trained)]

    def _named(self, models: tuple[nn.Module, ...]) -> list[Training]:
        """The trained ones among `models`; all if none is among them, or only one is trained."""
        if len(self._trained) == 1:
            return self._trained
        for model in models:
            if not any(training.is_of_model(model) for training in self._trainings):
                raise LoopError(f"accumulate() got a {type(model).__name__} that is not prepared.")
        named = [training for training in self._trained if any(map(training.is_of_model, models))]
        return named or self._trained


def _expect_loss(loss: Any, *, has_gradient: bool) -> None:
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
