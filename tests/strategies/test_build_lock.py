"""Obstacles to building an op, like a killed build's lock or a missing compiler, raise errors before anything waits."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from zero_plugin.config.installed import installed_version
from zero_plugin.errors import MachineError
from zero_plugin.machine.op_builds import describe_missing_tools, find_stale_build_locks, refuse_stale_build_locks

pytestmark = pytest.mark.programs


def use_torch(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this torch is installed, here and in processes that a test starts."""
    metadata = folder / "site" / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    if plugins := distribution("torch").read_text("entry_points.txt"):  # torch 2.15 finds gloo through them
        metadata.with_name("entry_points.txt").write_text(plugins)
    site = str(metadata.parents[1])
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH")))))
    installed_version.cache_clear()
    assert installed_version("torch") == version  # kept for tests that may not read this folder


@pytest.fixture(autouse=True)
def older_torch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a torch whose builders wait for an existing lock."""
    use_torch("2.13.0", tmp_path_factory.mktemp("older"), monkeypatch)
    yield
    monkeypatch.undo()
    installed_version.cache_clear()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """Create a lock that torch's builder left an hour ago."""
    return leave_lock(tmp_path, "cpu_adam")


def leave_lock(cache: Path, op: str, seconds_ago: float = 3600) -> Path:
    lock = cache / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    for file in (lock, lock.parent):
        os.utime(file, (time.time() - seconds_ago,) * 2)
    return lock


def test_a_stale_lock_is_refused(lock: Path, tmp_path: Path) -> None:
    """The error names the lock and the command that removes it. After that, nothing is refused."""
    with pytest.raises(MachineError) as caught:
        refuse_stale_build_locks(["async_io", "cpu_adam"], tmp_path)
    assert f"rm {lock}" in str(caught.value)
    lock.unlink()
    refuse_stale_build_locks(["async_io", "cpu_adam"], tmp_path)


def test_a_newer_torch_waits_for_no_lock(lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its builders leave the file behind after every build, and no later build waits for the file."""
    use_torch("2.14.0", tmp_path, monkeypatch)
    refuse_stale_build_locks(["cpu_adam"], tmp_path)
    assert lock.exists()


def test_a_lock_of_something_else_is_not(lock: Path, tmp_path: Path) -> None:
    """A lock is ignored if this run does not load its op, or if another Python made it."""
    leave_lock(tmp_path / "py38_cpu", "async_io")
    refuse_stale_build_locks(["async_io"], tmp_path)
    assert lock.exists()


def test_a_build_of_another_machine_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """That build writes to the folder now and then.

    The run logs the wait, which ends with the build or with its silence.
    """
    lock = leave_lock(tmp_path, "cpu_adam", seconds_ago=1)
    monkeypatch.setattr("time.sleep", lambda _: lock.unlink())
    refuse_stale_build_locks(["cpu_adam"], tmp_path)
    told = capfd.readouterr().err
    assert "waiting for a build of cpu_adam" in told
    assert f"rm {lock}" in told
    lock.touch()
    monkeypatch.setattr("time.sleep", lambda _: [os.utime(file, (0, 0)) for file in (lock, lock.parent)])
    with pytest.raises(MachineError):
        refuse_stale_build_locks(["cpu_adam"], tmp_path)


def test_a_live_builders_lock_is_respected(lock: Path, tmp_path: Path) -> None:
    """While a live process has the lock open, the run may wait for it.

    Once that process is killed, the run is refused.
    """
    hold = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print(flush=True); sys.stdin.read()"
    builder = subprocess.Popen(
        [sys.executable, "-c", hold, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        assert builder.stdout is not None
        builder.stdout.readline()
        refuse_stale_build_locks(["cpu_adam"], tmp_path)
    finally:
        builder.kill()
        builder.communicate()
    with pytest.raises(MachineError):
        refuse_stale_build_locks(["cpu_adam"], tmp_path)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Act as a user who may not see the open files of root's processes. Some of these run."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        if os.access("/proc/1/fd", os.R_OK, effective_ids=True):
            pytest.skip("no process belongs to another user")
        yield
    finally:
        os.seteuid(user)


def test_a_lock_of_another_user_who_has_processes_is_not_stale(unprivileged: None) -> None:
    """The open files of its owner's processes are invisible. Processes of a third user do not count."""
    with tempfile.TemporaryDirectory() as cache:
        lock = leave_lock(Path(cache), "cpu_adam")
        assert find_stale_build_locks(["cpu_adam"], Path(cache)) == [lock]
        lock.unlink()
        lock.symlink_to("/etc/passwd")  # a file of root that no process has open
        assert find_stale_build_locks(["cpu_adam"], Path(cache)) == []


INIT = """
import sys, torch
from zero_plugin import Accelerator
offload = {"device": "nvme", "nvme_path": sys.argv[1]} if sys.argv[1:] else {"device": "none"}
accelerator = Accelerator(config={"zero_optimization": {"stage": 3, "offload_param": offload}})
with accelerator.init_model():
    torch.nn.Linear(2, 2)
print("made")
"""


@pytest.mark.parametrize("swaps", [True, False])
def test_a_model_that_is_built_in_partitions_does_not_wait_either(swaps: bool, tmp_path: Path) -> None:
    """NVMe offload of weights loads its op while the model is built, before any engine. Without it no op is loaded."""
    lock = leave_lock(tmp_path / "cache", "async_io")
    done = subprocess.run(
        [sys.executable, "-c", INIT, *([tmp_path / "swap"] if swaps else [])],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, "made" in done.stdout) == ((1, False) if swaps else (0, True)), done.stderr
    assert ("MachineError" in done.stderr) == (f"rm {lock}" in done.stderr) == swaps


def test_missing_tools_are_named_with_what_needs_none(tmp_path: Path) -> None:
    """The error names a compiler for an op that is not built, ninja for any op, and the key that avoids the op."""
    nothing = {"PATH": str(tmp_path), "CPATH": str(tmp_path)}
    described = describe_missing_tools(["cpu_adam"], tmp_path, nothing) or ""
    assert described.startswith(
        "This run compiles DeepSpeed's cpu_adam, but ninja is not on the PATH and the C++ compiler c++ "
    )
    assert "apt-get install g++" in described
    assert described.splitlines()[-1].startswith("Or do without: write zero_force_ds_cpu_optimizer: false")
    for name in ("ninja", "c++", "clang++-19"):
        (tmp_path / name).touch(mode=0o755)
    assert describe_missing_tools(["cpu_adam"], tmp_path, nothing | {"CXX": "clang++-19 -g"}) is None
    described = describe_missing_tools(["cpu_adam"], tmp_path, nothing | {"CXX": "clang++-20"}) or ""
    assert "the C++ compiler clang++-20 is not on the PATH." in described
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert describe_missing_tools(["cpu_adam"], tmp_path, nothing | {"CXX": "clang++-20"}) is None
    (tmp_path / "ninja").unlink()
    described = describe_missing_tools(["cpu_adam"], tmp_path, nothing) or ""
    assert described.startswith("This run loads DeepSpeed's cpu_adam, but ninja is not on the PATH.\npip install ninja")
    assert describe_missing_tools([], tmp_path, nothing) is None


OFFLOADS = """
import torch
from zero_plugin import Accelerator
from zero_plugin.errors import MachineError

offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def train(**more):
    torch.manual_seed(0)
    accelerator = Accelerator(config={**offload, **more}, cpu=True)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loss = model(torch.ones(2, 4)).sum()
    accelerator.backward(loss)
    optimizer.step()
    return float(loss - model(torch.ones(2, 4)).sum())


try:
    train()
except MachineError as error:
    print("refused:", error)
print("learned:", train(zero_force_ds_cpu_optimizer=False) > 0)
"""


@pytest.mark.processes
def test_a_machine_without_a_compiler_offloads_with_torchs_optimizer(tmp_path: Path) -> None:
    """`prepare` names the missing tool and the key. With the key it trains. No build begins."""
    environ = {**os.environ, "PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", OFFLOADS], env=environ, capture_output=True, text=True, timeout=400)
    assert "refused: This run compiles DeepSpeed's cpu_adam, but ninja is not on the PATH" in done.stdout, done.stderr
    assert "zero_force_ds_cpu_optimizer: false in the DeepSpeed config" in done.stdout
    assert "learned: True" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


