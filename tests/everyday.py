"""Which checks run every day where each is for many paths; `make campaign` runs the others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest

# Their code differs most. The others are these with more of the same: another stage, or an offload.
EVERY_DAY = ("single", "ddp", "zero2", "zero3", "zero3-gathered")
FURTHER = (
    "zero0",
    "zero1",
    "zero1-cpu",
    "zero2-cpu",
    "zero2-one-process",
    "zero3-cpu",
    "zero3-cpu-optimizer",
    "zero3-nvme",
)
# Of what a further path alone does, and no other daily check is known to notice.
OF_ITS_OWN = {
    "dropped_gradients_of_what_sits_out": ("zero1-cpu", "zero2-cpu"),
    "a_step_that_is_not_finite_is_skipped": ("zero0", "zero2-cpu"),
    "steps-at-the-end": ("zero2-cpu",),  # of two models, one frozen for the other's loss
    "accumulate-stream-short-window": ("zero0", "zero1", "zero2-cpu"),  # rescaled: the window was shorter
    "bf16-accumulate-stream": ("zero1",),
    "bf16": ("zero0",),
    "branch-single-steps": ("zero2-cpu",),
}
PATHS = sorted((*EVERY_DAY, *FURTHER), key=len, reverse=True)


def split_path(name: str) -> tuple[str, str]:
    """`zero2-cpu-clips` → (`zero2-cpu`, `clips`); a check that is for no path in particular has "" there."""
    path = next((path for path in PATHS if name.startswith(f"{path}-")), "")
    return path, name.removeprefix(f"{path}-")


def campaign_unless_daily(path: str, check: str, paths: Iterable[str]) -> list[pytest.MarkDecorator]:
    """The marks of `check` on `path`: daily on each of `EVERY_DAY`, on one of its further paths, in turn, and its own.

    Args:
        path: "" for a check without one.
        check: its name decides which further path it is.
        paths: all that the check is for.
    """
    further = sorted(set(paths) & set(FURTHER))
    if path not in further or path in OF_ITS_OWN.get(check, ()):
        return []
    turn = further[zlib.crc32(check.encode()) % len(further)]
    return [] if path == turn else [pytest.mark.campaign]


def marks_of(names: Iterable[str]) -> dict[str, list[pytest.MarkDecorator]]:
    """The marks of checks that are named `PATH-CHECK`."""
    split = {name: split_path(name) for name in names}
    paths: dict[str, list[str]] = {}
    for path, check in split.values():
        paths.setdefault(check, []).append(path)
    return {name: campaign_unless_daily(path, check, paths[check]) for name, (path, check) in split.items()}
