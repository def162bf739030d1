"""A DeepSpeed that is too old is an error before anything starts. A release newer than tested is a warning."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from zero_plugin.config.installed import NEWER_DEEPSPEED, OLDEST_DEEPSPEED, TESTED, garbage_collection_paused, is_newer

OLD = f"DeepSpeed {OLDEST_DEEPSPEED} or newer is needed, and 0.18.2 is installed"
FIX = f"pip install 'deepspeed>={OLDEST_DEEPSPEED},<0.20'"


def with_deepspeed(version: str, folder: Path, *command: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Run Python with the metadata of another DeepSpeed first. The package itself is the installed one."""
    metadata = folder / "site" / f"deepspeed-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    (folder / "zero.yaml").write_text("use_cpu: true\ndistributed_type: DEEPSPEED\n")
    (folder / "ddp.yaml").write_text("distributed_type: MULTI_CPU\n")
    (folder / "zero.json").write_text('{"zero_optimization": {"stage": 2}}')
    (folder / "train.py").write_text("print('started')\n")
    path = os.pathsep.join([str(metadata.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "RANK": str(rank), "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (["check", "zero.yaml"], "zero.yaml:2:1: error: distributed_type"),
        (["check", "zero.json"], "zero.json:1:2: error: zero_optimization"),
        (["launch", "--config", "zero.yaml", "train.py"], "zero.yaml:2:1: distributed_type"),
        (["launch", "--zero_stage", "2", "train.py"], "--zero_stage: DeepSpeed"),
    ],
    ids=["YAML", "JSON", "launch", "flag"],
)
def test_commands_refuse_an_old_one(command: list[str], where: str, tmp_path: Path) -> None:
    """The error at the request has both versions and the install command. No script starts."""
    done = with_deepspeed("0.18.2", tmp_path, "-m", "zero_plugin", *command)
    assert done.returncode == 2
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if OLD in line]
    assert where in line
    assert FIX in done.stdout + done.stderr
    assert "started" not in done.stdout


def test_without_zero_an_old_one_is_none_of_the_run_s_business(tmp_path: Path) -> None:
    """DDP reads nothing of DeepSpeed's."""
    assert with_deepspeed("0.18.2", tmp_path, "-m", "zero_plugin", "check", "ddp.yaml").returncode == 0


def test_the_strategy_refuses_an_old_one(tmp_path: Path) -> None:
    """Its import raises the same error before DeepSpeed is imported."""
    program = "import sys; sys.modules['deepspeed'] = None; import zero_plugin.strategies.deepspeed.strategy"
    done = with_deepspeed("0.18.2", tmp_path, "-c", program)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("zero_plugin.errors.MachineError: ")
    assert OLD in last
    assert FIX in last


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_a_newer_one_is_warned_of_once(rank: int, lines: int, tmp_path: Path) -> None:
    """The first process warns. A check of a file does not, since the file is right."""
    program = "import zero_plugin.strategies.deepspeed, zero_plugin.strategies.deepspeed"
    done = with_deepspeed("0.77.1", tmp_path, "-c", program, rank=rank)
    said = f"DeepSpeed 0.77.1 is newer than {TESTED['deepspeed']}, the tested one."
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(said) == lines
    checked = with_deepspeed("0.77.1", tmp_path, "-m", "zero_plugin", "check", "--strict", "zero.yaml")
    assert checked.stdout == "zero.yaml: no problem found\n"


@pytest.mark.parametrize(
    ("version", "tested", "newer"),
    [
        ("0.19.8+abc", "0.19.8", False),
        ("0.19.9", "0.19.8", True),
        ("2.13.1", "2.13.0", False),
        ("2.14.0", "2.13.0", True),
    ],
)
def test_what_counts_as_newer(version: str, tested: str, newer: bool) -> None:
    """From 1.0 on, the last number of a release and text after a + change no interface."""
    assert is_newer(version, tested) is newer


@pytest.mark.parametrize("wanted", [True, False])
def test_garbage_collection_is_as_the_script_had_it(wanted: bool) -> None:
    """It is restored after an import, a failed one, and a nested one. During the import it is paused."""
    was_enabled = gc.isenabled()
    (gc.enable if wanted else gc.disable)()
    try:
        with suppress(ImportError), garbage_collection_paused():
            with garbage_collection_paused():
                assert not gc.isenabled()
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == wanted
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_the_accepted_releases_are_those_that_were_read() -> None:
    """pyproject.toml accepts the releases in the advice and in docs/deepspeed-internals.md.

    Some rows there move silently.
    """
    root = Path(__file__).parents[2]
    accepted = f">={OLDEST_DEEPSPEED},<0.20"
    assert f'"deepspeed{accepted}"' in (root / "pyproject.toml").read_text()
    assert f"`pyproject.toml` accepts `{accepted}`" in (root / "docs/deepspeed-internals.md").read_text()
    assert accepted in NEWER_DEEPSPEED
