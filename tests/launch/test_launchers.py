"""The same script under each launcher's variables, by `Accelerator()` alone, and mistakes of a foreign process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from zero_plugin import Accelerator
from zero_plugin.distributed import joining
from zero_plugin.errors import LaunchError

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(1200)]

STAGE_2 = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
LATE = 1.5  # seconds in which the others have logged what they wait for


def environments(rank: int, port: int) -> dict[str, dict[str, str]]:
    """Return each launcher's variables for process `rank` of two on this machine, by the launcher's name."""
    number, job, one = str(rank), str(port), {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
    slurm = {"JOB_ID": job, "STEP_ID": 0, "PROCID": number, "LOCALID": number, "NODEID": 0, "NTASKS": 2}
    step = {"NUM_TASKS": 2, "NUM_NODES": 1, "TASKS_PER_NODE": 2, "NODELIST": "node7"}
    pod = {"NNODES": 2, "NPROC_PER_NODE": 1, "NODE_RANK": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port + 2}
    openmpi = {"RANK": number, "SIZE": 2, "LOCAL_RANK": number, "LOCAL_SIZE": 2}
    local = {"LOCAL_RANK": number, "NODE_RANK": "0"}
    return {
        "torchrun": one | local | {"MASTER_PORT": str(port), "RANK": number, "LOCAL_WORLD_SIZE": "2"},
        "PyTorchJob": one | {"MASTER_PORT": str(port + 1), "RANK": number, "PET_NPROC_PER_NODE": "auto"},
        "TrainJob": prefixed("PET_", pod),
        "Lightning": one | local | {"MASTER_PORT": str(port + 3)},
        "GLOBAL_RANK": one | local | {"MASTER_PORT": str(port + 4), "GLOBAL_RANK": number},
        "srun": prefixed("SLURM_", slurm) | prefixed("SLURM_STEP_", step),
        "mpirun": prefixed("OMPI_COMM_WORLD_", openmpi) | {"PMIX_NAMESPACE": job},
        "Intel MPI": {
            **prefixed("PMI_", {"RANK": number, "SIZE": 2}),
            **prefixed("MPI_", {"LOCALRANKID": number, "LOCALNRANKS": 2}),
            "MASTER_PORT": str(port + 5),
        },
    }


def prefixed(prefix: str, variables: dict[str, object]) -> dict[str, str]:
    """Return variables whose names begin alike."""
    return {f"{prefix}{name}": str(value) for name, value in variables.items()}


def train(config: dict[str, object] | None) -> list[object]:
    """Train a few steps. Return this process's identity, the processes' sum, and the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, config=config)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)), 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(accelerator.reduce(loss.detach(), "mean")), 5))
    place = [accelerator.process_index, accelerator.local_process_index, accelerator.num_processes]
    accelerator.end_training()
    return [*place, losses]


def train_under_each(rank: int, port: int) -> None:
    """Train both strategies under each launcher. In turns a process comes later than the other."""
    joining._FIRST_PAUSE = LATE / 10
    kept, outcomes = dict(os.environ), {}
    for late, (launcher, variables) in enumerate(environments(rank, port).items()):
        for config in (None, STAGE_2):
            os.environ.clear()
            os.environ.update({**kept, **variables})
            if late == rank:
                time.sleep(LATE)
            outcomes[launcher, config is None] = train(config)
    os.environ.clear()
    os.environ.update(kept)
    for (launcher, _), (index, local, world, losses) in outcomes.items():
        assert (index, local) == (rank, 0 if launcher == "TrainJob" else rank), launcher
        assert world == 2, launcher
        assert losses == outcomes["torchrun", True][-1], (launcher, losses)
    print("TRAINED", len(outcomes))


def come_as_stranger(process: int, port: int, folder: Path) -> None:
    """Run processes 0 and 1 as one run, while process 2 of another run uses the same port."""
    kept = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runs, left = folder / "runs", folder / "left"
    if process < 2:
        os.environ.update({**kept, "RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": "2"})
        accelerator = Accelerator(cpu=True)
        accelerator.wait_for_everyone()
        runs.touch()
        while not left.exists():
            time.sleep(0.1)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return
    while not runs.exists():
        time.sleep(0.1)
    try:
        for rank, world in ((1, 2), (2, 3), (0, 2)):
            os.environ.clear()
            os.environ.update({**kept, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)})
            with pytest.raises(LaunchError) as caught:
                Accelerator(cpu=True)
            print(caught.value)
    finally:
        left.touch()


_CHILD = """
from zero_plugin import Accelerator
try:
    print("ALONE", Accelerator(cpu=True).num_processes)
except Exception as error:
    print(error)
"""


def start_a_child(rank: int, port: int) -> None:
    """Start a program from rank 0 of an agent's run, with the rank's environment and without."""
    group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update(group | agent | {"MASTER_PORT": str(port)})
    accelerator = Accelerator(cpu=True)

    def start(environment: dict[str, str]) -> None:
        if rank == 0:
            subprocess.run([sys.executable, "-c", _CHILD], env=environment, check=True, timeout=60)

    start(dict(os.environ))
    left_out = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    start({name: value for name, value in os.environ.items() if name not in left_out})
    accelerator.wait_for_everyone()
    accelerator.end_training()
    print("left", "ZERO_PLUGIN_JOINED" in os.environ)


@pytest.fixture
def free_ports(free_port: Callable[[], int]) -> int:
    """Return the first of six free ports."""
    return free_port()


def test_the_same_script_trains_under_each_launcher(run_processes: Callable[..., list[str]], free_ports: int) -> None:
    """DDP and ZeRO 2 give one list of losses. A waiting process names the missing ones."""
    outputs = run_processes(__file__, 2, "train_under_each", free_ports)
    assert ["TRAINED 16" in output for output in outputs] == [True, True], outputs
    assert f"rank 1 of WORLD_SIZE=2 did not join yet; rank 0 waits at 127.0.0.1:{free_ports + 1}" in outputs[0]
    assert f"rank 1 of 2 waits for rank 0, which does not answer at 127.0.0.1:{free_ports}" in outputs[1]


def test_another_run_at_the_same_port(run_processes: Callable[..., list[str]], free_ports: int, tmp_path: Path) -> None:
    """Each of its processes ends with an error that names the port or the rank. The first run continues."""
    output = run_processes(__file__, 3, "come_as_stranger", free_ports, tmp_path)[2]
    assert "two processes have RANK=1: " in output
    assert "rank 2 has WORLD_SIZE=3, but rank" in output
    assert "has WORLD_SIZE=2.\n" in output
    assert f"rank 0 cannot listen at 127.0.0.1:{free_ports}: " in output
    assert "Set MASTER_PORT to a free port" in output


def test_a_program_that_a_rank_starts_does_not_wait_for_the_run(run_processes: Callable[..., list[str]]) -> None:
    """It has inherited a taken rank. The immediate error gives the fix, with which the program runs alone."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output = run_processes(__file__, 2, "start_a_child", agent.port)[0]
    assert "which is rank 0 of a run, and has inherited its rank" in output
    assert "without RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment" in output
    assert "ALONE 1\n" in output
    assert "left False" in output


if __name__ == "__main__":
    _, _, me, _, check, first_port, *rest = sys.argv
    if check == "start_a_child":
        start_a_child(int(me), int(first_port))
    elif check == "train_under_each":
        train_under_each(int(me), int(first_port))
    else:
        come_as_stranger(int(me), int(first_port), Path(rest[0]))
