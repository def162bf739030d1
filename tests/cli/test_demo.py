"""`zero-plugin demo` runs the launcher with the example script. The tests read its dry run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.machine.hardware import count_gpus

pytestmark = pytest.mark.programs


def dry_run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zero_plugin", "demo", "--dry_run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)


def handed_over(output: str) -> dict[tuple[str, ...], Any]:
    """Return the values of the document that the workers would get, by path."""
    line = next(line for line in output.splitlines() if line.startswith("export ZERO_PLUGIN_DOCUMENT="))
    document = json.loads(shlex.split(line)[1].partition("=")[2])
    return {tuple(leaf[0]): leaf[1] for part in ("launch", "deepspeed") for leaf in document[part]}


def test_default_is_zero_2_in_fp32() -> None:
    """Without flags the shipped config runs: ZeRO-2, fp32, schedulers counted as in the ready configs."""
    values = handed_over(dry_run().stdout)
    assert values["zero_optimization", "stage"] == 2
    assert values["distributed_type",] == "DEEPSPEED"
    assert values["mixed_precision",] == "no"
    assert ("scheduler_counts",) not in values


@pytest.mark.skipif(count_gpus() > 0, reason="with GPUs there is one process for each")
def test_two_processes_without_a_gpu_unless_asked_otherwise() -> None:
    """On a CPU two processes run, since one has nothing to partition. A flag or the file overrides the number."""
    assert "--nproc-per-node=2" in dry_run().stdout
    assert "--nproc-per-node=3" in dry_run("--num-processes", "3").stdout


def test_two_processes_where_the_cpu_is_asked_for_but_not_for_one(tmp_path: Path) -> None:
    """`--cpu` starts two processes with and without GPUs. `distributed_type: NO` always starts one."""
    assert "--nproc-per-node=2" in dry_run("--cpu").stdout
    (tmp_path / "one.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    assert "--nproc-per-node=1" in dry_run("--config", "one.yaml", folder=tmp_path).stdout


def test_launch_flags_and_the_scripts_arguments_go_where_they_belong() -> None:
    """Flags before `--` change the configuration. Arguments after it reach the script unchanged."""
    done = dry_run("--zero_stage", "3", "--offload_optimizer_device", "cpu", "--", "--steps", "5", "--output", "a b")
    values = handed_over(done.stdout)
    assert values["zero_optimization", "stage"] == 3
    assert values["zero_optimization", "offload_optimizer", "device"] == "cpu"
    command = shlex.split(done.stdout.splitlines()[-1])
    assert Path(command[-5]).name == "train.py"
    assert command[-4:] == ["--steps", "5", "--output", "a b"]


@pytest.mark.parametrize("flag", ["--config", "--config_file"])
def test_another_config_replaces_the_shipped_one(flag: str, tmp_path: Path) -> None:
    """`--config` and `--config_file` mean the same and replace the shipped file completely."""
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 1\n")
    done = dry_run(flag, "mine.yaml", folder=tmp_path)
    assert handed_over(done.stdout) == {("distributed_type",): "MULTI_CPU", ("num_processes",): 1}


@pytest.mark.parametrize("flag", ["--module", "-m", "--no_python"])
def test_flags_about_the_program_are_not_the_demos(flag: str) -> None:
    """Flags about the kind of program are refused, since the program is fixed and would ignore them."""
    done = dry_run(flag)
    assert done.returncode == 2
    assert f"{flag}: is no flag of demo" in done.stderr


def test_a_wrong_flag_value_is_refused_before_anything_starts() -> None:
    """The demo checks flags like `launch`: exit code 2 and the flag's name, before any process starts."""
    done = dry_run("--zero_stage", "4")
    assert done.returncode == 2
    assert "--zero_stage" in done.stderr
