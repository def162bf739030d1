"""`zero-plugin doctor` on this machine, and on one that lacks something."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from launching import run_afresh

from zero_plugin.config.installed import is_at_least

ROOT = Path(__file__).parents[2]


def doctor(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"HF_HOME": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "ops"), **environment}
    return run_afresh("-m", "zero_plugin", "doctor", *arguments, cwd=folder, **variables)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)["findings"]}


OFFLOAD = str(ROOT / "ds_configs" / "zero2_offload.yaml")


def test_this_machine(tmp_path: Path) -> None:
    """The default config has no error here. Exactly the lines that are not ok say what to do."""
    done = doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    assert len(report["findings"]) > 15
    assert all(bool(f["fix"]) == (f["level"] != "ok") for f in report["findings"])


def test_a_table_for_people(tmp_path: Path) -> None:
    """In a pipe, each check is one line, followed by its fix."""
    done = doctor(tmp_path, "--config_file", OFFLOAD)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (at,) = [n for n, line in enumerate(lines) if "op cpu_adam" in line]
    assert lines[at].startswith("warning")
    assert "not built yet" in lines[at]
    assert f"zero-plugin doctor --config_file {OFFLOAD} --build" in lines[at + 1]


def test_without_compiler_and_ninja(tmp_path: Path) -> None:
    """Without compiler and ninja, a config that builds an op gets an error, any other config a warning."""
    nothing = str(tmp_path / "bin")
    done = doctor(tmp_path, "--config_file", OFFLOAD, "--json", PATH=nothing)
    assert done.returncode == 1
    found = findings(done)
    for check, fix in (("C++ compiler", "apt-get install g++"), ("ninja", "pip install ninja")):
        assert found[check]["level"] == "wrong"
        assert "cpu_adam" in found[check]["found"]
        assert fix in found[check]["fix"]
    done = doctor(tmp_path, "--config_file", str(ROOT / "ds_configs" / "cpu.yaml"), "--json", PATH=nothing)
    assert done.returncode == 0
    assert {findings(done)[check]["level"] for check in ("C++ compiler", "ninja")} == {"warning"}


@pytest.mark.skipif(is_at_least("torch", "2.14"), reason="since torch 2.14 a lock that is left hinders nobody")
def test_a_killed_builds_lock(tmp_path: Path) -> None:
    """A killed build's lock is an error only for a config that loads the op, and the printed command removes it."""
    lock = tmp_path / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    offload = ("--config_file", str(ROOT / "ds_configs" / "zero2_offload.yaml"), "--json")
    done = doctor(tmp_path, *offload)
    assert done.returncode == 1
    found = findings(done)["op build locks"]
    assert found["fix"] == f"rm {lock}"
    for other in ((), ("--config_file", str(ROOT / "ds_configs" / "zero2.yaml"))):
        assert findings(doctor(tmp_path, *other, "--json"))["op build locks"]["level"] == "ok"
    subprocess.run(found["fix"], shell=True, check=True)
    assert findings(doctor(tmp_path, *offload))["op build locks"]["level"] == "ok"


def test_an_nvme_folder_on_a_ram_disk(tmp_path: Path) -> None:
    """/dev/shm as an NVMe folder is recognised as memory."""
    config = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/dev/shm/zero_plugin"}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    done = doctor(tmp_path, "--config_file", "ds.json", "--json")
    assert done.returncode == 1
    found = findings(done)["NVMe /dev/shm/zero_plugin"]
    assert found["level"] == "wrong"
    assert "tmpfs" in found["found"]
    assert not Path("/dev/shm/zero_plugin").exists()


def test_a_config_that_launch_would_refuse(tmp_path: Path) -> None:
    """A folder that cannot be made is a line of the table. A file that cannot be read is the usual error."""
    (tmp_path / "a.yaml").write_text("log_dir: a.yaml/logs\n")
    done = doctor(tmp_path, "--config_file", "a.yaml", "--json")
    assert done.returncode == 1
    assert "log_dir" in findings(done)["config"]["found"]
    assert doctor(tmp_path, "--config_file", "absent.yaml").returncode == 2


@pytest.mark.parametrize("variable", ["TMPDIR"])
def test_a_folder_that_takes_no_file(variable: str, tmp_path: Path) -> None:
    """A folder that accepts no file is named with its reason."""
    found = findings(doctor(tmp_path, "--json", **{variable: "/proc"}))[variable]
    assert found["level"] == "wrong"
    assert f"export {variable}=" in found["fix"]
