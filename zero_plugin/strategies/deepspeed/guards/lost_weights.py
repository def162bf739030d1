"""Detect writes of a script into weights that would be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.states import gathered_parts, own_part
from zero_plugin.strategies.events import Guard, Sampling
from zero_plugin.strategies.optimizer_only import weakly
from zero_plugin.tensors.modules import names_of


class PartitionedWrites(Guard):
    """A guard that refuses writes into partitioned parameters at stage 3, outside of `whole_weights`.

    A parameter's version counts every in-place write of a script, but not DeepSpeed's writes. The version also counts
    operations that change no value, e.g. of a parametrization that every forward registers and removes. So if a version
    has risen, the guard compares the gathered values with the partition.

    Mistake: a script initialises, clamps or averages weights after `prepare`, while they are empty.
    Cost: one comparison of integers for each parameter and step, and for each gather and release.
    """

    for_untrained = True

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._engine = session.engine
        self._watched: list[Any] = list(session.module.parameters())
        self._versions: dict[int, int] = {}  # by the parameters' ids
        self._lost: set[int] = set()  # ids of parameters that were written
        self.weights_noted()
        for p in self._watched:
            self._watch(p)

    @classmethod
    def is_needed(cls, session: Any) -> bool:
        """Return whether parameters are partitioned."""
        return bool(session.engine.zero_optimization_partition_weights())

    def weights_noted(self) -> None:
        """Note the versions after a write that is kept."""
        self._versions = {id(p): p._version for p in self._watched}
        self._lost.clear()

    def before_weights(self) -> None:
        """Check the weights.

        Raises:
            LoopError: the script has written into partitioned parameters since the last call.
        """
        rose = []
        for p in self._watched:
            if p._version != self._versions[id(p)]:
                rose.append(p)  # noqa: PERF401 - a comprehension would be a further call in each step
        if rose:
            self._check_gathered(rose)
            self._check_empty(rose)
        if self._lost:
            lost = [p for p in self._watched if id(p) in self._lost]
            self.weights_noted()
            _refuse(self.session.module, lost)

    def _watch(self, parameter: Any) -> None:
        """Compare versions whenever DeepSpeed gathers or releases the parameter, in the methods that it calls."""

        def calling(check: Callable[..., None]) -> Callable[..., None]:
            own = weakly(check)

            def precede(*args: Any, **kwargs: Any) -> None:
                own(args[0] if args else kwargs.get("param_list") or kwargs.get("params") or [parameter])

            return precede

        patches = self.session.patches
        patches.precede(parameter, "all_gather", calling(self._check_empty))
        patches.precede(parameter, "all_gather_coalesced", calling(self._check_empty))
        patches.precede(parameter, "partition", calling(self._check_gathered))
        patches.replace(parameter, "set_", _ignoring_itself(parameter))

    def _check_empty(self, parameters: Iterable[Any]) -> None:
        """Note empty parameters that the script has written, before they are gathered: the values are lost."""
        for p in parameters:
            if p._version != self._versions.get(id(p), p._version) and p.ds_status is ZeroParamStatus.NOT_AVAILABLE:
                self._lost.add(id(p))

    def _check_gathered(self, parameters: Iterable[Any]) -> None:
        """Note parameters whose gathered values were changed, before their release: the partition has the old values.

        Each process compares only its own partition, so only one process finds a write in one partition.
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
        # Values on NVMe are not in memory. Values that are quantized for the gather differ from the partition.
        is_comparable = values.shape == partition.shape and not self._engine.zero_quantized_weights()
        return is_comparable and torch.equal(values, partition.to(values.device))


class UncountedWrites(Guard):
    """A guard that warns once if the script has written weights past autograd, as `p.data` does.

    Mistake: `p.data.clamp_(…)`, as in WGAN and many recipes: ZeRO updates the fp32 master weights or the partitions,
    and the next step loses the write.
    Cost: in sampled steps, one comparison of all weights of this process.
    """

    def __init__(self, session: Any, sampling: Sampling) -> None:
        super().__init__(session, sampling)
        self._is_partitioned = session.engine.zero_optimization_partition_weights()

    def before_step(self) -> None:
        """Compare the weights with the values that the step will update, in the sampled steps."""
        masters = self.session.masters
        if not self.sampling.is_due() or masters.set_after == masters.steps - 1:
            return
        lost = [name for name, wanted, weight in self._kept() if not torch.equal(wanted, weight)]
        if lost and once(self, "p.data"):
            outside = "" if self._is_partitioned else "under torch.no_grad() into the parameter itself, or "
            announce(
                f"the script has written into {len(lost)} parameters through p.data since the last step, e.g. "
                f"{lost[0]}: ZeRO updates {'partitions' if self._is_partitioned else 'fp32 master weights'}, so the "
                f"writes are lost. Write {outside}inside `with accelerator.whole_weights(model):`.",
                by_each=True,
            )

    def _kept(self) -> Iterable[tuple[str, Tensor, Tensor]]:
        """Return each weight's name, the values that it should have, and its current values."""
        session = self.session
        if self._is_partitioned:
            # Empty weights cannot be checked. Weights that are quantized for the gather differ from their partition.
            if session.engine.zero_quantized_weights():
                return ()
            parts = gathered_parts(session.module, recurse=True)
            in_memory = (part for part in parts if part[1].shape == part[2].shape)  # not on NVMe
            return ((part, partition.to(values), values) for part, values, partition in in_memory)
        if not session.masters.are_reachable:
            return ()
        # After a step every weight equals its rounded master weight.
        return ((name, master.to(weight.dtype), weight) for name, master, weight in session.masters.with_weights())


def _ignoring_itself(parameter: Tensor) -> Callable[..., Tensor]:
    """Return a `set_` of the parameter that ignores the parameter itself as the argument.

    `torch.nn.utils.parametrize` passes it. Autograd counts this as a write, but an empty parameter cannot have one.
    """

    def set_to(*args: Any, **kwargs: Any) -> Tensor:
        is_itself = len(args) == 1 and args[0] is parameter and not kwargs
        return parameter if is_itself else torch.Tensor.set_(parameter, *args, **kwargs)

    return set_to


def _refuse(module: nn.Module, written: Iterable[nn.Parameter]) -> NoReturn:
    """Raise an error for parameters that the script has written; name one of them."""
    found = names_of(module, written)
    raise LoopError(
        f"the script has written into {len(found)} parameters of the {type(module).__name__}, e.g. {found[0]}, which "
        "ZeRO stage 3 has partitioned: the writes are lost.\n"
        "Write before prepare(), or inside `with accelerator.whole_weights(model):`."
    )
