"""A launch on one machine: no process beyond loopback reaches it, and none of its store's data is executed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

# A process's listening addresses, in hexadecimal as the kernel writes them, in the process's own network.
LISTENING = """
import json, os
from pathlib import Path

def listening(process):
    mine = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        try:
            mine.add(os.readlink(descriptor))
        except OSError:
            pass
    rows = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/{process}/net/{file}")]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]

def show(when):
    found = {"worker": listening("self"), "launcher": listening(os.getppid())}
    os.write(1, f"{json.dumps({'when': when, **found})}\\n".encode())  # one write: the ranks share the pipe
"""
TRAINS = (
    LISTENING
    + """
def train():
    show("rendezvous")
    import torch
    from zero_plugin import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    show("training")
    accelerator.end_training()
"""
)
# One rank of two that mpirun started on this machine, without our launcher.
MPI = 'for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank "$@" & done; wait'
MPI_SIZES = ("env", "OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_LOCAL_SIZE=2")
HEX_LOOPBACK = ("0100007F:", "00000000000000000000000001000000:", "0000000000000000FFFF00000100007F:")
# A separate machine whose name leads to a network that others reach.
OTHER_NAME = (
    "hostname 10.78.0.1 && ip link set lo up && ip link add zp0 type veth peer name zp1 && ip link set zp0 up"
    ' && ip addr add 10.78.0.1/24 dev zp0 && exec "$@"'
)


@pytest.fixture
def machine() -> list[str]:
    """Return a command prefix for a machine whose name leads to an address beyond loopback, or for this machine."""
    tools = [shutil.which(tool) for tool in ("unshare", "ip", "hostname")]
    prefix = ["unshare", "--net", "--uts", "sh", "-c", OTHER_NAME, "sh"]
    works = all(tools) and not subprocess.run([*prefix, "true"], capture_output=True).returncode
    return prefix if works else []


@pytest.fixture
def listeners(
    machine: list[str],
    tmp_path: Path,
    environment: dict[str, str],
    run_launcher: Callable[..., Any],
    forked_alone: dict[str, str],
) -> Callable[..., list[dict[str, object]]]:
    """Run a command there, and return the listening addresses of its workers and their launcher."""

    def run(*command: str | Path) -> list[dict[str, object]]:
        done = run_launcher([*machine, *command], seconds=200, cwd=tmp_path, env={**environment, **forked_alone})
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


def test_a_launch_listens_on_loopback_alone(listeners: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    """The store does from the start, gloo during training, wherever the machine's name leads."""
    (tmp_path / "train.py").write_text(f"{TRAINS}\ntrain()\n")
    launch = [sys.executable, "-m", "zero_plugin", "launch", "--cpu", "--num_processes", "2", "train.py"]
    assert_on_loopback(listeners(*launch), processes=2)


@pytest.mark.parametrize("how", ["debug_launcher", "python", pytest.param("mpirun", marks=pytest.mark.campaign)])
def test_other_starts_listen_on_loopback_alone(
    how: str, listeners: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """A notebook's processes, a script started without a launcher, and tasks of mpirun on one machine."""
    call = "from zero_plugin import debug_launcher; debug_launcher(train)" if how == "debug_launcher" else "train()"
    (tmp_path / "train.py").write_text(f"{TRAINS}\n{call}\n")
    start = [*MPI_SIZES, f"PMIX_NAMESPACE={tmp_path}", "sh", "-c", MPI, "sh"] if how == "mpirun" else []
    assert_on_loopback(listeners(*start, sys.executable, "train.py"), processes=1 if how == "python" else 2)


def assert_on_loopback(shown: list[dict[str, Any]], *, processes: int) -> None:
    """Check two observations of each process. The one in training found the addresses of gloo or the store."""
    assert [row["when"] for row in sorted(shown, key=lambda row: row["when"])] == [
        *["rendezvous"] * processes,
        *["training"] * processes,
    ]
    addresses = {address for row in shown for address in [*row["worker"], *row["launcher"]]}
    assert addresses
    assert all(address.startswith(HEX_LOOPBACK) for address in addresses), shown


ATTACKS = (
    LISTENING
    + """
import base64, pickle
from torch.distributed import TCPStore

class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)

key = "torch.rendezvous." + os.environ["TORCHELASTIC_RUN_ID"]  # where the c10d rendezvous keeps a pickle
for address in listening(os.getppid()):
    store = TCPStore("127.0.0.1", int(address.partition(":")[2], 16), None, False, wait_for_workers=False)
    print("kept there:", store.check([key]))
    store.set(key, base64.b64encode(pickle.dumps(Attack())))
raise SystemExit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""
)


def test_what_a_client_writes_into_the_store_is_not_run(
    launch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The launcher reads no pickle from the store: at its start, while it watches, or when it restarts its workers."""
    (tmp_path / "attack.py").write_text(ATTACKS)
    done = launch("--cpu", "--max_restarts", "1", "attack.py", workers_afresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["kept there: False"] * 2
    assert not (tmp_path / "attacked").exists()


RESTARTED = """
import os
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os._exit(1)
os.write(1, f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}\\n".encode())
dist.destroy_process_group()
"""


def test_workers_of_a_restart_meet_at_the_port_that_was_named(
    launch: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    free_port: Callable[[], int],
    lines_of: Callable[..., Iterator[str]],
) -> None:
    """They get a new store. The old one has the addresses of processes that are gone."""
    (tmp_path / "restarted.py").write_text(RESTARTED)
    port = str(free_port())
    flags = ["--num_processes", "2", "--max_restarts", "1", "--main_process_port", port]
    done = launch("--cpu", *flags, "restarted.py")
    assert done.returncode == 0, done.stderr
    assert list(lines_of(done.stdout.splitlines())) == [f"127.0.0.1:{port}"] * 2
