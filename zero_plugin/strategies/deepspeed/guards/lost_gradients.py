"""Detect a script's changes of `p.grad` between a backward and the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import OWN_GRADIENTS
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.precision import FoundInf


class LostGradients(Guard):
    """A guard that refuses a `p.grad` of the script that the step would not apply.

    Most stages keep gradients in buffers of the engine. `p.grad` is then None or, in bf16 at stage 1, already
    accumulated elsewhere. A value that the script writes there is lost.

    Mistake: `torch.nn.utils.clip_grad_norm_`, noise or a mask between `backward()` and `step()`.
    Cost: one read of `p.grad` of each parameter, four times a step.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        # Whether the gradients are reduced into partitions. Before that, some stages accumulate and reduce `p.grad`.
        self._is_reduced = not session.steps_by_grad
        # `p.grad` of parameters that have one, after the last backward, with its version.
        self._left: dict[int, tuple[Tensor, int]] = {}

    def after_backward(self) -> None:
        """Note `p.grad`, if the step does not apply it."""
        left = self._left = {}
        for p in self.session.trained if self._is_reduced else ():
            if (gradient := p.grad) is not None:
                left[id(p)] = gradient, gradient._version

    def completed(self) -> None:
        """Note that the gradients were reduced. At stage 0 they stay in `p.grad`, which the step applies."""
        if self.session.steps_by_grad and self.session.stage > 0:
            self._is_reduced = True
            self.after_backward()

    def scaled(self) -> None:
        """Note `p.grad` again, if the session has multiplied it."""
        if self.session.steps_by_grad:
            self.after_backward()

    def before_complete(self) -> None:
        """Check `p.grad`.

        Raises:
            LoopError: the script has set or changed a `p.grad` that the step would not apply.
        """
        for p in self.session.trained if self._is_reduced else ():
            if (gradient := p.grad) is not None:
                before = self._left.get(id(p))
                if before is None or gradient is not before[0] or gradient._version != before[1]:
                    raise LoopError(OWN_GRADIENTS)

    before_step = before_complete

    def nothing_to_step(self, *, is_again: bool) -> None:  # noqa: ARG002
        """Check that the script has set no `p.grad`: this step would not apply it."""
        self._is_reduced = True
        self.before_complete()
        self._is_reduced = not self.session.steps_by_grad

    def stepped(self, applied: bool | FoundInf = False) -> None:  # noqa: ARG002
        """Begin a window."""
        self._left, self._is_reduced = {}, not self.session.steps_by_grad

    dropped = stepped


class PartialGradients(Guard):
    """A guard that warns of a script's changes to gradients that are not averaged yet, or have the loss scale.

    Stages 0 and 1 average `p.grad` over the processes only in the step. To average in the backward, as DDP does, stage
    1 would have to communicate all gradients twice. A value that the script computes from `p.grad` may therefore differ
    from DDP.

    Mistake: clipping, noise or sharpness-aware minimisation by `p.grad` of one process.
    Cost: in sampled windows, two lists of `p.grad` and of the weights.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._is_partial = dist.get_world_size() > 1
        self._is_due = sampling.is_due()
        self._is_reduced = False
        # `p.grad` with its version, and the versions of the weights, after the last backward of a sampled window.
        self._seen: tuple[list[tuple[Tensor | None, int]], list[int]] | None = None

    @classmethod
    def is_needed(cls, session: Any) -> bool:
        """Return whether the step applies `p.grad`, and it may be one process's or have the loss scale."""
        return session.steps_by_grad and (dist.get_world_size() > 1 or session.scales_loss)

    def after_backward(self) -> None:
        """Note `p.grad` and the weights."""
        if self._is_due and not self._is_reduced:
            self._seen = (self._gradients(), self._versions())

    scaled = after_backward

    def before_scaling(self) -> None:
        """Warn if the script has changed gradients, before the session changes or reduces them."""
        if self._seen is None:
            return
        (left, _), self._seen = self._seen, None
        both = zip(self._gradients(), left, strict=True)
        self._warn(
            "the script has changed p.grad of {0} parameters between backward() and optimizer.step(), e.g. {1}. At "
            f"ZeRO stage {self.session.stage}, p.grad is {self._describe()} then. A change by the same factor on every "
            "process works as under DDP. Clipping, noise, and changes that depend on norms or signs do not. To clip, "
            "call accelerator.clip_grad_norm_(model.parameters(), max_norm) instead of "
            "torch.nn.utils.clip_grad_norm_. For other changes, train with DDP, and call "
            "accelerator.unscale_gradients() before them under fp16.",
            [now is not before or version != known for (now, version), (before, known) in both],
        )

    before_complete = before_scaling

    def completed(self) -> None:
        """Note that the gradients were reduced."""
        self._is_reduced = self.session.stage > 0

    def before_drop(self) -> None:
        """Warn if the script has written weights since the gradients were computed."""
        if self._seen is None or not self._is_partial:
            return
        self._warn(
            "the script has written into {0} parameters between backward() and zero_grad(), e.g. {1}. If it has used "
            f"p.grad for that, as sharpness-aware minimisation does: at ZeRO stage {self.session.stage}, p.grad is "
            f"{self._describe()} then, and the weights differ between the processes. Train with DDP, where p.grad is "
            "the average.",
            [new != old for new, old in zip(self._versions(), self._seen[1], strict=True)],
        )

    def stepped(self, applied: bool | FoundInf = False) -> None:  # noqa: ARG002
        """Begin a window."""
        self._seen, self._is_reduced = None, False
        self._is_due = self.sampling.is_due()

    dropped = stepped

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(None, -1) if (g := p.grad) is None else (g, g._version) for p in self.session.trained]

    def _versions(self) -> list[int]:
        return [p._version for p in self.session.trained]

    def _describe(self) -> str:
        own = "the gradient of this process alone, before it is averaged" if self._is_partial else ""
        scaled = "multiplied by the loss scale" if self.session.scales_loss else ""
        return ", ".join(part for part in (own or "the gradient", scaled) if part)

    def _warn(self, text: str, which: Sequence[bool]) -> None:
        if any(which) and once(self, text):
            ids = {id(p) for p, changed in zip(self.session.trained, which, strict=True) if changed}
            name = next(name for name, p in self.session.module.named_parameters() if id(p) in ids)
            announce(text.format(len(ids), name), by_each=True)
