"""Find a batch size that fits, and release memory."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from zero_plugin.errors import Foreign
from zero_plugin.loop.out_of_memory import is_out_of_memory
from zero_plugin.machine.hardware import clear_device_cache as clear_device_cache

_logger = logging.getLogger(__name__)

_TOO_LARGE = Foreign(r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\.")  # no algorithm for a batch of this size


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and clear the device's cache; `a, b = release_memory(a, b)` drops both references.

    Returns:
        A None for each object. An object's memory is freed when the caller has dropped its reference.
    """
    released: list[None] = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether GPU or CPU memory ran out, or cuDNN does not support a batch of this size."""
    return is_out_of_memory(exception) or _TOO_LARGE.find(exception) is not None


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate `function(batch_size, …)`: a call retries with smaller batches until memory is sufficient.

    A later call begins with the batch size that the last one ended with.

        @find_executable_batch_size(starting_batch_size=128)
        def train(batch_size, model): ...

        train(model)

    Args:
        function: its first parameter is the batch size; the caller does not pass this argument.
        starting_batch_size: the first batch size to try.
        reduce_batch_size_fn: returns the next batch size; by default nine tenths of the last, rounded down.

    Raises:
        TypeError: the caller passed the batch size.
        RuntimeError: not even a batch of one sample fits.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    name = getattr(function, "__name__", repr(function))
    batch_size = starting_batch_size
    parameters = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        if len(parameters) < len(args) + 1:
            call = ", ".join(f"{argument}={value!r}" for argument, value in zip(parameters[1:], args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{name}` as the first argument when called. The decorator "
                f"passes it; write `{name}({call})`"
            )
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # After the `except`: inside it, the traceback still keeps the frames and their tensors alive.
            clear_device_cache(garbage_collection=True)
            smaller = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(batch_size * 0.9)
            _logger.warning(f"{name}: memory is not sufficient for batch size {batch_size}; next is {smaller}")
            batch_size = smaller
        raise RuntimeError("No executable batch size found, reached zero.")

    return run
