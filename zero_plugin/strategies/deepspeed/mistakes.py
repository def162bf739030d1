"""Mistakes of a script that an engine takes in silence, or answers with an error that does not name them."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD, OWN_GRADIENTS
from zero_plugin.strategies.deepspeed.gradients import EngineGradients

__all__ = [
    "GradientWatch",
    "explain_empty_weights",
    "is_checked_step",
    "names_with_hooks",
    "refuse_engine_backward",
    "refuse_engine_step",
    "refuse_frozen",
    "refuse_hooks_on_sums",
    "runs_forward",
    "versions_of",
]

# What torch says where a gradient comes back to a tensor that was empty in the forward.
_OF_EMPTY = re.compile(r"invalid gradient at index \d+ - got \[0\]")
_LOOKS, _LOOK_EVERY = 10, 100


def is_checked_step(step: int) -> bool:
    """Whether a step, counted from 0, is one before which is looked for mistakes: the first ones, then some."""
    return step < _LOOKS or step % _LOOK_EVERY == 0


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """How often each was written in place, as autograd counts it; DeepSpeed writes past that."""
    return [p._version for p in parameters]


class GradientWatch:
    """Sees what a script does to `p.grad` between a backward and the step.

    Stages 0 and 1 step by `p.grad`, but average it over the processes in the step only: to average it in the backward
    as well, as DDP does, stage 1 would have to send all gradients twice. So what a script computes from it may be
    otherwise than under DDP, and is warned of once. At other stages `p.grad` is None, or in bf16 at stage 1 what was
    added up elsewhere before: what is set or written there is lost.

    Args:
        module: the user's own.
        trained: its parameters that get gradients.
        stage: of ZeRO.
        steps_by_grad: whether the step applies what is in `p.grad`.
        scaled: whether the loss scale is in it.
    """

    def __init__(
        self, module: nn.Module, trained: Sequence[nn.Parameter], *, stage: int, steps_by_grad: bool, scaled: bool
    ) -> None:
        self._module, self._trained, self._stage = module, trained, stage
        self._steps_by_grad = steps_by_grad
        self._is_partial, self._is_scaled = dist.get_world_size() > 1, scaled
        self._is_reduced = False  # the window's gradients, into partitions
        # `p.grad` as the last backward has left it, with its version; where a change is warned of, the weights' too.
        self._left: list[tuple[Tensor | None, int]] = []
        self._seen: tuple[list[tuple[Tensor | None, int]], list[int]] | None = (
            None  # the same, and the weights' versions
        )
        self._windows = 0
        self._said: set[str] = set()

    def note(self) -> None:
        """A backward has run, or this package has changed the gradients."""
        if not self._steps_by_grad or self._is_reduced:
            self._left = self._gradients()
        elif (self._is_partial or self._is_scaled) and is_checked_step(self._windows):
            self._seen = (self._gradients(), versions_of(self._trained))

    def note_reduced(self) -> None:
        """The gradients were reduced: at stage 0 they stay in `p.grad`, where the step finds them."""
        if self._steps_by_grad and self._stage > 0:
            self._is_reduced = True
            self._left = self._gradients()

    def begin_window(self) -> None:
        """The window's gradients were applied, or dropped."""
        self._left, self._seen, self._is_reduced = [], None, False
        self._windows += 1

    def refuse_lost(self, *, has_gradients: bool) -> None:
        """Before a step.

        Args:
            has_gradients: whether a backward of the window has reached the model.

        Raises:
            LoopError: the script has set or written a `p.grad` that the step would not apply.
        """
        if self._steps_by_grad and has_gradients and not self._is_reduced:
            return
        left = self._left or [(None, -1)] * len(self._trained)
        for (now, version), (before, known) in zip(self._gradients(), left, strict=True):
            if now is not None and (now is not before or version != known):
                raise LoopError(OWN_GRADIENTS)

    def warn_of_changed(self) -> None:
        """Before this package changes or reduces the gradients of the window: say it if the script has changed them."""
        if self._seen is None:
            return
        (left, _), self._seen = self._seen, None
        both = zip(self._gradients(), left, strict=True)
        self._mention(
            "the script has changed p.grad of {0} parameters between backward() and optimizer.step(), e.g. {1}: at "
            f"ZeRO stage {self._stage} that is {self._describe()}. A change by the same factor on every process is "
            "applied as under DDP; clipping, noise, and what is computed from norms or signs are not. To clip, call "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm) in place of torch.nn.utils.clip_grad_norm_; for "
            "anything else train by DDP, with accelerator.unscale_gradients() before it under fp16.",
            [now is not before or version != known for (now, version), (before, known) in both],
        )

    def warn_of_perturbed(self) -> None:
        """Before the gradients are dropped: say it if the script has written weights since they were made."""
        if self._seen is None or not self._is_partial:
            return
        versions = self._seen[1]
        self._mention(
            "the script has written into {0} parameters between backward() and zero_grad(), e.g. {1}. If it has used "
            f"p.grad for that, as sharpness-aware minimisation does: at ZeRO stage {self._stage} that is "
            f"{self._describe()}, so that the weights differ over the processes. Train by DDP, where p.grad is the "
            "average.",
            [new != old for new, old in zip(versions_of(self._trained), versions, strict=True)],
        )

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(None, -1) if (g := p.grad) is None else (g, g._version) for p in self._trained]

    def _describe(self) -> str:
        own = "this process' own gradient, before the processes are averaged" if self._is_partial else ""
        scaled = "multiplied by the loss scale" if self._is_scaled else ""
        return ", ".join(part for part in (own or "the gradient", scaled) if part)

    def _mention(self, text: str, which: Sequence[bool]) -> None:
        if any(which) and text not in self._said:
            self._said.add(text)
            ids = {id(p) for p, changed in zip(self._trained, which, strict=True) if changed}
            name = next(name for name, p in self._module.named_parameters() if id(p) in ids)
            announce(text.format(len(ids), name), by_each=True)


