"""What a script calls in its loop: backward, accumulation, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from zero_plugin.accumulation import AccumulationWindow, TogetherWindows
from zero_plugin.backward import run_backward
from zero_plugin.config.document import Document
from zero_plugin.errors import LoopError
from zero_plugin.first_steps import FirstSteps
from zero_plugin.resolve.resolved import Resolved
from zero_plugin.training import Training

__all__ = ["LoopCalls"]


class LoopCalls:
    """The calls of the facade that make up the training loop."""

    document: Document
    resolved: Resolved | None
    _trainings: list[Training]
    _trained: list[Training]
    _untrained: list[Training]
    _window: AccumulationWindow | None
    _first_steps: FirstSteps

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
