"""`FirstSteps`: checks the first backwards of a training for mistakes in the loop."""

from __future__ import annotations

import functools
import logging
import math
import operator
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Final

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from zero_plugin.data.active import ActiveLoaders
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError
from zero_plugin.loop.optimizer import AcceleratedOptimizer
from zero_plugin.loop.training import Training
from zero_plugin.strategies.base import Strategy
from zero_plugin.tensors.wrappers import find_leaves

_log = logging.getLogger(__name__)


# Walking the graph takes up to milliseconds: check only the first backwards of each model, then one in a hundred.
_FIRST = 10
_EVERY = 100
_STARTS = 3  # the number of epochs whose first batch is also checked


class FirstSteps:
    """A check for losses that depend on unprepared parameters, and for loops that never call `optimizer.step()`.

    With several processes the check also finds tensors that the script trains itself; `DifferingSteps` compares them.

    Checked backwards are:

    * the first ones that reach each trained model, and the first ones of the first epochs;
    * every backward after the script unfroze a parameter, or added a layer or parameter to a trained model;
    * one in a hundred of the others.

    Args:
        trainings: all prepared models; the caller adds to this list.
        running: knows the prepared loader that the loop currently iterates over.
        processes: the number of processes.
    """

    def __init__(self, trainings: Sequence[Training], running: ActiveLoaders, processes: int) -> None:
        self._trainings = trainings
        self._running = running
        self._processes = processes
        # The script's tensors that losses depend on, with their version and the number of steps when first seen.
        self._tensors: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()
        self._trained_tensors: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        # Since the last call of `begin`: the backwards; the next one that is always checked; the epochs whose first
        # batch was checked; and whether the loop got past the first batch of an epoch.
        self._backwards = 0
        self._next = 1
        self._starts = 0
        self._has_advanced = False

        self._new: list[Training] = []  # models that were checked fewer than `_FIRST` times
        self._frozen: list[nn.Parameter] = []  # frozen parameters of trained models
        self._parts: frozenset[int] = frozenset()  # ids of the trained models' modules and parameters
        self._has_changed = False  # a trainable layer or parameter was added to a trained model

        self._mentioned = 0  # optimizers without a prepared model that were logged

    def begin(self) -> None:
        """Start again after something was prepared or released."""
        self._backwards, self._next, self._starts, self._mentioned = 0, 1, 0, 0
        trained = [training for training in self._trainings if training.optimizer is not None]
        self._new = [training for training in trained if training.looks < _FIRST]
        known = {id(p) for training in trained for p in training.parameters}
        modules = [training.session.module for training in trained]
        self._frozen = [p for module in modules for p in module.parameters() if id(p) not in known]
        self._parts = frozenset(id(o) for m in modules for parts in (m.modules(), m.parameters()) for o in parts)
        self._has_changed = self._has_advanced = False
        for training in trained:
            training.session.script_tensors = self._trained_tensors
        if modules:
            _LIVE.add(self)
            _follow_registrations()

    def note(self, module: nn.Module, part: nn.Module | nn.Parameter | None) -> None:
        """Note a layer or a parameter that some module registers."""
        if id(module) in self._parts and id(part) not in self._parts:
            new = [part] if isinstance(part, nn.Parameter) else () if part is None else part.parameters()
            self._has_changed |= any(p.requires_grad for p in new)

    def is_due(self) -> bool:
        """Count the backward that is about to run, and return whether to check it."""
        self._backwards += 1
        if self._backwards >= self._next or self._has_changed:
            return True
        if self._starts < _STARTS:
            epoch = self._running.current
            if epoch is not None and epoch.position == 0:
                self._starts += 1
                return True
        for training in self._new:
            if training.reached:  # by the previous backward
                return True
        # Only once in a window, before its gradients are complete: ten thousand parameters may be frozen.
        ends = bool(self._frozen) and any(training.window.next_backward_ends for training in self._trainings)
        return ends and any(map(_is_trainable, self._frozen))

    def allows_plain_backward(self, strategy: Strategy, processes: int) -> bool:
        """Return whether a backward may run although no model is prepared with its optimizer, and log this once.

        The result would be wrong with partitioned models, or with several processes and no prepared model.
        """
        may = strategy.optimizer_may_follow and (processes == 1 or bool(self._trainings))
        if may and once(self, "plain"):
            alone = "" if processes == 1 else "; gradients of a model that is not prepared are not averaged"
            _log.info(f"no model is prepared with its optimizer: backward() is torch's own{alone}")
        return may

    def check(self, loss: Tensor, waiting: Sequence[AcceleratedOptimizer] = ()) -> None:
        """Check the loss of a backward that is about to run.

        Args:
            loss: the loss, with its graph.
            waiting: the prepared optimizers whose models are not prepared.

        Raises:
            LoopError: no model is prepared with an optimizer, or the loss depends on parameters that no prepared
                optimizer trains.
        """
        trained = [training for training in self._trainings if training.optimizer is not None]
        if not trained:
            raise LoopError("no trained model is prepared; call prepare(model, optimizer, …) before backward().")
        leaves = find_leaves(loss)
        found = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        self._refuse_unprepared([p for p in found if not any(id(p) in training.ids for training in trained)])
        if len(found) < len(leaves) and self._processes > 1:
            self._note_tensors([leaf for leaf in leaves if not isinstance(leaf, nn.Parameter)])
        self._has_changed = False
        self._mention(waiting)
        ids = {id(p) for p in found}
        for training in [training for training in self._new if not training.ids.isdisjoint(ids)]:
            training.looks += 1
            if training.looks == _FIRST:
                self._new.remove(training)
        is_first = len(trained) == 1 and bool(self._new)  # with one model, `reached` is not recorded
        self._next = self._backwards + (1 if is_first else _EVERY)
        epoch = self._running.current
        position = 0 if epoch is None else epoch.position
        self._has_advanced |= position > 0
        if self._backwards > _EVERY or (
            self._has_advanced and position == 0
        ):  # the first batch may have several backwards
            self.warn_if_never_stepped()

    def warn_if_never_stepped(self) -> None:
        """Warn if `optimizer.step()` was never called, although more backwards ran than one window has."""
        optimizers = [(o, t.window.steps) for t in self._trainings if (o := t.optimizer) is not None]
        asked = any(o.was_stepped for o, _ in optimizers)
        most = max((steps for _, steps in optimizers), default=self._backwards)
        if not asked and self._backwards > most and once(self, "never stepped"):
            _log.info(
                "backward() has run several times and optimizer.step() was never called: backward() only computes "
                "gradients, so nothing was trained"
            )

    def _mention(self, waiting: Sequence[AcceleratedOptimizer]) -> None:
        for optimizer in waiting[self._mentioned :]:
            given = " and its scheduler" if optimizer.schedulers else ""
            _log.info(
                f"the {type(optimizer.optimizer).__name__}{given} were prepared, but not the model of its parameters: "
                "the optimizer trains no prepared model"
            )
        self._mentioned = len(waiting)

    def _note_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Record the tensors that the script trains: they change between two steps. Inputs are new in each step."""
        steps = sum(t.optimizer.applied_steps for t in self._trainings if t.optimizer is not None)
        for tensor in tensors:
            version, before = self._tensors.setdefault(tensor, (tensor._version, steps))
            if version != tensor._version and before != steps:
                self._trained_tensors[tensor] = None

    def _refuse_unprepared(self, strangers: Sequence[nn.Parameter]) -> None:
        """Raise a `LoopError` if the loss depends on parameters that no prepared optimizer trains."""
        if not strangers:
            return
        owners = {id(p): training for training in self._trainings for p in training.session.module.parameters()}
        owner = next((owners[id(p)] for p in strangers if id(p) in owners), None)
        if owner is None:
            is_scaled = any(training.resolved.precision == "fp16" for training in self._trainings)
            if self._processes == 1 and not is_scaled:
                return  # the script may train them itself, as in plain torch
            wrong = "be multiplied by the loss scale" if is_scaled else "not be averaged over the processes"
            shapes = [tuple(getattr(p, "ds_shape", p.shape)) for p in strangers]
            raise LoopError(
                f"the loss of this backward() depends on {len(strangers)} parameters of no prepared model, e.g. one of "
                f"shape {max(shapes, key=math.prod)}: their gradients would {wrong}.\n"
                "To train their module, prepare() it with its optimizer. Otherwise call module.requires_grad_(False) "
                "before its forward."
            )
        name = type(owner.session.module).__name__
        if owner.optimizer is not None:
            raise LoopError(
                f"the loss of this backward() depends on parameters of the {name} that were frozen in prepare(), or "
                "were added later: they would not be averaged over the processes, or not be trained.\n"
                "Set requires_grad before prepare(). To unfreeze parameters later, call accelerator.free_memory(), and "
                "prepare() the model again with a new optimizer."
            )
        raise LoopError(
            f"the loss of this backward() depends on the {name}, which was prepared without an optimizer: its "
            "gradients would not be averaged over the processes, and no step would apply them.\n"
            "To train it, prepare it with its optimizer. Otherwise call requires_grad_(False) before its forward, or "
            "run it under torch.no_grad()."
        )


_is_trainable: Final = operator.attrgetter("requires_grad")
_LIVE: Final[weakref.WeakSet[FirstSteps]] = weakref.WeakSet()


@functools.cache  # once in a process
def _follow_registrations() -> None:
    """Notify every `FirstSteps` when a module or a parameter is registered, by torch's global registration hooks."""

    def note(module: nn.Module, _: str, part: nn.Module | nn.Parameter | None) -> None:
        for looks in tuple(_LIVE):
            looks.note(module, part)

    register_module_module_registration_hook(note)
    register_module_parameter_registration_hook(note)
