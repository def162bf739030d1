"""Refuse a step of a torch optimizer that the session does not take."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_plugin.errors import LoopError
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.optimizer_only import has_step_hooks


class ForeignSteps(Guard):
    """A guard that raises if an optimizer steps the weights outside of a step of the session.

    Mistake: `step()` of the optimizer that was passed to `prepare`, whose gradients may be scaled, incomplete or
    partitioned; or, under ZeRO, of an optimizer that the script builds later over the same parameters.
    Cost: one hook for each step; under ZeRO a second one for every step of any optimizer.

    Optimizers without torch's step hooks are not watched.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._hooks = [optimizer.register_step_pre_hook(_refusing(session)) for optimizer in _optimizers_of(session)]
        session.own_step_hooks = 1
        if session.partitioned:
            hook = register_optimizer_step_pre_hook(_refusing_others(session))
            # torch keeps the hook in a global registry, even after the script drops its Accelerator.
            weakref.finalize(self, hook.remove).atexit = False
            self._hooks.append(hook)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _optimizers_of(session: Any) -> list[Optimizer]:
    """Return the running optimizer and, if different, the script's; without those that lack step hooks."""
    found = {id(o): o for o in (session.given, session.optimizer) if o is not None}
    return [o for o in found.values() if has_step_hooks(o)]


def _refusing(session: Any) -> Callable[..., None]:
    """Return the hook of one optimizer. The hook holds a weak reference to the session."""
    reference = weakref.ref(session)

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        session = reference()
        if session is not None and not session.is_stepping:
            raise LoopError(
                f"step() of the {type(optimizer).__name__} that was passed to prepare(): its gradients may be scaled, "
                "incomplete or partitioned.\nCall step() of the optimizer that prepare() returned."
            )

    return refuse


def _refusing_others(session: Any) -> Callable[..., None]:
    """Return the hook of all optimizers. It refuses steps of parameters that the session has partitioned."""
    reference, partitioned = weakref.ref(session), {id(p) for p in session.partitioned}

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        session = reference()
        if session is None or session.is_stepping:
            return
        if any(id(p) in partitioned for g in optimizer.param_groups for p in g["params"]):
            raise LoopError(
                f"step() of a {type(optimizer).__name__} that holds parameters of a model that ZeRO trains with "
                "another optimizer: their gradients are incomplete, or None.\n"
                "Call step() of the optimizer that prepare() returned, and change its param_groups. To use "
                "another optimizer: accelerator.free_memory(), then prepare() the model again with it."
            )

    return refuse
