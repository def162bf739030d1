"""Requests that XLA devices cannot fulfil are errors, or are replaced with a warning."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytest.importorskip("torch_xla", reason="`make test-tpu` has torch_xla, in an environment of its own")


def test_parameters_that_sit_out_and_what_is_dropped(
    run_case: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Unused parameters are named, or averaged if used elsewhere. A ZeRO stage is dropped with a warning."""
    done = run_case("sitting_out")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ZeRO stage 3 dropped" in done.stderr


def test_a_backward_before_the_runtime(run_case: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """An early backward is refused where processes start, since torch would crash in the first one on the device."""
    done = run_case("starting_late")
    assert done.returncode == 0, done.stderr[-4000:]


def test_without_zero_and_without_room(run_case: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Dropping ZeRO is refused, with both numbers, if each device would have to hold more than its memory."""
    done = run_case("without_room")
    assert done.returncode == 0, done.stderr[-4000:]
