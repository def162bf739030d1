"""Two jobs save into one folder: the second is refused, the error names the first, and no checkpoint is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_plugin import Accelerator, ProjectConfiguration
from zero_plugin.checkpoint import locks
from zero_plugin.checkpoint.folders import known_checkpoints
from zero_plugin.checkpoint.locks import claim, give_up, lock_of
from zero_plugin.checkpoint.publish import open_draft
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError

pytestmark = pytest.mark.programs

JOB = """
import os, sys
import torch
from zero_plugin import Accelerator, ProjectConfiguration
from zero_plugin.checkpoint import locks
print(os.getpid(), flush=True)
locks._OTHERS_END_S = 0.5
how, folder = sys.argv[1:]
project = ProjectConfiguration(folder, automatic_checkpoint_naming=how == "automatic")
accelerator = Accelerator(cpu=True, project_config=project)
model = accelerator.prepare(torch.nn.Linear(2, 2))
if how == "automatic":
    accelerator.resume()
for line in sys.stdin:
    print("saved:", accelerator.save_state(None if how == "automatic" else folder + line.strip()), flush=True)
"""


OPENS = """
import sys
from pathlib import Path
from zero_plugin.checkpoint.publish import open_draft
print(open_draft(Path(sys.argv[1]), 1))
"""


Start = Callable[[str, Path], "subprocess.Popen[str]"]


@pytest.fixture
def start(forked_alone: dict[str, str], start_program: Callable[..., subprocess.Popen[str]]) -> Start:
    """Start a job that saves on request, in a folder that another job may hold."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **forked_alone}

    def start(how: str, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOB, how, str(folder)]
        return start_program(command, env=environment, stdin=subprocess.PIPE)

    return start


def process_of(job: subprocess.Popen[str]) -> int:
    """Return the process that holds the lock. The job prints its id first (see `forked_alone`)."""
    assert job.stdout is not None
    return int(job.stdout.readline())


def save(job: subprocess.Popen[str], name: str = "") -> str:
    """Request a save. Return what the job prints: the folder, or nothing if the save failed."""
    assert job.stdin is not None
    assert job.stdout is not None
    print(name, file=job.stdin, flush=True)
    for line in job.stdout:
        if line.startswith("saved: "):  # torch 2.9's gloo prints its connection there
            return line.removeprefix("saved: ").strip()
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["automatic", "named"])
def test_the_second_is_refused(how: str, start: Start, tmp_path: Path) -> None:
    """The second job is refused under any name while the first lives. After a kill the next one takes over."""
    first = start(how, tmp_path)
    process = process_of(first)
    saved = [Path(save(first, "/last")) for _ in range(3)]
    second = start(how, tmp_path)
    assert save(second, "/last") == ""
    errors = second.communicate()[1]
    assert f"process {process} on {socket.gethostname()} saves checkpoints in {saved[0].parent} too" in errors
    assert second.returncode != 0
    assert all(find_damage(folder) is None for folder in saved)
    assert find_damage(Path(save(first, "/last"))) is None
    os.kill(process, signal.SIGKILL)
    first.wait()
    third = start(how, tmp_path)
    assert find_damage(Path(save(third, "/last"))) is None
    assert third.communicate()[1].count("CheckpointError") == 0
    assert not list(tmp_path.rglob("*.lock"))


@pytest.mark.processes
def test_jobs_with_names_of_their_own(start: Start, tmp_path: Path) -> None:
    """A sweep that saves into `run_1` and `run_2` of one folder leaves one lock each, however often it saves."""
    for number in (1, 2):
        job = start("named", tmp_path)
        for step in range(3):
            assert save(job, f"/run_{number}/step_{step}").endswith(f"step_{step}")
        assert save(job, f"/run_{number}")
    assert len(list(tmp_path.rglob("*.lock"))) == 2


def test_a_lock_ends_with_its_last_holder(tmp_path: Path) -> None:
    """The lock is released with the last of two runs in one process. A third process waits for a job that is ending."""
    (tmp_path / "new").mkdir()
    lock = lock_of(tmp_path / "new" / "checkpoint_1", automatic=True)
    for _ in range(2):
        claim(lock, tmp_path)
    give_up(lock)
    child = os.fork()
    if not child:
        code = 1
        try:
            locks._OTHERS_END_S = 30.0
            claim(lock, tmp_path)
            give_up(lock)
            code = 0
        finally:
            os._exit(code)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    give_up(lock)
    assert os.waitpid(child, 0) == (child, 0)
    assert not lock.exists()


def test_a_draft_that_another_job_writes_stays(tmp_path: Path) -> None:
    """A save under the same name removes only what a killed run has left, not a draft of a live job."""
    (tmp_path / ".last.00000000.writing").mkdir()
    draft = open_draft(tmp_path / "last", 1)
    other = subprocess.run([sys.executable, "-c", OPENS, tmp_path / "last"], capture_output=True, text=True, check=True)
    assert draft.is_dir()
    assert Path(other.stdout.strip()).is_dir()
    assert not (tmp_path / ".last.00000000.writing").exists()


