"""Runs that are killed while they save: a complete checkpoint always exists, and resumed losses do not differ."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ProcessGroup, wait_for_ends

from zero_plugin.checkpoint.folders import choose_checkpoint, numbered_checkpoints
from zero_plugin.checkpoint.load import find_differences
from zero_plugin.checkpoint.manifest import read_manifest
from zero_plugin.checkpoint.objects import read_nested
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError

pytestmark = pytest.mark.programs

WORKER = Path(__file__).parent / "kill_worker.py"
PHASES = ("write", "fsync", "rename", "rotate")  # from 1 on; 0 means no phase
ROW = 16  # indices of a process's numbers on the board
LAYOUTS = [(2, "zero2"), (2, "zero3"), (1, "single"), (2, "ddp"), (1, "zero3")]  # processes, path
NAMINGS = ["automatic", "fixed", "numbered"]
STEPS = 8  # a save at every other step
PER_STORY = 3  # kills of one run before it may run to its end
SAVED, REACHED = 8, 9  # as in kill_worker.py

Kills = Callable[..., Counter[str]]


@dataclass(frozen=True)
class Outcome:
    """The result of a run's processes.

    Attributes:
        codes: exit codes; None after a time-out.
        board: a row of numbers for each process, see kill_worker.py.
        logs: the processes' output.
    """

    codes: list[int | None]
    board: list[list[int]]
    logs: str

    def phase(self, rank: int) -> str:
        """Return the phase in which a process has ended."""
        return ("none", *PHASES)[self.board[rank][0]]


def run_worker(folder: Path, world: int, kill: dict[str, Any] | None = None, /, **arguments: Any) -> Outcome:
    """Run the worker to its end, or kill some of its processes.

    Args:
        folder: holds the processes' logs.
        world: number of processes.
        kill: `ranks` get SIGKILL when process `watch` enters its `count`-th `phase`, or after `after` seconds. The
            others then get `grace` seconds before they are killed, as a launcher would.
        **arguments: arguments of the worker.
    """
    board_file = folder / f"board-{time.monotonic_ns()}"
    board_file.write_bytes(bytes(8 * ROW * world))
    board = np.memmap(board_file, np.int64, "r+").reshape(world, ROW)
    group = ProcessGroup(WORKER, world, board_file, json.dumps(arguments), folder=folder)
    began, waits = time.monotonic(), kill is not None
    deadline = began + 60

    def is_due(kill: dict[str, Any]) -> bool:
        if "after" in kill:
            return time.monotonic() - began >= kill["after"]
        phase = 1 + PHASES.index(kill["phase"])
        row = board[kill["watch"]]
        return bool(row[0] == phase and row[phase] >= kill["count"])

    def is_over(ended: Mapping[int, float]) -> bool:
        nonlocal deadline, waits
        if kill is not None and waits and is_due(kill):
            for rank in set(kill["ranks"]) - ended.keys():
                os.kill(group.processes[rank].pid, signal.SIGKILL)
            deadline, waits = time.monotonic() + kill["grace"], False
        failed = [ended[rank] + 20 for rank in ended if group.processes[rank].returncode == 1]
        time.sleep(0.0002 if waits else 0.005)
        return time.monotonic() > min([deadline, *failed])

    ended = wait_for_ends(group.processes, is_over, every=0)
    in_time = time.monotonic() <= began + 60
    codes = [process.returncode if in_time or rank in ended else None for rank, process in enumerate(group.processes)]
    return Outcome(codes, board.tolist(), "\n".join(group.outputs()))


class Story:
    """One run and its continuations, in a separate folder."""

    def __init__(self, folder: Path, world: int, path: str, naming: str, **arguments: Any) -> None:
        self._folder = folder
        self._world = world
        self._naming = naming
        self._arguments = {"folder": str(folder), "path": path, "naming": naming, "steps": STEPS, **arguments}
        self._floor = 0  # steps of the newest complete checkpoint
        folder.mkdir(parents=True)

    def uninterrupted(self) -> list[str]:
        """Return the losses of a run that neither saves nor ends early."""
        outcome = run_worker(self._folder, self._world, **self._arguments, saves=False)
        assert outcome.codes == [0] * self._world, outcome.logs
        return [line.split()[1] for line in (self._folder / "losses.txt").read_text().splitlines()]

    def go_on(self, kill: dict[str, Any] | None = None, **arguments: Any) -> Any:
        """Start the run again, kill it, and check its leftovers. Return None if the run reached its end."""
        must_load = self._floor > 0
        outcome = run_worker(self._folder, self._world, kill, **self._arguments, **arguments, must_load=must_load)
        killed = kill is not None and any(outcome.codes[rank] == -9 for rank in kill["ranks"])
        assert killed or outcome.codes == [0] * self._world, outcome.logs
        saved = max(outcome.board[rank][SAVED] for rank in range(self._world))
        reached = max(outcome.board[rank][REACHED] for rank in range(self._world))
        self._look(max(saved, self._floor), max(reached, self._floor))
        self._saves = saved > 0
        return outcome if killed else None

    def assert_losses(self, wanted: list[str]) -> None:
        """Assert that every step of every continuation has bitwise the loss of the uninterrupted run."""
        lines = [line.split() for line in (self._folder / "losses.txt").read_text().splitlines()]
        assert {int(step) for step, _ in lines} == set(range(STEPS))
        assert [(step, loss) for step, loss in lines if loss != wanted[int(step)]] == []

    def assert_nothing_left(self) -> None:
        """Assert that, once a run has saved again, two checkpoints (or the one folder) exist and no leftovers.

        The number of an unfinished save is not reused, since it may belong to another run that still writes.
        """
        if not self._saves:
            return
        names = sorted(path.name for path in self.place.parent.rglob("*") if path.is_dir() and path.name != "optimizer")
        last = [f"checkpoint_{number}" for number in (6, 8)]
        if self._naming == "automatic":
            numbers = [number for number, _ in numbered_checkpoints(self.place)]
            assert len(numbers) == 2
            assert numbers[0] >= 2
            last = sorted(f"checkpoint_{number}" for number in numbers)
        assert names == (["last"] if self._naming == "fixed" else sorted([*last, self.place.name]))

    @property
    def place(self) -> Path:
        """The path for `load_state`."""
        return self._folder / {"automatic": "checkpoints", "numbered": "numbered", "fixed": "last"}[self._naming]

    def _look(self, saved: int, reached: int) -> None:
        """Assert that the chosen checkpoint is complete, and not older than the newest one known to be complete."""
        try:
            chosen, _ = choose_checkpoint(self.place)
        except CheckpointError:
            assert saved == 0
            return
        assert find_damage(chosen) is None
        assert not list(find_differences(chosen, read_manifest(chosen), lambda _: None))
        steps = read_nested(chosen / "training")["models"][0]["optimizer"]["applied_steps"]
        assert saved <= steps <= reached
        for _, path in numbered_checkpoints(self.place):
            assert not path.exists() or find_damage(path) is None
        self._floor = steps


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> Callable[[int, str], list[str]]:
    """Return the losses of a layout's uninterrupted run."""

    @functools.cache
    def losses(world: int, path: str) -> list[str]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        return Story(folder, world, path, "automatic").uninterrupted()

    return losses


