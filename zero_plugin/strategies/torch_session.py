"""`TorchSession`: plain PyTorch on one device, under DDP or on XLA, with unpartitioned gradients and states."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_plugin.config.handlers import AutocastKwargs
from zero_plugin.config.resolve.facts import Precision
from zero_plugin.errors import raise_clearer
from zero_plugin.strategies.base import Session, describe_renormalizing, release_failed_backward
from zero_plugin.strategies.ddp_reducer import OF_BACKWARD, DdpReducer
from zero_plugin.strategies.events import Events
from zero_plugin.strategies.optimizer_only import skips_by_found_inf
from zero_plugin.strategies.precision import (
    FoundInf,
    LossScale,
    Measured,
    all_finite,
    autocast_as,
    dense,
    find_nonfinite,
    run_under_autocast,
)


class Recorder(Protocol):
    """A lazy device (XLA): it records operations, runs them on request, and averages gradients itself."""

    def end_backward(self, module: nn.Module, *, averages: bool) -> None:
        """Finish a recorded backward.

        Args:
            module: the module that got gradients.
            averages: whether to average the gradients over the processes.
        """

    def run(self) -> None:
        """Run the recorded operations. Call this before reading a value: the read would run the operations twice."""

    def close(self) -> None:
        """Release the module."""


class TorchSession(Session):
    """A session without an engine, on one device or under DDP.

    Args:
        model: the object that the loop calls: the module itself, or its DDP wrapper.
        module: the user's module.
        optimizer: the optimizer; None for a model without one.
        precision: with `bf16` and `fp16` the weights stay fp32, and forwards run under autocast and return fp32.
        scale: the loss scale of `fp16`.
        skips: whether steps with gradients that are not finite are skipped.
        autocast: arguments of autocast for the forwards.
        recorder: the recorder of a lazy device; also an attribute.
        has_own_samples: whether this process's gradients cover complete samples, so the process may step alone. If
            processes share samples, only the average over the processes is a complete gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        optimizer: Optimizer | None,
        *,
        precision: Precision,
        scale: LossScale | None = None,
        skips: bool = True,
        autocast: AutocastKwargs | None = None,
        recorder: Recorder | None = None,
        has_own_samples: bool = True,
    ) -> None:
        self.model = model
        self.module = module
        self.optimizer: Optimizer | None = None
        self.events = Events()
        self._reducer = DdpReducer(model, self.no_sync) if isinstance(model, DistributedDataParallel) else None
        self._local_only = False
        self._has_own_samples = has_own_samples
        self.recorder = recorder
        self._averages = False  # whether the running backward averages gradients
        self._are_averaged = True  # whether the accumulated gradients are averaged
        self.undo = []
        self._scale = scale
        self.scales_loss, self.adds_to_complete_gradients = scale is not None, scale is None
        self._skips = skips
        if precision != "no":
            device = next((p.device.type for p in module.parameters()), "cpu")
            self.undo.append(run_under_autocast(module, lambda: autocast_as(precision, device, autocast), device))
        if optimizer is not None:
            self.train_with(optimizer)

    def train_with(self, optimizer: Optimizer) -> None:
        """Add the optimizer to a session that was built without one."""
        self.optimizer = self.given = optimizer
        if self._reducer is not None and describe_renormalizing(self.module) is None:  # `build_session` warns of it
            # Not DTensors, which hold parts of a weight.
            self.copies = [p for p in self.module.parameters() if p.requires_grad and type(p) is nn.Parameter]

    def emit_from_hooks(self) -> None:
        if self.events.gradient_outside:
            emit = _emit_gradient_outside(weakref.ref(self))
            trained = [p for p in self.module.parameters() if p.requires_grad]
            self.undo += [p.register_post_accumulate_grad_hook(emit).remove for p in trained]  # type: ignore[no-untyped-call]

    def raise_clearer(self, error: BaseException) -> None:
        if self._reducer is not None:
            raise_clearer(error, OF_BACKWARD, model=type(self.module).__name__)

    def drop_applied(self) -> bool | None:
        had_any = self._has_any_grad()
        self.drop_gradients(failed=False)
        return had_any

    def open_backward(self, loss: Tensor, *, ends_window: bool, is_first: bool) -> None:
        for check in self.events.before_backward:
            check(loss, is_first=is_first)
        self._averages = ends_window and not self._local_only
        self.is_in_backward = True
        if self._reducer is not None and self._averages:
            self._emit_averages(self._reducer)
            self._reducer.prepare(loss)

    def has_reached(self, loss: Tensor, *, is_first: bool) -> bool:  # noqa: ARG002
        """Check only under fp16, where a loss of another model must not be scaled; see `Session.has_reached`."""
        return self._scale is None or not is_first or self._has_any_grad()

    def close_backward(self, *, reached: bool) -> None:
        self.is_in_backward = False
        if reached and (self._reducer is not None or self.recorder is not None):
            steps_alone = self._local_only and self._has_own_samples  # inside no_sync, if the script steps there
            self._are_averaged = self._averages or steps_alone
        try:
            if self.recorder is not None and reached:
                self.recorder.end_backward(self.module, averages=self._averages)
            if self._reducer is not None:
                self._reducer.finish(reached=reached)
            for check in self.events.after_backward if reached else ():
                check()
        except BaseException:
            self._reset_reducer()
            raise

    def abandon_backward(self, *, reached: bool) -> bool:
        self.is_in_backward = False
        leaves_gradients = reached and self._has_any_grad()
        if leaves_gradients:
            self._reset_reducer()
        return leaves_gradients

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self._scale is None else loss.float() * self._scale.value

    def set_loss_scale(self, scale: float, *, accumulated: bool, complete: bool) -> None:  # noqa: ARG002
        assert self._scale is not None, "only sessions that scale share a scale"
        if accumulated:
            self.scale_gradients(scale / self._scale.value)
        self._scale.value = scale

    def follow_window(self, ends_window: Callable[[], bool]) -> None:
        """Make DDP reduce only in the backward that ends the window; see `Session.follow_window`."""
        if self._reducer is not None:
            self._reducer.follow(lambda: ends_window() and not self._local_only)

    def scale_gradients(self, factor: float) -> None:
        if gradients := self._gradients():
            torch._foreach_mul_(gradients, factor)

    def complete_gradients(self) -> Measured:
        """Complete the gradients; the window's last backward has averaged them, if there was one."""
        for check in self.events.before_complete:
            check()
        if not self._are_averaged:
            self._are_averaged = True
            if self._reducer is not None:
                self._emit_averages(self._reducer)
                self._reducer.average()
            elif self.recorder is not None:
                self.recorder.end_backward(self.module, averages=True)
        if self._scale is None:
            return Measured()
        return Measured(all_finite(self._gradients(), 1.0 / self._scale.value, before_reading=self._run_recorded))

    def clip(self, max_norm: float, *, norm_type: float, only: list[Tensor] | None, measured: Measured) -> Measured:
        parameters = self._trained_parameters() if only is None else only
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        finite, is_small = measured.finite, False
        is_of_all = only is None and norm_type == 2.0
        if is_of_all and self._skips_on_device():
            finite = FoundInf((~norm.isfinite()).float())
            norm = norm.nan_to_num(inf, posinf=inf)
        elif is_of_all and self._skips:
            self._run_recorded()
            value = norm.item()
            finite = isfinite(value)
            # torch would multiply by 1. A recorder does, so all steps have the same graph. 1e-6 is torch's constant.
            is_small = value + 1e-6 <= max_norm and self.recorder is None
            if not finite:
                norm = torch.full_like(norm, inf)  # nan or inf: the same result with every strategy
        # If the norm is not finite, the step is skipped. The gradients stay unchanged, to show the cause.
        if max_norm != inf and finite is not False and not is_small:
            # A norm of 0 makes torch change nothing: gradients that are not finite stay, to show the cause.
            by = norm.nan_to_num(0.0, posinf=0.0) if isinstance(finite, FoundInf) else norm
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, by)
        return Measured(finite, norm)

    def step(self, measured: Measured, *, max_norm: float) -> bool | FoundInf:
        assert self.optimizer is not None
        for check in self.events.before_step:
            check()
        if max_norm != inf:
            measured = self.clip(max_norm, norm_type=2.0, only=None, measured=measured)
        finite: bool | FoundInf | None = measured.finite
        on_device = self._skips_on_device()
        if isinstance(finite, FoundInf) and not on_device:  # e.g. a hook was registered after the clipping
            finite = not finite.read()
        if finite is None and on_device:
            finite = find_nonfinite(self._gradients())
        if finite is None:
            finite = not self._skips or all_finite(self._gradients(), before_reading=self._run_recorded)
        # A FoundInf is truthy: the optimizer reads it on the device, and skips the step on its own.
        applied: bool | FoundInf = finite
        if applied:
            self.is_stepping = True
            if isinstance(finite, FoundInf):
                self.optimizer.found_inf = finite.value  # type: ignore[attr-defined]
            try:
                self.optimizer.step()
            finally:
                self.is_stepping = False
                if isinstance(finite, FoundInf):
                    del self.optimizer.found_inf  # type: ignore[attr-defined]
        if self._scale is not None:
            self._scale.update(skipped=not applied)
        self.last_norm = measured.norm
        if self._reducer is not None:
            self._reducer.settle()
        self._run_recorded()
        for note in self.events.stepped:
            note(applied)
        return applied

    def first_nonfinite(self) -> str | None:
        for name, p in self.module.named_parameters():
            if p.grad is not None and not torch.isfinite(dense(p.grad)).all():
                return name
        return None

    def drop_gradients(self, *, failed: bool) -> None:
        assert self.optimizer is not None
        for check in self.events.before_drop:
            check()
        if failed:
            self._reset_reducer()
        self.optimizer.zero_grad(set_to_none=True)
        for p in self.left_out:
            p.grad = None
        for note in self.events.dropped:
            note()

    def drop_foreign_gradients(self, *, in_window: bool) -> None:  # noqa: ARG002
        if self.left_out or self._has_any_grad():  # the check is cheaper than the optimizer's zero_grad
            self.drop_gradients(failed=False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        previous, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = previous

    def reduction_state(self) -> list[list[str]]:
        return [] if self._reducer is None else self._reducer.state()

    def restore_reduction(self, state: list[list[str]]) -> None:
        if self._reducer is not None:
            self._reducer.restore(state)

    def close(self) -> None:
        release_failed_backward()
        for undo in self.undo:
            undo()
        if self.recorder is not None:
            self.recorder.close()
        for model in (self.model, self.module):
            model.__dict__.pop("zero_grad", None)
            model.__dict__.pop("no_sync", None)
        self.model = self.module
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = None
        self.optimizer = None

    def _skips_on_device(self) -> bool:
        """Return whether the optimizer itself skips a step that is not finite, so the session reads no result."""
        assert self.optimizer is not None
        looks = self._skips and self._scale is None and self.recorder is None
        return looks and skips_by_found_inf(self.optimizer, self.own_step_hooks)

    def _emit_averages(self, reducer: DdpReducer) -> None:
        for check in self.events.averages if not reducer.is_joined else ():
            check()

    def _reset_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.reset()

    def _has_any_grad(self) -> bool:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    return True
        return False

    def _run_recorded(self) -> None:
        if self.recorder is not None:
            self.recorder.run()

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trained_parameters() if p.grad is not None]

    def _trained_parameters(self) -> list[nn.Parameter]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def _emit_gradient_outside(reference: weakref.ref[TorchSession]) -> Callable[[Tensor], None]:
    """Return a hook that emits `gradient_outside`. It is one function, as it runs for each parameter and backward.
    torch keeps the hook in C++, where Python's garbage collector cannot see it: its reference to the session is weak.
    """

    def emit(_: Tensor) -> None:
        session = reference()
        if session is not None and not session.is_in_backward:
            for check in session.events.gradient_outside:
                check()

    return emit
