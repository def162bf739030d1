"""A script inside the worker file behaves as under `python`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero_plugin.launch import worker

WORKER = str(Path(worker.__file__))
FIRST_FAILURE = worker.FIRST_FAILURE


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60)


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
    """`-m` likewise."""
    (tmp_path / "ask.py").write_text(ASK.replace('"spec": __spec__ is None, ', ""))
    (tmp_path / "neighbour.py").write_text("")
    mine, pythons = (run(tmp_path, *start, "ask", "-x") for start in ([WORKER, "-m"], ["-m"]))
    assert mine.returncode == 0, mine.stderr
    assert json.loads(mine.stdout) == json.loads(pythons.stdout)


def test_files_beside_the_user_do_not_shadow_the_library(tmp_path: Path) -> None:
    """A `token.py` in the current folder is not what the standard library imports, for a script elsewhere."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "ok.py").write_text("import tokenize; print('ok')")
    for name in ("token.py", "types.py", "runpy.py"):
        (tmp_path / name).write_text("raise SystemExit('shadowed')")
    assert run(tmp_path, WORKER, "inner/ok.py").stdout == "ok\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_script_can_start_processes(method: str, tmp_path: Path) -> None:
    """Functions and classes of the script are found again in processes that it starts (data loader workers)."""
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
    """It reads all that is piped in; every other rank sees the end, instead of snatching lines away."""
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
    """`--cores` binds a script, a module and a program to the part of the list that is their rank's."""
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


LEAVES_ITS_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Model:
    is_initialized = staticmethod(dist.is_initialized)
    destroy = dist.destroy_process_group

    def __del__(self, print=print):
        print("model gone, group", "there" if self.is_initialized() else "gone")

dist.destroy_process_group = lambda destroy=Model.destroy, print=print: (destroy(), print("group gone"))
model = Model()
"""


def test_a_group_that_a_script_leaves_is_ended(tmp_path: Path) -> None:
    """First what the script holds goes, then the group: gloo aborts at exit while a model holds it."""
    (tmp_path / "script.py").write_text(LEAVES_ITS_GROUP)
    done = run(tmp_path, WORKER, "script.py")
    assert (done.returncode, done.stdout) == (0, "model gone, group there\ngroup gone\n"), done.stderr
    module = run(tmp_path, WORKER, "-m", "script")
    assert module.returncode == 0, module.stderr
    assert module.stdout.endswith("group gone\n")


def test_what_a_failing_rank_leaves_for_the_report(tmp_path: Path) -> None:
    """Its rank, exit code and kind of exception, in the folder of the attempt; only the first one's."""
    (tmp_path / "script.py").write_text("class OutOfMemoryError(RuntimeError): ...\nraise OutOfMemoryError('CUDA')")
    for rank in (3, 1):
        own = {**os.environ, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(tmp_path / str(rank) / "error.json")}
        done = subprocess.run(
            [sys.executable, WORKER, "script.py"], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
    assert "rank 1 failed later: OutOfMemoryError: CUDA" in done.stderr
    assert (tmp_path / FIRST_FAILURE).read_text() == "3 1 OutOfMemoryError"