def test_no_locks_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves work on a file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)
    lock = lock_of(tmp_path / "last", automatic=False)
    claim(lock, tmp_path)
    give_up(lock)
    assert lock.name == ".last.lock"
    assert not known_checkpoints(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("what", ["a copy is made", "a link is saved to", "the folder is removed"])
def test_what_a_script_does_meanwhile(what: str, start: Start, tmp_path: Path) -> None:
    """The other job is refused whatever the script does in between."""
    project = ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    if what == "a copy is made":
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        (tmp_path / "run" / ".checkpoints.lock").read_bytes()
    elif what == "a link is saved to":
        (tmp_path / "link").symlink_to(tmp_path / "run")
        linked = ProjectConfiguration(str(tmp_path / "link"), automatic_checkpoint_naming=True)
        again = Accelerator(cpu=True, project_config=linked)
        again.prepare(torch.nn.Linear(2, 2))
        again.save_state()
        again.end_training()
    else:
        shutil.rmtree(tmp_path / "run")
        accelerator.save_state()
    other = start("automatic", tmp_path / "run")
    assert save(other) == ""
    assert f"process {os.getpid()} on " in other.communicate()[1]
    accelerator.end_training()
    assert save(start("automatic", tmp_path / "run")) != ""


def test_an_end_leaves_the_lock_of_another_job(tmp_path: Path) -> None:
    """An ending job leaves the lock of the job that took over the folder."""
    (tmp_path / "run").mkdir()
    lock = lock_of(tmp_path / "run" / "last", automatic=False)
    claim(lock, tmp_path)
    lock.unlink()
    lock.write_text("another job's")
    give_up(lock)
    assert lock.read_text() == "another job's"


@pytest.mark.parametrize(
    ("umask", "folder", "mode"),
    [
        (0o077, None, 0o600),
        (0o022, None, 0o600),
        (0o002, None, 0o660),
        (0o022, 0o2775, 0o660),  # a group's folder: its users exclude each other
        (0o077, 0o2775, 0o600),
        (0o000, 0o1777, 0o600),  # no other user can remove the leftover lock
        (0o022, 0o0777, 0o666),  # every user can
    ],
    ids=lambda mode: "" if mode is None else f"{mode:o}",
)
def test_who_may_take_the_lock(umask: int, folder: int | None, mode: int, tmp_path: Path) -> None:
    """Exactly the users who may write into the folder may take the lock. The umask applies to the lock too."""
    kept = os.umask(umask)
    try:
        (tmp_path / "run").mkdir(mode=0o777)
        if folder is not None:
            (tmp_path / "run").chmod(folder)
        lock = lock_of(tmp_path / "run" / "last", automatic=False)
        claim(lock, tmp_path)
        assert stat.S_IMODE(lock.stat().st_mode) == mode
        give_up(lock)
    finally:
        os.umask(kept)


def _as_user(number: int, group: int, run: Callable[[], None]) -> int:
    """Run this in a fork as another user. Return its exit code; the fork prints its error."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(number)
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="makes processes of other users")
def test_users_of_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger cannot hold the lock. A group member is refused while it is held, and takes over a stale one."""
    monkeypatch.setattr(locks, "_OTHERS_END_S", 0.2)
    with tempfile.TemporaryDirectory() as folder:  # pytest's folders are private to its user
        Path(folder).chmod(0o755)
        _share_a_folder(Path(folder))


@pytest.mark.skipif(os.geteuid() != 0, reason="makes processes of other users")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_users_of_a_folder_of_everybody(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed job's lock blocks no other user. If only some users can remove it, the message names them."""
    monkeypatch.setattr(locks, "_OTHERS_END_S", 0.2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        shared = Path(folder) / "shared"  # root's folder, whose group the users are not in
        shared.mkdir()
        shared.chmod(mode)
        lock, errors = lock_of(shared / "last", automatic=False), Path(folder) / "errors"
        errors.touch()
        errors.chmod(0o666)

        def take() -> None:
            try:
                claim(lock, shared)
            except CheckpointError as error:
                errors.write_text(str(error))
                raise

        assert _as_user(60001, 60001, take) == 0
        assert lock.exists()
        if mode == 0o777:
            assert _as_user(60002, 60002, take) == 0
        else:
            assert _as_user(60002, 60002, take) == 1
            assert errors.read_text().endswith(f"it was killed: that user can remove {lock}.")


def _share_a_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 60001, 60000)
    shared.chmod(0o2770)
    lock, errors = lock_of(shared / "last", automatic=False), tmp_path / "errors"
    errors.touch()
    errors.chmod(0o666)

    def take() -> None:
        try:
            claim(lock, shared)
        except CheckpointError as error:
            errors.write_text(str(error))
            raise

    def lose() -> None:
        claim(lock, shared)  # and ends without releasing it

    assert _as_user(60001, 60000, lose) == 0
    assert lock.exists()
    assert _as_user(60002, 60000, take) == 0  # a killed job blocks no other
    claim(lock, shared)
    os.chown(lock, 60001, 60000)
    assert _as_user(60002, 60000, take) == 1
    assert errors.read_text().startswith(
        f"process {os.getpid()} on {socket.gethostname()} of user 60001 saves checkpoints in {shared} too"
    )
    lock.chmod(0o600)
    assert _as_user(60002, 60000, take) == 1
    assert errors.read_text().startswith(f"a process of user 60001 saves checkpoints in {shared} too")
    assert f"it was killed: remove {lock}." in errors.read_text()
    give_up(lock)

    own = tmp_path / "own"
    own.mkdir(mode=0o755)
    alone = lock_of(own / "last", automatic=False)
    claim(alone, own)
    give_up(alone)

    def hold_for_reading() -> None:
        claim(alone, own)

    assert _as_user(60002, 60000, hold_for_reading) == 0  # it cannot create a lock there, nor save
    assert not alone.exists()
