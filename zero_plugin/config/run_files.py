"""Files that a run leaves: what it resolved to, and what one attempt of a launch tells the next."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final


def replace_text(file: Path, text: str, *, private: bool = False) -> None:
    """Write a text file so that every reader, also after a crash, finds either the old text or the new one, complete.

    Args:
        file: where it goes.
        text: all of it.
        private: whether nobody but the user may read it, whatever the umask is; else it keeps the mode that it has.

    Raises:
        OSError: the file cannot be written, or its folder is missing.
    """
    target = Path(os.path.realpath(file))  # a link stays a link
    beside = target.with_name(f".{target.name}.{threading.get_native_id()}")  # several may write the same
    try:
        beside.touch(mode=0o600 if private else 0o666)
        beside.write_text(text, encoding="utf-8")
        if target.exists() and not private:
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it, which nobody but the user may look into, whatever the umask is.

    What is there already stays as it is.

    Raises:
        OSError: it cannot be made, or still begins with `~`, as that of a user without a home does: a folder of this
            name in the working folder would be one that `rm -r ~` is typed for.
    """
    if folder.parts[:1] and folder.parts[0].startswith("~") and not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder; set HOME", str(folder))
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME`, else `~/.cache`."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache))  # noqa: PTH111 - Path.expanduser raises for a user without a home


RECORD_NAME: Final = "resolved_config.json"  # beside weights and checkpoints
FOLDER_VARIABLE: Final = "ZERO_PLUGIN_RUNS"

_KEPT: Final = 20


def write_record(record: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the record of what a run resolved to beside what is in `folder`, e.g. weights; the file.

    Raises:
        OSError: it cannot be written.
    """
    file = Path(folder) / RECORD_NAME
    _write(record, file)
    return file


def keep_record(record: Mapping[str, Any], log_dir: str | None, environ: Mapping[str, str]) -> str:
    """Keep a run's record, and say in a sentence where; never fails a run.

    It goes to `log_dir` where the launch has one, else to `$ZERO_PLUGIN_RUNS`, else to the user's cache, where the
    newest twenty stay.
    """
    name = f"resolved-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(log_dir or environ.get(FOLDER_VARIABLE) or cache_folder(environ) / "zero_plugin" / "runs")
    try:
        make_private_folder(folder)
        taken = sum(1 for _ in folder.glob(f"{name}*"))  # several models prepared in one second
        file = folder / f"{name}{f'-{taken + 1}' if taken else ''}.json"
        _write(record, file)
        if not log_dir:
            for old in sorted(folder.glob("resolved-*.json"))[:-_KEPT]:
                old.unlink(missing_ok=True)
    except OSError as error:
        return f"the resolved configuration is kept nowhere: {folder} cannot be written ({error.strerror})"
    return f"every value and where it came from: {file}"


def _write(record: Mapping[str, Any], file: Path) -> None:
    text = json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"
    replace_text(file, text, private=True)  # a configuration may hold a key of a monitor's service


CUT_VARIABLE: Final = "ZERO_PLUGIN_MICRO_BATCH_CUT"  # set, to 1 at first, by a launcher that reads what workers leave

_FILE: Final = "out_of_memory"  # in torchrun's folder of one attempt, where all its workers of a machine write
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_ATTEMPT: Final = re.compile(r"attempt_\d+")


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """What a worker says that has run out of memory.

    Attributes:
        headline: where, with what was needed and what is there.
        advice: lines on how to reduce its use, the cheapest first.
        cut: into how many micro-batches the next attempt is to cut each of the loader's batches, with as many times the
            accumulation; 0 where a smaller micro-batch is not open, or would not help.
        micro_batch: samples of a micro-batch then.
    """

    headline: str
    advice: str
    cut: int = 0
    micro_batch: int = 0


def micro_batch_cut(environ: Mapping[str, str]) -> int:
    """Into how many micro-batches this attempt cuts each of the loader's batches; 1 as long as memory sufficed."""
    return int(environ.get(CUT_VARIABLE, "1"))


def leave_out_of_memory_report(report: OutOfMemoryReport, environ: Mapping[str, str]) -> bool:
    """Leave it for the launcher; False where none reads it, so that it has to be logged here."""
    if CUT_VARIABLE not in environ or _ERROR_FILE not in environ:
        return False
    try:
        Path(environ[_ERROR_FILE]).parents[1].joinpath(_FILE).write_text(json.dumps(asdict(report)), encoding="utf-8")
    except OSError:
        return False
    return True


def take_out_of_memory_report(folder: Path) -> OutOfMemoryReport | None:
    """What a worker has left, and no longer is there after this.

    Args:
        folder: where torchrun has its folders of the attempts.
    """
    for file in folder.glob(f"*/attempt_*/{_FILE}"):
        text = file.read_text(encoding="utf-8")
        file.unlink()
        return OutOfMemoryReport(**json.loads(text))
    return None


def keep_run(folder: Path, run: str, environ: Mapping[str, str]) -> None:
    """Tell the attempts to come that checkpoints in `folder` are this run's where they bear this id.

    It is not a variable that the launcher sets, since it is known only when a checkpoint was chosen. Nothing happens
    where no launcher starts workers again, or where its folder cannot be written.
    """
    if (note := _note_of_run(folder, environ)) is not None:
        with suppress(OSError):
            replace_text(note, run)


def kept_run(folder: Path, environ: Mapping[str, str]) -> str | None:
    """What `keep_run` has recorded, on this machine, in an earlier attempt of the same launch or in this one."""
    note = _note_of_run(folder, environ)
    try:
        return None if note is None else note.read_text(encoding="utf-8")
    except OSError:
        return None


def _note_of_run(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """A file in torchrun's folder of all attempts, or above it where our launcher begins a torchrun anew."""
    error_file = Path(environ.get(_ERROR_FILE, ""))
    if len(error_file.parents) < 4 or not _ATTEMPT.fullmatch(error_file.parents[1].name):
        return None
    launch = error_file.parents[3 if CUT_VARIABLE in environ else 2]
    return launch / f"run_{zlib.crc32(str(folder).encode()):08x}"
