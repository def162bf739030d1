"""A process that dies silently and without a launcher: the others end within seconds and name it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from launching import find_free_port, start_script, wait_for_ends

SCRIPT = Path(__file__).parent / "dies.py"
WORLD = 3
BOUND_S = 10.0  # on an idle machine
WAITED_S = 60.0

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

# In a loop and in a save. Process 0 holds the store. "prepare" is before the dying process's first tick. This death
# went unnoticed while a process published its id only at its first tick.
PLACES = {
    "prepare": 1,
    "forward": 2,
    "backward": 1,
    "step": 0,
    "gather": 0,
    "wait": 2,
    "save": 0,
    "file-1": 1,
    "background-1": 2,
    "weights": 0,
    "end": 1,
}


class Survivor(NamedTuple):
    """The end of another process: seconds after the death (None if killed by the test), exit code, and output."""

    seconds: float | None
    code: int | None
    output: str


def die(folder: Path, path: str, place: str, victim: int, seconds: int) -> list[Survivor]:
    """Start the processes, wait for the death, and return how the others end."""
    folder.mkdir()
    group = {"WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1"}
    group["MASTER_PORT"] = str(find_free_port())
    logs = [folder / f"{rank}.log" for rank in range(WORLD)]
    processes = []
    for rank, log in enumerate(logs):
        own = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = (path, place, folder / "project", victim, seconds)
        processes.append(start_script(SCRIPT, *arguments, log=log, variables=own))
    began = time.monotonic()
    ended = wait_for_ends(processes, lambda ended: time.monotonic() - ended.get(victim, began + 200) >= WAITED_S)
    outputs = [log.read_text() for log in logs]
    assert processes[victim].returncode == -signal.SIGKILL, outputs[victim]
    return [
        Survivor(ended[rank] - ended[victim] if rank in ended else None, processes[rank].returncode, outputs[rank])
        for rank in range(WORLD)
        if rank != victim
    ]


def cases() -> Iterator[object]:
    for path in ("zero2", "ddp", "zero3"):
        for place, usual in PLACES.items():
            for victim in range(WORLD):
                for seconds in (0, 2):
                    is_daily = path == "zero2" and victim == usual and seconds == 0
                    marks = () if is_daily else pytest.mark.campaign
                    yield pytest.param((path, place, victim, seconds), marks=marks)


@pytest.fixture(scope="module")
def survivors(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str, int, int], list[Survivor]]:
    """Run all selected deaths, a few at a time, since the processes mostly wait."""
    folder = tmp_path_factory.mktemp("dies")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    asked = sorted({item.callspec.params["case"] for item in here})
    with ThreadPoolExecutor(3) as pool:
        ended = pool.map(lambda one: die(folder / "-".join(map(str, one)), *one), asked)
        return dict(zip(asked, ended, strict=True))


@pytest.mark.parametrize("case", list(cases()))
def test_the_others_end_and_name_it(
    case: tuple[str, str, int, int], survivors: dict[tuple[str, str, int, int], list[Survivor]]
) -> None:
    """The others end and name the dead process, whether they wait in torch, in the store, or for a dead store."""
    for survivor in survivors[case]:
        assert survivor.code == 1, survivor.output
        assert f"process {case[2]}" in survivor.output, survivor.output
    took = [survivor.seconds for survivor in survivors[case]]
    assert all(seconds is not None and seconds < BOUND_S * max(1, os.getloadavg()[0] / 2) for seconds in took), took
