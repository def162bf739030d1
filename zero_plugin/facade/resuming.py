"""What a script calls to be stopped and started again: go on from the newest checkpoint, notice a request to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.folders import Lineages, choose_checkpoint, has_checkpoints
from zero_plugin.checkpoint.load import LoadReport
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, read_manifest
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.distributed import collectives
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.stop_request import StopRequest
from zero_plugin.distributed.together import on_main


class ResumingCalls:
    """The calls of the facade for runs that are interrupted."""

    document: Document
    _background: BackgroundWriter
    _find_checkpoint: Callable[[str | os.PathLike[str] | None], Path]
    _go_on_from: Callable[..., LoadReport]
    _lineages: Lineages
    _must_resume: bool
    _say: Callable[[str], None]
    _stop: StopRequest

    @collective("resume", meets=True)
    def resume(self, folder: str | os.PathLike[str] | None = None) -> LoadReport | None:
        """Go on from the newest complete checkpoint, where this run is one that goes on; collective, after `prepare`.

        It is one after a restart by the launcher (`--max_restarts`, or for want of memory), where only what this run
        has saved counts, and from the first start with `--auto_resume` (`auto_resume: true` in the config), where the
        newest one counts, whose run this launch joins. Without that, what a launch before has saved is not loaded, and
        a line says which checkpoint.

        The loaders go on inside the interrupted epoch by themselves:

            resumed = accelerator.resume()
            for epoch in range(resumed.epochs[0] if resumed else 0, epochs):
                for batch in loader:
                    ...

        Args:
            folder: holds `checkpoint_<number>`s, or is one; absent: that of `project_dir/checkpoints`, where naming is
                automatic.

        Returns:
            What was restored; None where the run begins anew: it does not go on, or no checkpoint is there yet.

        Raises:
            CheckpointError: the checkpoints that are there are all damaged, or do not fit; training is not begun anew.
        """
        self._background.wait()
        place = on_main(lambda: self._find_checkpoint(folder))
        is_one = on_main(lambda: (place / MANIFEST_NAME).exists())
        run = self._lineages.known(place.parent if is_one else place)
        only = None if is_one else run
        found = on_main(lambda: choose_checkpoint(place, only) if has_checkpoints(place, only) else None)
        self._must_resume = False
        if found is None:
            whose = "" if run is None else " of this run"
            self._say(f"resume(): no checkpoint{whose} in {place} yet; the run begins anew")
            self._lineages.own(place)
            return None
        saved_by = on_main(lambda: read_manifest(found[0]).about.get("run"))
        is_own = run is not None and saved_by == run
        named = saved_by or "not recorded"
        if not is_own and not launch_settings(self.document).auto_resume:
            self._say(
                f"resume(): {found[0]} is not loaded and the run begins anew, since it is of a launch before (run "
                f"{named}). --auto_resume goes on from there."
            )
            self._lineages.own(found[0].parent)
            return None
        if not is_own:
            self._say(f"resume(): {found[0]} is what this run goes on from; it is of run {named}")
        return self._go_on_from(*found, loaders_go_on=True)

    @collective("stop_requested")
    def stop_requested(self) -> bool:
        """Whether some process was asked to stop by SIGTERM, as schedulers do; the same on every process; collective.

        From the first call on SIGTERM does not end this process: the loop has to ask after each step, save and end.
        The launcher waits `--grace_period` seconds for that, and returns 143.

            if accelerator.stop_requested():
                accelerator.save_state()
                break

        Raises:
            LoopError: it is first called outside of the main thread, where no signal can be waited for.
        """
        self._stop.listen()
        return collectives.start_sum([int(self._stop.received)])()[0] > 0