@pytest.fixture
def kill_runs(
    whole_losses: Callable[[int, str], list[str]], tmp_path: Path, tried: Callable[..., dict[str, Any]]
) -> Kills:
    """Kill a number of runs at random instants, and count the phases in which processes were killed."""

    def kill_runs(kills: int, seed: int, *, asynchronous: bool) -> Counter[str]:
        draw = random.Random(seed)
        landed: Counter[str] = Counter()
        row = tried(f"killed inside {'an asynchronous' if asynchronous else 'a'} save")
        numbers = itertools.count()
        while landed.total() < kills:
            number = next(numbers)
            world, path = LAYOUTS[number % len(LAYOUTS)]
            naming = NAMINGS[number % len(NAMINGS)]
            folder = tmp_path / f"story-{number}"
            story = Story(folder, world, path, naming, asynchronous=asynchronous, swaps=number % 2 == 0)
            for _ in range(PER_STORY):
                rarest = min((*PHASES, "none"), key=lambda phase: landed[phase])
                kill = plan_kill(draw, world, rarest)
                row["tried"] += 1
                row["lost"] += 1  # until a complete one is known
                outcome = story.go_on(kill, dwell=0.001, seed=draw.randrange(1000))
                row["ended in time"] += 1
                row["lost"] -= 1
                if outcome is None:
                    break
                victim = kill["watch"] if kill["watch"] in kill["ranks"] else kill["ranks"][0]
                landed[outcome.phase(victim)] += 1
            else:
                assert story.go_on() is None
            story.assert_losses(whole_losses(world, path))
            story.assert_nothing_left()
        row["right message"] = row["tried"]  # the losses equal those of the uninterrupted run
        return landed

    return kill_runs


def plan_kill(draw: random.Random, world: int, phase: str) -> dict[str, Any]:
    """Draw which processes are killed and when, and how soon the launcher ends the others.

    Only the main process renames and rotates. The kill hits the main process, all processes, or another one meanwhile.
    """
    watch = draw.randrange(world) if phase in ("write", "fsync") else 0
    groups = [list(range(world)), *([rank] for rank in range(world))]
    kill: dict[str, Any] = {"watch": watch, "ranks": draw.choice(groups), "grace": draw.choice([0, 0.05, 0.5])}
    if phase == "none":
        return {**kill, "after": draw.uniform(0.1, 1.5)}
    latest = {"write": 160, "fsync": 40 if watch == 0 else 8, "rename": 2, "rotate": 12}[phase]  # early enough to occur
    return {**kill, "phase": phase, "count": draw.randint(1, latest)}


@pytest.mark.processes
@pytest.mark.parametrize("asynchronous", [False, True])
def test_goes_on_from_a_complete_checkpoint(asynchronous: bool, kill_runs: Kills) -> None:
    """Killed in every phase of saving, all processes or one, runs end with the losses of an uninterrupted run."""
    landed = kill_runs(6, 1, asynchronous=asynchronous)
    assert all(landed[phase] for phase in PHASES), landed


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_goes_on_wherever_it_is_killed(asynchronous: bool, kill_runs: Kills) -> None:
    """Killed at 150 instants or more, at least eight in each phase, runs end with the uninterrupted losses."""
    landed = kill_runs(150, 2, asynchronous=asynchronous)
    print(dict(landed))
    assert all(landed[phase] >= 8 for phase in PHASES), landed


@pytest.mark.processes
@pytest.mark.parametrize(
    ("path", "asynchronous"),
    [
        ("ddp", False),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in [("ddp", True), ("zero2", False), ("zero3", True)]
        ),
    ],
)
def test_the_others_end(path: str, asynchronous: bool, tmp_path: Path) -> None:
    """If one process is killed while all save, the others end alone, long before the group's time-out."""
    story = Story(tmp_path / "run", 2, path, "automatic", asynchronous=asynchronous)
    kill = {"watch": 1, "phase": "write", "count": 5, "ranks": [1], "grace": 25}
    outcome = story.go_on(kill, dwell=0.001)
    assert outcome.codes == [1, -9], outcome.logs
