"""The running loops over loaders in this process, and the loop that ends accumulation windows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol

from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError

_LOOPS = count(1)
_WARNED_AFTER = 3  # micro-batches; by then it is known which loops run side by side
_ENCLOSING = 2  # a loop that advances in none of so many micro-batches in a row is around another loop


class DataLoaderStateMixin:
    """The state of the loop that runs over a loader.

    Attributes:
        batch_size: samples per process and batch; None if batches have no common size.
        end_of_dataloader: whether the current batch is the epoch's last, on all processes.
        remainder: samples in the epoch's last step, over all processes; known in that step at the latest. 0 may mean a
            full step. -1 means unknown, or that an incomplete last step is dropped.
        position: index of the current batch in the loop; -1 before the first.
        batches_left: batches in this epoch after the current one; None if unknown.
        batch_samples: samples in the current batch, including repeated ones; None if not counted.
        real_samples: samples, from the front of the current batch, that are not repeats; None for all.
        repeats_unseen: the class name of a sampler that may repeat samples without reporting it; None if repeats are
            known.
        epoch_length: batches of a complete epoch; None if unknown.
        loop: number of the running loop, or of the last one.
        trains: whether the loop has computed a micro-batch of a training.
    """

    batch_size: int | None = None
    end_of_dataloader: bool = False
    remainder: int = -1
    position: int = -1
    batch_samples: int | None = None
    real_samples: int | None = None
    repeats_unseen: str | None = None
    epoch_length: int | None = None
    loop: int = 0
    trains: bool = False

    @property
    def batches_left(self) -> int | None:
        """Batches in this epoch after the current one; None if unknown before the last one."""
        return 0 if self.end_of_dataloader else None

    def reset(self) -> None:
        """Return to the state before the first batch of an epoch."""
        self.end_of_dataloader, self.position = False, -1
        loader: Any = self
        try:
            self.remainder = -1 if loader.drop_last else loader.total_dataset_length % loader.total_batch_size
        except (AttributeError, TypeError):  # a stream, or batches of no common size
            self.remainder = -1

    def begin(self) -> None:
        """Note that a loop over the loader begins."""
        self.trains = False
        self.reset()
        RUNNING.enter(self)

    def end(self) -> None:
        """Note that a loop over the loader has ended."""
        RUNNING.leave(self)


class ActiveLoaders:
    """The loaders whose loops are running, innermost last.

    Attributes:
        loaders: the loaders.
        batches: the number of batches that all loops have had.
    """

    def __init__(self) -> None:
        self.loaders: list[DataLoaderStateMixin] = []
        self.batches = 0

    @property
    def current(self) -> DataLoaderStateMixin | None:
        """The loader of the innermost running loop."""
        return self.loaders[-1] if self.loaders else None

    def enter(self, loader: DataLoaderStateMixin) -> None:
        """Add the loader of a loop that begins."""
        loader.loop = next(_LOOPS)
        self.loaders.append(loader)

    def leave(self, loader: DataLoaderStateMixin) -> None:
        """Remove the loader of a loop that has ended; loops may end in any order, not only innermost first."""
        newest = max((index for index, active in enumerate(self.loaders) if active is loader), default=None)
        if newest is not None:
            del self.loaders[newest]


RUNNING = ActiveLoaders()


@dataclass
class _Seen:
    """A loop as seen by the micro-batches so far.

    Attributes:
        position: the loop's position at the last micro-batch that had a batch of the loop.
        ahead: batches that the loop had fetched by then, beyond that micro-batch's own.
        rests: micro-batches in a row since then without a batch of the loop.
        encloses: whether the loop turned out to be around another loop, whose batches make the micro-batches.
    """

    position: int = -1
    ahead: int = 0
    rests: int = 0
    encloses: bool = False


_UNSEEN = _Seen()  # for loops that no micro-batch has seen; no code changes this object


class LoaderProgress:
    """The position of a window's micro-batches in the running loops over prepared loaders.

    One loop, the leader, ends windows. If several loaders are iterated side by side, for example a short one that is
    restarted alongside a long one, the longest leads; with unknown or equal lengths, the first one begun. A loop around
    another loop never leads.

    Args:
        ends_windows: whether a loader's end ends a window at all.
        running: the loops of this process.

    Attributes:
        is_own: whether the last micro-batch has its own batch of some loop, or no loop could give it one.
    """

    def __init__(self, *, ends_windows: bool = True, running: ActiveLoaders = RUNNING) -> None:
        self.is_own = True
        self._running = running
        self._ends_windows = ends_windows
        # By the loop's number. A loop that already runs is around the coming loops, or an error has left it and its
        # traceback keeps it alive.
        self._seen = {loader.loop: _Seen(loader.position, encloses=True) for loader in running.loaders}
        self._leader: DataLoaderStateMixin | None = None  # at the last micro-batch
        # Whether the leader's loop fetches several batches, then computes them all. Otherwise it may skip them.
        self._fetches_ahead = False
        self._dropped = 0  # dropped micro-batches; the loop may compute them again without fetching new batches
        self._was_left = False  # whether the leader's loop has begun again since the previous micro-batch
        self._side_by_side = 0  # micro-batches in a row in which the running loops have different lengths

    @property
    def is_running(self) -> bool:
        """Whether a prepared loader whose end ends windows is being iterated."""
        return self._find_leader() is not None

    @property
    def left(self) -> int | None:
        """Micro-batches of the epoch after the current one; None if unknown.

        The number is also unknown in the first window of a loop that fetches several batches before it computes them,
        because the loop may also skip them.
        """
        leader = self._find_leader()
        ahead = 0 if leader is None else self._of(leader).ahead
        if leader is None or (ahead and not self._fetches_ahead):
            return None
        left = leader.batches_left
        return None if left is None else ahead + left

    @property
    def is_last(self) -> bool:
        """Whether the current micro-batch is the last one of the epoch."""
        leader = self._find_leader()
        return leader is not None and leader.end_of_dataloader and not (self._fetches_ahead and self._of(leader).ahead)

    @property
    def next_is_last(self) -> bool:
        """Whether the next micro-batch, whose batch was already fetched, is the epoch's last; before it is counted."""
        leader = self._find_leader()
        return leader is not None and leader.end_of_dataloader and not all(self._look_ahead(leader))

    def advance(self, *, accumulates: bool) -> None:
        """Advance to the next micro-batch.

        Args:
            accumulates: whether a window has several micro-batches; only then its end matters.
        """
        loaders, leader = self._running.loaders, self._find_leader()
        self._was_left = leader is not None and leader is self._leader and leader.loop not in self._seen
        if leader is not None:
            self._fetches_ahead = self._look_ahead(leader)[1]
            self._leader = leader
        before, self._seen = self._seen, {}
        all_enclose = True
        for loader in loaders:
            loader.trains = True
            seen = self._seen[loader.loop] = before.get(loader.loop) or _Seen()
            all_enclose = all_enclose and seen.encloses
        self.is_own = self._dropped > 0 or all_enclose
        self._dropped = max(0, self._dropped - 1)
        for loader in loaders:
            seen = self._seen[loader.loop]
            if loader.position == seen.position + 1 and not seen.ahead:  # most loops: a micro-batch for each batch
                seen.position, seen.rests, self.is_own = loader.position, 0, True
            elif loader.position > seen.position or seen.ahead:
                seen.ahead, _ = self._look_ahead(loader)
                seen.position, seen.rests, self.is_own = loader.position, 0, True
            else:
                seen.rests += 1
                seen.encloses = seen.encloses or seen.rests >= _ENCLOSING
        if accumulates and self._ends_windows and len(loaders) > 1:
            self._warn_of_others(self._beside(loaders))

    def repeat(self, micro_batches: int) -> None:
        """Note dropped micro-batches: the loop may compute them again without fetching new batches."""
        self._dropped += micro_batches

    def warn_if_left(self, micro_batches: int, size: int) -> None:
        """Warn once if the loop has left an epoch inside a window, after `micro_batches` of its `size`."""
        if self._was_left and once(self, "left"):
            announce(
                f"an epoch was left after {micro_batches} of the {size} micro-batches of an accumulation "
                "window (by break, or zipped with a shorter loader): the window continues in the next epoch"
            )

    def _of(self, loader: DataLoaderStateMixin) -> _Seen:
        return self._seen.get(loader.loop) or _UNSEEN

    def _look_ahead(self, loader: DataLoaderStateMixin) -> tuple[int, bool]:
        """Return how many batches were fetched beyond the next micro-batch's, and whether the loop will compute them.

        If a loop fetches a window's batches before it computes them, the position jumps, and then does not change for
        some micro-batches. If it keeps jumping, the loop skips batches.
        """
        seen = self._seen.get(loader.loop) or _UNSEEN
        fetched = loader.position - seen.position
        if fetched < 1:
            return max(0, seen.ahead - 1), seen.ahead > 0
        return fetched - 1, self._fetches_ahead and loader is self._leader and fetched > 1

    def _find_leader(self) -> DataLoaderStateMixin | None:
        """Return the loader whose epoch's end ends the window."""
        loaders = self._running.loaders
        if not self._ends_windows or not loaders:
            return None
        return loaders[0] if len(loaders) == 1 else self._lead(self._beside(loaders))

    def _beside(self, loaders: list[DataLoaderStateMixin]) -> list[DataLoaderStateMixin]:
        """Return the loaders that are iterated side by side: those whose loops enclose no other loop."""
        return [loader for loader in loaders if not self._of(loader).encloses] or loaders

    def _lead(self, loaders: list[DataLoaderStateMixin]) -> DataLoaderStateMixin:
        lengths = [loader.epoch_length for loader in loaders]
        known = [length for length in lengths if length is not None]
        return loaders[lengths.index(max(known))] if len(known) == len(lengths) else loaders[0]

    def _warn_of_others(self, loaders: list[DataLoaderStateMixin]) -> None:
        """Warn once if the loops that run side by side have different lengths."""
        lengths = {loader.epoch_length for loader in loaders}
        differ = len(loaders) > 1 and (len(lengths) > 1 or None in lengths)
        self._side_by_side = self._side_by_side + 1 if differ else 0
        if self._side_by_side >= _WARNED_AFTER and once(self, "side by side"):
            leader = self._lead(loaders)
            others = ", ".join(_describe(loader) for loader in loaders if loader is not leader)
            announce(
                f"several prepared loaders are iterated side by side: accumulation windows end with the epoch of "
                f"{_describe(leader)}, not with that of {others}"
            )


