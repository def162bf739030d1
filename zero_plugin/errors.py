"""The one exception tree.

All errors that this package raises on purpose are in one tree:

    ZeroPluginError
    ├── ConfigError         a value in a file, a flag or code is invalid; lists every problem found
    ├── LaunchError         the launcher could not start or keep the workers
    ├── MachineError        this machine cannot run it: no compiler, no libaio, or a stale build lock
    ├── StrategyError       the requested strategy cannot run here
    ├── LoopError           the training loop uses this package in a way that has no meaning
    └── CheckpointError     a checkpoint cannot be written, is damaged, or does not fit; names file or tensor
        └── DamagedError    a checkpoint is damaged: its contents differ from what was written
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

Severity = Literal["error", "warning", "note"]

_PLACE: Final = re.compile(r"(.+):(\d+):(\d+)", re.DOTALL)
# Control characters except newline and tab, marks that change text direction, other line ends, unpaired surrogates.
_NOT_SHOWN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text of a file or a peer with control characters escaped, as `\u001b`, to protect the terminal.

    The escape has the same meaning in JSON, YAML, Python, and in `$'…'` of a shell.
    """
    return _NOT_SHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class ZeroPluginError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        exit_code: the exit status of the command line.
        lost_peer: whether the error only reports that another process does not answer, has ended or has failed.
        repeats: the message of another process's error that this error repeats; None for this process's own error.
    """

    exit_code = 1
    lost_peer = False
    repeats: str | None = None

    def __str__(self) -> str:
        return printable(super().__str__())


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding in the configuration: where, what, and what to write instead.

    Attributes:
        where: `file:line:column`, a flag such as `--zero_stage`, or a call such as `Accelerator(mixed_precision=…)`.
        key: the dotted path of the key, e.g. `zero_optimization.stage`; empty if the problem concerns the entire file.
        message: what is wrong, with the value that was found.
        fix: what is legal or what to write; empty for a note only.
        value: the value that was found, as text; empty if the problem does not concern a single value.
        severity: `error`: the run would not start, or would differ from its configuration. `warning`: the run starts,
            but a setting has no effect, is read as another value than it looks like, or will be an error in a later
            release. `note`: information, never a reason to fail.
        rename: the key to write instead of the last part of `key`, if no other key is meant; otherwise "".
    """

    where: str
    key: str
    message: str
    fix: str
    value: str = ""
    severity: Severity = "error"
    rename: str = ""

    @property
    def headline(self) -> str:
        """The place and the finding, in one line. The key is left out for a flag, which already names it."""
        return f"{self.where}: {self.message if self.where.startswith('--') else self.finding}"

    @property
    def finding(self) -> str:
        """Key, value if the message does not show it, and message."""
        value = re.escape(self.value.strip('"'))
        is_shown = re.search(rf"(?<![\w.]){value}(?!\w|\.\d)", self.message)  # as a separate word: 1024 does not show 4
        shown = "" if is_shown or not value else f" = {self.value}"
        return f"{self.key}{shown}: {self.message}" if self.key else self.message

    @property
    def remark(self) -> str:
        """The log line of a finding that does not stop a run: a warning with its fix, a note without."""
        return str(self) if self.severity == "warning" else self.headline

    @property
    def place(self) -> tuple[str, int, int]:
        """File, line and column of `where`; 0 for a line or column that is not known or has no meaning."""
        found = _PLACE.fullmatch(self.where)
        return (found[1], int(found[2]), int(found[3])) if found else (self.where, 0, 0)

    def __str__(self) -> str:
        return f"{self.headline}\n    {self.fix}" if self.fix else self.headline


E = TypeVar("E", bound=ZeroPluginError)


def of_lost_peer(error: E) -> E:
    """Mark an error as the mere consequence of a lost peer: the launcher looks for the error of that peer instead."""
    error.lost_peer = True
    return error


