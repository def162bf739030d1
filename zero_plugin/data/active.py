"""Which loaders' loops are running in this process, and which of them ends accumulation windows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Protocol

from zero_plugin.distributed.collectives import announce
from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError

_LOOPS = count(1)
_WARNED_AFTER = 3  # micro-batches, when it is known which loops run side by side
_ENCLOSING = 2  # micro-batches in a row that had none of a loop's batches: it is around another loop


class DataLoaderStateMixin:
    """What a loader tells of the loop that runs over it.

    Attributes:
        batch_size: samples per process and batch; None where batches have no common size.
        end_of_dataloader: whether the current batch is the epoch's last, on all processes.
        remainder: samples in the epoch's last step, over all processes, known at that step at the latest; 0 may
            mean a full one, -1 for one that is not known or, where it is incomplete, is left out.
        position: index of the current batch in the loop; -1 before the first.
        batches_left: batches to come in this epoch after the current one; None where that is not known.
        batch_samples: samples in the current batch, repeated ones included; None where nobody counts.
        real_samples: samples, from the front of the current batch, that are not repeats; None for all.
        repeats_unseen: name of what shares the samples and may repeat some; None where repeats are known.
        epoch_length: batches of a complete epoch; None if it is not known.
        loop: number of the loop that runs, or ran last.
        trains: whether a micro-batch of a training was computed in it.
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
        """Batches to come in this epoch after the current one; None where that is not known before the last one."""
        return 0 if self.end_of_dataloader else None

    def reset(self) -> None:
        """No batch of an epoch was seen."""
        self.end_of_dataloader, self.position = False, -1
        loader: Any = self
        try:
            self.remainder = -1 if loader.drop_last else loader.total_dataset_length % loader.total_batch_size
        except (AttributeError, TypeError):  # a stream, or batches of no common size
            self.remainder = -1

    def begin(self) -> None:
        """A loop over the loader begins."""
        self.trains = False
        self.reset()
        RUNNING.enter(self)

    def end(self) -> None:
        """A loop over the loader has ended."""
        RUNNING.leave(self)


class ActiveLoaders:
    """The loaders whose loops are running, innermost last.

    Attributes:
        loaders: them.
        batches: that all loops have had.
    """

    def __init__(self) -> None:
        self.loaders: list[DataLoaderStateMixin] = []
        self.batches = 0

    @property
    def current(self) -> DataLoaderStateMixin | None:
        """The loader of the innermost running loop."""
        return self.loaders[-1] if self.loaders else None

    def enter(self, loader: DataLoaderStateMixin) -> None:
        """A loop over `loader` begins."""
        loader.loop = next(_LOOPS)
        self.loaders.append(loader)

    def leave(self, loader: DataLoaderStateMixin) -> None:
        """A loop over `loader` has ended; loops need not end in the order of their nesting."""
        newest = max((index for index, active in enumerate(self.loaders) if active is loader), default=None)
        if newest is not None:
            del self.loaders[newest]


RUNNING = ActiveLoaders()


@dataclass
class _Seen:
    """What the micro-batches of a window have had of a loop.

    Attributes:
        position: of the loop's last batch, at the last micro-batch.
        ahead: batches that the loop had fetched then beyond the one of that micro-batch.
        rests: micro-batches in a row since then that had none of it.
        encloses: whether the loop proved to be around another one, whose batches make the micro-batches.
    """

    position: int = -1
    ahead: int = 0
    rests: int = 0
    encloses: bool = False


_UNSEEN = _Seen()  # of a loop that no micro-batch has seen; no code changes it


