"""The rule that ends a run on a mismatch, and the facts known about late processes."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from zero_plugin.distributed import collective_check
from zero_plugin.distributed.collective_check import Patience
from zero_plugin.distributed.mismatch import Call, Waiting, describe_late, find_mismatch
from zero_plugin.distributed.rank_progress import RankProgress, begin_progress
from zero_plugin.distributed.whereabouts import last_exit, note_exits, running_functions

CALL = Call(number=5, name="gather", passes=2)
HERE = replace(begin_progress(), calls=4, call="gather", left=4, passes=2)


@pytest.fixture(scope="module")
def ended_pid() -> int:
    """Return the id of a process that has ended and was waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_one_that_has_come_is_no_mismatch() -> None:
    """No mismatch: the other process is in the same call, past it, or before it with as many passes."""
    for other in (replace(HERE, calls=5), replace(HERE, calls=9, call="reduce"), HERE, replace(HERE, passes=0)):
        assert find_mismatch(CALL, {1: other}) is None


def test_another_call_of_the_same_number_is_one() -> None:
    """Another call with the same number is a mismatch, whatever the process does meanwhile."""
    found = find_mismatch(CALL, {1: HERE, 3: replace(HERE, calls=5, call="reduce")})
    assert found is not None
    assert "process 3 is in reduce()" in found.text
    assert not found.error().lost_peer


def test_a_pass_that_this_process_has_not_begun_is_one() -> None:
    """A pass that this process has not begun is a mismatch only after equal calls, because the counts must match."""
    assert "process 1 did not come: it continued" in str(find_mismatch(CALL, {1: replace(HERE, passes=3)}))
    assert find_mismatch(CALL, {1: replace(HERE, calls=3, passes=3)}) is None


def test_who_is_gone(ended_pid: int) -> None:
    """A process is gone by its own notice or a missing process id on this machine, never by silence."""
    failed = find_mismatch(CALL, {1: replace(HERE, gone=True, failed=True)})
    assert failed is not None
    assert "process 1 has failed" in failed.text
    assert failed.error().lost_peer  # tells the launcher that another process is the cause
    vanished = replace(HERE, pid=ended_pid)
    assert "process 1 has ended" in str(find_mismatch(CALL, {1: vanished}))
    assert find_mismatch(CALL, {1: replace(vanished, machine="another")}) is None
    assert find_mismatch(CALL, {1: RankProgress()}) is None  # has published nothing yet


def test_where_one_that_is_gone_was_last_seen() -> None:
    """The message says where a process that is gone was last seen, and what its script did before its end."""
    gone = find_mismatch(CALL, {1: replace(HERE, gone=True, line="train.py:7")})
    assert gone is not None
    assert "It was last seen at train.py:7." in gone.text
    ended = replace(HERE, calls=5, call="end_training", line="its end", end=", after sys.exit(0) at train.py:7")
    early = find_mismatch(CALL, {1: ended})
    assert early is not None
    assert "process 1 is in end_training() (its end), after sys.exit(0) at train.py:7.\n" in early.text


def test_how_a_script_has_left_is_noted() -> None:
    """The argument and line of `sys.exit` are recorded, since Python does not keep them."""
    note_exits()
    with pytest.raises(SystemExit) as left:
        sys.exit(3)
    assert left.value.code == 3
    assert last_exit() == f"sys.exit(3) at {__file__}:{inspect.currentframe().f_lineno - 2}"  # type: ignore[union-attr]


def test_a_caught_exit_is_not_the_end() -> None:
    """A caught exit, as of argparse or `pytest.main`, is not the end of the script."""
    note_exits()
    try:
        sys.exit(5)
    except SystemExit as caught:
        found = type(caught).__name__, caught.code, last_exit()[:11]
    assert found == ("SystemExit", 5, "sys.exit(5)")
    assert last_exit() == ""


