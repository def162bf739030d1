"""The run that a folder's checkpoints belong to: its id, and their order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection
from pathlib import Path

from zero_plugin.checkpoint import folders
from zero_plugin.checkpoint.manifest import Manifest
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.config.run_files import keep_run, kept_run
from zero_plugin.distributed import collectives


class Lineages:
    """The run's id in each folder that it saves checkpoints into.

    The first launch creates the id; manifests hold it. Restarts by the launcher keep it, and a launch that resumes from
    the newest checkpoint of a run joins that run. A launch that resumes from an older checkpoint is a new run: it does
    not remove the newer checkpoints.
    """

    def __init__(self) -> None:
        self._runs: dict[Path, str] = {}
        self._orders: dict[tuple[Path, str], int] = {}  # newest, by folder and name; on the main process

    def known(self, folder: Path) -> str | None:
        """Return the id if this process, or an earlier attempt of its launch, has one in `folder`. Collective."""
        folder = folder.resolve()
        if folder not in self._runs:
            known = collectives.gather_values(kept_run(folder, os.environ))
            if (run := next(filter(None, known), None)) is None:  # a restarted machine may not know it: ask all
                return None
            self.join(folder, run)
        return self._runs[folder]

    def own(self, folder: Path) -> str:
        """Return the id; create it if none exists yet. Collective."""
        run = self.known(folder)
        if run is None:
            run = collectives.broadcast_value(secrets.token_hex(8))
            self.join(folder, run)
        return run

    def join(self, folder: Path, run: str) -> None:
        """Join a run's checkpoints in `folder`, now and after restarts; called on every process."""
        folder = folder.resolve()
        self._runs[folder] = run
        keep_run(folder, run, os.environ)

    def is_newest(self, path: Path, manifest: Manifest, damaged: Collection[Path]) -> bool:
        """Return whether a checkpoint is the newest complete one of its run. On the main process.

        A launch that resumes from the newest checkpoint continues its run.
        """
        run, number = manifest.about.get("run"), folders.split_number(path.name)
        if run is None or number is None:
            return False
        order = manifest.about.get("order")  # None if the name had no number when it was saved
        order = number[1] if order is None else order
        return not any(
            one.run == run and one.path not in damaged and one.order > order and find_damage(one.path) is None
            for one in folders.known_checkpoints(path.parent, number[0])
        )

    def next_order(self, target: Path) -> int | None:
        """Return the order of a new checkpoint among those with the same name; None without a number.

        On the main process. The order is the checkpoint's number, unless an earlier checkpoint has a larger one: a run
        may restart its step count.
        """
        number = folders.split_number(target.name)
        if number is None:
            return None
        key = target.parent.resolve(), number[0]
        if key not in self._orders:
            self._orders[key] = max((one.order for one in folders.known_checkpoints(*key)), default=-1)
        self._orders[key] = max(number[1], self._orders[key] + 1)
        return self._orders[key]