class LoaderProgress:
    """Where a window's micro-batches are in the running loops over prepared loaders, of which one ends windows.

    Where several loaders are iterated side by side, as a short one that is begun again and again beside a long one, it
    is the longest; with unknown or equal lengths the one begun first. A loop around another one is left out.

    Args:
        ends_windows: whether a loader's end ends a window at all.
        running: the loops of this process.

    Attributes:
        is_own: whether the last micro-batch has its own batch of some loop, or there is none to have one of.
    """

    def __init__(self, *, ends_windows: bool = True, running: ActiveLoaders = RUNNING) -> None:
        self.is_own = True
        self._running = running
        self._ends_windows = ends_windows
        # By the loop's number. One that runs already is around what is to come, or was left by an error whose traceback
        # keeps it alive.
        self._seen = {loader.loop: _Seen(loader.position, encloses=True) for loader in running.loaders}
        self._leader: DataLoaderStateMixin | None = None  # at the last micro-batch
        self._fetches_ahead = False  # whether its loop is known to compute what it fetches ahead, not to skip it
        self._dropped = 0  # dropped micro-batches, which the loop may compute again without fetching others
        self._was_left = False  # whether the leader's loop has begun again since the micro-batch before
        self._side_by_side = 0  # micro-batches in a row of loops that end at different ones

    @property
    def is_running(self) -> bool:
        """Whether a prepared loader whose end ends windows is being iterated."""
        return self._find_leader() is not None

    @property
    def left(self) -> int | None:
        """Micro-batches of the epoch after the current one; None if that is not known.

        It is not known either in the first window of a loop that fetches several batches before it computes them,
        since the loop may also skip them.
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
        """`is_last` of the next micro-batch, whose batch was fetched, before it is counted."""
        leader = self._find_leader()
        return leader is not None and leader.end_of_dataloader and not all(self._look_ahead(leader))

    def advance(self, *, accumulates: bool) -> None:
        """Go on to the next micro-batch.

        Args:
            accumulates: whether a window has several micro-batches, so that their ends matter.
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
        """So many micro-batches were dropped, and may be computed again without fetching others."""
        self._dropped += micro_batches

    def warn_if_left(self, micro_batches: int, size: int) -> None:
        """Warn once if the loop has left an epoch inside a window, after so many of its micro-batches."""
        if self._was_left and once(self, "left"):
            announce(
                f"an epoch was left after {micro_batches} of the {size} micro-batches of an accumulation "
                "window (by break, or zipped with a shorter loader): the window continues in the next epoch"
            )

    def _of(self, loader: DataLoaderStateMixin) -> _Seen:
        return self._seen.get(loader.loop) or _UNSEEN

    def _look_ahead(self, loader: DataLoaderStateMixin) -> tuple[int, bool]:
        """The number of batches fetched beyond that of the next micro-batch, and whether they will be computed.

        If a loop fetches a window's batches before it computes them, the position jumps, and then does not change for
        some micro-batches. If it keeps jumping, the loop skips batches.
        """
        seen = self._seen.get(loader.loop) or _UNSEEN
        fetched = loader.position - seen.position
        if fetched < 1:
            return max(0, seen.ahead - 1), seen.ahead > 0
        return fetched - 1, self._fetches_ahead and loader is self._leader and fetched > 1

    def _find_leader(self) -> DataLoaderStateMixin | None:
        """The loader whose epoch's end ends the window."""
        loaders = self._running.loaders
        if not self._ends_windows or not loaders:
            return None
        return loaders[0] if len(loaders) == 1 else self._lead(self._beside(loaders))

    def _beside(self, loaders: list[DataLoaderStateMixin]) -> list[DataLoaderStateMixin]:
        """The loaders that are iterated together: without those in whose loop another one is iterated."""
        return [loader for loader in loaders if not self._of(loader).encloses] or loaders

    def _lead(self, loaders: list[DataLoaderStateMixin]) -> DataLoaderStateMixin:
        lengths = [loader.epoch_length for loader in loaders]
        known = [length for length in lengths if length is not None]
        return loaders[lengths.index(max(known))] if len(known) == len(lengths) else loaders[0]

    def _warn_of_others(self, loaders: list[DataLoaderStateMixin]) -> None:
        """Once, where the loops that run side by side end at different batches."""
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
    """What `GradientState` shows of an `Accelerator`."""

    sync_gradients: bool

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""


class GradientState:
    """Where the newest `Accelerator` is in its accumulation and its data; every instance is the same one.

    Args:
        gradient_accumulation_plugin: what to show while there is no `Accelerator`.
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
        """Whether there has been an instance, or an `Accelerator`."""
        return "_run" in self._shared_state

    @property
    def _run(self) -> _Accumulating | None:
        shown = self._shared_state.get("_run")
        return None if shown is None else shown()  # the state does not keep it

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """What was configured of accumulation, as far as it differs from the defaults."""
        return dict(self._shared_state.get("plugin_kwargs", {}))

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window, so that `optimizer.step()` acts; can be set.

        True while there is no `Accelerator`.
        """
        return True if self._run is None else self._run.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, ends: bool) -> None:
        if self._run is None:
            raise LoopError("GradientState().sync_gradients is set for an Accelerator, and there is none.")
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
        """False: what an optimizer steps with is averaged before, in `backward`."""
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
        """Whether the current batch is its loader's last."""
        return self.in_dataloader and bool(self.active_dataloader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last step of the active loader's epoch, over all processes; -1 where that is not known."""
        return int(self.active_dataloader.remainder) if self.in_dataloader else -1

    @staticmethod
    def _reset_state() -> None:
        """Forget what is shown; the run goes on."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\n"
            f"At end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
            f"Gradient accumulation plugin: {self.plugin_kwargs}\n"
        )
