"""Ray Train for real: the guide's script on two workers. It runs where Ray is installed:

python -m venv --system-site-packages ray-venv          # from an environment that holds the package
ray-venv/bin/pip install 'ray[train]'
ray-venv/bin/python -m pytest tests/launch/test_ray.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.programs,
    pytest.mark.campaign,
    pytest.mark.processes,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; the docstring says how"),
]
GUIDE = Path(__file__).parents[2] / "docs" / "launchers.md"
# Two of Ray's processors, whatever this machine has; then the guide's lines; then the run's remains.
BEFORE = "import ray\n\nray.init(num_cpus=2, include_dashboard=False)\n"
AFTER = """
import json
from pathlib import Path

losses = [metrics["loss"] for metrics in result.metrics_dataframe.to_dict("records")]
files = sorted(file.name for file in Path(result.checkpoint.path).iterdir())
print("OUTCOME", json.dumps({"losses": losses, "processes": result.metrics["processes"], "files": files}))
ray.shutdown()
"""


def ray_script(folder: Path, config: str) -> str:
    """Return the guide's script with this folder instead of the shared one, and this config instead of `zero2`."""
    section = GUIDE.read_text().partition("## Ray Train")[2].partition("\n## ")[0]
    (script,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert script.count('config="zero2"') == 1
    return BEFORE + script.replace('config="zero2"', f'config="{config}"').replace("/shared", str(folder)) + AFTER


@pytest.mark.parametrize("config", ["cpu", "zero2"])
def test_the_guides_script_trains_and_reports_checkpoints(
    config: str, tmp_path: Path, run_launcher: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Two workers on DDP, then ZeRO 2: the loss falls from epoch to epoch, and Ray holds a complete checkpoint."""
    (tmp_path / "train_on_ray.py").write_text(ray_script(tmp_path, config))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    done = run_launcher([sys.executable, "train_on_ray.py"], seconds=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = json.loads(done.stdout.partition("OUTCOME ")[2].splitlines()[0])
    assert outcome["processes"] == 2
    assert outcome["losses"] == sorted(outcome["losses"], reverse=True), outcome
    assert {"manifest.json", "model.safetensors"} <= set(outcome["files"])
