"""What a launcher hands to its workers, and one attempt of a launch to the next.

A document as one environment variable, from the launcher to its workers.

What one attempt of a launch tells the next: that memory ran out, and whose checkpoints it has resumed from.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from zero_plugin.config.document import Document
from zero_plugin.config.files import replace_text
from zero_plugin.config.tree import AUTO, Entry, Origin, Tree
from zero_plugin.errors import ConfigError, Problem

ENVIRONMENT_VARIABLE: Final = "ZERO_PLUGIN_DOCUMENT"

_LARGEST: Final = 128 * 1024 - len(ENVIRONMENT_VARIABLE) - 2  # Linux: MAX_ARG_STRLEN, 32 pages for `NAME=value\0`


def to_environment(document: Document, processes: int | None = None) -> str:
    """The document as compact JSON in ASCII, with its origins; `AUTO` stays distinct from any text.

    Args:
        document: checked.
        processes: how many are started, on all machines; written into a document that leaves it open, so that they
            can see whether all have met.

    Raises:
        ConfigError: the text is longer than one environment variable can be.
    """
    assert not document.problems, "a document is checked before it is handed over"
    if processes is not None and document.launch.value("num_processes") in (None, AUTO):
        started = Entry(processes, Origin("rule", "launch", "as many as are started"))
        document = replace(document, launch=document.launch.replace({("num_processes",): started}))
    text = json.dumps(
        {
            "launch": _encode_tree(document.launch),
            "deepspeed": _encode_tree(document.deepspeed),
            "sources": document.sources,
            "sections": [[path, where] for path, where in document.sections.items()],
            "notes": [astuple(note) for note in document.notes],
        },
        separators=(",", ":"),
    )
    if len(text) > _LARGEST:
        message = f"needs {len(text)} bytes to hand over to the workers"
        where = document.sources[0] if document.sources else "the configuration"
        raise ConfigError([Problem(where, "", message, f"Shorten it: the system takes at most {_LARGEST} bytes.")])
    return text


def from_environment(environ: Mapping[str, str]) -> Document | None:
    """The document that a launcher handed over, or None where there was none."""
    text = environ.get(ENVIRONMENT_VARIABLE)
    if not text:
        return None
    data = json.loads(text)
    return Document(
        launch=_decode_tree(data["launch"]),
        deepspeed=_decode_tree(data["deepspeed"]),
        sources=tuple(data["sources"]),
        sections={tuple(path): where for path, where in data["sections"]},
        notes=tuple(Problem(*row) for row in data["notes"]),
    )


def _encode_tree(tree: Tree) -> list[Any]:
    return [
        [path, _encode(entry.value), entry.origin.kind, entry.origin.where, entry.origin.reason]
        for path, entry in tree.entries.items()
    ]


def _decode_tree(rows: list[Any]) -> Tree:
    return Tree(
        {tuple(path): Entry(_decode(value), Origin(kind, where, reason)) for path, value, kind, where, reason in rows}
    )


def _encode(value: Any) -> Any:
    """JSON in which an object is always a tag: `{"auto": …}` for AUTO, `{"keys": …}` for a mapping."""
    if value is AUTO:
        return {"auto": True}
    if isinstance(value, Mapping):
        return {"keys": {key: _encode(child) for key, child in value.items()}}
    if isinstance(value, tuple):
        return [_encode(child) for child in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if "auto" in value:
            return AUTO
        return MappingProxyType({key: _decode(child) for key, child in value["keys"].items()})
    if isinstance(value, list):
        return tuple(_decode(child) for child in value)
    return value


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
    """What `keep_run` has told, on this machine, in an earlier attempt of the same launch or in this one."""
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
