"""Disk parts use no process memory except pages that the system can drop at any time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

CODE = """
import sys
import torch
from pathlib import Path
from torch import nn
from zero_plugin import init_empty_weights, load_checkpoint_and_dispatch

folder, kind = Path(sys.argv[1]), sys.argv[2]
width, layers = 1024, 24  # 4 MiB each, 96 MiB

def own():  # MiB that only this process holds, and the most that it ever held of anything
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024

with init_empty_weights():
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
x = torch.ones(1, width)
with torch.no_grad():
    nn.Linear(width, 8)(x)
before, most = own(), 0
def measure(*_):
    global most
    most = max(most, own() - before)
for layer in model:
    layer.register_forward_hook(measure)
name, places = ("model.bin", {"": "disk"}) if kind == "bin" else ("model.safetensors", {"": "disk"})
if kind == "half":
    places |= {str(i): "cpu" for i in range(layers // 2)}
load_checkpoint_and_dispatch(model, folder / name, places, offload_folder=folder / kind, dtype=torch.float32)
measure()
for _ in range(2):
    out = model(x)
measure()
print(round(most))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    state = {f"{i}.weight": torch.full((1024, 1024), i / 1024) for i in range(24)}
    save_file(state, made / "model.safetensors")
    torch.save(state, made / "model.bin")
    return made


def measure(folder: Path, kind: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", CODE, folder, kind], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(("kind", "mebibytes"), [("disk", 0), ("half", 48), ("bin", 0)])
def test_memory_is_that_of_the_part_on_the_cpu(folder: Path, kind: str, mebibytes: int) -> None:
    """For 96 MiB of weights, loading and two forwards use the CPU part plus less than three layers."""
    most = int(measure(folder, kind))
    assert mebibytes - 2 <= most < mebibytes + 12
