"""Detects what a script changes between two steps and an engine would ignore: gradients, weights, frozen parameters."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import DIRECT_BACKWARD, OWN_GRADIENTS, is_checked_step
from zero_plugin.strategies.deepspeed.gradients import EngineGradients, preceded
from zero_plugin.strategies.deepspeed.partitioned_models import NOTES_WRITTEN, OwnHook
from zero_plugin.strategies.deepspeed.states import engine_pieces, gathered_parts, unreachable_by
from zero_plugin.strategies.optimizer_only import weakly

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


class WrittenWeights:
    """Detects writes of a script into the weights between two steps, and copies them to the fp32 master weights.

    Autograd counts every in-place write of a script in the parameter's version, but not the writes of DeepSpeed.

    Args:
        engine: the engine; at stage 3 it may have no optimizer.
        trained: the parameters that it trains.
        before_change: called before master weights change.
    """

    def __init__(self, engine: Any, trained: Sequence[nn.Parameter], before_change: Callable[[], None]) -> None:
        self._engine = engine
        self._trains = engine.basic_optimizer is not None
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._trained = trained
        self._watched = list(engine.module.parameters()) if self._is_partitioned else trained
        self._before_change = before_change
        self._has_master_weights = hasattr(engine.optimizer, "refresh_fp32_params") and not unreachable_by(engine)
        self._is_written = False  # whether the master weights have to be updated before they are used
        self._versions = versions_of(self._watched)
        self._steps = 0  # calls of `warn_of_lost`
        self._written_before: dict[int, bool] = {}  # steps -> whether that has changed this process's master weights
        self._are_rounded = True  # each weight is the rounding of its master weight, unless the script has written it
        self._has_warned = False

    def watch(self) -> list[Callable[[], Any]]:
        """Detect writes by `load_state_dict`, DeepSpeed's setters and its own context; returns what undoes this."""
        hook = OwnHook(self._note_loaded)
        parts: Iterable[Any] = self._engine.module.modules()
        undo: list[Callable[[], Any]] = [part.register_load_state_dict_post_hook(hook).remove for part in parts]
        note = weakly(self.note)
        for p in self._watched if self._is_partitioned else ():
            setattr(p, NOTES_WRITTEN, note)
            undo.append(partial(p.__dict__.pop, NOTES_WRITTEN, None))
        # DeepSpeed's `safe_set_…` functions call these methods, at stage 3 of its optimizer, below it of parameters.
        for owner in (self._engine.optimizer, *self._trained) if self._trains else ():
            for name in ("set_full_hp_param", "set_local_hp_param"):
                if (method := getattr(owner, name, None)) is not None:
                    undo.append(partial(setattr, owner, name, method))
                    setattr(owner, name, preceded(method, self._note_set_master_weights))
        return undo

    def note(self) -> None:
        """Record that the weights were written."""
        self._is_written = self._trains
        self._versions = versions_of(self._watched)

    def follow(self) -> None:
        """Update the master weights with what the script has written since the last call.

        Raises:
            LoopError: the script has written into partitioned parameters, which has no effect.
        """
        if (versions := versions_of(self._watched)) != self._versions:
            written = [p for p, old, new in zip(self._watched, self._versions, versions, strict=True) if old != new]
            self._versions = versions
            if self._is_partitioned:
                refuse_lost_weights(self._engine.module, written)
            self._is_written = self._trains
        if self._is_written:
            self._before_change()
            self._is_written = False
            if self._has_master_weights:
                # A weight that equals its rounded master weight was not written: that one keeps its precision.
                has_changed = self._written_before.get(self._steps, False)
                for _, master, weight in self._master_weights_and_weights():
                    is_same = master.to(weight.dtype) == weight
                    has_changed = has_changed or not bool(is_same.all())
                    master.copy_(torch.where(is_same, master, weight.to(master.dtype)))
                self._written_before[self._steps] = has_changed
            else:
                self.copy_to_master_weights()

    def take_steps(self) -> dict[int, bool]:
        """See `Session.take_written`."""
        taken, self._written_before = self._written_before, {}
        return taken

    def copy_to_master_weights(self) -> None:
        """Copy all weights to the master weights."""
        self._before_change()
        self._is_written = False
        self._versions = versions_of(self._watched)
        refresh = getattr(self._engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:  # a plain torch optimizer, at stage 0, steps the weights themselves
            refresh()

    def warn_of_lost(self) -> None:
        """Before some of the steps: warn once if the script has written weights past autograd, as `p.data` does."""
        steps, self._steps = self._steps, self._steps + 1
        are_rounded, self._are_rounded = self._are_rounded, True
        if self._has_warned or not are_rounded or not is_checked_step(steps):
            return
        kept: Iterable[tuple[str, Tensor, Tensor]] = ()
        if self._is_partitioned:
            # What is empty now cannot be seen, nor what differs from its partition by being quantized for the gather.
            if not self._engine.zero_quantized_weights():
                parts = gathered_parts(self._engine.module, recurse=True)
                in_memory = (part for part in parts if part[1].shape == part[2].shape)  # not on NVMe
                kept = ((part, partition.to(values), values) for part, values, partition in in_memory)
        elif self._has_master_weights:  # after a step every weight equals its rounded master weight
            pairs = self._master_weights_and_weights()
            kept = ((name, master.to(weight.dtype), weight) for name, master, weight in pairs)
        if lost := [name for name, wanted, weight in kept if not torch.equal(wanted, weight)]:
            self._has_warned = True
            outside = "" if self._is_partitioned else "under torch.no_grad() into the parameter itself, or "
            announce(
                f"the script has written into {len(lost)} parameters through p.data since the last step, e.g. "
                f"{lost[0]}: ZeRO updates {'partitions' if self._is_partitioned else 'fp32 master weights'}, so that "
                f"what was written is lost. Write {outside}inside `with accelerator.whole_weights(model):`.",
                by_each=True,
            )

    def _note_loaded(self, part: nn.Module, *_: Any) -> None:
        if self._is_partitioned:
            for _name, values, partition in gathered_parts(part, recurse=False):
                partition.copy_(values)
        self.note()

    def _note_set_master_weights(self, *_: Any, **__: Any) -> None:
        self._before_change()
        self._are_rounded = False  # until the next step

    def _master_weights_and_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, flat master weights and flat weights of each piece of this process, both on the former's device."""
        parameters: dict[str, Any] = dict(self._engine.module.named_parameters())
        for piece in engine_pieces(self._engine):
            parameter = parameters[piece.name]
            start, values = (0, parameter.ds_tensor) if self._is_partitioned else (piece.start, parameter)
            master = piece.stepped.detach().view(-1)[piece.offset : piece.offset + piece.count]
            yield piece.name, master, values.detach().view(-1)[start : start + piece.count].to(master.device)


def refuse_lost_weights(module: nn.Module, written: Iterable[nn.Parameter]) -> NoReturn:
    """Refuse writes of a script into partitioned parameters.

    Args:
        module: the module.
        written: the parameters that were written.

    Raises:
        LoopError: always; it names one of them.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    found = [names.get(id(p), "a parameter") for p in written]
    raise LoopError(
        f"the script has written into {len(found)} parameters of the {type(module).__name__}, e.g. {found[0]}, which "
        "ZeRO stage 3 has partitioned: what was written is lost.\n"
        "Write before prepare(), or inside `with accelerator.whole_weights(model):`."
    )
