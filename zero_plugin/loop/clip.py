"""`clip`: complete the gradients of a window, and clip or unscale them before the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, nn

from zero_plugin.config.keys import CLIPPING
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.loop import window_errors
from zero_plugin.loop.prepared import Prepared
from zero_plugin.loop.run import Run
from zero_plugin.loop.step import complete
from zero_plugin.loop.training import Training
from zero_plugin.loop.window import CLIP_NORM, CLIP_VALUE, Phase, Window
from zero_plugin.strategies.base import Session
from zero_plugin.strategies.optimizer_only import UnpreparedOptimizer

_NO_PARAMETERS: Final = " It got no parameters: at ZeRO stage 3 optimizer.param_groups are empty outside of the step."
ALL, SOME = "all", "some"  # of a model's trained parameters


def clip_norm(run: Run, prepared: Prepared, parameters: Any, max_norm: float, norm_type: float) -> Tensor:
    """Clip the next step's gradients by norm; see `Accelerator.clip_grad_norm_`."""
    given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    trained = prepared.trained
    if len(trained) > 1:
        _refuse_several(trained, given)
    for training in trained:
        found = _select(training, given)
        if found is None:
            continue
        if training.window.typed_clipping not in (None, max_norm) and max_norm != math.inf:
            _refuse_other_norm(training.resolved, max_norm)
        only = None if found is ALL else given
        return clip(training.window, training.session, max_norm, norm_type=norm_type, only=only)
    if not trained and run.strategy.optimizer_may_follow:
        if not _complete_waiting(prepared):
            return torch.tensor(math.nan)
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type)
    raise LoopError(
        "clip_grad_norm_ got parameters of no prepared model; pass model.parameters() of the model from prepare()."
        + ("" if given else _NO_PARAMETERS)
    )


def clip(
    window: Window,
    session: Session | UnpreparedOptimizer,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    only: list[Tensor] | None = None,
    call: str = CLIP_NORM,
) -> Tensor:
    """Complete the gradients and clip them. Before the window's last micro-batch: clip nothing and return nan.

    Args:
        window: the window.
        session: the session of its model.
        max_norm, norm_type, only: see `Session.clip`.
        call: the call of the script, for messages.

    Raises:
        LoopError: the step was already taken; or see `Session.clip`.
    """
    if not window.ends_here:
        return torch.tensor(math.nan)
    if window.phase is Phase.APPLIED:
        raise window_errors.clipped_after_step(call)
    if window.phase is Phase.EMPTY and isinstance(session, Session):
        session.step_without_backward(is_again=False)
        return torch.tensor(0.0)
    window.completed_by = call
    complete(window, session)
    window.measured = session.clip(max_norm, norm_type=norm_type, only=only, measured=window.measured)
    if max_norm != math.inf:
        window.enter(Phase.CLIPPED)
    assert window.measured.norm is not None, "clip measures the norm"
    return window.measured.norm


def clip_values(run: Run, prepared: Prepared, parameters: Any, clip_value: float) -> None:
    """Clamp each element of the next step's gradients; see `Accelerator.clip_grad_value_`."""
    given: list[Tensor] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    ids = {id(p) for p in given}
    for training in prepared.trained:
        own: list[Tensor] = [p for p in training.parameters if id(p) in ids]
        if not training.session.unpartitioned_gradients:
            raise LoopError(
                "clip_grad_value_ under ZeRO: gradients are partitioned, and DeepSpeed clips by norm only.\n"
                "Use accelerator.clip_grad_norm_(model.parameters(), max_norm)."
            )
        if own and training.window.ends_here:
            # Clipping to inf divides by the loss scale, and detects non-finite values before clamping hides them.
            clip(training.window, training.session, math.inf, call=CLIP_VALUE)
            nn.utils.clip_grad_value_(own, clip_value)
    others = [p for p in given if not any(id(p) in training.ids for training in prepared.trained)]
    if prepared.trained and any(p.grad is not None for p in others):  # parameters that the script trains itself
        nn.utils.clip_grad_value_(others, clip_value)
    may_follow = not prepared.trained and run.strategy.optimizer_may_follow
    if may_follow and _complete_waiting(prepared):
        nn.utils.clip_grad_value_(given, clip_value)


def unscale(prepared: Prepared, optimizer: Any, *, call: str = "unscale_gradients()") -> None:
    """Divide the next step's gradients by the loss scale; see `Accelerator.unscale_gradients`.

    Args:
        prepared: the prepared objects.
        optimizer: see `Accelerator.unscale_gradients`.
        call: the call of the script, for messages.
    """
    chosen = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for training in prepared.trained:
        if optimizer is None or any(map(training.is_of_optimizer, chosen)):
            window, session = training.window, training.session
            are_scaled = session.unpartitioned_gradients and session.loss_scale != 1.0
            if are_scaled and window.phase is not Phase.APPLIED:
                clip(window, session, math.inf, call=call)


def _select(training: Training, given: Sequence[Tensor]) -> str | None:
    """Return which of the model's trained parameters are given: `ALL`, `SOME`, or None."""
    stepped: Sequence[nn.Parameter] = training.parameters
    session = training.session
    if session.left_out:
        idle = set(map(id, session.left_out))
        stepped = [p for p in stepped if id(p) not in idle]
    if given and len(given) == len(stepped) and all(map(is_, given, stepped)):  # model.parameters()
        return ALL
    ids = {id(p) for p in given}
    counted = sum(id(p) in ids for p in stepped)
    if not counted and not session.unpartitioned_gradients and session.optimizer is not None:
        stepped = [p for group in session.optimizer.param_groups for p in group["params"]]  # its partitions
        counted = sum(id(p) in ids for p in stepped)
    if not counted:
        return None
    return ALL if counted == len(stepped) else SOME


def _refuse_several(trained: Sequence[Training], given: Sequence[Tensor]) -> None:
    ids = {id(p) for p in given}
    owners = [training for training in trained if any(id(p) in ids for p in training.parameters)]
    if len(owners) > 1:
        raise LoopError(f"clip_grad_norm_ got parameters of {len(owners)} prepared models; call it once for each.")


def _refuse_other_norm(resolved: Resolved, max_norm: float) -> None:
    entry = resolved.tree.entries[CLIPPING.path]
    where = f"clip_grad_norm_(max_norm={max_norm})"
    message = f"{max_norm} in code, but {entry.value} at {entry.origin.where}"
    fix = "Write the same value in both, or auto in the file."
    raise ConfigError([Problem(where, CLIPPING.name, message, fix)])


def _complete_waiting(prepared: Prepared) -> bool:
    """Complete the gradients of all optimizers without a prepared model, if this micro-batch ends their window.

    Returns:
        Whether the micro-batch ends the window.
    """
    windows = prepared.waiting_windows
    if not windows[-1][0].ends_here:
        return False
    for window, session in windows:
        if session is not None and window.phase is Phase.ACCUMULATED:
            complete(window, session)
    return True
