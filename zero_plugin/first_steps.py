"""Looks at every backward until each optimizer has stepped once, for mistakes that a loop would hide for ever."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import Tensor, nn

from zero_plugin.accumulation import Epoch
from zero_plugin.errors import LoopError
from zero_plugin.optimizer import AcceleratedOptimizer
from zero_plugin.strategies.base import Strategy
from zero_plugin.training import Training

__all__ = ["FirstSteps", "find_unprepared"]


class FirstSteps:
    """Finds losses that train what is not prepared, and loops that never step.

    Args:
        trainings: all prepared models; the caller adds to it.
        running_epoch: the prepared loader that is being iterated.
        say: prints a line.

    Attributes:
        pending: whether some optimizer has not stepped yet, so that `look_at` is to be called.
    """

    def __init__(
        self, trainings: Sequence[Training], running_epoch: Callable[[], Epoch | None], say: Callable[[str], None]
    ) -> None:
        self.pending = True
        self._trainings = trainings
        self._running_epoch = running_epoch
        self._say = say
        self._epoch_ended = False  # a backward of an epoch's last batch was seen
        self._said = self._said_loose = False
        self._mentioned = 0  # of those that wait

    def may_run_loose(self, strategy: Strategy, processes: int) -> bool:
        """Whether a backward may run though nothing is prepared with its optimizer; said once.

        Not where it would train something else than it seems to: partitioned models, copies that are not averaged.
        """
        may = strategy.optimizer_may_follow and (processes == 1 or bool(self._trainings))
        if may and not self._said_loose:
            self._said_loose = True
            alone = "" if processes == 1 else "; where a model is not prepared, its gradients stay with their process"
            self._say(f"no model is prepared with its optimizer: backward() is torch's own{alone}")
        return may

    def look_at(self, loss: Tensor, waiting: Sequence[AcceleratedOptimizer] = ()) -> None:
        """A backward of `loss` is about to run.

        Args:
            loss: with its graph.
            waiting: optimizers, given or known by their schedules, whose models are not prepared.

        Raises:
            LoopError: nothing is prepared to be trained, or the loss reaches something that is not.
        """
        optimizers = [training.optimizer for training in self._trainings if training.optimizer is not None]
        if not optimizers:
            raise LoopError("no trained model is prepared; call prepare(model, optimizer, …) before backward().")
        self._refuse_unprepared(loss)
        self._mention(waiting)
        epoch = self._running_epoch()
        last_batch = epoch is not None and epoch.end_of_dataloader
        if self._epoch_ended and not last_batch:
            self.say_if_none()
        self._epoch_ended = last_batch
        self.pending = any(optimizer.applied_steps == 0 for optimizer in optimizers)

    def say_if_none(self) -> None:
        """At an epoch's end: say it if no optimizer was ever asked to step."""
        acted = any(o.applied_steps or o.skipped_in_a_row for t in self._trainings if (o := t.optimizer) is not None)
        if self._epoch_ended and not acted and not self._said:
            self._said = True
            self._say(
                "an epoch has ended and optimizer.step() was never called: backward() computes gradients and never "
                "steps, so nothing was trained"
            )
        self._epoch_ended = False

    def _mention(self, waiting: Sequence[AcceleratedOptimizer]) -> None:
        for optimizer in waiting[self._mentioned :]:
            given = " and its schedule" if optimizer.schedules else ""
            self._say(
                f"the {type(optimizer.optimizer).__name__}{given} were prepared, but not the model whose parameters it "
                "holds: it trains nothing here"
            )
        self._mentioned = len(waiting)

    def _refuse_unprepared(self, loss: Tensor) -> None:
        strangers = find_unprepared(loss, {id(p) for training in self._trainings for p in _trained(training)})
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
                f"the loss of this backward() reaches parameters of the {name} that were frozen when it was prepared; "
                "make them require gradients before prepare()."
            )
        raise LoopError(
            f"the loss of this backward() reaches the {name}, which was prepared without an optimizer.\n"
            "If it is to be trained, prepare it with its optimizer. If not: requires_grad_(False) before its forward, "
            "or torch.no_grad() around it."
        )


def find_unprepared(loss: Tensor, known: Collection[int]) -> list[nn.Parameter]:
    """Parameters that the gradient of `loss` would reach and that are not among `known`.

    It walks the whole graph, which takes milliseconds for a large model.

    Args:
        loss: with its graph.
        known: ids of parameters.
    """
    found: list[nn.Parameter] = []
    pending = [loss.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is None:
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _trained(training: Training) -> Sequence[nn.Parameter]:
    return () if training.optimizer is None else training.parameters
