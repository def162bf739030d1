"""Processes that make different collective calls get an error within seconds, each with its line."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launching import start_script, wait_for_ends, wait_until

SCRIPT = Path(__file__).parent / "disagree.py"

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Ended:
    """The end of a script's two processes: exit codes (None if killed by the test) and output."""

    codes: list[int | None]
    outputs: list[str]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the scripts of all selected tests once, at the same time."""
    folder = tmp_path_factory.mktemp("agreement")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    scripts = sorted({item.callspec.params["script"] for item in here}, key=lambda name: not name.endswith(":overdue"))
    processes: dict[str, Any] = {}
    deadline = time.monotonic() + 400
    for script in scripts:
        names = [f"{script.replace(':', '-')}-{rank}" for rank in range(2)]
        for rank, name in enumerate(names):
            processes[name] = start_script(SCRIPT, folder, script, rank, log=folder / f"{name}.log")
        if script.endswith(":overdue"):
            # The time-out is short from the start, so imports of the other process must not delay its first calls.
            wait_until(lambda names=names: all((folder / f"{name}.trained").exists() for name in names), seconds=120)
    started = list(processes.values())
    ended = wait_for_ends(started, lambda _: time.monotonic() > deadline)
    codes = [process.returncode if index in ended else None for index, process in enumerate(started)]
    (folder / "codes.json").write_text(json.dumps(dict(zip(processes, codes, strict=True))))
    return folder


def ended(folder: Path, script: str) -> Ended:
    """Return how a script ended."""
    codes = json.loads((folder / "codes.json").read_text())
    names = [f"{script.replace(':', '-')}-{rank}" for rank in range(2)]
    return Ended([codes[name] for name in names], [(folder / f"{name}.log").read_text() for name in names])


def line_of(text: str, occurrence: int = 0) -> str:
    """Return the `file:line` at which the script contains `text`."""
    found = [number for number, line in enumerate(SCRIPT.read_text().splitlines(), 1) if text in line]
    return f"{SCRIPT}:{found[occurrence]}"


@pytest.mark.parametrize(
    ("script", "call"),
    [
        ("ddp:save_alone", "save_model"),
        ("zero3:state_alone", "get_state_dict"),
        pytest.param("ddp:saves_alone", "save_state", marks=pytest.mark.campaign),
        pytest.param("ddp:loads_alone", "load_state", marks=pytest.mark.campaign),
    ],
)
def test_a_long_call_on_one_process_is_an_error_of_the_script(folder: Path, script: str, call: str) -> None:
    """A long call inside `if accelerator.is_main_process:` raises a LoopError with both places and the fix."""
    run = ended(folder, script)
    assert run.codes[0] == 1
    assert "LoopError" in run.outputs[0]
    assert f"process 0 is in {call}() ({line_of(f'accelerator.{call}(')})" in run.outputs[0]
    assert f"process 1 did not come: it continued, and needs this process at {line_of('backward(')}" in run.outputs[0]
    assert "not under `if accelerator.is_main_process:`" in run.outputs[0]
    assert run.codes[1] != 0
    assert run.codes[1] is not None, "the other process did not end"


@pytest.mark.parametrize(("script", "call"), [("ddp:gather_alone", "gather"), ("ddp:wait_alone", "wait_for_everyone")])
def test_a_short_call_on_one_process_ends_it(folder: Path, script: str, call: str) -> None:
    """A process in an operation that cannot be interrupted prints the same sentence and exits with 1."""
    run = ended(folder, script)
    assert run.codes[0] == 1
    assert f"zero_plugin: error: process 0 is in {call}()" in run.outputs[0]
    assert "process 1 did not come" in run.outputs[0]
    assert run.codes[1] == 1


@pytest.mark.parametrize("script", ["ddp:long_calls"])
def test_different_long_calls(folder: Path, script: str) -> None:
    """`get_state_dict` here and `save_model` there raise errors that name both."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    for output in run.outputs:
        assert "LoopError" in output
        assert "get_state_dict()" in output
        assert "save_model()" in output
        assert "the same collective calls in the same order" in output


@pytest.mark.parametrize("script", ["ddp:short_calls"])
def test_different_short_calls(folder: Path, script: str) -> None:
    """`gather` here and `reduce` there: the first process to notice reports both calls, and both processes end."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    assert any("gather()" in output and "reduce()" in output for output in run.outputs)


@pytest.mark.parametrize("script", ["ddp:leaves"])
def test_a_process_that_ended(folder: Path, script: str) -> None:
    """A process that ran off its end is detected by the other. Neither waits for the time-out or exits with 0."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    assert "process 0 is in gather()" in run.outputs[0] + run.outputs[1]
    assert "end_training() (its end)" in run.outputs[0] + run.outputs[1]


@pytest.mark.parametrize("script", ["ddp:fails"])
def test_a_process_that_failed(folder: Path, script: str) -> None:
    """A failed process keeps its own error. The other one reports the failure and the last known place."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    assert "ValueError: the script's own error" in run.outputs[1]
    assert "process 1 has failed; its last such call was gather()" in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:memory"])
def test_a_process_that_ran_out_of_memory(folder: Path, script: str) -> None:
    """The other process ends, even in an uninterruptible backward, while the out-of-memory process still lives."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    assert run.outputs[1].count("CPU memory ran out on rank 1, in the forward") == 1
    assert "process 1 has run out of memory; process 0 ends with it" in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:more_steps"])
