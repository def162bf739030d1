"""What torch leaves marks of for its profiler, without them while no profiler runs.

A mark takes longer than the update of a small layer, and torch makes one around each step of an optimizer and each
forward of DDP. Its compiled functions make theirs only where a profiler runs, by the same flag.
"""

from __future__ import annotations

from typing import Any, Final

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

__all__ = ["is_profiled", "step_unmarked"]

# That of every function which torch puts around an optimizer's step: the mark and the hooks.
_MARKING: Final = Optimizer.profile_hook_step(lambda _: None).__code__


def is_profiled() -> bool:
    """Whether a profiler of torch runs in this process."""
    return profiler._is_profiler_enabled


def step_unmarked(optimizer: Optimizer, known_hooks: int) -> None:
    """`optimizer.step()`, straight where nothing but torch's mark stands around it.

    Args:
        optimizer: any; its hooks, a profiler, and what replaced its `step` get their due.
        known_hooks: how many of its hooks before a step need not be called.
    """
    step: Any = type(optimizer).step
    if (
        is_profiled()
        or getattr(step, "__code__", None) is not _MARKING
        or len(optimizer._optimizer_step_pre_hooks) > known_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    ):
        optimizer.step()
        return
    if (replaced := optimizer.__dict__.get("step")) is not None:
        # By a schedule that was built on it: it notes that a step was taken, and calls what was there.
        if not hasattr(replaced, "_wrapped_by_lr_sched") or replaced.__wrapped__ is not step:
            optimizer.step()
            return
        optimizer._opt_called = True  # type: ignore[attr-defined]
    step.__wrapped__(optimizer)
