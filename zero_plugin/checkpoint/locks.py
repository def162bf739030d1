"""Who writes where: a draft is held while it is written, and a job claims the place that it saves in.

Both end with the process, however it ends, so that what a killed run has left is told from what a living one does.
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
# Process and lock → descriptor and count: a fork, which inherits the dict, claims for itself.
_claims: Final[dict[tuple[int, Path], list[int]]] = {}
_OTHERS_END_S = 10.0  # that a job may overlap with the one before it, which is ending
_LOOK_S: Final = 0.1
_LONGEST_HOLDER: Final = 300


def hold(folder: Path) -> None:
    """Have `is_held` be true everywhere, also when the folder gets another name, until `let_go` or this process ends.

    Nothing happens where the file system cannot lock a folder (NFS).
    """
    descriptor = _descriptors[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def let_go(folder: Path) -> None:
    """End `hold`, if it holds.

    Args:
        folder: as it was called there.
    """
    if (descriptor := _descriptors.pop(folder, None)) is not None:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # else processes forked meanwhile would hold it further
        os.close(descriptor)


def is_held(folder: Path) -> bool:
    """Whether a process that lives holds it. False where nobody can know."""
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
    """The file by which the job that saves a checkpoint keeps others away.

    Args:
        target: the checkpoint.
        automatic: whether its name is, and so are those of all that is saved in its folder.
    """
    kept = Path(os.path.realpath(target.parent if automatic else target))
    return kept.with_name(f".{kept.name}.lock")


def claim(lock: Path, place: Path) -> None:
    """Keep other jobs from saving where this one does, until `give_up` or until this process ends, however it ends.

    Args:
        lock: of `lock_of`; its folder is there.
        place: the folder, for the message.

    The lock is POSIX's, which NFS has too. Nothing is kept away where the file system has no locks, or no room.

    Raises:
        CheckpointError: a process of another job has it.
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
        return  # what is saved fails too, and says why
    if (removed := _claims.get(key)) is not None:  # with its folder
        os.close(removed[0])
    _claims[key] = [descriptor, 1 if removed is None else removed[1] + 1]


def holds(lock: Path) -> bool:
    """Whether this process has claimed it, and its file is still there."""
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
            if _is_file(held[0], lock):  # else the folder was removed, and another job may have one of that name
                lock.unlink()
        os.close(held[0])


class ClaimedPlace:
    """The place in which a run saves, and other jobs do not. It is claimed on the main process, one at a time."""

    def __init__(self) -> None:
        self._locks: list[Path] = []

    def move(self, target: Path, *, automatic: bool) -> None:
        """Claim the place of a checkpoint; give up the last place if it is another.

        Args:
            target: the checkpoint.
            automatic: as for `lock_of`.

        Raises:
            CheckpointError: a process of another job has claimed it.
        """
        lock = lock_of(target, automatic=automatic)
        if self._locks == [lock] and holds(lock):
            return
        with suppress(OSError):  # saving fails too, and says why
            make_folder(lock.parent)
        claim(lock, target.parent)
        self.give_up()
        self._locks.append(lock)

    def give_up(self) -> None:
        """Let other jobs save there; not collective."""
        while self._locks:
            give_up(self._locks.pop())


def _try_to_lock(lock: Path) -> int | None:
    """A descriptor of the file that is locked, or None where another process has it.

    Raises:
        OSError: there can be no such file.
    """
    try:
        descriptor = _open(lock)
    except (PermissionError, FileNotFoundError) as error:
        if os.path.lexists(lock) or (isinstance(error, FileNotFoundError) and lock.parent.is_dir()):
            return None  # another user's; or its last holder has removed it just now
        raise
    try:
        _lock(descriptor)
        if not _is_file(descriptor, lock):  # its last holder has removed it just now
            raise BlockingIOError
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        os.close(descriptor)
        return None
    except OSError:  # it has no locks
        pass
    return descriptor


def _open(lock: Path) -> int:
    """Open the file, and make it if it is missing."""
    with suppress(FileExistsError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
        with suppress(OSError):
            _share(descriptor, lock.parent.stat())
        return descriptor
    return os.open(lock, os.O_RDWR | os.O_CLOEXEC)


def _share(descriptor: int, folder: os.stat_result) -> None:
    """Let only users who may write into the folder open the file: whoever can read it can lock it.

    A umask that hides files from the group counts; one that only denies writing does not, since jobs of a group's users
    in their common folder have to keep each other away.
    """
    hidden = not os.fstat(descriptor).st_mode & stat.S_IRGRP
    os.fchmod(descriptor, 0o600)
    if hidden or folder.st_mode & stat.S_ISVTX or not folder.st_mode & stat.S_IWGRP:
        return
    if folder.st_mode & stat.S_IWOTH:  # its owner may be of another group, so the file's group says nothing
        os.fchmod(descriptor, 0o666)
        return
    os.fchown(descriptor, -1, folder.st_gid)
    os.fchmod(descriptor, 0o660)


def _lock(descriptor: int) -> None:
    """Of the open file, where the system has such: a plain lock ends when the process closes the file anywhere."""
    if hasattr(fcntl, "F_OFD_SETLK"):
        whole = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock; fcntl(2)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole)
    else:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _describe_holder(lock: Path, place: Path) -> str:
    """Return what keeps this job from saving, and what to do."""
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
        # In a sticky folder, as /tmp, only the owner of a file or of the folder removes the file.
        removes = f"that user can remove {lock}" if _is_sticky(lock.parent) else f"remove {lock}"
        advice += f" If that user has no job there, it was killed: {removes}."
    elif not holder.endswith(f" on {socket.gethostname()}"):
        advice += " If its machine is gone, the file server gives the lock up within minutes."
    whose = "" if owner == os.geteuid() else f" of {_user(owner)}"
    both = "two jobs would replace and remove each other's"
    return f"{holder}{whose} saves checkpoints in {place} too, and {both}.\n{advice}"


def _is_sticky(folder: Path) -> bool:
    """Whether this user cannot remove what another user has made in a folder."""
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
