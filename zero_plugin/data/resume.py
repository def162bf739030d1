"""`ResumePoint`: the position of a loader's loop, its state in a checkpoint, and the start of the next loop."""

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
    """The position in the running epoch, or in the last one. A loader and its copies that skip batches share it.

    Args:
        base: the DataLoader that is read.
        epochs: the epochs of the loader.
        shard: the batch sampler that divides map-style data; None for other data.
        outer: the user's batch sampler.
        total_batch_size: samples per step over all processes; None if batches have no common size.

    Attributes:
        batches: number of batches that the loop has had, including skipped ones.
        is_end: whether these are all batches of the epoch.
        loaded: the state that the next loop begins with; None if none was loaded since the last loop began.
        is_seeded: whether the seed of the next iterator's workers was already drawn when that state was saved.
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
        self._resumed = 0  # batches that the next loop skips because it resumes
        self._loop = 0  # number of the newest loop
        self._trains = False  # whether that loop computed gradients; known at its end
        self._left_at: int | None = None  # batches of all loops of this process when that loop ended; None before

    @property
    def generators(self) -> list[torch.Generator | None]:
        """The script's own generators: for workers' seeds, and the sampler's; None for each that does not exist."""
        return [self._base.generator, generator_of(drawing_part(self._outer))]

    @property
    def was_given_up(self) -> bool:
        """Whether the newest loop was left by `break` and will not continue.

        True for the loop of an evaluation, if other loops have had batches since, or if the script has set another
        epoch since. A training loop that has just left its epoch may continue: it may have had a stop request.
        """
        is_newest = RUNNING.batches == self._left_at and self._epochs.chosen is None
        return self._left_at is not None and not (self._trains and is_newest)

    @property
    def was_left_inside(self) -> bool:
        """Whether the newest loop was left by `break` and may continue."""
        return self._left_at is not None and not self.is_end and not self.was_given_up

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def begin(self, skip: int) -> int:
        """Begin the next loop's epoch, and return how many batches the loop skips.

        Args:
            skip: batches that the loader always skips.
        """
        loaded = self.loaded
        if loaded is not None and loaded.get("is_last") and not loaded["_iterator_finished"]:
            # The state is from the epoch's last batch. A script that counts itself may be done with that epoch, or skip
            # all its batches.
            is_through = max(skip, self._resumed) < self.batches_had(loaded)
            if is_through or self._epochs.chosen != loaded["epoch"]:
                self._pass_over(loaded["epoch"])
        resumed, self._resumed = self._resumed, 0
        return max(skip, resumed)

    def enter(self, first: int, loop: int) -> None:
        """Note that a loop begins.

        Args:
            first: batches that the loop skips.
            loop: the number of the loop.
        """
        self.batches, self.is_end, self.loaded = first, False, None
        self._loop, self._left_at = loop, None

    def leave(self, loop: int, *, trains: bool) -> None:
        """Note that a loop has ended, unless a newer one has begun.

        Args:
            loop: the number of the loop.
            trains: whether the loop computed gradients.
        """
        if self._loop == loop:
            self._trains, self._left_at = trains, RUNNING.batches

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self, *, is_over: bool = False) -> dict[str, Any]:
        """Return the position of the loop, for `load_state_dict`.

        The order of the samples is kept if the sampler draws with torch's own or with global generators: all of the
        order before its first batch, or from a generator that no other code uses. Random numbers that the dataset draws
        while it is read are not kept.

        Args:
            is_over: whether a resumed run begins the next epoch, although this one was left before its end.
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
        """Make the next loop resume at the position that `state_dict` has recorded.

        With another number of processes, the loop resumes at the same sample; if that is within a batch, the batch is
        read again.

        Args:
            state_dict: from `state_dict`.
            skip: whether to skip the batches that the loop has had. If False, the script skips them with
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
        """Return how many batches of this loader the interrupted epoch has had; a saved batch may have another size."""
        if state_dict["_iterator_finished"]:
            return 0
        batches, then = int(state_dict["batches"]), state_dict["total_batch_size"]
        now = self._total_batch_size
        return batches if then is None or now is None else batches * then // now

    def _pass_over(self, epoch: int) -> None:
        """Make the next loop begin the epoch after `epoch`, or the epoch that the script has set since."""
        if self._epochs.chosen == epoch:
            self._epochs.choose(epoch + 1, by_loop=False)
        if self._shard is not None:
            self._shard.end_resumed()
        # Persistent workers get one seed, in the first epoch, unless each epoch has new workers.
        dataset = self._base.dataset
        has_new = not isinstance(dataset, StreamShard) and self._epochs.of(dataset) is not None
        self.is_seeded = self._base.persistent_workers and not has_new
