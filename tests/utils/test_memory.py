"""The search for a batch size that fits stops at the first fit, and other errors are raised."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch

from zero_plugin.machine.hardware import clear_device_cache
from zero_plugin.utils.memory import find_executable_batch_size, release_memory, should_reduce_batch_size

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_nine_tenths_until_it_fits(caplog: pytest.LogCaptureFixture) -> None:
    """The batch shrinks by a tenth at each failure, which is logged. Arguments and result are passed through."""
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int, word: str, *, times: int = 1) -> str:
        tried.append(batch_size)
        if batch_size > 10:
            raise RuntimeError(OUT)
        return word * times

    with caplog.at_level(logging.WARNING):
        assert train("ab", times=2) == "abab"
    assert tried == [16, 14, 12, 10]
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == ["14", "12", "10"]
    assert train.__name__ == "train"
    train("ab")
    assert tried[4:] == [10]


def test_the_users_own_reduction() -> None:
    """A function without arguments gives each next batch size. The decorator can be called directly."""
    sizes = iter([7, 3])
    tried = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 3:
            raise torch.OutOfMemoryError("no memory")
        return batch_size

    assert find_executable_batch_size(train, 64, reduce_batch_size_fn=lambda: next(sizes))() == 3
    assert tried == [64, 7, 3]


def test_what_a_failed_attempt_held_is_free_at_the_next() -> None:
    """The failure's traceback, and the tensors of its frames, are freed before the next attempt."""
    held: list[weakref.ref[torch.Tensor]] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> bool:
        if held:
            return held[0]() is None
        tensor = torch.ones(batch_size)
        held.append(weakref.ref(tensor))
        raise RuntimeError(OUT)

    assert train() is True


@pytest.mark.parametrize("start", [0, 3])
def test_nothing_fits(start: int) -> None:
    """The search ends at a batch of zero samples."""

    @find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> None:
        raise RuntimeError(OUT)

    with pytest.raises(RuntimeError, match=r"^No executable batch size found, reached zero\.$"):
        train()


def test_the_batch_size_is_not_the_callers() -> None:
    """A caller that passes the batch size gets the right call in the error."""

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, model: str, steps: int) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match=r"Batch size was passed into `train` .*`train\(model='m', steps=2\)`"):
        train(4, "m", 2)


def test_other_errors_pass() -> None:
    """An error that is not about memory ends the search."""

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise ValueError(f"at {batch_size}")

    with pytest.raises(ValueError, match="at 128"):
        train()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(OUT), True),
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError(OUT), False),
    ],
)
def test_which_errors_are_about_memory(error: Exception, expected: bool) -> None:
    """Only runtime errors of device allocators and cuDNN are about memory."""
    assert should_reduce_batch_size(error) is expected


def test_the_cpus_own_error_is_recognised() -> None:
    """torch's error for a tensor larger than any machine leads to a smaller batch."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


def test_releasing() -> None:
    """Objects without other references are freed, also in cycles. Each returns a None."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    a, b = Cycle(), torch.ones(3)
    gone = weakref.ref(a)
    a, b = release_memory(a, b)
    assert (a, b) == (None, None)
    del a
    clear_device_cache(garbage_collection=True)
    assert gone() is None
