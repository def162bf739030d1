"""`ResumePoint`: where a loader's loop is, what a checkpoint keeps of that, and where the coming loop begins."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from zero_plugin.data.active import RUNNING
from zero_plugin.data.batch_sampler import BatchSamplerShard, drawing_part
from zero_plugin.data.epochs import Epochs
from zero_plugin.data.stream import StreamShard
from zero_plugin.distributed.seeding import Draws, generator_of


class ResumePoint:
    """Where the running epoch is, or was last. A loader and its copies that skip batches share it.

    Args:
        base: the DataLoader that is read.
        epochs: the loader's.
        shard: the batch sampler that divides map-style data; None for other data.
        outer: the user's batch sampler.
        total_batch_size: samples per step over all processes; None if batches have no common size.

    Attributes:
        batches: number that the loop has had, with the skipped ones.
        is_end: whether these are all.
        loaded: the state that the coming loop begins with; None if none was loaded since the last loop began.
        is_seeded: whether the seed of the coming iterator's workers was drawn before that state was saved.
    """

    def __init__(
        self,
        base: DataLoader[Any],
        epochs: Epochs,
        shard: BatchSamplerShard | None,
        outer: Any,
        total_batch_size: int | None,
    ) -> None:
        self.batches = 0
        self.is_end = False
        self.loaded: dict[str, Any] | None = None
        self.is_seeded = False
        self._base, self._epochs, self._shard, self._outer = base, epochs, shard, outer
        self._total_batch_size = total_batch_size
        self._resumed = 0  # batches that the coming loop skips, since it resumes
        self._loop = 0  # number of the newest loop
        self._trains = False  # whether that loop computed gradients; known when it was left
        self._left_at: int | None = None  # how many batches all loops of this process had had then; None before

    @property
    def generators(self) -> list[torch.Generator | None]:
        """The script's own generators: the one that seeds workers, and the sampler's; None for one it does not have."""
        return [self._base.generator, generator_of(drawing_part(self._outer))]

    @property
    def was_given_up(self) -> bool:
        """Whether the newest loop was left by `break` and will not continue.

        True for the loop of an evaluation, for one since which other loops have had batches, and if the script has set
        another epoch since. A training that has just been left inside an epoch may have been asked to stop.
        """
        is_newest = RUNNING.batches == self._left_at and self._epochs.chosen is None
        return self._left_at is not None and not (self._trains and is_newest)

    @property
    def was_left_inside(self) -> bool:
        """Whether the newest loop was left by `break` and may continue."""
        return self._left_at is not None and not self.is_end and not self.was_given_up

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def begin(self, skip: int) -> int:
        """Begin the coming loop's epoch, and return how many batches the loop skips.

        Args:
            skip: batches that the loader always skips.
        """
        loaded = self.loaded
        if loaded is not None and loaded.get("is_last") and not loaded["_iterator_finished"]:
            # At the last batch a script that counts for itself may be through with the epoch, or skip all of it.
            is_through = max(skip, self._resumed) < self.batches_had(loaded)
            if is_through or self._epochs.chosen != loaded["epoch"]:
                self._pass_over(loaded["epoch"])
        resumed, self._resumed = self._resumed, 0
        return max(skip, resumed)

    def enter(self, first: int, loop: int) -> None:
        """Note that a loop begins.

        Args:
            first: batches that it skips.
            loop: its number.
        """
        self.batches, self.is_end, self.loaded = first, False, None
        self._loop, self._left_at = loop, None

    def leave(self, loop: int, *, trains: bool) -> None:
        """Note that a loop has ended, unless a newer one has begun.

        Args:
            loop: its number.
            trains: whether it computed gradients.
        """
        if self._loop == loop:
            self._trains, self._left_at = trains, RUNNING.batches

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return where the loop is, for `load_state_dict`.

        The order of the samples is kept, as long as the sampler draws it with torch's or with global generators: all of
        it before its first batch, or with one that nothing else draws from. Random numbers that the dataset draws while
        it is read are not kept.

        Args:
            is_over: whether the next epoch comes next, though this one was left before its end.
        """
        is_over = is_over or (self.is_end and self._left_at is not None)
        if self.loaded is not None:
            return dict(self.loaded)
        draws = None if self._shard is None else self._shard.draws
        chosen = self._epochs.chosen
        return {
            "epoch": self._epochs.current if not is_over or chosen is None else chosen - 1,
            "batches": self.batches,
            "total_batch_size": self._total_batch_size,
            "draws": None if draws is None else draws._asdict(),
            "generators": [None if own is None else own.get_state() for own in self.generators],
            "is_last": self.is_end,
            "_iterator_finished": is_over,
        }

    def load_state_dict(self, state_dict: dict[str, Any], *, skip: bool = True) -> None:
        """Resume, in the coming loop, where the loop was that `state_dict` was called in.

        With another number of processes, it is the same sample; if that is within a batch, the batch is read again.

        Args:
            state_dict: from `state_dict`.
            skip: whether to leave out the batches that the loop has had; otherwise the script does, with
                `skip_first_batches`.
        """
        shard, epoch = self._shard, state_dict["epoch"]
        self.loaded, self._resumed, self.is_seeded = None, 0, False
        # Older checkpoints have neither these states nor `is_last`.
        for own, then in zip(self.generators, state_dict.get("generators", ()), strict=False):
            if own is not None and then is not None:
                own.set_state(then)
        draws = None if state_dict["draws"] is None else Draws(**state_dict["draws"])
        if shard is not None:
            shard.resumed = None
        if epoch < 0:
            return
        self.loaded = state_dict
        self._epochs.choose(epoch, by_loop=False)
        if state_dict["_iterator_finished"]:
            self._pass_over(epoch)
            return
        self._resumed = self.batches_had(state_dict) if skip else 0
        self.is_seeded = True
        if shard is not None:
            shard.resumed = draws

    def batches_had(self, state_dict: dict[str, Any]) -> int:
        """Return how many batches of this loader the interrupted epoch has had, which may have had another size."""
        if state_dict["_iterator_finished"]:
            return 0
        batches, then = int(state_dict["batches"]), state_dict["total_batch_size"]
        now = self._total_batch_size
        return batches if then is None or now is None else batches * then // now

    def _pass_over(self, epoch: int) -> None:
        """Have the coming loop begin the next epoch, or the one that the script has set since."""
        if self._epochs.chosen == epoch:
            self._epochs.choose(epoch + 1, by_loop=False)
        if self._shard is not None:
            self._shard.end_resumed()
        # Lasting workers get one seed, in the first epoch, unless each epoch has new ones.
        dataset = self._base.dataset
        has_new = not isinstance(dataset, StreamShard) and self._epochs.of(dataset) is not None
        self.is_seeded = self._base.persistent_workers and not has_new
