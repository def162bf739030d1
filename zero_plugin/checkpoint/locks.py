"""Locks for checkpoint folders: a process holds a draft while writing, and a job claims the folder that it saves in.

Both locks end with the process, even if it is killed. So the rest of a killed run is distinguishable from a live save.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from zero_plugin.checkpoint.disk import make_folder
from zero_plugin.errors import CheckpointError

_descriptors: Final[dict[Path, int]] = {}  # of the folders that this process holds
# (process id, lock) → [descriptor, count]. A forked child inherits the dict, so the process id keeps its claims apart.
_claims: Final[dict[tuple[int, Path], list[int]]] = {}
_OTHERS_END_S = 10.0  # seconds to wait for the previous job, which may still be ending
_LOOK_S: Final = 0.1  # seconds between tries
_LONGEST_HOLDER: Final = 300  # characters


def hold(folder: Path) -> None:
    """Make `is_held` true for a folder until `let_go` or the end of this process, even if the folder is renamed.

    Does nothing if the file system cannot lock a folder (NFS).
    """
    descriptor = _descriptors[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def let_go(folder: Path) -> None:
    """Release a folder of `hold`, if it is held.

    Args:
        folder: the path that was given to `hold`.
    """
    if (descriptor := _descriptors.pop(folder, None)) is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough: forked processes share the lock
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Return whether a live process holds the folder. False if that cannot be known."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def lock_of(target: Path, *, automatic: bool) -> Path:
    """Return the lock file with which a job keeps other jobs from saving in the same place.

    Args:
        target: the checkpoint.
        automatic: whether the checkpoint is named automatically. If so, the lock is for the folder that holds it.
    """
    kept = Path(os.path.realpath(target.parent if automatic else target))
    return kept.with_name(f".{kept.name}.lock")


def claim(lock: Path, place: Path) -> None:
    """Keep other jobs from saving in the same place, until `give_up` or the end of this process.

    The lock is a POSIX lock, which NFS supports too. Without locks or space in the file system, other jobs are not
    kept away.

    Args:
        lock: the file of `lock_of`; its folder exists.
        place: the folder, for the message.

    Raises:
        CheckpointError: a process of another job holds the lock.
    """
    key = os.getpid(), lock
    if holds(lock):
        _claims[key][1] += 1
        return
    deadline = time.monotonic() + _OTHERS_END_S
    try:
        while (descriptor := _try_to_lock(lock)) is None:
            if time.monotonic() > deadline:
                raise CheckpointError(_describe_holder(lock, place))
            time.sleep(_LOOK_S)
    except OSError:
        return  # the save itself fails too, with a clear message
    if (removed := _claims.get(key)) is not None:  # the claimed file was removed, together with its folder
        os.close(removed[0])
    _claims[key] = [descriptor, 1 if removed is None else removed[1] + 1]


def holds(lock: Path) -> bool:
    """Return whether this process has claimed the lock and its file still exists."""
    held = _claims.get((os.getpid(), lock))
    return held is not None and _is_file(held[0], lock)


def _is_file(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def give_up(lock: Path) -> None:
    """End one `claim` of this process."""
    held = _claims.get((os.getpid(), lock))
    if held is None:
        return
    held[1] -= 1
    if held[1] == 0:
        del _claims[os.getpid(), lock]
        with suppress(OSError):
            if _is_file(held[0], lock):  # if not, the folder was removed, and another job may have this file now
                lock.unlink()
        os.close(held[0])


class ClaimedPlace:
    """The folder in which only this run saves. The main process claims one folder at a time."""

    def __init__(self) -> None:
        self._locks: list[Path] = []

    def move(self, target: Path, *, automatic: bool) -> None:
        """Claim the place of a checkpoint. Give up the previous place if it is a different one.

        Args:
            target: the checkpoint.
            automatic: see `lock_of`.

        Raises:
            CheckpointError: a process of another job has claimed it.
        """
        lock = lock_of(target, automatic=automatic)
        if self._locks == [lock] and holds(lock):
            return
        with suppress(OSError):  # the save itself fails too, with a clear message
            make_folder(lock.parent)
        claim(lock, target.parent)
        self.give_up()
        self._locks.append(lock)

    def give_up(self) -> None:
        """Let other jobs save there. Not collective."""
        while self._locks:
            give_up(self._locks.pop())


def _try_to_lock(lock: Path) -> int | None:
    """Lock the file. Return its descriptor, or None if another process holds the lock.

    Raises:
        OSError: the file cannot be created.
    """
    try:
        descriptor = _open(lock)
    except (PermissionError, FileNotFoundError) as error:
        if os.path.lexists(lock) or (isinstance(error, FileNotFoundError) and lock.parent.is_dir()):
            return None  # the file is another user's, or its last holder has removed it just now
        raise
    try:
        _lock(descriptor)
        if not _is_file(descriptor, lock):  # its last holder has removed the file just now
            raise BlockingIOError
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        os.close(descriptor)
        return None
    except OSError:  # the file system has no locks
        pass
    return descriptor


def _open(lock: Path) -> int:
    """Open the file. Create it if it is missing."""
    with suppress(FileExistsError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        with suppress(OSError):
            _share(descriptor, lock.parent.stat())
        return descriptor
    return os.open(lock, os.O_RDWR | os.O_CLOEXEC)


def _share(descriptor: int, folder: os.stat_result) -> None:
    """Allow exactly the users who may write into the folder to open the file. Any user who can read it can lock it.

    A umask that hides files from the group is respected. A umask that only denies writing is not: the jobs of a group's
    users in a common folder must lock each other out.
    """
    hidden = not os.fstat(descriptor).st_mode & stat.S_IRGRP
    os.fchmod(descriptor, 0o600)
    if hidden or folder.st_mode & stat.S_ISVTX or not folder.st_mode & stat.S_IWGRP:
        return
    if folder.st_mode & stat.S_IWOTH:  # every user may save here, so every user must be able to lock
        os.fchmod(descriptor, 0o666)
        return
    os.fchown(descriptor, -1, folder.st_gid)
    os.fchmod(descriptor, 0o660)


def _lock(descriptor: int) -> None:
    """Lock the open file: with an open file description lock if the system has it, otherwise with a plain lock.

    A plain lock ends as soon as the process closes any descriptor of the file.
    """
    if hasattr(fcntl, "F_OFD_SETLK"):
        whole = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock; fcntl(2)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _describe_holder(lock: Path, place: Path) -> str:
    """Return a message that names the job that holds the lock, and says what to do."""
    try:
        owner = lock.stat().st_uid
    except OSError:
        owner = os.geteuid()
    try:
        holder = lock.read_text(errors="replace")[:_LONGEST_HOLDER] or "a process"
    except OSError:
        holder = "a process"
    advice = "Save into another folder, or end that job."
    if owner != os.geteuid() and not os.access(lock, os.R_OK | os.W_OK):
        # In a sticky folder such as /tmp, only the owner of the file or of the folder may remove the file.
        removes = f"that user can remove {lock}" if _is_sticky(lock.parent) else f"remove {lock}"
        advice += f" If that user has no job there, it was killed: {removes}."
    elif not holder.endswith(f" on {socket.gethostname()}"):
        advice += " If its machine is gone, the file server releases the lock within minutes."
    whose = "" if owner == os.geteuid() else f" of {_user(owner)}"
    both = "two jobs would replace and remove each other's"
    return f"{holder}{whose} saves checkpoints in {place} too, and {both}.\n{advice}"


def _is_sticky(folder: Path) -> bool:
    """Return whether this user cannot remove another user's files from the folder."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return bool(status.st_mode & stat.S_ISVTX) and os.geteuid() not in (0, status.st_uid)


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
