"""A script inside the worker file behaves as under `python`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from zero_plugin.errors import CheckpointError, LoopError, of_lost_peer
from zero_plugin.launch import worker

pytestmark = pytest.mark.programs

WORKER = str(Path(worker.__file__))
FIRST_FAILURE = worker.FIRST_FAILURE


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=180)


ASK = """
import json, os, sys
import neighbour
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "package": __package__,
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": __spec__ is None, "where": neighbour.__file__,
}))
"""


def test_a_script_sees_what_python_shows_it(tmp_path: Path) -> None:
    """Name, file, arguments, import folder and `__main__` are python's, for a script in another folder too."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "ask.py").write_text(ASK)
    (inner / "neighbour.py").write_text("")
    mine, pythons = (run(tmp_path, *start, "inner/ask.py", "-x", "y z") for start in ([WORKER], []))
    assert mine.returncode == 0, mine.stderr
    assert json.loads(mine.stdout) == json.loads(pythons.stdout)


def test_a_module_sees_what_python_shows_it(tmp_path: Path) -> None:
    """`-m` behaves the same."""
    (tmp_path / "ask.py").write_text(ASK.replace('"spec": __spec__ is None, ', ""))
    (tmp_path / "neighbour.py").write_text("")
    mine, pythons = (run(tmp_path, *start, "ask", "-x") for start in ([WORKER, "-m"], ["-m"]))
    assert mine.returncode == 0, mine.stderr
    assert json.loads(mine.stdout) == json.loads(pythons.stdout)


def test_files_beside_the_user_do_not_shadow_the_library(tmp_path: Path) -> None:
    """The standard library does not import a `token.py` of the current folder, for a script elsewhere."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "ok.py").write_text("import tokenize; print('ok')")
    for name in ("token.py", "types.py", "runpy.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    assert run(tmp_path, WORKER, "inner/ok.py").stdout == "ok\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_script_can_start_processes(method: str, tmp_path: Path) -> None:
    """Processes that the script starts (data loader workers) find its functions and classes."""
    (tmp_path / "pool.py").write_text(
        "import multiprocessing as mp\n"
        "class Sample:\n    value = 3\n"
        "def square(sample):\n    return sample.value ** 2\n"
        "if __name__ == '__main__':\n"
        f"    with mp.get_context('{method}').Pool(1) as pool:\n        print(pool.map(square, [Sample()]))\n"
    )
    done = run(tmp_path, WORKER, "pool.py")
    assert done.stdout == "[9]\n", done.stderr


def test_failures_print_as_under_python(tmp_path: Path) -> None:
    """The traceback, a syntax error and an exit message are python's own, without a frame of ours."""
    for name, text in {
        "raises.py": "def f():\n    1 / 0\nf()\n",
        "syntax.py": "x = (\n",
        "exits.py": "import sys; sys.exit('the end')",
        "code.py": "import sys; sys.exit(5)",
    }.items():
        (tmp_path / name).write_text(text)
        mine, pythons = run(tmp_path, WORKER, name), run(tmp_path, name)
        assert mine.returncode == pythons.returncode
        assert mine.stderr == pythons.stderr