LEAVES = """
import atexit, sys
from zero_plugin.distributed.whereabouts import last_exit, note_exits
note_exits()
atexit.register(lambda: print(last_exit() or "unknown"))

def leave(model):
    try:
        sys.exit((3, 4))
    finally:
        print("cleaning up")

try:
    sys.exit(5)
except SystemExit:
    pass
if sys.argv[1] == "sys.exit":
    leave([0])
raise SystemExit(3)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("how", "known"), [("sys.exit", "sys.exit((3, 4)) at {}:9"), ("SystemExit", "unknown")])
def test_the_exit_that_ends_a_script_is_known(how: str, known: str, tmp_path: Path) -> None:
    """The exit that ends a script is known, also through a `finally`. Exit code and Python's output do not change."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    script = str(tmp_path / "leaves.py")
    done = subprocess.run([sys.executable, script, how], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == known.format(script)
    assert (done.returncode, done.stderr) == ((1, "(3, 4)\n") if how == "sys.exit" else (3, ""))


def test_an_end_of_unknown_cause_is_not_said_to_be_the_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`raise SystemExit` and `quit()` leave no note, so the message lists them and the last known line."""
    monkeypatch.setattr(collective_check, "is_at_exit", lambda: True)
    monkeypatch.setattr(collective_check, "last_exit", lambda: "")
    monkeypatch.setattr(collective_check.dist, "is_initialized", lambda: True)
    ended = ", after the end of its script (its last line, quit() or SystemExit"
    assert collective_check._describe_end("train.py:7") == f"{ended}; last seen at train.py:7)"
    assert collective_check._describe_end("its end") == collective_check._describe_end("") == f"{ended})"


def test_who_is_gone_after_the_call(ended_pid: int) -> None:
    """A process that ends after the call has left it or ends with all. One that is gone inside the call is missed."""
    gone = replace(HERE, calls=5, pid=ended_pid)
    assert "process 1 has ended" in str(find_mismatch(CALL, {1: gone}))
    assert find_mismatch(CALL, {1: replace(gone, left=5)}) is None
    assert find_mismatch(CALL, {1: replace(gone, ended=True)}) is None


def test_the_first_warning_comes_after_a_minute_of_quiet() -> None:
    """The first warning comes a minute after the last import, build or save that the late process reported."""
    assert Patience().late == 60
    waiting = Waiting(CALL, 60)
    waiting.seconds = 100.0
    assert describe_late(waiting, {1: HERE})[1] == 100  # it has reported none
    assert describe_late(waiting, {1: replace(HERE, quiet=7.0)})[1] == 7
    waiting.seconds = 130.0
    told, quiet = describe_late(waiting, {1: replace(HERE, quiet=7.0)})  # the same tick: no report for 30 s
    assert quiet == 37
    assert "(silent for 30 s, though its process is alive)" in told
    assert describe_late(waiting, {1: replace(HERE, quiet=7.0, beat=1)})[1] == 7


def test_a_thousand_late_processes_are_one_line() -> None:
    """A thousand late processes give one line that names some of them with their lines."""
    told, _ = describe_late(Waiting(CALL, 60), dict.fromkeys(range(1, 1000), replace(HERE, line="train.py:7")))
    assert told.count("is at train.py:7") == 4
    assert told.endswith("and 995 more")


def test_what_is_said_of_a_process_that_is_busy() -> None:
    """The message names what a busy process imports, compiles or saves."""
    told, _ = describe_late(
        Waiting(CALL, 60), {1: replace(HERE, line="train.py:7", busy="compiles cpu_adam", since=9.0)}
    )
    assert told == "process 1 is at train.py:7 for 9 s, where it compiles cpu_adam; its last such call was gather()"


def test_the_watch_keeps_nothing_that_the_script_drops() -> None:
    """A function's objects are freed at its end, even while the watching thread still reads what it saw."""

    class Model:
        pass

    def train() -> tuple[object, weakref.ref[Model]]:
        model = Model()
        return list(running_functions(threading.get_ident())), weakref.ref(model)

    seen, model = train()
    assert seen
    assert model() is None
