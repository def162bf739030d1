"""What a script asks of its processes: who it is among them, who goes first, and its part of what all hold."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.config.choices import DistributedType
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LoopError


def split(inputs: Any, index: int, count: int, *, padded_on: torch.device | None) -> Any:
    """Part `index` of `count` of a sequence, a tensor, an array, a dataset, or of each value of a dict.

    Args:
        inputs: the same on every process; the values of a dict have one length.
        index: which part.
        count: how many parts.
        padded_on: repeat the last element so that all parts have one length, with tensors on this device; None leaves
            the last parts shorter, and maybe empty.

    Raises:
        LoopError: it cannot be divided, the values of a dict differ in length, or there is no element to repeat.
    """
    length = _length(inputs)
    size, longer = divmod(length, count)
    start = index * size + min(index, longer)
    stop = start + size + (index < longer)
    if padded_on is None:
        return _take(inputs, range(start, stop), None)
    longest = size + (longer > 0)
    if not length and count > 1:
        raise LoopError("split_between_processes(apply_padding=True) got nothing: there is no element to repeat.")
    return _take(inputs, [*range(start, stop), *[length - 1] * (longest - (stop - start))], padded_on)


def _length(inputs: Any) -> int:
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise LoopError(f"split_between_processes needs values of one length in a dict, and got {lengths}.")
        return next(iter(lengths.values()), 0)
    datasets = sys.modules.get("datasets")  # whoever holds a Dataset has imported it
    if (
        (isinstance(inputs, Tensor | np.ndarray) and inputs.ndim)
        or (isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes))
        or (datasets is not None and isinstance(inputs, datasets.Dataset))
    ):
        return len(inputs)
    raise LoopError(
        f"split_between_processes cannot divide a {type(inputs).__name__}; give a list, a tuple, a tensor, an "
        "array, a datasets.Dataset, or a dict of these."
    )


def _take(inputs: Any, indices: Sequence[int], device: torch.device | None) -> Any:
    if isinstance(inputs, Mapping):
        return {key: _take(value, indices, device) for key, value in inputs.items()}
    if isinstance(inputs, Tensor):
        if isinstance(indices, range):
            return inputs[indices.start : indices.stop]
        return inputs[torch.tensor(indices, dtype=torch.int64, device=inputs.device)].to(device)
    if isinstance(inputs, np.ndarray):
        return inputs[np.asarray(indices, dtype=np.int64)]
    if isinstance(inputs, Sequence):
        taken = [inputs[index] for index in indices]
        return tuple(taken) if isinstance(inputs, tuple) else taken
    return inputs.select(indices)


Function = Callable[..., Any]


class ProcessCalls:
    """The calls of `Accelerator`, `PartialState` and `AcceleratorState` that concern processes.

    Attributes:
        device: where this process computes.
        distributed_type: how the processes work together.
    """

    device: torch.device
    distributed_type: DistributedType
    _processes: Processes

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return self._processes.world_size

    @property
    def process_index(self) -> int:
        """This process among all, from 0."""
        return self._processes.rank

    @property
    def local_process_index(self) -> int:
        """This process on its machine, from 0."""
        return self._processes.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._processes.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's process 0."""
        return self._processes.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process."""
        return self._processes.rank == self._processes.world_size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether several processes run."""
        return self._processes.world_size > 1

    @property
    def multi_device(self) -> bool:
        """Whether several GPUs compute, without ZeRO."""
        return self.use_distributed and self.distributed_type is DistributedType.MULTI_GPU

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._processes.barrier()

    def print(self, *values: Any, **kwargs: Any) -> None:
        """`print`, once on every machine."""
        if self.is_local_main_process:
            print(*values, **kwargs)  # noqa: T201 - what it is for

    # ---- one after another -----------------------------------------------------------------------------------------

    def main_process_first(self) -> AbstractContextManager[None]:
        """What is inside runs on the main process, then on all others at once; collective.

        If it raises on the main process, the others come in all the same, and see for themselves.
        """
        return self._goes_first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """What is inside runs on each machine's main process, then on all others at once; collective.

        If it raises on a machine's main process, the others come in all the same, and see for themselves.
        """
        return self._goes_first(self.is_local_main_process, "local_main_process_first")

    @contextmanager
    def _goes_first(self, first: bool, call: str) -> Iterator[None]:
        meet = collective(call)(self._processes.barrier)
        if not first:
            meet()
        try:
            yield
        except Exception:  # whoever is interrupted, or exits, leaves at once
            if first:
                meet()
            raise
        if first:
            meet()

    # ---- functions that some processes run -------------------------------------------------------------------------

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on the main process; elsewhere it returns None."""
        return self._on(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on each machine's main process; elsewhere it returns None."""
        return self._on(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function | None = None) -> Function:
        """Decorator: the function runs on the last process; elsewhere it returns None."""
        return self._on(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorator: the function runs on process `process_index`, and wherever there is one process only."""
        return self._on(lambda: not self.use_distributed or self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorator: the function runs on each machine's process `local_process_index`, or on the only process."""
        return self._on(lambda: not self.use_distributed or self.local_process_index == local_process_index, function)

    def _on(self, here: Callable[[], bool], function: Function | None) -> Function:
        if function is None:  # @accelerator.on_process(process_index=2), or @accelerator.on_main_process()
            return functools.partial(self._on, here)

        @functools.wraps(function)
        def run_here(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return run_here

    # ---- dividing --------------------------------------------------------------------------------------------------

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's consecutive share of `inputs`, which is the same on every process; not collective.

        Args:
            inputs: a list, tuple or other sequence, a tensor or array (by its first dimension), a `datasets.Dataset`,
                or a dict of these, all of one length. Strings are not divided.
            apply_padding: repeat the last element where a share is shorter, so that results can be gathered; tensors
                are then on this process's device.

        Raises:
            LoopError: it cannot be divided, or the values of a dict differ in length.
        """
        yield split(inputs, self.process_index, self.num_processes, padded_on=self.device if apply_padding else None)
