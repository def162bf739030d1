"""The rule by which a process in a collective call judges where the others are, and the sentences that tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from zero_plugin.standing import Standing

__all__ = ["Call", "Waiting", "describe_late", "find_mismatch", "overdue"]

_SHOWN: Final = 4  # late processes in a warning
_SILENT_S: Final = 5.0  # since when a process' silence is spoken of


class Call(NamedTuple):
    """One collective call, as its process entered it.

    Attributes:
        number: of collective calls, this one included.
        name: what messages call it.
        passes: that the process had begun since the call before.
    """

    number: int
    name: str
    passes: int


def find_mismatch(call: Call, others: Mapping[int, Standing]) -> str | None:
    """Who of `others` can never come to `call`, and what to do about it; None where each has come, or still may.

    One is gone, and had not come; or is in another of our collectives: its call of this number has another name, or
    before that call it has begun a pass that this process has not, and that it needs this process in.
    """
    for rank, standing in others.items():
        if standing.calls == call.number and standing.call != call.name:
            return _different(rank, standing)
        if standing.left < call.number and standing.is_gone:
            return _gone(call, rank, standing)
        if standing.calls == call.number - 1 and standing.passes > call.passes:
            return _elsewhere(call, rank, standing)
    return None


class Waiting:
    """How long this process has been in a call, and what it has seen of the others there.

    Args:
        call: None while it is in none.
        warns_at: quiet of another process, in seconds, at which it is named.
    """

    def __init__(self, call: Call | None, warns_at: float) -> None:
        self.call = call
        self.seconds = 0.0
        self.looks = 0
        self.warns_at = warns_at
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: its last beat, and when that came

    def silence_of(self, rank: int, standing: Standing) -> float:
        """Seconds in which the process is known to have said nothing."""
        beat, heard = self._heard.get(rank, (-1, 0.0))
        if beat != standing.beat:
            heard = self.seconds
            self._heard[rank] = (standing.beat, heard)
        return self.seconds - heard


def describe_late(waiting: Waiting, others: Mapping[int, Standing]) -> tuple[str, float]:
    """Who has not come to the call, and where each is; and the longest quiet of one, without import, build or save."""
    assert waiting.call is not None, "it waits"
    late = {rank: standing for rank, standing in others.items() if standing.calls < waiting.call.number}
    silences = {rank: waiting.silence_of(rank, standing) for rank, standing in late.items()}
    told = [_whereabouts(rank, standing, silences[rank]) for rank, standing in late.items()]
    more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    quiet = max((min(waiting.seconds, s.quiet + silences[rank]) for rank, s in late.items()), default=0.0)
    return "; ".join([*told[:_SHOWN], *more]), quiet


def overdue(here: str, limit: float, late: str) -> str:
    """What a process says that has waited for `limit` seconds."""
    return (
        f"{here} for {limit:.0f} s, the process group's time-out: {late or 'other processes have not come'}.\n"
        "Where a process may take that long, raise it: "
        "Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=…))])."
    )


def _whereabouts(rank: int, standing: Standing, silence: float) -> str:
    if not standing.pid:
        return f"process {rank} has not said yet where it is"
    where = f"process {rank} is at {standing.line} for {standing.since:.0f} s"
    state = standing.process_state
    if state == "stopped":
        where += " (its process is stopped)"
    elif silence > _SILENT_S:
        where += f" (silent for {silence:.0f} s{', though its process is alive' if state == 'alive' else ''})"
    elif standing.busy:
        where += f", where it {standing.busy}"
    return f"{where}; its last such call was {standing.last_call}"


def _different(rank: int, standing: Standing) -> str:
    line = "" if standing.gone else f" ({standing.line})"
    return (
        f"process {rank} is in {standing.call}(){line}.\n"
        "Both are collective: every process has to make the same calls in the same order."
    )


def _elsewhere(call: Call, rank: int, standing: Standing) -> str:
    fix = (
        "Every process has to take the same number of steps, and to come to the end."
        if call.name == "end_training"
        else f"{call.name}() is collective: call it on every process, not under "
        "`if accelerator.is_main_process:`. What one process alone may do, it does there by itself."
    )
    return f"process {rank} did not come: it went on, and waits for this process at {standing.line}.\n{fix}"


def _gone(call: Call, rank: int, standing: Standing) -> str:
    how = "failed" if standing.failed else "ended"
    return (
        f"process {rank} has {how}; its last such call was {standing.last_call}.\n"
        f"{call.name}() is collective: every process has to come to it."
    )
