"""Full, read-only, broken or unshared disks: every process gets an error, and all other state is unchanged."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_paths import on_paths, on_rows, row
from paths import loss_of, make_net, own_batch, running

from zero_plugin import Accelerator
from zero_plugin.checkpoint import locks, save, tensor_files
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.distributed import collectives
from zero_plugin.errors import CheckpointError

pytestmark = pytest.mark.programs

ROWS = [
    row("zero3", 2, "full", "without-reserving", daily=False),
    row("ddp", 2, "full", "asynchronously", daily=True),
    row("ddp", 2, "read-only", "usual", daily=True),
    row("zero2", 2, "broken", "usual", daily=True),
    row("zero3", 2, "over-quota", "usual", daily=False),
]
_MS_RDONLY, _MS_REMOUNT, _MS_REC_PRIVATE, _CLONE_NEWNS = 1, 32, 0x4000 | 0x40000, 0x20000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Training:
    """A small training; `losses` has one entry a step."""

    asynchronous = False

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        net = make_net()
        self.model, self.optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        self.losses: list[float] = []

    def step(self) -> None:
        """Take one step."""
        loss = loss_of(self.model, own_batch(len(self.losses)))
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(collectives.reduce(loss.detach())))

    def save(self, target: Path) -> str | None:
        """Save. If that fails, return the error of every process."""
        try:
            self.accelerator.save_state(target, max_shard_size=600, asynchronous=self.asynchronous)
            self.accelerator.wait_for_save()
            told = None
        except CheckpointError as error:
            told = str(error)
        everyone = collectives.gather_object([told])
        assert all((one is None) == (told is None) for one in everyone), everyone
        return told


class Moments:
    """Hook that runs an action in one process right before one of its system calls."""

    def __init__(self) -> None:
        self._left = -1
        self._action: Callable[[], None] = lambda: None
        for owner, name in (
            (os, "pwrite"),
            (os, "fsync"),
            (os, "ftruncate"),
            (Path, "open"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "replace"),
            (tensor_files, "reserve"),
            (shutil, "disk_usage"),
        ):
            setattr(owner, name, self._counted(getattr(owner, name)))

    def set(self, moment: int, action: Callable[[], None]) -> None:
        """Run `action` before the call after `moment` further calls."""
        self._left, self._action = moment, action

    def have_come(self) -> bool:
        """Return whether the moment has come, and disarm the hook."""
        come, self._left = self._left < 0, -1
        return come

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left == -1:
                self._action()
            return call(*args, **kwargs)

        return counted


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a file system of 24 MB, in memory, on process 0."""
    disk, refusal = folder / "disk", [""]
    if dist.get_rank() == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        refusal = [mounted.stderr.strip() if mounted.returncode else ""]
    dist.broadcast_object_list(refusal)
    if refusal[0]:
        pytest.skip(f"mounting a file system takes root's rights: {refusal[0]}")
    try:
        yield disk
    finally:
        if dist.get_rank() == 0:
            subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextmanager
def training_on(path: str, folder: Path) -> Iterator[tuple[Training, Path]]:
    """Create a training and a small disk. At the end, compare the losses with a training that never saves."""
    with small_disk(folder) as disk, running(path) as accelerator:
        training = Training(accelerator)
        yield training, disk
    assert len(training.losses) > 1
    with running(path) as accelerator:
        whole = Training(accelerator)
        for _ in training.losses:
            whole.step()
    assert training.losses == whole.losses


@on_rows(("failure", "way"), ROWS, alone=True)
def test_a_failing_disk(path: str, failure: str, way: str, folder: Path) -> None:
    """If the disk fails at any moment on one process, all get errors, old checkpoints stay, and training runs."""
    with training_on(path, folder) as (training, disk):
        training.asynchronous = way == "asynchronously"
        moments = Moments()
        if failure == "read-only":  # no file may be open then
            locks.claim = lambda lock, place: None
        if way == "without-reserving":
            tensor_files.reserve = lambda file, size: file.truncate(size)
        rank, main = dist.get_rank(), dist.get_rank() == 0
        training.step()
        assert training.save(disk / "first") is None
        hindered = 0
        for failing in range(dist.get_world_size()):
            moment, come = 0, True
            while come:
                if rank == failing:
                    moments.set(moment, lambda: FAILURES[failure](disk))
                told = training.save(disk / "second")
                come = any(collectives.gather_object([rank == failing and moments.have_come()]))
                dist.barrier()
                if main:
                    mend(disk)
                dist.barrier()
                hindered += told is not None
                assert told is None or any(word in told for word in WORDS[failure]), told
                assert find_damage(disk / "first") is None
                assert not (disk / "second").exists() or find_damage(disk / "second") is None
                assert failure == "read-only" or not (names_in(disk) - {"first", "second", "filler"})
                training.step()
                moment += 1
            assert told is None
        assert hindered > 5
        assert names_in(disk) == {"first", "second"}
        assert training.accelerator.load_state(disk / "second", verify=True).steps == len(training.losses) - 1
        training.losses.pop()


