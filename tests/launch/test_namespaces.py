"""Two machines with their own addresses, as network namespaces: meeting, training, and possible failures."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launching import ends_of

from zero_plugin.launch.rendezvous import store_command

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("train_machines.py")
PORT = "29533"
_NAMED = 'hostname "$0" && exec "$@"'


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@dataclass
class Host:
    """A machine: a namespace with an address on a cable to the other, and a name that leads to no address."""

    name: str
    cable: str
    address: str
    folder: Path
    environment: dict[str, str]
    start_program: Callable[..., subprocess.Popen[str]]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command on this machine."""
        there = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", _NAMED, self.name, *command]
        environment = {**self.environment, **variables}
        process = self.start_program(there, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def launch(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start `zero-plugin launch` on this machine."""
        return self.start(sys.executable, "-m", "zero_plugin", "launch", *arguments, **variables)

    def processes(self) -> list[str]:
        """Return the processes of this machine."""
        return ip("netns", "pids", self.name).split()


@pytest.fixture
def hosts(
    tmp_path: Path, environment: dict[str, str], start_program: Callable[..., subprocess.Popen[str]]
) -> Iterator[tuple[Host, Host]]:
    """Create two machines in their own network. Check after the test that no process is left, and remove both."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    mark = f"zp{os.getpid()}"
    alike = (tmp_path, {**environment, "OMP_NUM_THREADS": "1"}, start_program)
    pair = [Host(f"{mark}{side}", f"{mark}{side}", f"10.77.0.{number}", *alike) for number, side in enumerate("ab", 1)]
    made = subprocess.run(["ip", "netns", "add", pair[0].name], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", pair[1].name)
        cable = ["link", "add", pair[0].cable, "netns", pair[0].name, "type", "veth"]
        ip(*cable, "peer", "name", pair[1].cable, "netns", pair[1].name)
        for host in pair:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", host.name, "link", "set", host.cable, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield pair[0], pair[1]
        left = {host.name: host.processes() for host in pair if host.processes()}
    finally:
        for host in pair:
            for number in subprocess.run(["ip", "netns", "pids", host.name], capture_output=True).stdout.split():
                os.kill(int(number), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
    assert not left, "processes are left on the machines"


def static(host: Host, rank: int, *more: str, machines: int = 2) -> list[str]:
    """Return flags of the static rendezvous on `host`."""
    counts = ["--num_processes", str(machines), "--num_machines", str(machines), "--machine_rank", str(rank)]
    return [*counts, "--main_process_ip", host.address, "--main_process_port", PORT, *more]


def elastic(host: Host, *more: str) -> list[str]:
    """Return flags of the elastic rendezvous on `host`."""
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{host.address}:{PORT}"]
    return ["--num_processes", "2", "--num_machines", "2", *meeting, *more]


def expected_losses() -> list[float]:
    """Return the losses of the same training in this process, by torch alone."""
    import torch

    spec = importlib.util.spec_from_file_location("train_machines", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model = script.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in script.SAMPLES.split(8):
        loss = torch.nn.functional.mse_loss(model(batch), batch[:, :4].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_trained(output: str) -> None:
    losses = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert losses["2"] == pytest.approx(expected_losses(), rel=1e-5)
    assert losses["3"] == pytest.approx(expected_losses(), rel=1e-5)


def test_zero_2_and_3_over_two_machines(hosts: tuple[Host, Host], forked_workers: dict[str, str]) -> None:
    """Two launchers with a static rendezvous train like one process. Each uses its own network's name."""
    main, other = hosts
    launchers = [
        host.launch(*static(main, rank), str(SCRIPT), **forked_workers) for rank, host in enumerate((main, other))
    ]
    for code, output, errors in ends_of(*launchers):
        assert code == 0, errors
        assert_trained(output)


@pytest.mark.campaign
def test_deepspeeds_launcher_on_each_machine(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """With `nossh` the same command on both machines, each with its own rank, is one run."""
    main = hosts[0]
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    flags = ["--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "nossh", "--main_process_ip"]
    launchers = [
        host.launch("--use_deepspeed", *flags, main.address, "--machine_rank", str(rank), str(SCRIPT))
        for rank, host in enumerate(hosts)
    ]
    for code, output, errors in ends_of(*launchers):
        assert code == 0, errors
        assert_trained(output)


@pytest.mark.campaign
@pytest.mark.parametrize("end", [1, 0])
def test_a_cut_cable(end: int, hosts: tuple[Host, Host], lines_of: Callable[..., Iterator[str]]) -> None:
    """With c10d they train too. When the cable is cut at one end, both sides fail within the time-out and say why.

    No machine can resolve its own name, at which torch's launcher alone fails.
    """
    main, other = hosts
    conf = "read_timeout=6,keep_alive_interval=1"
    launchers = [
        host.launch(*elastic(main, "--rdzv_conf", conf), str(SCRIPT), "on", PATIENCE="6") for host in (main, other)
    ]
    first: list[str] = []
    for launcher in launchers:
        assert launcher.stdout is not None
        said = lines_of(launcher.stdout)
        first.append(next(said))
        assert "going on" in next(said), launcher.communicate(timeout=60)[1]
    ip("-n", hosts[end].name, "link", "set", hosts[end].cable, "down")
    done = ends_of(*launchers)
    for output in first:
        assert_trained(output)
    for code, _, errors in done:
        assert code not in (0, None)
        lost_a_rank = "failed first" in errors and "cannot be reached any more" in errors
        assert lost_a_rank or "the connection to" in errors, errors
    assert not main.processes()
    assert not other.processes()


@pytest.mark.campaign
@pytest.mark.parametrize("apart", [True, False])
def test_machine_0_is_killed(apart: bool, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """The run continues if a separate process keeps the rendezvous. Otherwise the other machine tells how to do so."""
    main, other = hosts
    command = store_command(PORT)
    if apart:
        other.start(sys.executable, *shlex.split(command)[1:])
        while not ip("netns", "exec", other.name, "ss", "-ltnH", "sport", "=", PORT):
            time.sleep(0.1)
    flags = ["--min_machines", "1", "--max_restarts", "1", "--rdzv_conf", "last_call_timeout=20,keep_alive_interval=1"]
    script = (str(SCRIPT.with_name("train_fewer.py")), str(tmp_path / "out"), "0.5")
    stays_up = other if apart else main
    killed, stays = (host.launch(*elastic(stays_up, *flags), *script) for host in (main, other))
    assert killed.stdout is not None
    for line in ("2 at 0", "step 1", "step 2"):
        assert killed.stdout.readline() == f"{line}\n", killed.communicate(timeout=60)[1]
    for number in main.processes():
        os.kill(int(number), signal.SIGKILL)
    ((code, output, errors),) = ends_of(stays)
    if apart:
        for process in other.started[:1]:
            process.kill()
            process.communicate()
        assert code == 0, errors
        assert "1 of 2 processes run; the global batch size does not change" in errors
        assert output.endswith("step 16\n")
    else:
        assert code == 1
        assert f"the one in --rdzv_endpoint ({main.address})" in errors
        assert command in errors


@pytest.mark.campaign
def test_a_cable_that_is_cut_before_all_have_come(hosts: tuple[Host, Host]) -> None:
    """Machine 1 and machine 0 wait for a third.

    When machine 1 hears no more of machine 0, it says so and stops waiting.
    """
    main, other = hosts
    conf = ("--rdzv_conf", "read_timeout=6,timeout=20")
    waiting = [
        host.launch(*static(main, rank, *conf, machines=3), str(SCRIPT)) for rank, host in enumerate((main, other))
    ]
    for launcher in waiting:
        assert launcher.stderr is not None
        while "machine 2 did not come" not in launcher.stderr.readline():
            assert launcher.poll() is None
    ip("-n", other.name, "link", "set", other.cable, "down")
    (code_0, _, errors_0), (code_1, _, errors_1) = ends_of(*waiting)
    assert (code_0, code_1) == (1, 1)
    assert "machine 2 did not come" in errors_0 or "machines 1, 2 did not come" in errors_0
    assert f"the connection to {main.address}, where the machines met, has been lost" in errors_1


@pytest.mark.campaign
def test_a_number_given_twice_and_different_counts(hosts: tuple[Host, Host]) -> None:
    """Both sides learn immediately which machines share a number, or that their counts differ."""
    main, other = hosts
    for rank, machines, told in ((0, 2, "two machines have the number 0"), (1, 3, "the machines count differently")):
        launchers = (
            main.launch(*static(main, 0), str(SCRIPT)),
            other.launch(*static(main, rank, machines=machines), str(SCRIPT)),
        )
        for code, _, errors in ends_of(*launchers):
            assert code == 1
            assert told in errors
            assert "Traceback" not in errors
            assert f"({other.address}, process" in errors or "3 on machine 1" in errors


SOON = ("--rdzv_conf", "timeout=3,join_timeout=3,read_timeout=3,last_call_timeout=1")


def test_a_missing_machine(hosts: tuple[Host, Host], forked_alone: dict[str, str]) -> None:
    """The waiting machine says for whom and how long. An uninvited machine says that no machine answers."""
    main, other = hosts
    waiting, lonely, waiting_elastic, lonely_elastic = (
        host.launch(*flags, *SOON, str(SCRIPT), **forked_alone)
        for host, flags in (
            (main, static(main, 0)),
            (other, static(main, 1, "--main_process_port", "29544")),
            (other, elastic(other)),
            (main, elastic(other, "--rdzv_endpoint", f"{other.address}:29544")),
        )
    )
    done = ends_of(waiting, lonely, waiting_elastic, lonely_elastic)
    assert [code for code, _, _ in done] == [1, 1, 1, 1]
    told = [errors for _, _, errors in done]
    assert "machine 1 did not come, 3 s after machine 0 of 2 came" in told[0]
    assert "machine 0 does not answer (Connection refused)" in told[1]
    assert "not all of the 2 machines met" in told[2]
    assert f"did not meet at {other.address}:29544" in told[3]
    assert "Traceback" not in "".join(told)


def test_a_taken_port(hosts: tuple[Host, Host], forked_alone: dict[str, str]) -> None:
    """Machine 0 immediately says that another program has the port. The other side also ends in bounded time."""
    main, other = hosts
    server = f"import socket, time; s = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(300)"
    taker = main.start(sys.executable, "-c", server)
    assert taker.stdout is not None
    assert taker.stdout.readline() == "up\n"
    done = ends_of(
        main.launch(*static(main, 0, *SOON), str(SCRIPT), **forked_alone),
        other.launch(*static(main, 1, *SOON), str(SCRIPT), **forked_alone),
        main.launch(*elastic(main, *SOON), str(SCRIPT), **forked_alone),
    )
    taker.kill()
    taker.communicate()
    assert [code for code, _, _ in done] == [2, 1, 1]
    assert f"port {PORT} is taken on this machine, which is machine 0" in done[0][2]
    for _, _, errors in done[1:]:
        assert f"the service at {main.address}:{PORT} is not torchrun's rendezvous" in errors
        assert "Traceback" not in errors
