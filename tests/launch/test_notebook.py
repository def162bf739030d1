"""Functions that no other process could import run in several processes, from a notebook or any running program."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero_plugin.errors import ConfigError
from zero_plugin.launchers import debug_launcher, notebook_launcher

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

NOTEBOOK = """
import os, signal, sys, time
import torch
from zero_plugin.launchers import debug_launcher, notebook_launcher

settings = {"text": "from a cell", "numbers": torch.arange(3.0)}
"""


@pytest.fixture
def run_cells(tmp_path: Path, forked_alone: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run cells as a notebook's kernel does: no file to import them from, all names in `__main__`."""

    def run(*cells: str, **environment: str) -> subprocess.CompletedProcess[str]:
        run = [sys.executable, "-c", NOTEBOOK + "\n".join(cells)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **forked_alone, **environment}
        return subprocess.run(run, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)

    return run


def test_training(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], lines_of: Callable[..., Iterator[str]]
) -> None:
    """Arguments of any iterable, names of the notebook and the configuration arrive. The notebook is unchanged."""
    done = run_cells(
        """
class Model(torch.nn.Linear):
    pass

def train(text, numbers):
    from zero_plugin import Accelerator
    accelerator = Accelerator()
    model = Model(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(numbers).sum())
    optimizer.step()
    total = accelerator.reduce(numbers + accelerator.process_index).tolist()
    rank, state = accelerator.process_index, accelerator.state
    what = (rank, text, total, accelerator.mixed_precision, accelerator.distributed_type.value, state.fork_launched)
    os.write(1, f"{what}\\n".encode())
    settings["text"] = "changed there"
""",
        "before = dict(os.environ), signal.getsignal(signal.SIGINT)",
        "notebook_launcher(train, settings.values(), num_processes=2, mixed_precision='bf16')",
        """
zero = {"use_cpu": True, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_optimization": {"stage": 2}}}
notebook_launcher(train, settings.values(), config={**zero, "num_processes": 2})
assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == before
assert settings["text"] == "from a cell"
from zero_plugin import Accelerator
assert Accelerator().num_processes == 1
""",
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(lines_of(done.stdout.splitlines()))
    for rank, line in zip((0, 0, 1, 1), lines, strict=True):
        assert line.startswith(f"({rank}, 'from a cell', [1.0, 3.0, 5.0], ")
    assert [line.endswith("'bf16', 'MULTI_CPU', True)") for line in lines] == [True, False] * 2
    assert [line.endswith("'no', 'DEEPSPEED', True)") for line in lines] == [False, True] * 2
    assert "zero_plugin: train runs in 2 processes on the CPU" in done.stderr


def test_one_process_is_the_notebook_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only process is the notebook, with the configuration. A generator of arguments works."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    before = dict(os.environ)
    seen: list[object] = []

    def train(*args: object) -> None:
        seen.extend([os.getpid(), args, "bf16" in os.environ["ZERO_PLUGIN_DOCUMENT"]])

    notebook_launcher(train, (n for n in (1, 2)), num_processes=1, mixed_precision="bf16")
    assert seen == [os.getpid(), (1, 2), True]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("def f():\n    if os.environ['RANK'] == '1': raise ValueError('its own error')\n    time.sleep(100)",
         ["process 1 failed first", "in f", "ValueError: its own error"]),
        ("def f(): os.kill(os.getpid(), 9)", ["was ended by signal 9 (SIGKILL)"]),
        *(pytest.param(*row, marks=pytest.mark.campaign) for row in [
            ("def f():\n    from zero_plugin import Accelerator\n    a = Accelerator(cpu=True)\n    bytearray(1 << 60)",
             ["MemoryError\nCPU memory ran out on rank ", "What needs less memory, the cheapest first"]),
            ("def f(): sys.exit(3)", ["failed first", "SystemExit: 3"]),
            ("def f(): os._exit(4)", ["failed first, with exit code 4"]),
        ]),
    ],
)  # fmt: skip
def test_a_failure_is_raised_in_the_notebook(
    run_cells: Callable[..., subprocess.CompletedProcess[str]],
    function: str,
    told: list[str],
    lines_of: Callable[..., Iterator[str]],
) -> None:
    """It has the traceback of the first failing process. The other processes end, and the notebook continues."""
    done = run_cells(
        function,
        """
try:
    debug_launcher(f)
except Exception as error:
    print(type(error).__name__, error)
    import multiprocessing
    assert not multiprocessing.active_children()
    debug_launcher(lambda: None)
""",
    )
    assert done.returncode == 0, done.stderr
    assert next(lines_of(done.stdout.splitlines())).startswith("LaunchError")
    for part in told:
        assert part in done.stdout


