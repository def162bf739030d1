"""A tracker that needs no package: one JSON object per line."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import Any

from zero_plugin.trackers.base import KnownTracker, on_main_process

__all__ = ["JsonlTracker"]


class JsonlTracker(KnownTracker):
    """One JSON object per line in `<logging_dir>/<run_name>/metrics.jsonl`; hyper-parameters in `config.json` there.

    A line holds the `step`, the `time` in seconds since 1970, and the values. Numbers that JSON cannot hold are the
    strings `nan`, `inf` and `-inf`. A second run of the same name goes on at the file's end.
    """

    name = "jsonl"
    requires_logging_directory = True

    @on_main_process
    def start(self) -> None:
        """See `GeneralTracker.start`."""
        self.logging_dir.mkdir(parents=True, exist_ok=True)
        self._file = (self.logging_dir / "metrics.jsonl").open("a", encoding="utf-8", **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """The open file."""
        return self._file

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """See `GeneralTracker.store_init_configuration`."""
        text = json.dumps(_json(values), indent=2, ensure_ascii=False)
        (self.logging_dir / "config.json").write_text(text + "\n", encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """See `GeneralTracker.log`."""
        line = {**({} if step is None else {"step": step}), "time": round(time.time(), 3), **_json(values)}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()  # for who follows the file, and for the end that comes without warning

    @on_main_process
    def finish(self) -> None:
        """See `GeneralTracker.finish`."""
        self._file.close()


def _json(value: Any) -> Any:
    """The value with what JSON cannot hold as text."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)
