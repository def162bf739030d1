"""Detects what a script changes between two steps and an engine would ignore: gradients, frozen parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD, OWN_GRADIENTS, is_checked_step
from zero_plugin.strategies.deepspeed.gradients import EngineGradients

# torch's message for the gradient of a tensor that was empty in the forward.
_OF_EMPTY = re.compile(r"invalid gradient at index \d+ - got \[0\]")
# torch's message for a product with a weight that was released after the first backward through its forward.
_OF_RELEASED = re.compile(r"size of tensor \w \(0\) must match")


def refuse_rank_allocation(model: nn.Module) -> list[Callable[[], Any]]:
    """Make `update_and_allocate` of PEFT's AdaLoRA an error: it reads `p.grad` after the step, and writes into weights.

    Returns:
        What takes this back.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise LoopError(
            "update_and_allocate() of AdaLoRA reads p.grad after optimizer.step() and writes into the adapters: under "
            "ZeRO p.grad is gone by then.\nTrain AdaLoRA without DeepSpeed (distributed_type: MULTI_GPU), or use LoRA, "
            "which trains at every stage. Without update_and_allocate() AdaLoRA keeps the ranks that it begins with."
        )

    undo: list[Callable[[], Any]] = []
    for module in model.modules():
        if callable(getattr(type(module), "update_and_allocate", None)):
            module.__dict__["update_and_allocate"] = refuse
            undo.append(partial(module.__dict__.pop, "update_and_allocate", None))
    return undo


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """Autograd's counts of in-place writes, which DeepSpeed's own writes do not increase."""
    return [p._version for p in parameters]


class GradientWatch:
    """Detects changes that a script makes to `p.grad` between a backward and the step.

    Stages 0 and 1 apply `p.grad`, but average it over the processes only in the step: to average it in the backward, as
    DDP does, stage 1 would have to communicate all gradients twice. So what a script computes from `p.grad` may differ
    from DDP, which is warned of once. At other stages `p.grad` is None, or in bf16 at stage 1 already accumulated
    elsewhere: what a script writes there is lost.

    Args:
        module: the user's module.
        trained: its trained parameters.
        stage: the ZeRO stage.
        steps_by_grad: whether the step applies `p.grad`.
        scaled: whether `p.grad` is multiplied by the loss scale.
    """

    def __init__(
        self, module: nn.Module, trained: Sequence[nn.Parameter], *, stage: int, steps_by_grad: bool, scaled: bool
    ) -> None:
        self._module, self._trained, self._stage = module, trained, stage
        self._steps_by_grad = steps_by_grad
        self._is_partial, self._is_scaled = dist.get_world_size() > 1, scaled
        self._is_reduced = False  # whether the accumulated gradients were reduced into partitions
        # `p.grad` as the last backward has left it, with its version; where a change is warned of, the weights' too.
        self._left: list[tuple[Tensor | None, int]] = []
        self._seen: tuple[list[tuple[Tensor | None, int]], list[int]] | None = (
            None  # the same, and the weights' versions
        )
        self._windows = 0
        self._said: set[str] = set()

    def note(self) -> None:
        """Record `p.grad` after a backward."""
        if not self._steps_by_grad or self._is_reduced:
            self._left = self._gradients()
        elif (self._is_partial or self._is_scaled) and is_checked_step(self._windows):
            self._seen = (self._gradients(), versions_of(self._trained))

    def note_scaled(self) -> None:
        """Record `p.grad` again after this package has multiplied the gradients, if they are accumulated there."""
        if self._steps_by_grad:
            self.note()

    def note_reduced(self) -> None:
        """Record that the gradients were reduced; at stage 0 they stay in `p.grad`, which the step applies."""
        if self._steps_by_grad and self._stage > 0:
            self._is_reduced = True
            self._left = self._gradients()

    def begin_window(self) -> None:
        """Start again after the gradients were applied or dropped."""
        self._left, self._seen, self._is_reduced = [], None, False
        self._windows += 1

    def refuse_lost(self, *, has_gradients: bool) -> None:
        """Check before a step that no change of a `p.grad` is lost.

        Args:
            has_gradients: whether a backward of the window has reached the model.

        Raises:
            LoopError: the script has set or changed a `p.grad` that the step would not apply.
        """
        if self._steps_by_grad and has_gradients and not self._is_reduced:
            return
        left = self._left or [(None, -1)] * len(self._trained)
        for (now, version), (before, known) in zip(self._gradients(), left, strict=True):
            if now is not None and (now is not before or version != known):
                raise LoopError(OWN_GRADIENTS)

    def warn_of_changed(self) -> None:
        """Warn if the script has changed gradients; called before this package changes or reduces them."""
        if self._seen is None:
            return
        (left, _), self._seen = self._seen, None
        both = zip(self._gradients(), left, strict=True)
        self._mention(
            "the script has changed p.grad of {0} parameters between backward() and optimizer.step(), e.g. {1}: at "
            f"ZeRO stage {self._stage} that is {self._describe()}. A change by the same factor on every process is "
            "applied as under DDP; clipping, noise, and changes that depend on norms or signs are not. To clip, call "
            "accelerator.clip_grad_norm_(model.parameters(), max_norm) in place of torch.nn.utils.clip_grad_norm_; for "
            "other changes train with DDP, and call accelerator.unscale_gradients() before them under fp16.",
            [now is not before or version != known for (now, version), (before, known) in both],
        )

    def warn_of_perturbed(self) -> None:
        """Warn if the script has written weights since the gradients were computed; called before they are dropped."""
        if self._seen is None or not self._is_partial:
            return
        versions = self._seen[1]
        self._mention(
            "the script has written into {0} parameters between backward() and zero_grad(), e.g. {1}. If it has used "
            f"p.grad for that, as sharpness-aware minimisation does: at ZeRO stage {self._stage} that is "
            f"{self._describe()}, so that the weights differ between the processes. Train with DDP, where p.grad is "
            "the average.",
            [new != old for new, old in zip(versions_of(self._trained), versions, strict=True)],
        )

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        return [(None, -1) if (g := p.grad) is None else (g, g._version) for p in self._trained]

    def _describe(self) -> str:
        own = "the gradient of this process alone, before it is averaged" if self._is_partial else ""
        scaled = "multiplied by the loss scale" if self._is_scaled else ""
        return ", ".join(part for part in (own or "the gradient", scaled) if part)

    def _mention(self, text: str, which: Sequence[bool]) -> None:
        if any(which) and text not in self._said:
            self._said.add(text)
            ids = {id(p) for p, changed in zip(self._trained, which, strict=True) if changed}
            name = next(name for name, p in self._module.named_parameters() if id(p) in ids)
            announce(text.format(len(ids), name), by_each=True)


