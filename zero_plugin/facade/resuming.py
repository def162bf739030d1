"""What a script calls to be stopped and started again: go on from the newest checkpoint, notice a request to stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from zero_plugin import collectives
from zero_plugin.agreement import collective
from zero_plugin.checkpoint.background import BackgroundWriter
from zero_plugin.checkpoint.folders import choose_checkpoint, numbered_checkpoints
from zero_plugin.checkpoint.load import LoadReport
from zero_plugin.checkpoint.manifest import MANIFEST_NAME
from zero_plugin.checkpoint.together import on_main
from zero_plugin.config.attempt import AGAIN_VARIABLE, LAUNCHED_VARIABLE
from zero_plugin.config.document import Document
from zero_plugin.config.launch_settings import launch_settings
from zero_plugin.facade.stop_request import StopRequest

__all__ = ["ResumingCalls"]

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun, and by `zero-plugin launch`


class ResumingCalls:
    """The calls of the facade for runs that are interrupted."""

    document: Document
    _background: BackgroundWriter
    _cut: int
    _find_checkpoint: Callable[[str | os.PathLike[str] | None], Path]
    _go_on_from: Callable[..., LoadReport]
    _must_resume: bool
    _say: Callable[[str], None]
    _stop: StopRequest

    @collective("resume", meets=True)
    def resume(self, folder: str | os.PathLike[str] | None = None) -> LoadReport | None:
        """Go on from the newest complete checkpoint, where this run is one that goes on; collective, after `prepare`.

        It is one after a restart by the launcher (`--max_restarts`, or for want of memory), and from the first start
        with `--auto_resume` (`auto_resume: true` in the config). Without that, what a launch before has saved is not
        loaded, and a line says which checkpoint.

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
        restarted = int(os.environ.get(_RESTARTS, "0")) > 0 or AGAIN_VARIABLE in os.environ or self._cut > 1
        # A machine that has come back counts no restart, and began later: one that does decides for all.
        told = collectives.gather_object([(restarted, float(os.environ.get(LAUNCHED_VARIABLE, "0")))])
        restarted, began = any(again for again, _ in told), min(began for _, began in told)
        place = on_main(lambda: self._find_checkpoint(folder))
        found = on_main(lambda: choose_checkpoint(place) if _has_checkpoints(place) else None)
        self._must_resume = False
        if found is None:
            self._say(f"resume(): no checkpoint in {place} yet; the run begins anew")
            return None
        own = restarted and on_main(lambda: (found[0] / MANIFEST_NAME).stat().st_mtime >= began)
        if not (own or launch_settings(self.document).auto_resume):
            why = "it is of a launch before" if restarted else "the launcher has not restarted it"
            self._say(
                f"resume(): {found[0]} is not loaded and the run begins anew, since {why}. "
                "--auto_resume goes on from there."
            )
            return None
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


def _has_checkpoints(place: Path) -> bool:
    """Whether there is one, complete or not; what is left of a save that never ended is none."""
    return (place / MANIFEST_NAME).exists() or bool(numbered_checkpoints(place))
