"""A run continues with fewer processes after losing a machine, and with more after gaining one.

Its result is the same.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import read_until, wait_until
from torch.distributed import TCPStore

from zero_plugin.machine.hardware import port_is_free

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("train_fewer.py")
Start = Callable[..., "subprocess.Popen[str]"]


def expected() -> Any:
    """Return steps, learning rate and weights of the same training by torch alone, on 8 samples in each step."""
    import torch

    spec = importlib.util.spec_from_file_location("train_fewer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model, optimizer, schedule = script.build()
    steps = 0
    for _ in range(script.EPOCHS):
        for batch in script.SAMPLES.split(8):
            torch.nn.functional.mse_loss(model(batch), batch[:, :4].sin()).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            schedule.step()  # Accelerate's counting: once for each of the two processes
            steps += 1
    return steps, schedule.get_last_lr()[0], {name: tensor.tolist() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("joins", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_machines_come_and_go(
    joins: bool, start: Start, tmp_path: Path, free_port: Callable[[], int], forked_workers: dict[str, str]
) -> None:
    """One of two launchers is killed, and may have begun later. Weights and learning rate end as in one run."""
    out = uuid.uuid4().hex
    port = free_port()
    flags = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--min_machines", "1", "--max_restarts", "2"]
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]

    def join(waits_for_more: int = 2) -> subprocess.Popen[str]:
        waits = f"last_call_timeout={waits_for_more},keep_alive_interval=1"
        command = (*flags, *meeting, "--rdzv_conf", waits, str(SCRIPT), out, "0.5")
        return start(*command, OMP_NUM_THREADS="1", **forked_workers)

    folder = tmp_path / out
    folder.mkdir()
    hold = folder / "hold"
    if joins:
        hold.touch()
        stays = join()
        wait_until(lambda: not port_is_free(port))
        assert read_until(stays, "step 3")[0] == "1 at 0\n"
        lost = join()
    else:  # they meet in this process, so either one can be killed
        store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        before = store.num_keys()
        lost = join(waits_for_more=600)
        while store.num_keys() == before:  # until it waits for the other
            assert lost.poll() is None, lost.communicate()[1]
            time.sleep(0.05)
        stays = join()
    assert int(read_until(lost, "2 at")[-1].split()[-1]) >= (3 if joins else 0)
    hold.unlink(missing_ok=True)
    read_until(lost, "step")
    lost.kill()
    lost.communicate()
    (folder / "hurry").touch()
    assert int(read_until(stays, "1 at")[-1].split()[-1]) > (3 if joins else 0)
    _, errors = stays.communicate(timeout=120)
    assert stays.returncode == 0, errors
    if not joins:
        del store
    assert "1 of 2 processes run; the global batch size does not change" in errors
    steps, rate, weights = json.loads((tmp_path / out / "final.json").read_text())
    wanted_steps, wanted_rate, wanted = expected()
    assert steps == wanted_steps == 16
    assert rate == pytest.approx(wanted_rate)
    for name, tensor in wanted.items():
        for row, wanted_row in zip(weights[name], tensor, strict=True):
            assert row == pytest.approx(wanted_row, abs=1e-5)
