"""What one attempt of a run tells the next through the launcher: that memory ran out, and what then comes smaller."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "AGAIN_VARIABLE",
    "CUT_VARIABLE",
    "LAUNCHED_VARIABLE",
    "Shortage",
    "leave_shortage",
    "micro_batch_cut",
    "take_shortage",
]

CUT_VARIABLE: Final = "ZERO_PLUGIN_MICRO_BATCH_CUT"  # set, to 1 at first, by a launcher that reads what workers leave
AGAIN_VARIABLE: Final = "ZERO_PLUGIN_STARTED_AGAIN"  # set where workers were started before, for whatever reason
LAUNCHED_VARIABLE: Final = "ZERO_PLUGIN_LAUNCHED"  # when the first attempt began, in seconds since the epoch

_FILE: Final = "out_of_memory"  # in torchrun's folder of one attempt, where all its workers of a machine write
_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory has run out in a worker.

    Attributes:
        headline: where, with what was needed and what is there.
        advice: lines on what lowers the use, the cheapest first.
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


def leave_shortage(shortage: Shortage, environ: Mapping[str, str]) -> bool:
    """Leave it for the launcher; False where none reads it, so that it has to be said here."""
    if CUT_VARIABLE not in environ or _ERROR_FILE not in environ:
        return False
    try:
        Path(environ[_ERROR_FILE]).parents[1].joinpath(_FILE).write_text(json.dumps(asdict(shortage)), encoding="utf-8")
    except OSError:
        return False
    return True


def take_shortage(folder: Path) -> Shortage | None:
    """What a worker has left, and no longer is there after this.

    Args:
        folder: where torchrun has its folders of the attempts.
    """
    for file in folder.glob(f"*/attempt_*/{_FILE}"):
        text = file.read_text(encoding="utf-8")
        file.unlink()
        return Shortage(**json.loads(text))
    return None