def test_a_restart(run_cells: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """`max_restarts` starts all processes again. `sys.exit(0)` is a good end."""
    done = run_cells(
        """
def f():
    os.write(1, f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n".encode())
    sys.exit(0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" else 1)
""",
        "notebook_launcher(f, num_processes=2, max_restarts=1)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("attempt 1") == 2


def test_logs_and_the_prefix_of_lines(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The configuration's `log_dir` is used, with the prefix that the call names."""
    done = run_cells(
        "def f(): print('hello', flush=True)",
        "config = {'log_dir': 'logs', 'use_cpu': True, 'num_processes': 2}",
        "notebook_launcher(f, config=config, log_line_prefix_template='<${rank}>')",
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["<0>hello", "<1>hello"]
    assert [log.read_text() for log in tmp_path.glob("logs/*/*/attempt_0/*/stdout.log")] == ["hello\n"] * 2


@pytest.mark.parametrize("everyone", [False, True])
def test_ctrl_c(everyone: bool, tmp_path: Path) -> None:
    """The kernel's stop button reaches the kernel alone or all. It raises KeyboardInterrupt, and no process is left."""
    cell = "notebook_launcher(lambda: (os.write(1, b'up\\n'), time.sleep(200)), num_processes=2)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{NOTEBOOK}{cell}"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as kernel:  # fmt: skip
        try:
            assert [kernel.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
            (os.killpg if everyone else os.kill)(kernel.pid, signal.SIGINT)
            errors = kernel.communicate(timeout=60)[1]
            assert errors.rstrip().endswith("KeyboardInterrupt")
            with pytest.raises(ProcessLookupError):  # the session's group is empty
                os.killpg(kernel.pid, 0)
        finally:
            if kernel.poll() is None:
                os.killpg(kernel.pid, signal.SIGKILL)


def test_ctrl_c_while_the_processes_are_made(run_cells: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """During a fork an exception cannot leave and logging is locked, so the signal takes effect a moment later."""
    done = run_cells(
        """
def interrupt():
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # not for the copy that is a trial
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # here Python sees it
            pass

os.register_at_fork(after_in_parent=interrupt)
notebook_launcher(lambda: time.sleep(200), num_processes=2)
"""
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "ignored" not in done.stderr


def test_the_others_end_soon_after_a_failure(run_cells: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A process that ignores SIGTERM gets five seconds, as in `zero-plugin launch`, not torch's 30."""
    done = run_cells(
        """
log = os.open("seconds", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

def f():
    if os.environ["RANK"] == "1":
        time.sleep(1)
        raise ValueError("boom")
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
    while True:
        time.sleep(0.1)
        if asked:
            os.write(log, f"{time.monotonic() - asked[0]}\\n".encode())
""",
        """
try:
    debug_launcher(f)
except Exception as error:
    print(error)
print(open("seconds").read().splitlines()[-1])
""",
    )
    assert done.returncode == 0, done.stderr
    assert "ValueError: boom" in done.stdout
    assert 1 < float(done.stdout.splitlines()[-1]) < 20


def test_a_process_that_cannot_be_copied_is_refused(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], lines_of: Callable[..., Iterator[str]]
) -> None:
    """If an Accelerator exists here, the call is refused before anything starts. Ending the Accelerator suffices."""
    done = run_cells(
        """
from zero_plugin import Accelerator
accelerator = Accelerator(cpu=True)
try:
    notebook_launcher(print, num_processes=2)
except Exception as error:
    print(type(error).__name__, error)
accelerator.end_training()

def who():
    from zero_plugin.loop.state import PartialState, is_initialized
    assert not is_initialized()
    os.write(1, f"process {PartialState().process_index}\\n".encode())

notebook_launcher(who, num_processes=2)
"""
    )
    assert done.returncode == 0, done.stderr
    refusal, *rest = lines_of(done.stdout.splitlines())
    assert refusal.startswith("LaunchError this process has an Accelerator")
    assert "accelerator.end_training()" in done.stdout
    assert sorted(rest[-2:]) == ["process 0", "process 1"]


LEFT_OVER = """
from zero_plugin import Accelerator
from zero_plugin.state import AcceleratorState, PartialState

ZERO = {"use_cpu": True, "distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_optimization": {"stage": 2}}}

def train(config, label):
    accelerator = Accelerator(config=config)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(settings["numbers"]).sum())
    optimizer.step()
    total = accelerator.reduce(torch.ones(1)).item()
    os.write(1, f"{label} {accelerator.num_processes} {total}\\n".encode())
    return accelerator

notebook_launcher(train, (None, "here"), num_processes=1, config={"use_cpu": True})  # its Accelerator is dropped
debug_launcher(train, (ZERO, "after one process"))
train(ZERO, "here")
debug_launcher(train, (None, "after a dropped one"))
kept = train(ZERO, "here")
AcceleratorState._reset_state(True)
debug_launcher(train, (ZERO, "after a reset"))
debug_launcher(train, (None, "one copy"), num_processes=1)
PartialState(cpu=True)
notebook_launcher(train, (ZERO, "after a state"), num_processes=2, config={"use_cpu": True})
"""


def test_what_earlier_runs_have_left_is_no_hindrance(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], lines_of: Callable[..., Iterator[str]]
) -> None:
    """A one-process run whose `Accelerator` is dropped or forgotten ends when copies of this process are made."""
    done = run_cells(LEFT_OVER)
    assert done.returncode == 0, done.stderr
    after = ("after one process", "after a dropped one", "after a reset", "after a state")
    copies = [f"{label} 2 2.0" for label in after for _ in range(2)]
    assert sorted(lines_of(done.stdout.splitlines())) == sorted([*copies, *["here 1 1.0"] * 3, "one copy 1 1.0"])


@pytest.mark.parametrize(("on", "code"), [("cpu", 0), ("cuda", 1)])
def test_a_process_that_has_asked_cuda(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], on: str, code: int
) -> None:
    """CUDA works in no copy of this process. That is refused if the copies need CUDA. A run on the CPU works."""
    asked = "torch.cuda._is_in_bad_fork = lambda pid=os.getpid(): os.getpid() != pid"  # as a build for CUDA has it
    done = run_cells(asked, "debug_launcher(lambda: None)", DS_ACCELERATOR=on)
    assert done.returncode == code, done.stderr
    assert ("this process has asked CUDA for its devices" in done.stderr) is (code == 1)


def test_threads_that_would_hang(run_cells: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """If the notebook has computed with several threads, the processes have one each, which is logged."""
    done = run_cells(
        "torch.set_num_threads(2); torch.ones(2**22).exp()",
        "notebook_launcher(lambda: os.write(1, b'%d\\n' % torch.ones(2**22).exp().numel()), num_processes=2)",
        OMP_NUM_THREADS="2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{2**22}\n" * 2
    assert "Each process computes with one thread" in done.stderr


def test_two_notebooks_share_no_port(run_cells: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Accelerate's default port may be taken. A configured port that is taken is an error."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"use_port={port}\).*port {port} is taken"):
            notebook_launcher(print, num_processes=2, use_port=port)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # another process has it, which works as well
            taken.bind(("127.0.0.1", 29500))
        begun = time.monotonic()
        done = run_cells("debug_launcher(lambda: os.write(1, b'up\\n'))")
        assert done.stdout == "up\n" * 2, (done.stderr, time.monotonic() - begun)


def test_wrong_arguments_are_found_before_anything_starts() -> None:
    """An unknown precision and a contradiction of the configuration are errors that name the call."""
    with pytest.raises(ConfigError, match=r"notebook_launcher\(mixed_precision='fp61'\)"):
        notebook_launcher(print, num_processes=2, mixed_precision="fp61")
    with pytest.raises(ConfigError, match=r"num_processes=3\).*3 in code, but 2"):
        notebook_launcher(print, num_processes=3, config={"num_processes": 2})
    fewer = {"min_machines": 1, "max_restarts": 1, "rdzv_backend": "c10d"}
    with pytest.raises(ConfigError, match=r"min_machines: .* of notebook copies"):
        notebook_launcher(
            print, num_processes=1, num_nodes=2, master_addr="127.0.0.1", rdzv_backend="c10d", config=fewer
        )
    with pytest.raises(ConfigError, match=r"num_processes=0\)"):
        debug_launcher(print, num_processes=0)


AFTER_FAILURES = """
import gc, threading
kept = []

def fails():
    from zero_plugin import Accelerator
    accelerator = Accelerator()
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    accelerator.wait_for_everyone()

def works():
    from zero_plugin import Accelerator
    kept.clear()  # the tracebacks of earlier launches, with all that their frames hold
    gc.collect()
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    os.write(1, b"works\\n")

for _ in range(2):
    try:
        notebook_launcher(fails, num_processes=2)
    except Exception as error:
        kept.append(error)
    notebook_launcher(works, num_processes=2)
kept.clear()
gc.collect()
ends = ("TCPStore", "PrefixStore", "HashStore", "Agent", "Rendezvous")
held = [kind.__name__ for kind in map(type, gc.get_objects()) if kind.__name__.endswith(ends)]
os.write(1, f"{len(os.listdir('/proc/self/task'))} thread, {held}\\n".encode())
notebook_launcher(works, num_processes=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of the kernel")
def test_launches_after_failed_ones(
    run_cells: Callable[..., subprocess.CompletedProcess[str]], lines_of: Callable[..., Iterator[str]]
) -> None:
    """They work, also if the copies collect the failed run. No store, agent or thread stays in the notebook."""
    done = run_cells(AFTER_FAILURES, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = list(lines_of(done.stdout.splitlines()))
    assert [line for line in lines if line != "works"] == ["1 thread, []"]
    assert len(lines) == 7
