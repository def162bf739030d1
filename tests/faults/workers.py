"""The worker processes of a launch that a test disturbs."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_plugin.machine.hardware import port_is_free

BOUND_S = 120  # of any run, from the fault on; the group's time-out and the time to stop are seconds


@dataclass
class Workers:
    """The worker processes of a launch, found by a mark on their command lines."""

    mark: str

    def find(self) -> dict[int, tuple[int, dict[str, str]]]:
        """By rank: process id and environment; without the launcher, and without what has ended."""
        own = [
            entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and self.mark in read(entry / "cmdline")
        ]
        found = {}
        for entry in own:
            words = read(entry / "environ").split("\0")
            environment = dict(word.partition("=")[::2] for word in words)
            if "RANK" in environment:
                found[int(environment["RANK"])] = int(entry.name), environment
        return found

    def wait_for(self, count: int, launcher: Any = None) -> dict[int, tuple[int, dict[str, str]]]:
        """All of them, as soon as they are there; or those that are when `launcher` has ended."""
        deadline = time.monotonic() + BOUND_S
        while len(found := self.find()) < count and (launcher is None or launcher.poll() is None):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found


def read(file: Path) -> str:
    """Of a process; "" where it has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def finish(launcher: subprocess.Popen[str], workers: Workers, ports: set[int]) -> str:
    """Wait for the end, within the bound; no process and no port is left then. What was printed to stderr."""
    _, errors = launcher.communicate(timeout=BOUND_S)
    assert workers.find() == {}, errors
    assert [port for port in ports if not port_is_free(port)] == []
    return errors
