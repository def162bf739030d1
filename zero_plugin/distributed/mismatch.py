"""The rule of the collective check: how to see that a rank cannot reach a call, and how a message names late ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from zero_plugin.distributed.rank_progress import RankProgress
from zero_plugin.errors import LoopError
from zero_plugin.machine.hardware import number_ranges

SAME_ORDER: Final = "Both calls are collective: every process has to make the same collective calls in the same order."
_SHOWN: Final = 4  # late processes in a warning
_SILENT_S: Final = 5.0  # silence of a process that a message mentions


class Call(NamedTuple):
    """One collective call that a process has entered.

    Attributes:
        number: the number of collective calls so far, including this one.
        name: its name in messages.
        passes: the passes that the process had begun since the previous call.
    """

    number: int
    name: str
    passes: int


class Finding(NamedTuple):
    """A message about a mismatch with another process, or its end.

    Attributes:
        text: the message.
        lost_peer: see `ZeroPluginError`.
    """

    text: str
    lost_peer: bool = False

    def error(self) -> LoopError:
        """Return the error to raise in the script."""
        error = LoopError(self.text)
        error.lost_peer = self.lost_peer
        return error


def find_mismatch(call: Call, others: Mapping[int, RankProgress], *, in_loop: bool = False) -> Finding | None:
    """Find a process that can never reach `call`. Return None if all processes have reached it or still may.

    A process can never reach the call in three cases. It has ended before. Its call of the same number has another
    name. Or it has begun a pass before that call which this process has not begun, and which needs this process.

    Args:
        call: the call of this process.
        others: the other processes' progress by rank.
        in_loop: whether a loop over a prepared loader made the call, and not the script itself.
    """
    # A process that failed reports it, perhaps because of one that ended without a report. Name the latter first.
    for rank, progress in sorted(others.items(), key=lambda one: one[1].failed):
        if progress.calls == call.number and progress.call != call.name:
            line = "" if progress.gone else f" ({progress.line})"
            return Finding(f"process {rank} is in {progress.call}(){line}{progress.end}.\n{SAME_ORDER}")
        if progress.left < call.number and progress.is_gone:
            how = "failed" if progress.failed else "ended"
            seen = f" It was last seen at {progress.line}." if progress.line else ""
            return Finding(
                f"process {rank} has {how}; its last such call was {progress.last_call}.{seen}\n"
                f"{call.name}() is collective: every process has to call it.",
                lost_peer=True,
            )
        if progress.calls == call.number - 1 and progress.passes > call.passes:
            goes_on = "still trains" if call.name == "end_training" else "continued"
            return Finding(
                f"process {rank} did not come: it {goes_on}, and needs this process at {progress.line}.\n"
                f"{_advise(call.name, in_loop=in_loop)}"
            )
    return None


def _advise(call: str, *, in_loop: bool) -> str:
    """Return advice for a call that not all processes make."""
    if call == "end_training":
        return "Every process has to take the same number of steps, and to call end_training()."
    if in_loop:
        return (
            f"{call}() is a part of the loop over a prepared loader, which is collective. Every process has to begin "
            "the same loops, and to take the same number of steps. To leave a loop by `break` on all of them, use "
            "accelerator.set_trigger() and check_trigger()."
        )
    return (
        f"{call}() is collective: call it on every process, not under `if accelerator.is_main_process:`. Put only work "
        "of the main process alone there."
    )


class Waiting:
    """The time that this process has waited in a call, and its observations of the others meanwhile.

    Args:
        call: the call.
        warns_at: seconds of another process's quiet after which a warning names it.
    """

    def __init__(self, call: Call, warns_at: float) -> None:
        self.call = call
        self.seconds = 0.0
        self.looks = 0
        self.warns_at = warns_at
        self._heard: dict[int, tuple[int, float]] = {}  # rank → last beat, and `seconds` when it was first seen

    def silence_of(self, rank: int, progress: RankProgress) -> float:
        """Return the seconds in which the process is known to have published nothing."""
        beat, heard = self._heard.get(rank, (-1, 0.0))
        if beat != progress.beat:
            heard = self.seconds
            self._heard[rank] = (progress.beat, heard)
        return self.seconds - heard


def describe_late(waiting: Waiting, others: Mapping[int, RankProgress]) -> tuple[str, float]:
    """Describe the processes that have not reached the call. Also return their longest quiet time in seconds.

    Quiet time is time without import, build or save.
    """
    late = {rank: progress for rank, progress in others.items() if progress.calls < waiting.call.number}
    silences = {rank: waiting.silence_of(rank, progress) for rank, progress in late.items()}
    places = [_whereabouts(rank, progress, silences[rank]) for rank, progress in late.items()]
    more = [f"and {len(places) - _SHOWN} more"] if len(places) > _SHOWN else []
    quiet = max((min(waiting.seconds, s.quiet + silences[rank]) for rank, s in late.items()), default=0.0)
    return "; ".join([*places[:_SHOWN], *more]), quiet


def show_ranks(ranks: Sequence[int]) -> str:
    """Return the processes as text for the beginning of a sentence."""
    return f"process {ranks[0]}" if len(ranks) == 1 else f"processes {number_ranges(ranks)}"


def _whereabouts(rank: int, progress: RankProgress, silence: float) -> str:
    if not progress.pid:
        return f"process {rank} has not reported its place yet"
    where = f"process {rank} is at {progress.line} for {progress.since:.0f} s"
    state = progress.process_state
    if state == "stopped":
        where += " (its process is stopped)"
    elif silence > _SILENT_S:
        where += f" (silent for {silence:.0f} s{', though its process is alive' if state == 'alive' else ''})"
    elif progress.busy:
        where += f", where it {progress.busy}"
    return f"{where}; its last such call was {progress.last_call}"
