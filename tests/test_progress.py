"""The progress line: few lines off a terminal, one redrawn line on it, no reading of the loss in between."""

import io
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from zero_plugin.loop.progress import Progress


class CountedLoss(float):
    """A loss that counts how often it is read."""

    reads = 0

    def __float__(self) -> float:
        type(self).reads += 1
        return 2.5


def run(steps: int, console: Console, seconds: float, pause: float = 0.0) -> str:
    with Progress(total=steps, seconds=seconds, console=console) as progress:
        for step in range(1, steps + 1):
            time.sleep(pause)
            progress.update(step, loss=CountedLoss(), lr=1e-3, units=100)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_file_gets_few_plain_lines_with_every_quantity() -> None:
    """Off a terminal: the first step, the last, and few between; text only; loss read only for these."""
    CountedLoss.reads = 0
    text = run(1000, Console(file=io.StringIO(), width=60), seconds=10.0)
    lines = text.splitlines()
    assert lines[0].startswith("step 1/1000  loss 2.500  lr 1.00e-03  ")
    assert lines[-1].startswith("step 1000/1000  ")
    assert lines[-1].endswith("ETA 0:00:00")
    assert re.search(r"  [\d.e+]+[kMG]? tokens/s  [\d.]+ [MG]iB/rank  ETA \d+:\d\d:\d\d$", lines[1])
    assert lines[0].endswith("ETA ?")
    assert "\x1b" not in text
    assert CountedLoss.reads == len(lines) < 15


def test_a_terminal_gets_one_line_that_is_redrawn() -> None:
    """On a terminal the line is drawn over, whole also at 80 columns, and the final state stays."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    text = run(20, console, seconds=0.001)
    assert "20/20" in text
    assert "loss 2.500" in text
    assert "ETA 0:00:00" in text
    assert text.count("\n") == 1


def test_no_time_between_lines_means_a_line_for_every_step() -> None:
    """`seconds=0` is a choice, not the default."""
    assert len(run(20, Console(file=io.StringIO()), seconds=0).splitlines()) == 20


def test_lines_come_about_as_often_as_asked() -> None:
    """Twenty steps of 10 ms with a line each 50 ms: after the first, doubling ones, every fifth step or so."""
    text = run(20, Console(file=io.StringIO()), seconds=0.05, pause=0.01)
    assert 4 <= len(text.splitlines()) <= 9


def test_throughput_is_units_per_second_since_the_last_line() -> None:
    """100 units in each step of 20 ms are at most 5000 per second, and about that."""
    text = run(10, Console(file=io.StringIO()), seconds=0.1, pause=0.02)
    speed = float(re.findall(r"([\d.]+)k tokens/s", text)[-1])
    assert 1.0 < speed <= 5.0


def test_an_error_in_the_loop_passes_and_leaves_the_terminal_usable() -> None:
    """The line is closed (the cursor shown again) and the loop's own error comes out."""
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with pytest.raises(ZeroDivisionError), Progress(total=5, console=console):
        _ = 1 / 0
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


TWO_PROCESSES = """
import io, sys, time, torch
from rich.console import Console
from torch import distributed
from zero_plugin.loop.progress import Progress

distributed.init_process_group("gloo")
rank = distributed.get_rank()
console = Console(file=io.StringIO())
with Progress(total=30, seconds=0.02, console=console) as progress:
    for step in range(1, 31):
        time.sleep(0.002 * (1 + 4 * rank))  # unequal clocks must not make the processes report at different steps
        progress.update(step, loss=torch.tensor(1.0 + 2.0 * rank), lr=1e-3, units=10)
shown = console.file.getvalue()
assert bool(shown) == (rank == 0), shown
assert rank or all("loss 2.000" in line for line in shown.splitlines()), shown
distributed.destroy_process_group()
"""


@pytest.mark.processes
def test_two_processes_report_together_and_the_first_speaks(run_launcher: Callable[..., Any]) -> None:
    """The loss is the mean over processes, only rank 0 writes, and unequal speeds do not hang."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--no-python"]
    done = run_launcher([*command, sys.executable, "-c", TWO_PROCESSES], seconds=200)
    assert done.returncode == 0, done.stderr