def test_standard_input_is_the_first_local_rank_s(tmp_path: Path) -> None:
    """That rank reads all piped input. Every other rank gets end-of-file and cannot steal lines."""
    (tmp_path / "read.py").write_text("import sys; print(repr(sys.stdin.read()))")
    read = []
    for rank in ({}, {"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}):
        done = subprocess.run(
            [sys.executable, WORKER, "read.py"],
            cwd=tmp_path,
            env={**os.environ, **rank},
            input="one\ntwo\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        read.append(done.stdout.strip())
    assert read == [r"'one\ntwo\n'", r"'one\ntwo\n'", "''"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process")
def test_cores_of_the_local_rank(tmp_path: Path) -> None:
    """`--cores` binds a script, a module and a program to their rank's part of the list."""
    core = str(min(os.sched_getaffinity(0)))
    (tmp_path / "show.py").write_text("import os; print(*os.sched_getaffinity(0))")
    for program in (["show.py"], ["-m", "show"], ["--no_python", sys.executable, "show.py"]):
        done = subprocess.run(
            [sys.executable, WORKER, "--cores", f"9999/{core}", *program],
            cwd=tmp_path,
            env={**os.environ, "LOCAL_RANK": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout.strip() == core, done.stderr


ENDS_IN_ORDER = """
import atexit, sys, threading, time, torch
atexit.register(print, "script's")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread's"))).start()
"""


def test_the_end_is_pythons_where_torch_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with torch leaves before the interpreter ends. Exit codes and exit handlers work as under `python`."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text("import atexit; atexit.register(print, 'coverage')")
    (tmp_path / "order.py").write_text(ENDS_IN_ORDER)
    assert run(tmp_path, WORKER, "order.py").stdout == "thread's\nscript's\ncoverage\n"
    for number, end in enumerate(("0", "True", "-1", "''", "'the end'", "None", "2**8 + 3")):
        (tmp_path / f"exit{number}.py").write_text(f"import sys, torch; print('said'); sys.exit({end})")
    (tmp_path / "cancelled.py").write_text("import asyncio, torch; raise asyncio.CancelledError")
    (tmp_path / "closed.py").write_text("import sys, torch; sys.stdout.close()")
    for script in tmp_path.glob("[eco]*.py"):
        mine, pythons = run(tmp_path, WORKER, script.name), run(tmp_path, script.name)
        assert (mine.returncode, mine.stdout) == (pythons.returncode, pythons.stdout), script.read_text()
    if Path("/dev/full").exists():
        full = [f"PYTHONUNBUFFERED= {sys.executable} {worker} exit0.py > /dev/full" for worker in (WORKER, "")]
        assert [subprocess.run(line, shell=True, cwd=tmp_path, timeout=60).returncode for line in full] == [120, 120]


LEAVES_A_THREAD = """
import builtins, sys, threading, time
import elsewhere
import torch, torch.distributed as dist

class Last:
    def __init__(self, end):
        self.end = end

    def __del__(self):
        self.end()

store, groups = dist.HashStore(), {}

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

joining = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in joining]
[thread.join() for thread in joining]
builtins.kept = groups, Last(lambda sleep=time.sleep: sleep(0.5))  # for so long the interpreter ends
mine = Last(lambda print=print: print("mine is gone", end=""))
sys.setswitchinterval(1000)  # from here on the interpreter is this thread's
for rank in (0, 1):
    groups[rank].allreduce([torch.ones(1)])
finished = time.monotonic() + 0.5
while time.monotonic() < finished:
    pass  # until gloo's threads have done it, and wait for the interpreter
if sys.argv[1] == "raises":
    1 / 0
sys.exit(int(sys.argv[1]))
"""


def test_a_thread_that_torch_leaves_aborts_no_process(tmp_path: Path, lines_of: Callable[..., Iterator[str]]) -> None:
    """The exit code is the script's, and its open objects are closed. Python itself aborts here."""
    (tmp_path / "script.py").write_text(LEAVES_A_THREAD)
    (tmp_path / "elsewhere.py").write_text("import sys\nleft = open(sys.argv[1], 'w')\nleft.write('all of it')\n")
    codes = {"0": 0, "5": 5, "raises": 1}
    with ThreadPoolExecutor() as pool:
        ends = dict(zip(codes, pool.map(lambda how: run(tmp_path, WORKER, "script.py", how), codes), strict=True))
    assert {how: end.returncode for how, end in ends.items()} == codes, ends
    assert [list(lines_of(ends[how].stdout.splitlines())) for how in ("0", "5")] == [["mine is gone"]] * 2
    assert "ZeroDivisionError" in ends["raises"].stderr
    assert [(tmp_path / how).read_text() for how in codes] == ["all of it"] * 3


def test_what_a_failing_rank_leaves_for_the_report(tmp_path: Path) -> None:
    """The attempt's folder has the first failing rank's number, exit code and kind of exception.

    A later rank prints another error in one line, which has more than its headline, and prints nothing for the same
    error. Each leaves its error's digest.
    """
    (tmp_path / "script.py").write_text(
        "import os\nclass OutOfMemoryError(RuntimeError): ...\nraise OutOfMemoryError(os.environ['SAID'])"
    )
    said = {}
    for rank, text in ((3, "CUDA:\n  all"), (1, "CUDA:\n  half"), (0, "CUDA:\n  all")):
        error_file = str(tmp_path / str(rank) / "error.json")
        own = {**os.environ, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file, "SAID": text}
        done = subprocess.run(
            [sys.executable, WORKER, "script.py"], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 1
        said[rank] = done.stderr
    assert said[3].endswith("OutOfMemoryError: CUDA:\n  all\n")
    assert (said[1], said[0]) == ("rank 1 failed later: OutOfMemoryError: CUDA: half\n", "")
    assert (tmp_path / FIRST_FAILURE).read_text().split()[:3] == ["3", "1", "OutOfMemoryError"]
    of_rank = {rank: (tmp_path / f"failure_of.{rank}").read_text() for rank in said}
    assert of_rank[0] == of_rank[3] != of_rank[1]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (of_lost_peer(LoopError("in whatever words")), worker.LOST_PEER),
        (LoopError("process 1 has ended; its last such call was gather()"), "LoopError"),
        (dist.DistStoreError("in whatever words"), worker.LOST_PEER),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), worker.LOST_PEER),
        (RuntimeError("my database: Connection closed by peer"), "RuntimeError"),
    ],
)
def test_a_lost_peer_is_known_by_class(
    error: Exception, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by an attribute of this package's errors or by torch's class. Only gloo's errors have no class."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    assert worker.report_end(error, "0") == 1
    assert (tmp_path / FIRST_FAILURE).read_text().split()[2] == kind


def test_a_repeated_error_is_the_first_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raises another one's message has the same digest, with any prefix before the message."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    repeated = CheckpointError("of process 1, reworded: the disk is full")
    repeated.repeats = "the disk is full"
    worker.report_end(CheckpointError("the disk is full"), "1")
    worker.report_end(repeated, "0")
    assert (tmp_path / "failure_of.0").read_text() == (tmp_path / "failure_of.1").read_text()


def test_the_first_failure_is_there_as_a_whole(tmp_path: Path) -> None:
    """The file is never partial, since a second writer may get the first one killed. The second changes nothing."""
    file, text = tmp_path / FIRST_FAILURE, "told " * 5_000_000
    with ThreadPoolExecutor() as pool:
        first = pool.submit(worker.put_first, file, text)
        while not file.exists():
            assert not first.done() or first.result()
        assert file.stat().st_size == len(text)
    assert first.result() is True
    assert worker.put_first(file, "another") is False
    assert [file.stat().st_size, *tmp_path.iterdir()] == [len(text), file]


def test_the_first_failure_of_two_threads_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas on a TPU may be threads of one process. The second comes while the first finishes its writing."""
    link, file, answers = os.link, tmp_path / FIRST_FAILURE, []

    def second_comes_too(own: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        link(own, target)
        with ThreadPoolExecutor() as pool:
            answers.append(pool.submit(worker.put_first, file, "the second's").result())

    monkeypatch.setattr(os, "link", second_comes_too)
    assert worker.put_first(file, "the first's") is True
    assert (answers, file.read_text(), list(tmp_path.iterdir())) == ([False], "the first's", [file])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("sys.exit(-1)", 255, "failed first, with exit code 255"),
        ("sys.exit(300)", 44, "failed first, with exit code 44"),
        ("sys.exit(2**70)", 255, "failed first, with exit code 255"),
        ("os.kill(os.getpid(), 40)", 168, "was ended by signal 40"),
        ("os.fork() or sys.exit(3); time.sleep(1); raise RuntimeError('mine')", 1, "RuntimeError: mine"),
        ("raise RuntimeError('my database: Connection reset by peer')", 1, "failed first, with exit code 1"),
    ],
)
def test_codes_as_the_system_sees_them(
    ends: str, code: int, said: str, tmp_path: Path, forked_alone: dict[str, str]
) -> None:
    """The same holds for a script's own fork, which is no rank. Lost peers of other libraries do not count."""
    (tmp_path / "ends.py").write_text(f"import os, sys, time, torch\n{ends}\n")
    launch = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "ends.py"]
    environment = {**os.environ, **forked_alone}
    done = subprocess.run(launch, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "without success" not in done.stderr
