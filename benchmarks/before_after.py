"""Measure what a change of this package costs, at an older commit and now: start, prepare, step, save, load.

    python benchmarks/before_after.py REVISION --pairs 5

The same script trains with each version of the package, one process after the other, in reverse order every other
round. The numbers are seconds of the process's own processor time, summed over its threads. They do not include other
programs on the machine. A second run of today's package in each round shows how much the measurement differs without a
change.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pairs import Timings, describe_run
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
BEFORE, NOW, AGAIN = "before", "now", "now, again"
SETTINGS = {
    "one device": {"distributed_type": "NO", "use_cpu": True},
    **{
        f"ZeRO-{stage}": {
            "distributed_type": "DEEPSPEED",
            "use_cpu": True,
            "deepspeed_config": {"zero_optimization": {"stage": stage}},
        }
        for stage in (2, 3)
    },
}
_STEPS, _WIDTH, _LAYERS = 200, 256, 8
_SCRIPT = f"""
import json, sys, time
clock = time.process_time
marks = [("", clock())]
def done(name): marks.append((name, clock()))
import torch
done("import torch")
from zero_plugin import Accelerator
done("import zero_plugin")
accelerator = Accelerator(config=json.loads(sys.argv[1]))
done("Accelerator()")
torch.manual_seed(0)
layers = [torch.nn.Linear({_WIDTH}, {_WIDTH}) for _ in range({_LAYERS})]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn({8 * _STEPS}, {_WIDTH}), torch.randn({8 * _STEPS}, {_WIDTH}))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
done("prepare")
for i, (x, y) in enumerate(loader):
    if i == {_STEPS}:
        done("first {_STEPS} steps")
    if i == {2 * _STEPS}:
        break
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
done("next {_STEPS} steps")
accelerator.save_state(sys.argv[2])
done("save_state")
accelerator.load_state(sys.argv[2])
done("load_state")
print("TIMES", json.dumps({{name: now - then for (_, then), (name, now) in zip(marks, marks[1:])}}))
accelerator.end_training()
"""


def measure(package: Path, setting: str) -> dict[str, float]:
    """Return the seconds of each part of the script, with the package in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(_SCRIPT)
        done = subprocess.run(
            [sys.executable, str(script), json.dumps(SETTINGS[setting]), str(Path(folder, "saved"))],
            env={**os.environ, "PYTHONPATH": str(package), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            cwd=folder,
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("TIMES ")]
    assert found, done.stderr[-4000:]
    times: dict[str, float] = json.loads(found[0][6:])
    return times


def main() -> None:
    """Print a table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=5, help="rounds")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    asked = parser.parse_args()
    console = Console(width=120)
    console.print(describe_run(), highlight=False)
    git = functools.partial(subprocess.run, cwd=ROOT, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder, "older")
        git(["git", "worktree", "add", "--detach", str(older), asked.revision])
        try:
            for setting in asked.settings:
                console.print(compare({BEFORE: older, NOW: ROOT, AGAIN: ROOT}, setting, asked.pairs))
        finally:
            git(["git", "worktree", "remove", "--force", str(older)])


def compare(packages: dict[str, Path], setting: str, rounds: int) -> Table:
    """Return a table of a setting's parts: medians, and ratios over the rounds."""
    parts: dict[str, Timings] = {}
    for index in range(rounds):
        for name in list(packages)[:: 1 if index % 2 else -1]:
            for part, seconds in measure(packages[name], setting).items():
                parts.setdefault(part, Timings({each: [] for each in packages}))[name].append(seconds)
    table = Table("part", "before, s", "now, s", "now / before", "now, again / now", title=setting, box=MARKDOWN)
    for part, timings in parts.items():
        ratios = [f"{timings.ratio(*pair):.2f} ± {timings.spread(*pair):.2f}" for pair in ((NOW, BEFORE), (AGAIN, NOW))]
        table.add_row(part, f"{timings.seconds(BEFORE):.3f}", f"{timings.seconds(NOW):.3f}", *ratios)
    return table


if __name__ == "__main__":
    main()