def explain_empty_weights(error: BaseException, module: nn.Module) -> LoopError | None:
    """What to raise in place of torch's error in a backward at stage 3; None for any other."""
    if not _OF_EMPTY.search(str(error)):
        return None
    return LoopError(
        f"the loss was made of parameters of the {type(module).__name__} outside of its forward, where ZeRO stage 3 "
        "keeps none of their elements.\nWrite a penalty on weights as the optimizer's weight_decay, or use stage 2."
    )


def refuse_frozen(
    module: nn.Module, trained: Iterable[nn.Parameter], left_out: Iterable[nn.Parameter], gradients: EngineGradients
) -> None:
    """A parameter that was frozen after its gradient came is stepped, as in torch; one without would be too.

    Raises:
        LoopError: there is one without.
    """
    idle = {id(p) for p in left_out}
    frozen = {id(p) for p in trained if not p.requires_grad and p.numel() and id(p) not in idle}
    if not frozen:
        return
    named = [(name, p) for name, p in module.named_parameters() if id(p) in frozen]
    still = [name for name, p in named if not gradients.has_reached(p)]
    if still:
        shown = ", ".join(still[:4]) + (f" and {len(still) - 4} more" if len(still) > 4 else "")
        raise LoopError(
            f"{shown} of the {type(module).__name__} were frozen after prepare() and got no gradient: under "
            "ZeRO the optimizer's momentum and weight decay would move them all the same.\n"
            "Freeze before prepare(). To freeze later: accelerator.free_memory(), then prepare() the model again "
            "with a new optimizer. A model that is frozen for another model's loss: leave out its optimizer's "
            "step() then."
        )


def names_with_hooks(module: nn.Module) -> list[str]:
    """Of parameters that have, beside DeepSpeed's own, a hook after each gradient."""
    hooks = ((name, getattr(p, "_post_accumulate_grad_hooks", None)) for name, p in module.named_parameters())
    return [name for name, own in hooks if own is not None and len(own) > 1]


def refuse_hooks_on_sums(module: nn.Module, hooked: Collection[str]) -> None:
    """Before a window's further backwards, where their sum is not in `p.grad`.

    Raises:
        LoopError: a hook of the script is to find it there.
    """
    for name in hooked:
        raise LoopError(
            f"a second backward before the step, where {name} of the {type(module).__name__} has a "
            "hook of register_post_accumulate_grad_hook(): it is to find the sum of the gradients so far, which "
            "this ZeRO stage keeps elsewhere.\nChange each backward's gradient by p.register_hook(lambda gradient: "
            "…), step after each backward, or train without ZeRO."
        )


def runs_forward(engine: Any) -> bool:
    """Whether a forward of the engine runs: a function in it may make gradients by itself, of a loss in tiles, say."""
    for frame in sys._current_frames().values():  # a device's gradients come in a thread of their own
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code.co_name == "forward" and inner.f_locals.get("self") is engine:
                return True
            inner = inner.f_back
    return False


def refuse_engine_backward(*_: Any, **__: Any) -> NoReturn:
    """In place of the engine's own `backward`, which would step or divide."""
    raise LoopError(DIRECT_BACKWARD.replace("loss.backward()", "model.backward(loss)"))


def refuse_engine_step(*_: Any, **__: Any) -> NoReturn:
    """In place of the engine's own `step`, past the window."""
    raise LoopError("model.step() was called; call optimizer.step() of the optimizer from prepare().")
