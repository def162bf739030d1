"""One backward through the prepared models, and the mistakes that the first ones show.

One backward through the models that are trained: whose gradients it makes, and whose micro-batch it is.

Looks at the first backwards, and at some of the later ones, for mistakes that a loop would hide for ever.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zero_plugin.errors import LoopError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Strategy
from zero_plugin.strategies.window import AccumulationWindow, Epoch
from zero_plugin.tensors.wrappers import find_leaves

_log = logging.getLogger(__name__)


def run_backward(
    trainings: Sequence[Training], untrained: Sequence[Training], loss: Tensor, **kwargs: Any
) -> Sequence[Training]:
    """Add the gradients of `loss` to every model that it reaches, and count it in their windows.

    Args:
        trainings: all that have an optimizer; of several, each watches its gradients.
        untrained: the others, through which gradients may pass.
        loss: scalar.
        **kwargs: for `torch.autograd.backward`.

    Returns:
        Those reached.

    Raises:
        LoopError: see `Session.open_backward`, `Session.close_backward` and `AccumulationWindow.count_backward`; or it
            cannot be told whose micro-batch the loss is.
    """
    if len(trainings) == 1:
        window = trainings[0].window
        window.count_backward()
        divided = loss if window.divisor == 1 else loss / window.divisor
        trainings[0].session.backward(divided, ends_window=window.ends_here, **kwargs)
        reached = trainings
    else:
        reached = _run_through_several(trainings, loss, **kwargs)
    for training in untrained:
        training.session.close_backward(reached=False)
    return reached


def run_plain_backward(window: AccumulationWindow, loss: Tensor, *, counts: bool, **kwargs: Any) -> None:
    """Torch's own backward, of a loss that trains nothing that was prepared with its optimizer.

    Args:
        window: its number of micro-batches divides the loss.
        loss: scalar.
        counts: whether an optimizer steps by this window, so that outside `accumulate()` backwards are counted.
        **kwargs: for `torch.autograd.backward`.
    """
    if counts or window.in_context:
        window.count_backward()
    divisor = window.divisor
    torch.autograd.backward(loss if divisor == 1 else loss / divisor, **kwargs)


def _run_through_several(trainings: Sequence[Training], loss: Tensor, **kwargs: Any) -> Sequence[Training]:
    _share_loss_scale(trainings)
    steps = trainings[0].window.steps
    for training in trainings:
        training.reached = False
        training.session.open_backward(ends_window=training.window.next_backward_ends, loss=loss)
    try:
        scaled = trainings[0].session.scale_loss(loss)
        torch.autograd.backward(scaled if steps == 1 else scaled / steps, **kwargs)
    except BaseException as error:
        for training in trainings:
            training.session.abandon_backward(reached=training.reached)
        for training in trainings:
            if (explained := training.session.explain(error)) is not None:
                raise explained from error
        raise
    for training in trainings:
        training.session.close_backward(reached=training.reached)
    reached = [training for training in trainings if training.reached]
    _count(trainings, reached, steps)
    return reached


def _count(trainings: Sequence[Training], reached: Sequence[Training], steps: int) -> None:
    if not reached:
        raise LoopError("the loss of this backward() depends on no parameter of the prepared models that are trained.")
    by_hand = not any(training.window.in_context for training in trainings)
    if by_hand and steps > 1 and len(reached) > 1:
        raise LoopError(
            f"the loss of this backward() reaches {_names(reached)}, and gradient_accumulation_steps is {steps}: "
            "without accumulate() it cannot be told whose micro-batch it is.\n"
            "Where it only runs through a model, freeze that one for it: model.requires_grad_(False) before the "
            "forward. Where it trains them all, wrap each micro-batch in `with accelerator.accumulate(one, other):`."
        )
    for training in reached:
        if by_hand or training.window.in_context:
            training.window.count_backward()
        else:
            training.window.count_foreign_backward()


def _share_loss_scale(trainings: Sequence[Training]) -> None:
    """Under fp16, give all models the smallest loss scale among them: one loss has one scale."""
    if trainings[0].resolved.precision != "fp16":
        return
    scales = [training.session.loss_scale for training in trainings]
    for training, scale in zip(trainings, scales, strict=True):
        if scale != min(scales):
            training.session.set_loss_scale(min(scales))


def _names(trainings: Sequence[Training]) -> str:
    names = [type(training.session.module).__name__ for training in trainings]
    return f"{', '.join(names[:-1])} and {names[-1]}"


# A walk of the graph takes up to milliseconds: of so many backwards the first ones of each model, and one of the later.
_FIRST = 10
_EVERY = 100
_STARTS = 3  # of epochs; afterwards it is known what they begin with


class FirstSteps:
    """Finds losses that train what is not prepared, and loops that never step.

    Looked at are the first backwards that reach each trained model, those that begin the first epochs, one in a hundred
    otherwise, and those that follow after a parameter was unfrozen, or a layer or parameter put into a trained model.

    Args:
        trainings: all prepared models; the caller adds to it.
        running_epoch: the prepared loader that is being iterated.
    """

    def __init__(self, trainings: Sequence[Training], running_epoch: Callable[[], Epoch | None]) -> None:
        self._trainings = trainings
        self._running_epoch = running_epoch
        self._backwards = 0  # since something was prepared
        self._next = 1  # of them that is looked at anyhow
        self._starts = 0  # of epochs, that were looked at
        self._has_advanced = False  # past the first batch of an epoch
        self._new: list[Training] = []  # those not looked at often enough
        self._frozen: list[nn.Parameter] = []  # parameters of trained models that are not trained
        self._parts: frozenset[int] = frozenset()  # ids of the trained models' modules and parameters
        self._has_changed = False  # something was put into one of them
        self._logged = self._logged_plain = False
        self._mentioned = 0  # of those that wait

    def begin(self) -> None:
        """Something else is prepared, or nothing any more."""
        self._backwards, self._next, self._starts, self._mentioned = 0, 1, 0, 0
        trained = [training for training in self._trainings if training.optimizer is not None]
        self._new = [training for training in trained if training.looks < _FIRST]
        known = {id(p) for training in trained for p in training.parameters}
        modules = [training.session.module for training in trained]
        self._frozen = [p for module in modules for p in module.parameters() if id(p) not in known]
        self._parts = frozenset(id(o) for m in modules for parts in (m.modules(), m.parameters()) for o in parts)
        self._has_changed = self._has_advanced = False
        if modules:
            _LIVE.add(self)
            _follow_registrations()

    def note(self, module: nn.Module, part: nn.Module | nn.Parameter | None) -> None:
        """A layer or a parameter is put into a module."""
        if id(module) in self._parts and id(part) not in self._parts:
            new = [part] if isinstance(part, nn.Parameter) else () if part is None else part.parameters()
            self._has_changed |= any(p.requires_grad for p in new)

    def is_due(self) -> bool:
        """Whether the backward that is about to run is one to `check`; counts it."""
        self._backwards += 1
        if self._backwards >= self._next or self._has_changed:
            return True
        if self._starts < _STARTS:
            epoch = self._running_epoch()
            if epoch is not None and epoch.position == 0:
                self._starts += 1
                return True
        for training in self._new:
            if training.reached:  # by the backward before
                return True
        return bool(self._frozen) and any(p.requires_grad for p in self._frozen)

    def allows_plain_backward(self, strategy: Strategy, processes: int) -> bool:
        """Whether a backward may run though nothing is prepared with its optimizer; said once.

        Not where it would train something else than it seems to: partitioned models, copies that are not averaged.
        """
        may = strategy.optimizer_may_follow and (processes == 1 or bool(self._trainings))
        if may and not self._logged_plain:
            self._logged_plain = True
            alone = "" if processes == 1 else "; where a model is not prepared, its gradients stay with their process"
            _log.info(f"no model is prepared with its optimizer: backward() is torch's own{alone}")
        return may

    def check(self, loss: Tensor, waiting: Sequence[AcceleratedOptimizer] = ()) -> None:
        """A backward of `loss` is about to run.

        Args:
            loss: with its graph.
            waiting: optimizers, given or known by their schedulers, whose models are not prepared.

        Raises:
            LoopError: nothing is prepared to be trained, or the loss reaches something that is not.
        """
        trained = [training for training in self._trainings if training.optimizer is not None]
        if not trained:
            raise LoopError("no trained model is prepared; call prepare(model, optimizer, …) before backward().")
        found = [leaf for leaf in find_leaves(loss) if isinstance(leaf, nn.Parameter)]
        self._refuse_unprepared([p for p in found if not any(id(p) in training.ids for training in trained)])
        self._has_changed = False
        self._mention(waiting)
        ids = {id(p) for p in found}
        for training in [training for training in self._new if not training.ids.isdisjoint(ids)]:
            training.looks += 1
            if training.looks == _FIRST:
                self._new.remove(training)
        is_first = len(trained) == 1 and bool(self._new)  # of one model alone nobody asks whether it was reached
        self._next = self._backwards + (1 if is_first else _EVERY)
        epoch = self._running_epoch()
        position = 0 if epoch is None else epoch.position
        self._has_advanced |= position > 0
        if self._backwards > _EVERY or (self._has_advanced and position == 0):  # the first batch may have many losses
            self.warn_if_never_stepped()

    def warn_if_never_stepped(self) -> None:
        """After a window's backwards: warn if no optimizer was ever asked to step."""
        optimizers = [(o, t.window.steps) for t in self._trainings if (o := t.optimizer) is not None]
        asked = any(o.applied_steps or o.skipped_in_a_row or not o.acted for o, _ in optimizers)
        if self._logged or asked or self._backwards <= max((steps for _, steps in optimizers), default=self._backwards):
            return
        self._logged = True
        _log.info(
            "backward() has run again and again and optimizer.step() was never called: backward() computes gradients "
            "and never steps, so nothing was trained"
        )

    def _mention(self, waiting: Sequence[AcceleratedOptimizer]) -> None:
        for optimizer in waiting[self._mentioned :]:
            given = " and its scheduler" if optimizer.schedulers else ""
            _log.info(
                f"the {type(optimizer.optimizer).__name__}{given} were prepared, but not the model whose parameters it "
                "holds: it trains nothing here"
            )
        self._mentioned = len(waiting)

    def _refuse_unprepared(self, strangers: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that the loss reaches and that no prepared optimizer's model trains."""
        if not strangers:
            return
        owners = {id(p): training for training in self._trainings for p in training.session.module.parameters()}
        owner = next((owners[id(p)] for p in strangers if id(p) in owners), None)
        if owner is None:
            shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in strangers]
            raise LoopError(
                f"the loss of this backward() reaches {len(strangers)} parameters of no prepared model, e.g. one of "
                f"shape {max(shapes, key=math.prod)}: their gradients would not be averaged over the processes.\n"
                "If their module is to be trained, prepare() it with its optimizer. If not: "
                "module.requires_grad_(False) before its forward."
            )
        name = type(owner.session.module).__name__
        if owner.optimizer is not None:
            raise LoopError(
                f"the loss of this backward() reaches parameters of the {name} that were frozen when it was prepared, "
                "or have come since: they would not be averaged over the processes, or not be trained.\n"
                "Have them require gradients before prepare(). To unfreeze later: accelerator.free_memory(), then "
                "prepare() the model again with a new optimizer."
            )
        raise LoopError(
            f"the loss of this backward() reaches the {name}, which was prepared without an optimizer.\n"
            "If it is to be trained, prepare it with its optimizer. If not: requires_grad_(False) before its forward, "
            "or torch.no_grad() around it."
        )


_LIVE: Final[weakref.WeakSet[FirstSteps]] = weakref.WeakSet()


@functools.cache  # once in a process
def _follow_registrations() -> None:
    """Have every `FirstSteps` note what is put into modules: torch's own hook, called where that happens."""

    def note(module: nn.Module, _: str, part: nn.Module | nn.Parameter | None) -> None:
        for looks in tuple(_LIVE):
            looks.note(module, part)

    register_module_module_registration_hook(note)
    register_module_parameter_registration_hook(note)