def explain_empty_weights(error: BaseException, module: nn.Module) -> LoopError | None:
    """A clearer error in place of torch's in a backward at stage 3; None for other errors."""
    if _OF_RELEASED.search(str(error)):
        is_set = any(
            p.grad is not None and p.grad.numel() == 0 < getattr(p, "ds_numel", 0) for p in module.parameters()
        )
        return LoopError(OWN_GRADIENTS) if is_set else second_backward(module)
    if not _OF_EMPTY.search(str(error)):
        return None
    return LoopError(
        f"the loss was computed from parameters of the {type(module).__name__} outside of its forward, where they are "
        "empty at ZeRO stage 3.\nReplace a penalty on weights by the optimizer's weight_decay, or use stage 2."
    )


def second_backward(module: nn.Module) -> LoopError:
    """The error for a second backward through one forward at stage 3."""
    return LoopError(
        f"a second backward through one forward of the {type(module).__name__}: ZeRO stage 3 has released its weights "
        "after the first.\nAdd the losses and call backward() once, call the model again for the second loss, or use "
        "stage 2."
    )


def explain_sparse_gradients(error: BaseException, module: nn.Module) -> LoopError | None:
    """A clearer error in place of torch's where DeepSpeed meets a sparse gradient; None for other errors."""
    if not isinstance(error, RuntimeError) or "sparse" not in str(error).lower():
        return None
    names = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    which = f"of {', '.join(names[:4])}" if names else "of a parameter"
    return LoopError(
        f"the gradient {which} of the {type(module).__name__} is a sparse tensor, and DeepSpeed partitions dense "
        "ones.\nCall torch.nn.functional.embedding with sparse=False, or train without DeepSpeed "
        "(distributed_type: MULTI_GPU)."
    )


def refuse_frozen(
    module: nn.Module, trained: Iterable[nn.Parameter], left_out: Iterable[nn.Parameter], gradients: EngineGradients
) -> None:
    """Refuse a step with parameters that were frozen after `prepare` and got no gradient, since they would be stepped.

    Raises:
        LoopError: there is such a parameter.
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
            "ZeRO the optimizer's momentum and weight decay would still change them.\n"
            "Freeze parameters before prepare(). To freeze them later: accelerator.free_memory(), then prepare() the "
            "model again with a new optimizer. If a model is frozen for another model's loss, do not call its "
            "optimizer's step() then."
        )


def names_with_hooks(module: nn.Module) -> list[str]:
    """The names of parameters with a post-accumulate-grad hook of the script, besides DeepSpeed's."""
    hooks = ((name, getattr(p, "_post_accumulate_grad_hooks", None)) for name, p in module.named_parameters())
    return [name for name, own in hooks if own is not None and len(own) > 1]


def refuse_hooks_on_sums(module: nn.Module, hooked: Collection[str]) -> None:
    """Refuse a second backward in a window if a hook of the script expects the accumulated gradient in `p.grad`.

    Raises:
        LoopError: there is such a hook.
    """
    for name in hooked:
        raise LoopError(
            f"a second backward before the step, where {name} of the {type(module).__name__} has a "
            "hook of register_post_accumulate_grad_hook(): it expects the accumulated gradient in p.grad, which "
            "this ZeRO stage keeps elsewhere.\nChange each backward's gradient by p.register_hook(lambda gradient: "
            "…), step after each backward, or train without ZeRO."
        )


def runs_forward(engine: Any) -> bool:
    """Whether a forward of the engine is running, in which a function may compute gradients itself (a tiled loss)."""
    # Autograd computes gradients in a thread for each device. One frame is this function's own, which must not be in a
    # variable of its own: it would keep itself, and all that the functions around it have.
    return any(_is_in_forward(frame, engine) for frame in sys._current_frames().values())


def _is_in_forward(frame: FrameType | None, engine: Any) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is engine:
            return True
        frame = frame.f_back
    return False


def refuse_engine_backward(*_: Any, **__: Any) -> NoReturn:
    """Replaces the engine's `backward`, which would divide the loss or step."""
    raise LoopError(DIRECT_BACKWARD.replace("loss.backward()", "model.backward(loss)"))


def refuse_engine_step(*_: Any, **__: Any) -> NoReturn:
    """Replaces the engine's `step`, which would ignore the accumulation window."""
    raise LoopError("model.step() was called; call optimizer.step() of the optimizer from prepare().")
