"""SIGTERM is recorded while a training listens, and has its previous effect afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from zero_plugin.distributed.process_end import StopRequest, find_stop_handler, install_stop_handler


@pytest.fixture(autouse=True)
def handler() -> Iterator[Any]:
    """Return the current SIGTERM handler, and restore it after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield before
    signal.signal(signal.SIGTERM, before)


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_in_a_thread_the_launchers_note_is_used_and_given_back() -> None:
    """After the end of training no code reads the note, so the next SIGTERM must end the process."""
    install_stop_handler()
    note, request = find_stop_handler(), StopRequest()
    assert note is not None
    in_thread(request.listen)
    assert note.listened
    signal.raise_signal(signal.SIGTERM)
    assert request.received
    in_thread(request.forget)
    assert not note.listened


def test_in_the_main_thread(handler: Any) -> None:
    """The previous handler is restored."""
    request = StopRequest()
    request.listen()
    signal.raise_signal(signal.SIGTERM)
    assert request.received
    request.forget()
    assert signal.getsignal(signal.SIGTERM) == handler
