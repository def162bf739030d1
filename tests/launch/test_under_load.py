"""Healthy runs on an overloaded machine report no late, silent or lost processes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.campaign, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parent / "train_and_save.py"
LOAD, RUNS = 20, 5  # busy loops, and simultaneous runs next to them
CONFIGS = {
    "ddp": "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n",
    "zero2": "distributed_type: DEEPSPEED\nuse_cpu: true\nnum_processes: 2\ndeepspeed_config: {zero_stage: 2}\n",
}
# The collective check's reports, and messages about a process that it ended.
ALARM = re.compile(r"has waited|not reported|silent for|is stopped|compiles|error|[A-Z]\w*Error|Traceback|lost")


@pytest.fixture
def busy() -> Iterator[None]:
    """Run loops that take all of the machine's time. Check that none is left."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


@pytest.mark.parametrize("series", [1, 2])
@pytest.mark.parametrize("path", CONFIGS)
def test_no_false_alarm(
    busy: None, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, path: str, series: int
) -> None:
    """Start, three steps, a save, the end: no run's output calls a process late or lost."""
    folders = [tmp_path / f"{path}-{series}-{number}" for number in range(RUNS)]
    config = tmp_path / "config.yaml"
    config.write_text(CONFIGS[path])
    began = time.monotonic()
    launchers = [start("--config_file", str(config), str(SCRIPT), str(folder)) for folder in folders]
    outputs: dict[int, str] = {}

    def read(number: int) -> None:
        outputs[number] = "".join(launchers[number].communicate(timeout=1100))

    readers = [threading.Thread(target=read, args=(number,)) for number in range(RUNS)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    print(f"{path}: {RUNS} runs next to {LOAD} busy loops took {time.monotonic() - began:.0f} s")
    for number, folder in enumerate(folders):
        assert launchers[number].returncode == 0, outputs[number]
        assert (folder / "manifest.json").exists()
        assert ALARM.findall(outputs[number]) == [], outputs[number]
