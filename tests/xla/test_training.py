"""The shared training script on XLA devices, against the same training by hand in plain torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytest.importorskip("torch_xla", reason="`make test-tpu` has torch_xla, in an environment of its own")

RunCase = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "case", ["one_device", "one_device_in_bf16", "placeholders", "two_replicas", "two_replicas_in_bf16"]
)
def test_training_is_that_of_plain_torch(case: str, run_case: RunCase) -> None:
    """Losses, norms, rates and weights agree. One device compiles nothing after the first epoch."""
    done = run_case(case)
    assert done.returncode == 0, done.stderr[-4000:]


def test_nothing_is_compiled_for_another_number_of_batches(run_case: RunCase) -> None:
    """Each batch of a window or an evaluation is a separate program, and clipping always runs, so nothing compiles."""
    done = run_case("other_lengths")
    assert done.returncode == 0, done.stderr[-4000:]


def test_what_a_script_does_beside_training(run_case: RunCase) -> None:
    """Evaluation gives each sample once, files load without XLA, seeds reach dropout, a NaN changes no weight."""
    done = run_case("evaluating_and_saving")
    assert done.returncode == 0, done.stderr[-4000:]


def test_copies_of_a_model(run_case: RunCase) -> None:
    """Training does not change a deep copy, and `torch.save(model)` writes it, without anything of torch_xla."""
    done = run_case("copying")
    assert done.returncode == 0, done.stderr[-4000:]


def test_gradients_that_are_not_averaged_are_seen(run_case: RunCase) -> None:
    """The comparison of two replicas fails if the all-reduce does nothing."""
    done = run_case("two_replicas_without_all_reduce")
    assert done.returncode == 1
    assert "AssertionError: {'losses'" in done.stderr, done.stderr[-4000:]