class ConfigError(ZeroPluginError, ValueError):
    """All problems in the configuration, together; also a ValueError, as scripts written for Accelerate expect."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the configuration:" if count == 1 else f"{count} problems in the configuration:"
        super().__init__(
            "\n".join([head, *(f"  {line}" for p in self.problems for line in printable(str(p)).splitlines())])
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class LaunchError(ZeroPluginError):
    """The launcher could not start the workers, or could not keep them alive."""


class MachineError(ZeroPluginError):
    """The machine lacks something that the run needs; the message ends with the command that fixes it."""


class StrategyError(ZeroPluginError):
    """The requested strategy cannot run here; the message says why."""


class LoopError(ZeroPluginError):
    """The training loop uses this package in a way that has no meaning; the message shows the right way."""


class CheckpointError(ZeroPluginError):
    """A checkpoint cannot be written, is damaged, or does not fit this run; the message names the file or tensor."""

    exit_code = 2  # an error of usage: the command got the wrong folder


class DamagedError(CheckpointError):
    """A checkpoint is damaged: its contents differ from what was written."""


# ---- errors of other libraries ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Foreign:
    r"""An error of another library that only its text identifies. Files that handle these errors list them as rows.

        _TOO_LARGE = Foreign(r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\.")

    Attributes:
        pattern: a regular expression that is found in the error's text.
        source: a file of the installed release that has the text, below `site-packages`; empty if the text comes from
            Python, the operating system, or a release for GPUs.
        clearer: the text of a clearer error, with the names of facts in braces; or a function of the facts that returns
            the text. The fact `error` is the foreign error.
        kinds: the classes of the error.
        raised_in: the beginning of the name of the module that raises the error. C++ code has no Python module: the
            name is then the calling module's.
        becomes: the class of the clearer error.
    """

    pattern: str
    source: str = ""
    clearer: str | Callable[..., str] = ""
    kinds: type[BaseException] | tuple[type[BaseException], ...] = RuntimeError
    raised_in: str | tuple[str, ...] = ""
    becomes: type[ZeroPluginError] = LoopError

    def find(self, error: BaseException) -> re.Match[str] | None:
        """Return the match of the pattern in the text of an error; None if this is another error."""
        if not isinstance(error, self.kinds):
            return None
        *_, module = "", *(str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__))
        return re.search(self.pattern, str(error)) if module.startswith(self.raised_in) else None


def raise_clearer(error: BaseException, rows: Iterable[Foreign], **facts: Any) -> None:
    """Raise a clearer error instead of another library's; return if no row matches.

    Args:
        error: the error.
        rows: the candidates; the first that matches is used.
        facts: values for the texts and functions of the rows.
    """
    for row in rows:
        if row.find(error):
            make = row.clearer.format if isinstance(row.clearer, str) else row.clearer
            raise row.becomes(make(error=error, **facts)) from error


_LOST: Final = "Timed out waiting|Connection closed by peer|Connection reset by peer|Socket closed"
# Errors of gloo, which have no class of their own. Libraries that talk to a server may raise the same texts: the first
# row therefore requires the word gloo, the second a traceback that ends in torch or DeepSpeed.
OF_LOST_PEER: Final = (
    Foreign(f"(?s)(?=.*gloo).*({_LOST})", "torch/lib/libtorch_cpu.so"),
    Foreign(_LOST, "torch/lib/libtorch_cpu.so", raised_in=("torch.", "deepspeed.")),
)


# ---- how an error of this package ends a program ---------------------------------------------------------------------


def end_at_user_line(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return an excepthook that ends the traceback of this package's errors at the user's own line.

    All other exceptions, including defects of this package, are shown with all of their frames.

    Args:
        before: the hook that prints.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ZeroPluginError):
            before(kind, error, trace)
            return
        complete, shown = error.__traceback__, _without_own_end(trace)
        try:
            before(kind, error.with_traceback(shown), shown)
        finally:
            error.__traceback__ = complete

    return hook


def _without_own_end(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` without this package's frames at its end; all frames if they are all this package's."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    own = (str(Path(__file__).parent), contextlib.__file__)
    users = [n for n, frame in enumerate(frames) if not frame.tb_frame.f_code.co_filename.startswith(own)]
    shown: TracebackType | None = None
    for frame in reversed(frames[: users[-1] + 1] if users else frames):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


sys.excepthook = end_at_user_line(sys.excepthook)