def _describe(loader: Any) -> str:
    length = loader.epoch_length
    data = type(getattr(loader, "dataset", loader)).__name__
    return f"the loader over {data} ({'of unknown length' if length is None else f'{length} batches'})"


class _Accumulating(Protocol):
    """The attributes of an `Accelerator` that `GradientState` shows."""

    sync_gradients: bool

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""


class GradientState:
    """The position of the newest `Accelerator` in its accumulation window and its data; instances share one state.

    Args:
        gradient_accumulation_plugin: the settings to show while no `Accelerator` exists.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None) -> None:
        self.__dict__ = self._shared_state
        if gradient_accumulation_plugin is not None or not self.initialized:
            plugin = gradient_accumulation_plugin
            self._shared_state["plugin_kwargs"] = {} if plugin is None else plugin.to_kwargs()
            self._shared_state.setdefault("_run", None)

    @property
    def initialized(self) -> bool:
        """Whether an instance or an `Accelerator` was created."""
        return "_run" in self._shared_state

    @property
    def _run(self) -> _Accumulating | None:
        shown = self._shared_state.get("_run")
        return None if shown is None else shown()  # a weak reference: the state keeps no `Accelerator` alive

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The accumulation settings that differ from their defaults."""
        return dict(self._shared_state.get("plugin_kwargs", {}))

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window: only then `optimizer.step()` acts; can be set.

        True while no `Accelerator` exists.
        """
        return True if self._run is None else self._run.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        if self._run is None:
            raise LoopError("GradientState().sync_gradients is set for an Accelerator, but none exists.")
        self._run.sync_gradients = ends

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set `sync_gradients`; loops written after transformers' Trainer call this."""
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plugin_kwargs.get("num_steps", 1) if self._run is None else self._run.gradient_accumulation_steps

    @property
    def adjust_scheduler(self) -> bool:
        """The value in the plugin; it has no effect."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether a loader's end closes the window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def is_xla_gradients_synced(self) -> bool:
        """False: gradients are averaged earlier, in `backward`."""
        return False

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader of the innermost running loop, or None."""
        return RUNNING.current

    @property
    def dataloader_references(self) -> list[Any]:
        """None, then the prepared loaders whose loops run, innermost last."""
        return [None, *RUNNING.loaders]

    @property
    def in_dataloader(self) -> bool:
        """Whether a loop over a prepared loader runs."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its loader."""
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last step of the active loader's epoch, over all processes; -1 if unknown."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @staticmethod
    def _reset_state() -> None:
        """Clear the state; the run continues."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