def names_in(disk: Path) -> set[str]:
    """Return the file names, except those of locks, which the run keeps."""
    return {path.name for path in disk.iterdir() if path.suffix != ".lock"}


@on_paths("ddp", alone=True)
def test_what_cannot_work_is_told_before_anything_is_written(path: str, folder: Path) -> None:
    """A full disk, a file instead of the folder, and a disk's root folder are reported before anything is written."""
    with training_on(path, folder) as (training, disk):
        training.step()
        if dist.get_rank() == 0:
            fill(disk, but=2**20)
            (disk / "file").write_text("")
        dist.barrier()
        for target, words in (
            (disk / "saved", "does not fit: "),
            (disk / "file" / "saved", "disk/file: File exists)"),
            (disk / "file", "is a file"),
            (disk, "where a disk is mounted"),
        ):
            told = training.save(target)
            assert told is not None
            assert words in told, told
            assert names_in(disk) == {"file", "filler"}
        dist.barrier()
        if dist.get_rank() == 0:
            mend(disk)
        dist.barrier()
        training.step()
        assert training.save(disk / "new" / "folders" / "saved") is None
        assert find_damage(disk / "new" / "folders" / "saved") is None


@on_paths("zero2", alone=True)
def test_a_folder_that_is_another_one_for_a_process(path: str, folder: Path) -> None:
    """A process that sees another folder is named, on save and on load."""
    with training_on(path, folder) as (training, disk):
        shared, torn = disk / "shared", disk / "torn"
        training.step()
        assert training.save(shared / "saved") is None
        assert training.save(torn / "saved") is None
        dist.barrier()
        if dist.get_rank() == 1:
            copy = disk / "copy"
            shutil.copytree(torn, copy)
            assert _LIBC.unshare(_CLONE_NEWNS) == 0
            assert _LIBC.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
            assert _LIBC.mount(b"none", os.fsencode(torn), b"tmpfs", 0, None) == 0
        save._found_shared.discard(torn)
        training.step()
        for target in (torn / "saved", torn / "other"):
            told = training.save(target)
            assert told is not None
            assert "is not the same folder on all processes: process 0 cannot read what processes [1]" in told, told
        load = training.accelerator.load_state
        told = refused(lambda: load(torn / "saved"))
        assert "processes [1] see no checkpoint" in told, told
        if dist.get_rank() == 1:
            shutil.copytree(disk / "copy" / "saved", torn / "saved")
            manifest = torn / "saved" / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"created"', '"created" '))
        told = refused(lambda: load(torn / "saved"))
        assert "processes [1] see another checkpoint" in told, told
        dist.barrier()
        assert training.save(shared / "saved") is None
        training.step()


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the CheckpointError that `call` raises."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("it was not refused")


def fill(disk: Path, but: int = 0) -> None:
    """Fill the disk up to `but` free bytes."""
    usage = os.statvfs(disk)
    size = usage.f_bavail * usage.f_frsize - but
    descriptor = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    if size > 0:
        os.posix_fallocate(descriptor, 0, size)
    os.close(descriptor)


def make_read_only(disk: Path) -> None:
    """Make the disk read-only, except for files that are being written."""
    _LIBC.mount(b"none", os.fsencode(disk), None, _MS_REMOUNT | _MS_RDONLY, None)


def fail(disk: Path) -> None:
    """Raise the error of a broken disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def run_out(disk: Path) -> None:
    """Raise the error of an exceeded quota, which file servers report at any write."""
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def mend(disk: Path) -> None:
    """Make the disk writable again, with free space."""
    _LIBC.mount(b"none", os.fsencode(disk), None, _MS_REMOUNT, None)
    (disk / "filler").unlink(missing_ok=True)


FAILURES = {"full": fill, "read-only": make_read_only, "broken": fail, "over-quota": run_out}
WORDS = {
    "full": ("No space left on device", "does not fit"),
    "read-only": ("Read-only file system",),
    "broken": ("Input/output error",),
    "over-quota": ("Disk quota exceeded",),
}
