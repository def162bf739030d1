"""`MasterWeights`: the fp32 master weights of an engine, which follow a script's writes into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.strategies.deepspeed.partitioned_models import NOTES_WRITTEN, OwnHook
from zero_plugin.strategies.deepspeed.patches import Patches
from zero_plugin.strategies.deepspeed.states import engine_pieces, gathered_parts, unreachable_by
from zero_plugin.strategies.events import Events
from zero_plugin.strategies.optimizer_only import weakly


class MasterWeights:
    """The fp32 master weights. Copies weights that a script writes between two steps to the master weights.

    Below stage 3, a parameter's version counts every in-place write of a script, but not DeepSpeed's writes. At stage
    3, the places of writes note them: `whole_weights`, DeepSpeed's `GatheredParameters` and `load_state_dict`.

    Args:
        engine: the engine; at stage 3 it may have no optimizer.
        trained: the parameters that the engine trains.
        events: the session's events; `weights_noted` is emitted here.
        before_change: called before master weights change.

    Attributes:
        steps: the number of steps.
        set_after: the last step after which the script has set master weights. Until the next step, a weight may differ
            from its rounded master weight.
    """

    def __init__(
        self, engine: Any, trained: Sequence[nn.Parameter], events: Events, before_change: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._trains = engine.basic_optimizer is not None
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._trained = trained
        self._events = events
        self._before_change = before_change
        self.are_reachable = hasattr(engine.optimizer, "refresh_fp32_params") and not unreachable_by(engine)
        self._is_written = False  # whether the master weights must be updated before their use
        self._versions: list[int] = []  # below stage 3
        self.steps = 0
        self.set_after = -1
        self._written_before: dict[int, bool] = {}  # step → whether this process's master weights changed
        self._note_versions()

    def watch(self, patches: Patches) -> list[Callable[[], Any]]:
        """Follow writes by `load_state_dict`, DeepSpeed's setters and its context. Return the undo functions."""
        hook = OwnHook(self._note_loaded)
        parts: Iterable[Any] = self._engine.module.modules()
        undo: list[Callable[[], Any]] = [part.register_load_state_dict_post_hook(hook).remove for part in parts]
        note = weakly(self.note)
        for p in self._engine.module.parameters() if self._is_partitioned else ():
            setattr(p, NOTES_WRITTEN, note)
            undo.append(partial(p.__dict__.pop, NOTES_WRITTEN, None))
        # DeepSpeed's `safe_set_…` functions call these methods: of the optimizer at stage 3, of parameters below it.
        for owner in (self._engine.optimizer, *self._trained) if self._trains else ():
            if hasattr(owner, "set_full_hp_param"):
                patches.precede(owner, "set_full_hp_param", self._note_set_master_weights)
            if hasattr(owner, "set_local_hp_param"):
                patches.precede(owner, "set_local_hp_param", self._note_set_master_weights)
        return undo

    def note(self) -> None:
        """Note that the weights were written."""
        self._is_written = self._trains
        self._note_versions()
        for call in self._events.weights_noted:
            call()

    def follow(self, *, begins_step: bool = False) -> None:
        """Copy the script's writes since the last call to the master weights.

        Args:
            begins_step: whether a step follows.
        """
        if not self._is_partitioned:
            for p, version in zip(self._trained, self._versions, strict=True):
                if p._version != version:
                    self._note_versions()
                    self._is_written = self._trains
                    break
        if self._is_written:
            self._copy_written()
        self.steps += begins_step

    def take_steps(self) -> dict[int, bool]:
        """Return the written steps, as `Session.take_written`, and forget them."""
        taken, self._written_before = self._written_before, {}
        return taken

    def copy_all(self) -> None:
        """Copy all weights to the master weights."""
        self._before_change()
        self._is_written = False
        self._note_versions()
        for call in self._events.weights_noted:
            call()
        refresh = getattr(self._engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:  # at stage 0 a plain torch optimizer steps the weights themselves
            refresh()

    def with_weights(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, the flat master weights and the flat weights of each piece of this process.

        Both tensors are on the device of the master weights.
        """
        parameters: dict[str, Any] = dict(self._engine.module.named_parameters())
        for piece in engine_pieces(self._engine):
            parameter = parameters[piece.name]
            start, values = (0, parameter.ds_tensor) if self._is_partitioned else (piece.start, parameter)
            master = piece.stepped.detach().view(-1)[piece.offset : piece.offset + piece.count]
            yield piece.name, master, values.detach().view(-1)[start : start + piece.count].to(master.device)

    def _copy_written(self) -> None:
        if not self.are_reachable:
            self.copy_all()
            return
        self._before_change()
        self._is_written = False
        # A weight that equals its rounded master weight was not written. Keep the precision of its master weight.
        has_changed = self._written_before.get(self.steps, False)
        for _, master, weight in self.with_weights():
            is_same = master.to(weight.dtype) == weight
            has_changed = has_changed or not bool(is_same.all())
            master.copy_(torch.where(is_same, master, weight.to(master.dtype)))
        self._written_before[self.steps] = has_changed

    def _note_versions(self) -> None:
        self._versions = [] if self._is_partitioned else [p._version for p in self._trained]

    def _note_loaded(self, part: nn.Module, *_: Any) -> None:
        if self._is_partitioned:
            for _name, values, partition in gathered_parts(part, recurse=False):
                partition.copy_(values)
        self.note()

    def _note_set_master_weights(self, *_: Any, **__: Any) -> None:
        self._before_change()
        self.set_after = self.steps
