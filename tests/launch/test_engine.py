"""Launches of real processes: the script's inputs, the ends of runs, and the cleanup."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ends_of, needs_proc, processes_with, wait_until
from torch.distributed.launcher.api import LaunchConfig

from zero_plugin.config.document import ENVIRONMENT_VARIABLE
from zero_plugin.config.run_files import CUT_VARIABLE
from zero_plugin.machine.hardware import port_is_free

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

SHOW = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "DS_ACCELERATOR", "ZERO_PLUGIN_DOCUMENT"]
shown = {n: os.environ.get(n) for n in names}
ours = [n for n in os.environ if n.startswith("ZERO_PLUGIN")]
line = json.dumps({**shown, "ours": ours, "argv": sys.argv, "torch": "torch" in sys.modules})
os.write(1, (line + "\\n").encode())  # one write: two ranks share the pipe
"""
GLOO = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
MEET = """
os.write(1, f"{rank}/{dist.get_world_size()}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


def shown(output: str) -> list[dict[str, object]]:
    """Return the output of `SHOW`, by rank."""
    return sorted((json.loads(line) for line in output.splitlines()), key=lambda row: str(row["RANK"]))


def test_what_reaches_the_script(launch: Launch, tmp_path: Path) -> None:
    """All arguments after the script are the script's: other alphabets, `--help`, launch flags, `--`, empty text.

    A log line notes a launch flag there. Threads come from the cores, and DeepSpeed computes on the CPU.
    """
    (tmp_path / "show.py").write_text(SHOW)
    arguments = ["--help", "two words", "ü→", "--num_processes", "9", "--", "", "$HOME"]
    done = launch("--cpu", "--num-processes", "2", "show.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = shown(done.stdout)
    assert [row["RANK"] for row in rows] == ["0", "1"]
    assert all(row["argv"] == ["show.py", *arguments] for row in rows)
    (told,) = done.stderr.splitlines()
    assert told.startswith("warning: --num_processes is after show.py, so the flag is passed to the script")
    cores = len(os.sched_getaffinity(0))
    assert {row["OMP_NUM_THREADS"] for row in rows} <= {str(n) for n in range(1, max(1, cores // 2) + 1)}
    assert {row["DS_ACCELERATOR"] for row in rows} == {"cpu"}


def test_one_process_is_launched_the_same_way(launch: Launch, tmp_path: Path) -> None:
    """Without a count, a CPU gets one process, with rank, world and address as several have.

    The user's variables stay. This package adds two: the configuration, and the number of the attempt.
    """
    (tmp_path / "show.py").write_text(SHOW)
    (row,) = shown(launch("--cpu", "show.py", OMP_NUM_THREADS="7", afresh=True).stdout)
    assert (row["RANK"], row["WORLD_SIZE"], row["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    assert row["torch"] is False  # nothing was imported for the script
    assert row["OMP_NUM_THREADS"] == "7"
    assert isinstance(row["ours"], list)
    assert set(row["ours"]) - set(os.environ) == {ENVIRONMENT_VARIABLE, CUT_VARIABLE}


def test_streams_role_and_the_working_folder(launch: Launch, tmp_path: Path) -> None:
    """`--tee` and `--role` are torchrun's. A script in another folder can import from the working one."""
    (tmp_path / "beside.py").write_text("import os; name = os.environ['ROLE_NAME']")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "say.py").write_text("import sys, beside; print(beside.name); print('no', file=sys.stderr)")
    done = launch("--cpu", "--tee", "1", "--role", "trainer", "scripts/say.py")
    assert done.stdout == "[trainer0]:trainer\n"
    assert done.stderr == "no\n"


