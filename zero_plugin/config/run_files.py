"""Files of a run: records of its resolved configuration, and notes from one attempt of a launch to the next."""

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
    """Write a text file atomically: a reader finds the complete old or new text, also after a crash.

    Args:
        file: the file to write.
        text: the complete text.
        private: whether only the user may read the file, whatever the umask is. Otherwise an existing file keeps its
            mode.

    Raises:
        OSError: the file cannot be written, or its folder is missing.
    """
    target = Path(os.path.realpath(file))  # so a symbolic link stays one
    beside = target.with_name(f".{target.name}.{threading.get_native_id()}")  # unique, as several threads may write
    try:
        beside.touch(mode=0o600 if private else 0o666)
        beside.write_text(text, encoding="utf-8")
        if target.exists() and not private:
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents, which only the user may enter, whatever the umask is.

    Existing folders keep their mode.

    Raises:
        OSError: the folder cannot be made, or starts with `~` because the user has no home. A folder of that name in
            the working directory would invite `rm -r ~`.
    """
    if folder.parts[:1] and folder.parts[0].startswith("~") and not folder.exists():
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder; set HOME", str(folder))
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return `$XDG_CACHE_HOME`, or `~/.cache` if it is not set."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(cache))  # noqa: PTH111 - Path.expanduser raises for a user without a home


RECORD_NAME: Final = "resolved_config.json"  # next to weights and checkpoints
FOLDER_VARIABLE: Final = "ZERO_PLUGIN_RUNS"

_KEPT: Final = 20  # records outside `log_dir`


def write_record(record: Mapping[str, Any], folder: str | Path) -> Path:
    """Write the record of a resolved run into `folder`, e.g. next to weights. Return the file.

    Raises:
        OSError: the file cannot be written.
    """
    file = Path(folder) / RECORD_NAME
    _write(record, file)
    return file


def keep_record(record: Mapping[str, Any], log_dir: str | None, environ: Mapping[str, str]) -> str:
    """Keep a run's record, and return a sentence that names the file or the failure. Never fails a run.

    The folder is `log_dir` if the launch has one, otherwise `$ZERO_PLUGIN_RUNS`, otherwise the user's cache. Outside
    `log_dir`, only the newest twenty records are kept.
    """
    name = f"resolved-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(log_dir or environ.get(FOLDER_VARIABLE) or cache_folder(environ) / "zero_plugin" / "runs")
    try:
        make_private_folder(folder)
        taken = sum(1 for _ in folder.glob(f"{name}*"))  # one process may prepare several models in a second
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
    replace_text(file, text, private=True)  # a configuration may hold the API key of a monitor's service


CUT_VARIABLE: Final = "ZERO_PLUGIN_MICRO_BATCH_CUT"  # set by a launcher that reads workers' reports; 1 at first

_FILE: Final = "out_of_memory"  # in torchrun's folder of one attempt, which all its workers on a machine share
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
_ATTEMPT: Final = re.compile(r"attempt_\d+")


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """A worker's report that it ran out of memory.

    Attributes:
        headline: the place, with needed and available memory.
        advice: lines on how to reduce memory use, the cheapest first.
        cut: number of micro-batches into which the next attempt cuts each of the loader's batches, with as many times
            the accumulation; 0 if the micro-batch is not open, or a smaller one would not help.
        micro_batch: samples of a micro-batch after the cut.
    """

    headline: str
    advice: str
    cut: int = 0
    micro_batch: int = 0


def micro_batch_cut(environ: Mapping[str, str]) -> int:
    """Return the number of micro-batches into which this attempt cuts each loader batch; 1 if memory has sufficed."""
    return int(environ.get(CUT_VARIABLE, "1"))


def leave_out_of_memory_report(report: OutOfMemoryReport, environ: Mapping[str, str]) -> bool:
    """Leave the report for the launcher. Return False if no launcher reads it, so the caller has to log it."""
    if CUT_VARIABLE not in environ or _ERROR_FILE not in environ:
        return False
    try:
        Path(environ[_ERROR_FILE]).parents[1].joinpath(_FILE).write_text(json.dumps(asdict(report)), encoding="utf-8")
    except OSError:
        return False
    return True


def take_out_of_memory_report(folder: Path) -> OutOfMemoryReport | None:
    """Return a worker's report, if any, and delete its file.

    Args:
        folder: torchrun's folder, which has a folder for each attempt.
    """
    for file in folder.glob(f"*/attempt_*/{_FILE}"):
        text = file.read_text(encoding="utf-8")
        file.unlink()
        return OutOfMemoryReport(**json.loads(text))
    return None


def keep_run(folder: Path, run: str, environ: Mapping[str, str]) -> None:
    """Record for later attempts of this launch that checkpoints in `folder` with the id `run` are this run's.

    The launcher cannot set a variable for this, because the id is known only once a checkpoint was chosen. Does nothing
    if no launcher restarts workers, or if its folder cannot be written.
    """
    if (note := _note_of_run(folder, environ)) is not None:
        with suppress(OSError):
            replace_text(note, run)


def kept_run(folder: Path, environ: Mapping[str, str]) -> str | None:
    """Return the id that `keep_run` recorded on this machine in this or an earlier attempt of the same launch."""
    note = _note_of_run(folder, environ)
    try:
        return None if note is None else note.read_text(encoding="utf-8")
    except OSError:
        return None


def _note_of_run(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """Return a file in torchrun's folder of all attempts, or above it if our launcher starts torchrun again."""
    error_file = Path(environ.get(_ERROR_FILE, ""))
    if len(error_file.parents) < 4 or not _ATTEMPT.fullmatch(error_file.parents[1].name):
        return None
    launch = error_file.parents[3 if CUT_VARIABLE in environ else 2]
    return launch / f"run_{zlib.crc32(str(folder).encode()):08x}"
