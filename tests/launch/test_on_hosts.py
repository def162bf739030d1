"""Real runs through DeepSpeed's launcher, with pdsh and the test's own ssh server."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
# Plain DDP saves each process DeepSpeed's import. The strategy is not the launcher's concern.
SCRIPT = """
import json, os, sys, time, torch
from zero_plugin import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1)).item()
names = ["RANK", "LOCAL_WORLD_SIZE", "NCCL_DEBUG", "HF_TOKEN"]
told = [total, sys.argv[1:], os.path.basename(os.getcwd()), *(os.environ.get(name) for name in names)]
os.write(1, (json.dumps(told) + "\\n").encode())
if "wait" in sys.argv:
    time.sleep(300)
accelerator.end_training()
if "fail" in sys.argv and accelerator.process_index == 1:
    sys.exit(7)
"""


@pytest.fixture
def by_ssh(tmp_path: Path, environment: dict[str, str], free_port: Callable[[], int]) -> Iterator[dict[str, str]]:
    """Set up an environment in which `ssh` and `pdsh` reach this machine by the test's own ssh server."""
    if shutil.which("pdsh") is None or not os.access(SSHD, os.X_OK):
        pytest.skip("pdsh and openssh-server are not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("mine", "hosts"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True, timeout=30)
    port = free_port()
    settings = f"""Port {port}
ListenAddress 127.0.0.1
HostKey {keys}/hosts
AuthorizedKeysFile {keys}/mine.pub
PidFile none
StrictModes no
UsePAM no
"""
    (keys / "settings").write_text(settings)
    server = subprocess.Popen([SSHD, "-D", "-f", str(keys / "settings")], stderr=subprocess.DEVNULL)
    quietly = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    options = f"-i {keys}/mine {quietly} -p {port}"
    try:
        tried = ["ssh", *shlex.split(options), "-o", "BatchMode=yes", "127.0.0.1", "true"]
        deadline = time.monotonic() + 20
        while subprocess.run(tried, capture_output=True, timeout=20).returncode:
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.skip("sshd does not let this user in here")
            time.sleep(0.2)
        yield {**environment, "PDSH_SSH_ARGS_APPEND": options, "OMP_NUM_THREADS": "1"}
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def start_on_hosts(
    tmp_path: Path,
    by_ssh: dict[str, str],
    free_port: Callable[[], int],
    start_program: Callable[..., subprocess.Popen[str]],
) -> Callable[..., subprocess.Popen[str]]:
    """Start the script by pdsh on two names of this machine, in a folder whose name needs quoting in every shell."""
    folder = tmp_path / "my träin; →"
    folder.mkdir()
    (folder / "scrïpt a.py").write_text(SCRIPT)
    (folder / "hosts").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    (folder / ".deepspeed_env").write_text("RANK=99\n")

    def start(*arguments: str) -> subprocess.Popen[str]:
        meeting = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
        command = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--deepspeed_hostfile", "hosts", *meeting]
        environment = {**by_ssh, "NCCL_DEBUG": "WARN", "HF_TOKEN": "secret"}
        return start_program([*command, "scrïpt a.py", *arguments], gently=True, cwd=folder, env=environment)

    return start


def test_a_run_by_pdsh(start_on_hosts: Callable[..., subprocess.Popen[str]]) -> None:
    """Both hosts form one run. Folder, arguments and allowed variables arrive; secrets and stale files do not."""
    launcher = start_on_hosts("a b", "$HOME;ls", "ü")
    output, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
    told = [line.partition(": ")[2] for line in output.splitlines() if ": [2.0, " in line]
    expected = '[2.0, ["a b", "$HOME;ls", "\\u00fc"], "my tr\\u00e4in; \\u2192", "{}", "1", "WARN", null]'
    assert sorted(told) == [expected.format(0), expected.format(1)], output
    assert "not sent to the other machines, because they look secret: HF_TOKEN" in errors
    assert "./.deepspeed_env is not read" in errors


def run_of(launcher: subprocess.Popen[str]) -> str:
    """Return the word that marks only this launch on every command line."""
    listed = subprocess.run(["pgrep", "-a", "-P", str(launcher.pid)], capture_output=True, text=True).stdout
    found = re.search("zero_plugin_[0-9a-f]{32}", listed)
    assert found is not None, listed
    return found.group()


def processes_of(run: str) -> str:
    return subprocess.run(["pgrep", "-a", "-f", run], capture_output=True, text=True).stdout


@pytest.mark.campaign
def test_the_end_of_a_run_by_pdsh(start_on_hosts: Callable[..., subprocess.Popen[str]]) -> None:
    """A rank's exit code is the launcher's. SIGTERM leaves no process on any host."""
    launcher = start_on_hosts("fail")
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 7, errors
    launcher = start_on_hosts("wait")
    assert launcher.stdout is not None
    lines = 0
    while lines < 2:
        lines += ": [2.0, " in launcher.stdout.readline()
    run = run_of(launcher)
    assert processes_of(run)
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert "no worker is left" in errors
    time.sleep(1)
    assert not processes_of(run)


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (openmpi-bin) is not installed")
def test_a_run_by_mpirun(
    tmp_path: Path, environment: dict[str, str], run_launcher: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """The slots of one host are processes of one run, which read their ranks from Open MPI's variables."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    by_mpirun = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "openmpi"]
    command = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", *by_mpirun, "script.py", "x"]
    done = run_launcher(command, seconds=200, cwd=tmp_path, env={**environment, **allowed})
    assert done.returncode == 0, done.stderr
    assert sum('[2.0, ["x"]' in line for line in done.stdout.splitlines()) == 2


def test_a_host_that_cannot_be_reached(
    by_ssh: dict[str, str], tmp_path: Path, run_launcher: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Every host is tried before anything starts, and each that fails is named with its line."""
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    (tmp_path / "hosts").write_text("localhost slots=1\nno-such-host.invalid slots=1\n")
    command = ["launch", "--cpu", "--deepspeed_hostfile", "hosts", "script.py"]
    done = run_launcher([sys.executable, "-m", "zero_plugin", *command], seconds=60, cwd=tmp_path, env=by_ssh)
    assert done.returncode == 1
    assert "1 of 2 hosts cannot be reached by ssh; nothing was started" in done.stderr
    assert "no-such-host.invalid (hosts:2:1): " in done.stderr
    assert "started" not in done.stderr.replace("nothing was started", "")