def test_other_starters_hand_nothing_over(tmp_path: Path, environment: dict[str, str]) -> None:
    """The same script started by torchrun or by python gets no document."""
    (tmp_path / "show.py").write_text(SHOW)
    for starter in (["-m", "torch.distributed.run", "--standalone"], []):
        done = subprocess.run(
            [sys.executable, *starter, "show.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        (row,) = shown(done.stdout)
        assert row[ENVIRONMENT_VARIABLE] is None


def test_modules_and_executables(launch: Launch, tmp_path: Path) -> None:
    """`-m` runs a module of the current folder, `--no_python` a program; both get their arguments."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "go.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert launch("--cpu", "-m", "pack.go", "-x").stdout.strip() == "__main__ ['-x']"
    assert launch("--cpu", "--no-python", "echo", "-n", "a b", workers_afresh=True).stdout == "a b"


def test_any_folder_name_and_environment(launch: Launch, tmp_path: Path) -> None:
    """Every rank finds a script in `my träin; →`, and sees the caller's environment."""
    folder = tmp_path / "my träin; →"
    folder.mkdir()
    (folder / "scrïpt a.py").write_text(
        "import os, sys\n"
        "line = [os.environ['RANK'], os.environ['MY_ÜMLAUT'], os.path.basename(sys.path[0])]\n"
        "os.write(1, (repr(line) + '\\n').encode())\n"
    )
    done = launch(
        *("--cpu", "--num_processes", "2", "my träin; →/scrïpt a.py"),
        MY_ÜMLAUT="$HOME ; ü",
        PYTHONIOENCODING="utf-8",
        afresh=True,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(ast.literal_eval(line) for line in done.stdout.splitlines())
    assert lines == [[rank, "$HOME ; ü", "my träin; →"] for rank in "01"]


def test_how_much_the_launcher_says(launch: Launch, tmp_path: Path) -> None:
    """Overridden variables are logged, except under `--quiet`. `--debug` shows torchrun's log."""
    (tmp_path / "a.py").write_text("print('ok')")
    noted = {"ACCELERATE_USE_FSDP": "true"}
    told = [launch(*flags, "--cpu", "a.py", **noted).stderr for flags in ([], ["--quiet"], ["--debug"])]
    assert "ACCELERATE_USE_FSDP" in told[0]
    assert told[1] == ""
    assert "Starting elastic_operator" in told[2]


SAY = """
import logging, sys
from zero_plugin.distributed.messages import show_messages
show_messages()
for level in (logging.INFO, logging.WARNING):
    logging.getLogger("zero_plugin.loop").log(level, "of the package")
print("of the script")
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def test_quiet_and_times_are_the_workers_too(launch: Launch, tmp_path: Path) -> None:
    """`-q` keeps a worker's warnings. `--log_timestamps` puts one time before each message and each line of `--tee`.

    The file can set either.
    """
    (tmp_path / "say.py").write_text(SAY)
    (tmp_path / "c.yaml").write_text("log_timestamps: true\n")
    quiet = launch("-q", "--cpu", "say.py")
    assert (quiet.stdout, quiet.stderr) == ("of the script\n", "zero_plugin: warning: of the package\n")
    timed = launch("--config_file", "c.yaml", "--cpu", "say.py", ACCELERATE_USE_FSDP="true")
    assert timed.stdout == "of the script\n"
    assert re.fullmatch(
        f"{TIME}Overriding ACCELERATE_USE_FSDP.*\n({TIME}zero_plugin: .*of the package\n){{2}}", timed.stderr
    )
    teed = launch("--log_timestamps", "--tee", "3", "--cpu", "say.py")
    assert re.fullmatch(rf"{TIME}\[default0\]:of the script\n", teed.stdout)
    assert re.fullmatch(rf"(\[default0\]:{TIME}zero_plugin: .*of the package\n){{2}}", teed.stderr)


def test_the_first_failing_rank_is_shown_once(launch: Launch, tmp_path: Path) -> None:
    """The output has one traceback, of the first failing rank, without our frames, and no log of torchrun's."""
    (tmp_path / "fail.py").write_text(GLOO + "if rank == 1:\n    raise ValueError('boom')\ndist.barrier()\n")
    done = launch("--cpu", "--num_processes", "2", "fail.py")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ValueError: boom") == 1
    assert "rank 1 failed first, with exit code 1" in done.stderr
    assert "worker.py" not in done.stderr
    assert "ChildFailedError" not in done.stderr
    assert "Sending process" not in done.stderr


def test_exit_code_of_the_first_failing_rank(launch: Launch, tmp_path: Path) -> None:
    """`sys.exit(7)` in one rank ends the launch with 7, although its peer then fails with another code."""
    (tmp_path / "exit.py").write_text(GLOO + "if rank == 1:\n    sys.exit(7)\ndist.barrier()\n")
    done = launch("--cpu", "--num_processes", "2", "exit.py")
    assert done.returncode == 7
    assert "rank 1 failed first, with exit code 7" in done.stderr


def test_a_killed_rank_is_explained(launch: Launch, tmp_path: Path) -> None:
    """SIGKILL of one rank gives 137 and an explanation of CPU memory.

    It names the rank, though the peer failed first.
    """
    (tmp_path / "kill.py").write_text(GLOO + "if rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()\n")
    done = launch("--cpu", "--num_processes", "2", "kill.py")
    assert done.returncode == 137
    assert "rank 1 was ended by signal 9 (SIGKILL)" in done.stderr
    assert "CPU memory" in done.stderr


def test_a_rank_that_aborts_is_explained(launch: Launch, tmp_path: Path) -> None:
    """gloo ends a process whose collective has another size. The report names that rank, not its peer, and the fix."""
    (tmp_path / "sizes.py").write_text(f"{GLOO}dist.all_reduce(torch.ones(64 if rank else 1000))\n")
    done = launch("--cpu", "--num_processes", "2", "sizes.py")
    assert done.returncode == 134
    assert "was ended by signal 6 (SIGABRT)" in done.stderr
    assert "op.preamble.length <= op.nbytes" in done.stderr.split("Traceback")[0]
    assert "the same branch on every rank" in " ".join(done.stderr.split())


def test_an_error_of_ours_in_a_worker_keeps_its_exit_code(launch: Launch, tmp_path: Path) -> None:
    """A ConfigError raised inside the script ends the launch with 2 and shows the script's line, not our frames."""
    (tmp_path / "wrong.py").write_text(
        "from zero_plugin.config.read import read_document\nread_document('absent.yaml')\n"
    )
    done = launch("--cpu", "--num_processes", "2", "wrong.py")
    assert done.returncode == 2
    assert "read_document('absent.yaml')" in done.stderr
    assert "zero_plugin/config" not in done.stderr


def test_restarts(launch: Launch, tmp_path: Path) -> None:
    """`--max_restarts 1` starts the group once more. A second failure ends the run."""
    script = "import os, sys; sys.exit(int(os.environ['TORCHELASTIC_RESTART_COUNT']) < int(sys.argv[1]))"
    (tmp_path / "fails.py").write_text(script)
    assert launch("--cpu", "--max_restarts", "1", "fails.py", "1").returncode == 0
    assert launch("--cpu", "--max_restarts", "1", "fails.py", "2").returncode == 1


def test_logs_are_kept_where_asked(launch: Launch, tmp_path: Path) -> None:
    """`--log_dir` keeps a file for each worker's output, and the screen still shows it."""
    (tmp_path / "hello.py").write_text("print('hello')")
    done = launch("--cpu", "--log_dir", "logs", "hello.py")
    assert "hello" in done.stdout
    assert [log.read_text() for log in (tmp_path / "logs").rglob("stdout.log")] == ["hello\n"]


def test_folders_that_are_not_there(launch: Launch, tmp_path: Path) -> None:
    """A log folder that the file system refuses, and a working folder that was removed, are errors."""
    (tmp_path / "hello.py").write_text("print('hello')")
    done = launch("--cpu", "--log_dir", "/proc/logs", "hello.py")
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "log_dir: /proc/logs cannot be written (No such file or directory). Name another folder." in done.stderr
    typed = f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m zero_plugin launch --cpu {tmp_path}/hello.py"
    done = subprocess.run(typed, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "the working folder has been removed" in done.stderr


def start_and_wait(start: Start, tmp_path: Path, body: str) -> tuple[subprocess.Popen[str], str]:
    """Start two workers that report and run `body`. Return the launcher and the mark on all their command lines."""
    (tmp_path / "wait.py").write_text(f"import os, signal, time\n{body}\nos.write(1, b'up\\n')\ntime.sleep(100)\n")
    mark = uuid.uuid4().hex
    launcher = start("--cpu", "--num_processes", "2", "wait.py", mark)
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    assert len(processes_with(mark)) == 3
    return launcher, mark


@needs_proc
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.campaign)],
)
def test_signals_end_the_workers(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    """Ctrl-C, SIGTERM and a closed terminal reach the workers. No worker is left, and the code is 128 + n."""
    launcher, mark = start_and_wait(start, tmp_path, "")
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert processes_with(mark) == {}
    assert "Traceback" not in errors
    assert number.name in errors


INTERRUPTED_ALONE = """
import os, signal, time
import torch
from zero_plugin import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
accelerator.gather(torch.ones(1))
"""


def test_an_interrupt_of_one_process(start: Start, tmp_path: Path) -> None:
    """SIGINT to one rank ends the others within seconds, like an error there, and the launcher names the rank."""
    (tmp_path / "a.py").write_text(INTERRUPTED_ALONE)
    launcher = start("--cpu", "--num_processes", "2", "a.py")
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "error: rank 1 was interrupted (SIGINT), on " in errors
    assert "end_training()" not in errors  # the script never got that far


COPIES = """
import os, sys
import torch
from zero_plugin import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
for end in (lambda: sys.exit(7), lambda: 1 / 0):
    child = os.fork()
    if not child:
        end()
    os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n".encode())
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("strategy", [["--cpu"], ["--zero_stage", "2"]], ids=["ddp", "zero2"])
def test_copies_of_a_process_end_alone(start: Start, tmp_path: Path, strategy: list[str]) -> None:
    """A fork of the script ends immediately with its own code. It waits for no process of the run, and fails none."""
    (tmp_path / "a.py").write_text(COPIES)
    launcher = start(*strategy, "--num_processes", "2", "a.py")
    output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert sorted(output.split()) == ["1", "1", "7", "7"]
    assert errors.count("ZeroDivisionError") == 2


@needs_proc
@pytest.mark.skipif(
    "signals_to_handle" not in LaunchConfig.__dataclass_fields__, reason="torch before 2.10 ends a run at every SIGHUP"
)
def test_a_closed_terminal_does_not_end_a_run_under_nohup(start: Start, tmp_path: Path) -> None:
    """If SIGHUP is ignored, as nohup does it, the run continues."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher inherits this
    try:
        launcher, mark = start_and_wait(start, tmp_path, "")
    finally:
        signal.signal(signal.SIGHUP, before)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert len(processes_with(mark)) == 3
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert launcher.returncode == 143


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.campaign), signal.SIGTERM])
def test_a_signal_while_machines_are_awaited(
    start: Start, tmp_path: Path, number: signal.Signals, free_port: Callable[[], int]
) -> None:
    """Ctrl-C and SIGTERM immediately end a launcher that waits for another machine, without a traceback.

    The launcher listens only at the address that all machines know.
    """
    port = free_port()
    several = ["--num_processes", "2", "--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "127.0.0.1"]
    (tmp_path / "a.py").write_text("")
    launcher = start("--cpu", *several, "--main_process_port", str(port), "a.py")
    wait_until(lambda: not port_is_free(port))
    socket.create_server(("127.0.0.2", port)).close()
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == -number
    assert "Traceback" not in errors


@needs_proc
def test_workers_can_clean_up_after_a_signal(start: Start, tmp_path: Path) -> None:
    """The workers handle SIGTERM themselves and finish their work."""
    body = "def end(*_):\n    open('ended' + os.environ['RANK'], 'w').close()\n    exit()\nsignal.signal(15, end)"
    launcher, _ = start_and_wait(start, tmp_path, body)
    launcher.terminate()
    launcher.communicate(timeout=60)
    assert sorted(file.name for file in tmp_path.glob("ended*")) == ["ended0", "ended1"]


@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_no_worker_outlives_a_killed_launcher(start: Start, tmp_path: Path) -> None:
    """SIGKILL of the launcher leaves no workers behind, even if they ignore every signal."""
    launcher, mark = start_and_wait(start, tmp_path, "signal.signal(15, signal.SIG_IGN)")
    launcher.kill()
    launcher.communicate(timeout=60)
    wait_until(lambda: not processes_with(mark))


@needs_proc
def test_what_a_dead_worker_had_started_ends_too(launch: Launch, tmp_path: Path) -> None:
    """A failing rank's own children (data loader workers) end with it."""
    mark = uuid.uuid4().hex
    (tmp_path / "parent.py").write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)', '{mark}'])\n"
        "sys.exit(3)\n"
    )
    assert launch("--cpu", "parent.py", workers_afresh=True).returncode == 3
    wait_until(lambda: not processes_with(mark))


