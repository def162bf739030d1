"""Updates the fp32 master weights after the script has written into the weights between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.mistakes import is_checked_step, versions_of
from zero_plugin.strategies.deepspeed.states import engine_pieces, follow_loading, precede_setting, unreachable_by


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
        self._are_rounded = True  # each weight is the rounding of its master weight, unless the script has written it
        self._has_warned = False

    def watch(self) -> list[Any]:
        """Detect writes by `load_state_dict` and DeepSpeed's setters; returns handles."""
        if not self._trains:
            return []
        module, wrapper = self._engine.module, self._engine.optimizer
        return [
            *follow_loading(module, self.note),
            *precede_setting([wrapper, *self._trained], self._note_set_master_weights),
        ]

    def note(self) -> None:
        """Record that the weights were written."""
        self._is_written = self._trains
        self._versions = versions_of(self._watched)

    def follow(self) -> None:
        """Update the master weights with what the script has written since the last call.

        Raises:
            LoopError: the script has written into partitioned parameters, which has no effect.
        """
        if not self._trains:
            return
        if (versions := versions_of(self._watched)) != self._versions:
            written = [p for p, old, new in zip(self._watched, self._versions, versions, strict=True) if old != new]
            self._versions = versions
            if self._is_partitioned:
                refuse_lost_weights(self._engine.module, written)
            self._is_written = True
        if self._is_written:
            self._before_change()
            self._is_written = False
            if self._has_master_weights:
                follow_written_weights(self._engine)
            else:
                self.copy_to_master_weights()

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
        if not self._has_master_weights or self._is_partitioned:  # at stage 3 p.data is empty
            return
        if lost := find_written_weights(self._engine):
            self._has_warned = True
            announce(
                f"the script has written into {len(lost)} parameters through p.data since the last step, e.g. "
                f"{lost[0]}: ZeRO updates fp32 master weights, so that what was written is lost. Write under "
                "torch.no_grad() into the parameter itself, or inside `with accelerator.whole_weights(model):`.",
                by_each=True,
            )

    def _note_set_master_weights(self) -> None:
        self._before_change()
        self._are_rounded = False  # until the next step


def follow_written_weights(engine: Any) -> None:
    """Copy the weights that a script has written to the master weights, and no others.

    If a weight equals its rounded master weight, it was not written, and the master weight keeps its precision.
    """
    for _, master, weight in _pairs_of_master_and_weight(engine):
        master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))


def find_written_weights(engine: Any) -> list[str]:
    """The names of weights that differ from this process's rounded master weights, which they equal after a step."""
    beside = _pairs_of_master_and_weight(engine)
    return [name for name, master, weight in beside if not torch.equal(master.to(weight.dtype), weight)]


def _pairs_of_master_and_weight(engine: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, flat master weights and flat weights of each piece of this process, both on the master weights' device."""
    parameters: dict[str, Any] = dict(engine.module.named_parameters())
    for piece in engine_pieces(engine):
        parameter = parameters[piece.name]
        is_partitioned = hasattr(parameter, "ds_id")
        start, values = (0, parameter.ds_tensor) if is_partitioned else (piece.start, parameter)
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
        "ZeRO stage 3 has partitioned: they were empty, and nothing was changed.\n"
        "Write before prepare(), or inside `with accelerator.whole_weights(model):`."
    )
