"""A logger for several processes: a line comes from the main process only, from all, or from all in order."""

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
    """Python's logger with two more arguments in each call; each line begins with the rank.

    * `main_process_only=True`: the line comes from the main process only; with False from every process.
    * `in_order=False`: with True the line comes from every process, one after another; collective, even on a process
      whose level drops the line.

    Raises:
        LoopError: a line is logged before the process group is started.
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, Any] | None = None) -> None:
        super().__init__(logger, extra or {})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the line with this process's rank before it."""
        msg, kwargs = super().process(msg, kwargs)
        kwargs.setdefault("stacklevel", 2)  # the caller's file and line, not this one's
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log `msg % args`; `main_process_only` has no effect with `in_order`."""
        if not PartialState._shared_state:
            raise LoopError(
                f"the logger {self.logger.name!r} is used before the process group is started.\n"
                "Write accelerator = Accelerator(), or PartialState() without an Accelerator, before the first line."
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
        """Log a warning the first time that this method gets this message and these arguments."""
        call = repr((msg, args, sorted(kwargs.items(), key=lambda item: item[0])))
        if once(self, call):
            self.log(logging.WARNING, msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return Python's logger of that name, with `main_process_only` and `in_order` in each call, and `warning_once`.

    Args:
        name: the name of the logger, e.g. `__name__`.
        log_level: the level of this logger and of the root logger, e.g. `INFO`. None takes `ACCELERATE_LOG_LEVEL`;
            without that variable both levels stay as they are.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level:
        logger.setLevel(level.upper())
        logging.getLogger().setLevel(level.upper())
    return MultiProcessAdapter(logger)