def test_two_launches_at_once_never_clash(
    start: Start, tmp_path: Path, lines_of: Callable[..., Iterator[str]], forked_workers: dict[str, str]
) -> None:
    """Two simultaneous launches of two processes form their own groups, without a port being named."""
    (tmp_path / "meet.py").write_text(GLOO + MEET)
    launchers = [start("--cpu", "--num_processes", "2", "meet.py", **forked_workers) for _ in range(2)]
    for code, output, errors in ends_of(*launchers):
        assert (code, sorted(lines_of(output.splitlines()))) == (0, ["0/2", "1/2"]), errors


def test_a_port_can_be_chosen_and_is_free_afterwards(
    launch: Launch, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The workers meet at the named port. The launcher frees it afterwards."""
    (tmp_path / "port.py").write_text("import os; print(os.environ['MASTER_PORT'])")
    port = free_port()
    for _ in range(2):
        done = launch("--cpu", "--main_process_port", str(port), "port.py")
        assert done.stdout.strip() == str(port), done.stderr


def test_two_machines(
    start: Start,
    tmp_path: Path,
    free_port: Callable[[], int],
    lines_of: Callable[..., Iterator[str]],
    forked_workers: dict[str, str],
) -> None:
    """Two launchers with two machine ranks form one group of two processes."""
    (tmp_path / "meet.py").write_text(GLOO + MEET)
    port = str(free_port())
    common = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    common += ["--main_process_port", port]
    launchers = [
        start(*common, "--machine_rank", rank, "meet.py", GLOO_SOCKET_IFNAME="lo", **forked_workers) for rank in "01"
    ]
    for rank, (code, output, errors) in enumerate(ends_of(*launchers)):
        assert (code, list(lines_of(output.splitlines()))) == (0, [f"{rank}/2"]), errors


FAILS_ONCE = """
import os
from zero_plugin import Accelerator
accelerator = Accelerator()
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if accelerator.process_index == 1 and attempt == 0:
    os._exit(7)
accelerator.wait_for_everyone()
os.write(1, f"attempt {attempt} of rank {accelerator.process_index}\\n".encode())
accelerator.end_training()
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_failure_on_one_machine_ends_the_workers_of_all(
    start: Start,
    tmp_path: Path,
    free_port: Callable[[], int],
    lines_of: Callable[..., Iterator[str]],
    forked_workers: dict[str, str],
    restarts: int,
) -> None:
    """Without `--max_restarts` the run ends on both machines. With it both start again, without c10d's open store."""
    (tmp_path / "fails.py").write_text(FAILS_ONCE)
    common = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1"]
    common += ["--main_process_port", str(free_port()), "--max_restarts", str(restarts)]
    launchers = [start(*common, "--machine_rank", rank, "fails.py", **forked_workers) for rank in "01"]
    ends = ends_of(*launchers)
    assert [code for code, _, _ in ends] == ([0, 0] if restarts else [1, 7]), ends
    shown = [list(lines_of(output.splitlines())) for _, output, _ in ends]
    assert shown == ([["attempt 1 of rank 0"], ["attempt 1 of rank 1"]] if restarts else [[], []])
    host = socket.gethostname()
    assert f"rank 1 failed first of those on {host}, with exit code 7" in ends[1][2]
    assert restarts or "waited for another rank without success" in ends[0][2]


def test_c10d_says_what_it_opens(
    start: Start, tmp_path: Path, free_port: Callable[[], int], forked_workers: dict[str, str]
) -> None:
    """c10d runs only on request and names the port that is open to everyone."""
    (tmp_path / "a.py").write_text("")
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    counts = ["--num_processes", "2", "--num_machines", "2"]
    launchers = [start("--cpu", *counts, *meeting, "a.py", **forked_workers) for _ in range(2)]
    for code, _, errors in ends_of(*launchers):
        assert code == 0, errors
        assert f"{meeting[-1]} listens on every network" in errors
