"""A loader's worker process: its random numbers, and whether its data set asks which worker it is in."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from zero_plugin.collectives import num_processes

__all__ = ["WorkerStart", "WorkerWatch", "let_threads_settle", "watch_worker"]

_SETTLED_SECONDS = 0.01


def let_threads_settle(workers: int) -> None:
    """Wait a moment before a loader forks its workers, if a collective may just have ended.

    The communication threads enter Python then, to free tensors. Where one is about to when the process forks, the
    child waits for it for ever; Python 3.12 no longer does.
    """
    if workers and sys.version_info < (3, 12) and num_processes() > 1:
        time.sleep(_SETTLED_SECONDS)


class WorkerWatch:
    """Stands for torch's worker info while somebody's code runs, and notes what that code reads of it.

    Attributes:
        asked: whether one of the watched names was read.
    """

    def __init__(self, info: Any, names: frozenset[str]) -> None:
        self.asked = False
        self._info = info
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            self.asked = True
        return getattr(self._info, name)


@contextmanager
def watch_worker(*names: str) -> Iterator[WorkerWatch]:
    """Watch what the code inside reads of `torch.utils.data.get_worker_info()`; in the main process it is None."""
    info: Any = get_worker_info()
    watch = WorkerWatch(info, frozenset(names))
    if info is None:
        yield watch
        return
    torch_worker._worker_info = watch  # type: ignore[assignment]  # there is no public way to be asked
    try:
        yield watch
    finally:
        torch_worker._worker_info = info


class WorkerStart:
    """The `worker_init_fn` of a prepared loader, around the user's own.

    torch seeds worker w with the main process's draw plus w: seeded alike, the processes would have workers with the
    same random numbers. Here worker w of process r gets that plus r × workers + w. Process 0's are as in plain torch.

    Args:
        rank: this process.
        user_start: the user's `worker_init_fn`.
        stream: the loader reads a `StreamShard`. The user's function finds its own data set in the worker info, and if
            it takes it to divide the data, the `StreamShard` is told.
    """

    def __init__(self, rank: int, user_start: Callable[[int], Any] | None, *, stream: bool) -> None:
        self._rank = rank
        self._user_start = user_start
        self._stream = stream

    def __call__(self, worker: int) -> None:
        """Run first in worker number `worker`."""
        info: Any = get_worker_info()
        if self._rank:
            seed = info.seed + self._rank * info.num_workers
            object.__setattr__(info, "seed", seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
        if self._user_start is None:
            return
        shard = info.dataset
        if self._stream:
            object.__setattr__(info, "dataset", shard.dataset)
        with watch_worker("dataset") as watch:
            self._user_start(worker)
        if self._stream:
            shard.is_divided = watch.asked