OF_ANOTHER_LAYER = """
import deepspeed
from deepspeed.ops.op_builder import CPUAdamBuilder

deepspeed.init_distributed("gloo")
print("initialized", flush=True)
CPUAdamBuilder().load()
"""


@pytest.mark.processes
def test_a_script_of_another_layer_is_looked_after_too(tmp_path: Path) -> None:
    """Under `launch` this script neither waits for a killed build nor builds the inference op at its start."""
    lock = leave_lock(tmp_path / "cache", "cpu_adam")
    (tmp_path / "script.py").write_text(OF_ANOTHER_LAYER)
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--num_processes", "1", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400)
    assert done.returncode == MachineError.exit_code, done.stderr
    assert "initialized" in done.stdout
    assert f"rm {lock}" in done.stderr
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == ["cpu_adam"]


# torch really builds, with a compiler that never finishes.
BUILDS = """
import os, sys
from torch.utils.cpp_extension import load
open("op.cpp", "w").write("")
load("some_op", ["op.cpp"])
"""
COMPILER = """#!/bin/sh
case " $* " in *" -c "*) echo $$ > "$COMPILING"; exec sleep 1000;; esac
exec c++ "$@"
"""


@pytest.mark.processes
def test_a_stopped_launch_takes_its_build_along(tmp_path: Path) -> None:
    """ninja starts the compiler in its own process group. The compiler ends too, and no lock blocks the next run."""
    (tmp_path / "build.py").write_text(BUILDS)
    compiler, compiling, cache = tmp_path / "compiler", tmp_path / "compiling", tmp_path / "cache"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environ = {
        **os.environ,
        "CXX": str(compiler),
        "COMPILING": str(compiling),
        "TORCH_EXTENSIONS_DIR": str(cache),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "build.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        assert waits_for(lambda: compiling.exists() and compiling.read_text()), launcher.poll()
        lock = cache / "some_op" / "lock"
        assert lock.exists()
        launcher.terminate()
        _, errors = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 143, errors
    assert waits_for(lambda: not Path(f"/proc/{compiling.read_text().strip()}").exists(), seconds=5)
    assert not lock.exists()


def waits_for(holds: Callable[[], object], seconds: float = 200) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(holds())
