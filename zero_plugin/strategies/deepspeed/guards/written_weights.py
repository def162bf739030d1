"""Detects what a script writes into the weights between two steps, and copies it to the fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.errors import LoopError
from zero_plugin.strategies.base import is_checked_step
from zero_plugin.strategies.deepspeed.gradients import preceded
from zero_plugin.strategies.deepspeed.partitioned_models import NOTES_WRITTEN, OwnHook
from zero_plugin.strategies.deepspeed.states import engine_pieces, gathered_parts, own_part, unreachable_by
from zero_plugin.strategies.optimizer_only import weakly
from zero_plugin.tensors.modules import names_of


class WrittenWeights:
    """Detects writes of a script into the weights between two steps, and copies them to the fp32 master weights.

    Autograd counts every in-place write of a script in the parameter's version, but not the writes of DeepSpeed. It
    counts operations that change no value too, as those of a parametrization that every forward registers and removes.
    So where the version of a partitioned parameter has risen, its values are compared with its partition.

    Mistake: a script initialises, clamps or averages weights after `prepare`, which an engine would ignore.
    Cost: one comparison of integers for each parameter and step; at stage 3 also for each gather and release.

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
        self._versions: dict[int, int] = {}  # by the parameters' ids
        self._lost: set[int] = set()  # ids of partitioned parameters that were written
        self._note_versions()
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
            undo += self._watch_partitioned(p)
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
        self._note_versions()

    def follow(self) -> None:
        """Update the master weights with what the script has written since the last call.

        Raises:
            LoopError: the script has written into partitioned parameters, which has no effect.
        """
        if self._is_partitioned:
            self._refuse_lost()
        elif any(p._version != self._versions[id(p)] for p in self._watched):
            self._note_versions()
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
        self._note_versions()
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

    def _note_versions(self) -> None:
        self._versions = {id(p): p._version for p in self._watched}
        self._lost.clear()

    def _watch_partitioned(self, parameter: Any) -> list[Callable[[], Any]]:
        """Compare versions where DeepSpeed gathers and releases the parameter, by the methods that it calls of it."""
        undo: list[Callable[[], Any]] = []
        for name, check in (
            ("all_gather", self._check_empty),
            ("all_gather_coalesced", self._check_empty),
            ("partition", self._check_gathered),
        ):
            method, check_those = getattr(parameter, name), weakly(check)

            def precede(*args: Any, own: Any = check_those, **kwargs: Any) -> None:
                own(args[0] if args else kwargs.get("param_list") or kwargs.get("params") or [parameter])

            setattr(parameter, name, preceded(method, precede))
            undo.append(partial(setattr, parameter, name, method))
        parameter.set_ = _ignoring_itself(parameter)
        undo.append(partial(parameter.__dict__.pop, "set_", None))
        return undo

    def _check_empty(self, parameters: Iterable[Any]) -> None:
        """Note parameters that were written since they are empty, before they are gathered: those values are lost."""
        for p in parameters:
            if p._version != self._versions.get(id(p), p._version) and p.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                self._lost.add(id(p))

    def _check_gathered(self, parameters: Iterable[Any]) -> None:
        """Note parameters whose gathered values were changed, before they are released: the partition has the old ones.

        Each process compares only its own partition, so a write in one partition is found by one process.
        """
        for p in parameters:
            if p._version == self._versions.get(id(p), p._version) or p.ds_status is not ZeroParamStatus.AVAILABLE:
                continue
            if id(p) not in self._lost and self._has_own_values(p):
                self._versions[id(p)] = p._version
            else:
                self._lost.add(id(p))

    def _has_own_values(self, parameter: Any) -> bool:
        values, partition = own_part(parameter)
        # What is on NVMe is not in memory, and what is quantized for the gather differs from the partition.
        is_comparable = values.shape == partition.shape and not self._engine.zero_quantized_weights()
        return is_comparable and torch.equal(values, partition.to(values.device))

    def _refuse_lost(self) -> None:
        """Raise if the script has written into partitioned parameters since the last call."""
        rose = [p for p in self._watched if p._version != self._versions[id(p)]]
        self._check_gathered(rose)
        self._check_empty(rose)
        if lost := [p for p in self._watched if id(p) in self._lost]:
            self._note_versions()
            refuse_lost_weights(self._engine.module, lost)

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


def _ignoring_itself(parameter: Tensor) -> Callable[..., Tensor]:
    """The parameter's `set_`, which ignores the parameter itself.

    `torch.nn.utils.parametrize` calls it so: autograd counts it as a write, which an empty parameter cannot have.
    """

    def set_to(*args: Any, **kwargs: Any) -> Tensor:
        is_itself = len(args) == 1 and args[0] is parameter and not kwargs
        return parameter if is_itself else torch.Tensor.set_(parameter, *args, **kwargs)

    return set_to


def refuse_lost_weights(module: nn.Module, written: Iterable[nn.Parameter]) -> NoReturn:
    """Refuse writes of a script into partitioned parameters.

    Args:
        module: the module.
        written: the parameters that were written.

    Raises:
        LoopError: always; it names one of them.
    """
    found = names_of(module, written)
    raise LoopError(
        f"the script has written into {len(found)} parameters of the {type(module).__name__}, e.g. {found[0]}, which "
        "ZeRO stage 3 has partitioned: what was written is lost.\n"
        "Write before prepare(), or inside `with accelerator.whole_weights(model):`."
    )
