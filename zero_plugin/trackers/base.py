"""What every tracker has."""

from __future__ import annotations

import functools
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from zero_plugin.collectives import process_index

__all__ = ["GeneralTracker", "KnownTracker", "on_main_process"]

Method = TypeVar("Method", bound=Callable[..., Any])


def on_main_process(method: Method) -> Method:
    """A tracker's method that does nothing on other processes, unless the tracker says `main_process_only = False`."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_here = not getattr(self, "main_process_only", True) or process_index() == 0
        return method(self, *args, **kwargs) if is_here else None

    return run  # type: ignore[return-value]  # of the same signature


class GeneralTracker:
    """What a tracker has; subclass it for one's own.

    A subclass has a `name`, says by `requires_logging_directory` whether it writes files, and gives by `tracker` what
    it writes through.

    Raises:
        NotImplementedError: a subclass lacks one of the three; names those.
    """

    main_process_only: ClassVar[bool] = True
    name: str
    requires_logging_directory: bool

    def __init__(self, _blank: bool = False) -> None:
        missing = [part for part in ("name", "requires_logging_directory", "tracker") if part not in dir(self)]
        if missing and not _blank:
            raise NotImplementedError(
                f"{type(self).__name__} lacks {', '.join(missing)}; a tracker has a name, says whether it "
                "requires_logging_directory, and has a property tracker."
            )

    def start(self) -> None:
        """Open the run; called once, by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the run's hyper-parameters.

        Args:
            values: numbers, booleans, strings and None by name.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write measurements.

        Args:
            values: numbers, strings, or dicts of numbers, by name.
            step: which step they are of.
            **kwargs: for what the tracker writes through.
        """

    def finish(self) -> None:
        """Close the run."""


class KnownTracker(GeneralTracker):
    """A tracker that `log_with` knows by name."""

    needs: ClassVar[str] = ""  # the module that has to be installed

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = Path(logging_dir or ".", run_name)
        self.init_kwargs = kwargs

    @property
    @abstractmethod
    def tracker(self) -> Any:
        """What it writes through."""
