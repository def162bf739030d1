"""A logger that knows its process: a line from the main process only, from all, or from all in order."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from zero_plugin.distributed.messages import once
from zero_plugin.errors import LoopError
from zero_plugin.loop.state import PartialState

__all__ = ["MultiProcessAdapter", "get_logger"]

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # generic from Python 3.11 on


class MultiProcessAdapter(_Adapter):
    """Python's logger with two more arguments in each call; lines begin with the process's rank.

    * `main_process_only=True`: the line comes from the main process only; with False from every process.
    * `in_order=False`: with True the line comes from every process, one after another; collective, also on a process
      whose level leaves the line out.

    Raises:
        LoopError: a line is logged before the processes have been started.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, Any] | None = None) -> None:
        super().__init__(logger, extra or {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The line with this process's rank before it."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # the caller's file and line, not this one's
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log `msg % args`; `main_process_only` has no effect with `in_order`."""
        if not PartialState._shared_state:
            raise LoopError(
                f"the logger {self.logger.name!r} is used before the processes have been started.\n"
                "Write accelerator = Accelerator(), or PartialState() where there is none, before the first line."
            )
        state = PartialState()
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        msg, options = self.process(msg, kwargs) if self.isEnabledFor(level) else (msg, kwargs)
        if not in_order:
            if state.is_main_process or not main_process_only:
                self.logger.log(level, msg, *args, **options)
            return
        for process in range(state.num_processes):
            if process == state.process_index:
                self.logger.log(level, msg, *args, **options)
            state.wait_for_everyone()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """`warning`, the first time that it is called with this message and these arguments."""
        call = repr((msg, args, sorted(kwargs.items(), key=lambda item: item[0])))
        if once(self, call):
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Python's logger of that name, with `main_process_only` and `in_order` in each call, and `warning_once`.

    Args:
        name: of the logger, e.g. `__name__`.
        log_level: for this logger and the root one, e.g. `INFO`; by default what `ACCELERATE_LOG_LEVEL` says, else
            both stay as they are.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger)