def test_more_steps_on_one_process(folder: Path, script: str) -> None:
    """A loop that ends earlier on one process meets the other's backward, which is an error and not an exit with 0."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    left = f"process 0 is in end_training() (its end), after sys.exit(0) at {line_of('sys.exit(0)')}"
    assert f"{left}, but process 1 did not come: it still trains" in run.outputs[0]
    assert "the same number of steps" in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:raises_exit"])
def test_an_exit_that_left_no_note(folder: Path, script: str) -> None:
    """`raise SystemExit(3)` is not reported as the script's last line, nor as an exit with code 0."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    left = "process 0 is in end_training() (its end), after the end of its script (its last line, quit() or SystemExit"
    assert left in run.outputs[0]
    assert "exit code 0" not in run.outputs[0] + run.outputs[1]


@pytest.mark.parametrize("script", ["ddp:breaks"])
def test_a_loop_that_one_process_left(folder: Path, script: str) -> None:
    """A call that the next loop makes is not the script's, so the message does not mention `if is_main_process`."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    said = run.outputs[0]
    assert (
        f"({line_of('for _ in loader')}), but process 1 did not come: it continued, and needs this process at" in said
    )
    assert "is a part of the loop over a prepared loader, which is collective" in said
    assert "is_main_process" not in said


@pytest.mark.parametrize("script", ["ddp:late"])
def test_a_late_process_is_named_and_waited_for(folder: Path, script: str) -> None:
    """A late process gives a warning with its place, before long and short calls, and the run continues."""
    run = ended(folder, script)
    assert run.codes == [0, 0]
    for call in ("get_state_dict", "gather"):
        assert f"process 0 has waited in {call}()" in run.outputs[0]
    assert f"process 1 is at {line_of('time.sleep(3)')}" in run.outputs[0]
    assert "error" not in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:overdue"])
def test_a_meeting_ends_with_the_time_out(folder: Path, script: str) -> None:
    """A process that is busy elsewhere for too long, or was killed, is named at the time-out, so none waits forever."""
    run = ended(folder, script)
    assert run.codes[0] == 1
    assert "LoopError" in run.outputs[0]
    assert "in get_state_dict()" in run.outputs[0]
    assert "for 10 s, the process group's time-out: process 1 is at" in run.outputs[0]
    assert "InitProcessGroupKwargs(timeout=" in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:vanishes"])
def test_a_process_that_ended_without_a_word(folder: Path, script: str) -> None:
    """A process that ended by `os._exit(0)` or a signal is detected by its missing process id."""
    run = ended(folder, script)
    assert run.codes == [1, 0]
    assert "LoopError" in run.outputs[0]
    assert "process 0 is in get_state_dict()" in run.outputs[0]
    assert "process 1 has ended" in run.outputs[0]


@pytest.mark.parametrize("script", ["ddp:flushes"])
def test_what_can_be_kept_is_kept(folder: Path, script: str) -> None:
    """If the check ends a process, its trackers are finished and its asynchronous save is completed first."""
    run = ended(folder, script)
    assert run.codes == [1, 1]
    assert "zero_plugin: error: process 0 is in gather()" in run.outputs[0]
    assert (folder / "ddp-flushes.notes").read_text() == "finished"
    assert (folder / "behind" / "manifest.json").exists()


@pytest.mark.parametrize("script", ["ddp:healthy"])
def test_what_a_script_does_by_itself_ends_nothing(folder: Path, script: str) -> None:
    """Operations of torch that are not our calls, and work of one process alone, give a warning at most."""
    run = ended(folder, script)
    assert run.codes == [0, 0], run.outputs
    for step in ("sends", "own_group", "uneven", "goes_first"):
        assert "error" not in during(step, run.outputs[0]) + during(step, run.outputs[1])
    assert "process 1 has waited in main_process_first()" in during("goes_first", run.outputs[1])


@pytest.mark.parametrize("script", ["ddp:branches"])
def test_branches_that_differ_end_nothing(folder: Path, script: str) -> None:
    """Different branches are no error: both processes made the same backward, whichever parameters it reached."""
    run = ended(folder, script)
    assert run.codes == [0, 0], run.outputs
    assert "process 1 has waited in gather()" in run.outputs[1]


@pytest.mark.parametrize("script", ["zero3:evaluates"])
def test_an_evaluation_alone_ends_nothing(folder: Path, script: str) -> None:
    """Evaluation on one process is no error at stage 3 with gathered weights, whose forwards need no other process."""
    run = ended(folder, script)
    assert run.codes == [0, 0], run.outputs
    assert "process 1 has waited in wait_for_everyone()" in run.outputs[1]


@pytest.mark.parametrize("script", ["ddp:busy"])
def test_who_imports_compiles_or_saves_is_not_late(folder: Path, script: str) -> None:
    """A process that imports or saves gives no message, however long it takes. One that compiles prints its own."""
    run = ended(folder, script)
    assert run.codes == [0, 0], run.outputs
    for step in ("imports", "saves", "compiles"):
        assert "has waited" not in during(step, run.outputs[0])
    assert "process 1 compiles slow_op" in during("compiles", run.outputs[1])


@pytest.mark.parametrize("script", ["ddp:busy"])
def test_a_process_that_is_stopped(folder: Path, script: str) -> None:
    """A process stopped by SIGSTOP or a debugger is reported as late, with the reason, and continues afterwards."""
    run = ended(folder, script)
    assert "its process is stopped" in during("stops", run.outputs[0])
    assert "has waited" not in during("stops", run.outputs[1])


def during(step: str, output: str) -> str:
    """Return a healthy script's messages during that action."""
    return output.partition(f"== {step}\n")[2].partition("== ")[0]
