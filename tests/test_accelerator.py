"""The facade: the source of its configuration, its refusals before anything runs, and its messages."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zero_plugin import Accelerator

pytestmark = [pytest.mark.programs, pytest.mark.processes]

IMPORTS = """
import os, sys
import pytest, torch
from torch import nn
from zero_plugin import Accelerator, DummyOptim, DummyScheduler
from zero_plugin.errors import ConfigError, LaunchError, LoopError
"""


@pytest.fixture
def run_script(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script as by plain `python` in an empty folder, with further environment variables."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(IMPORTS + script)
        return run_python("script.py", cwd=tmp_path, DS_ACCELERATOR="cpu", **environment)

    return run


def test_where_the_configuration_comes_from(
    run_script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Nothing, a dict, a YAML or a DeepSpeed JSON works. Arguments fill open values.

    A contradiction lists every pair.
    """
    (tmp_path / "launch.yaml").write_text(
        "use_cpu: true\nmixed_precision: bf16\ndeepspeed_config: {gradient_accumulation_steps: 3}\n"
    )
    zero = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}
    (tmp_path / "zero.json").write_text(json.dumps(zero))
    done = run_script("""
nothing = Accelerator()
assert (nothing.num_processes, nothing.process_index, nothing.mixed_precision) == (1, 0, "no")
assert nothing.gradient_accumulation_steps == 1
assert nothing.resolved is None
assert nothing.is_main_process and nothing.is_last_process and nothing.is_local_main_process

yaml = Accelerator(config="launch.yaml")
assert (yaml.gradient_accumulation_steps, yaml.mixed_precision) == (3, "bf16")
assert yaml.device == torch.device("cpu")

given = Accelerator(config="zero.json", gradient_accumulation_steps=4, cpu=True)
assert given.gradient_accumulation_steps == 4
model = nn.Linear(4, 4)
given.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
assert given.resolved.zero_stage == 2
assert given.resolved.accumulation == 4

equal = Accelerator(config={"mixed_precision": "bf16"}, mixed_precision="bf16")
assert equal.mixed_precision == "bf16"

with pytest.raises(ConfigError) as caught:
    Accelerator(config="launch.yaml", mixed_precision="no", gradient_accumulation_steps=2)
assert len(caught.value.problems) == 2
for part in ("launch.yaml:2", "launch.yaml:3", "bf16", "mixed_precision", "gradient_accumulation_steps"):
    assert part in str(caught.value), part

with pytest.raises(ConfigError, match="missing.yaml"):
    Accelerator(config="missing.yaml")
with pytest.raises(ConfigError, match="mixed_precision"):
    Accelerator(mixed_precision="fp61")
print("all")
""")
    assert done.stdout.endswith("all\n"), done.stderr
    assert "zero_plugin: single on 1 × cpu" in done.stderr
    assert "zero_plugin: DeepSpeed on 1 × cpu" in done.stderr


def test_one_run_after_another(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """A process may end one training and begin the next, e.g. in a notebook, a sweep or a test."""
    done = run_script("""
for stage in (2, None, 3):
    accelerator = Accelerator(cpu=True, config={"zero_optimization": {"stage": stage}} if stage else None)
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    accelerator.end_training()
    assert "RANK" not in os.environ
""")
    assert done.returncode == 0, done.stderr


def test_half_a_process_group_is_an_error(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """RANK alone would be N runs of one process. The error names the missing variables."""
    done = run_script("Accelerator()", RANK="0", MASTER_ADDR="localhost")
    assert done.returncode == 1
    assert "LaunchError" in done.stderr
    assert "RANK=0 is set but WORLD_SIZE, MASTER_PORT are not" in done.stderr
    assert "zero-plugin launch" in done.stderr


def test_problems_are_found_at_prepare(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Values that depend on the loop are refused together. The same Accelerator then prepares right ones."""
    done = run_script(
        """
config = {
    "use_cpu": True,
    "deepspeed_config": {
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    },
}
accelerator = Accelerator(config=config)
model = nn.Linear(4, 4)
with pytest.raises(ConfigError) as caught:
    adamw = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, adamw)
assert len(caught.value.problems) >= 2, caught.value
optimizer = DummyOptim(model.parameters(), lr=0.1)
scheduler = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
accelerator.backward(model(torch.ones(1, 4)).sum())
optimizer.step()
scheduler.step()
assert type(optimizer.optimizer) is torch.optim.AdamW
print("all")
""",
        ZERO_PLUGIN_VERBOSE="1",
    )
    assert done.stdout.endswith("all\n"), done.stderr
    assert "WarmupDecayLR: learning rate" in done.stderr


def test_pickled_it_is_the_newest_one(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """An object with an Accelerator can be pickled. When loaded it gets that process's own Accelerator."""
    done = run_script("""
import pickle
accelerator = Accelerator(cpu=True)
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4)))
text = pickle.dumps({"accelerator": accelerator})
assert pickle.loads(text)["accelerator"] is accelerator
accelerator.state._reset_state()
with pytest.raises(LoopError, match="none exists"):
    pickle.loads(text)
""")
    assert done.returncode == 0, done.stderr


def test_a_program_that_a_group_of_one_starts(lines_of: Callable[..., Iterator[str]]) -> None:
    """It inherits the variables that DeepSpeed requires of a single process, and is a separate run."""
    code = "from zero_plugin import Accelerator; a = Accelerator(cpu=True); print(a.num_processes); a.end_training()"
    accelerator = Accelerator(cpu=True)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=200)
    accelerator.end_training()
    assert (done.returncode, list(lines_of(done.stdout.splitlines()))) == (0, ["1"]), done.stderr


def test_what_to_do_about_a_key_without_meaning(run_script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The run says it too, not only `check`: the options that Accelerate passes to a cloud's command line."""
    done = run_script("Accelerator(config={'use_cpu': 'yes', 'tpu_name': 'pod-1'})")
    assert done.returncode == 0, done.stderr
    assert 'tpu_name = "pod-1": has no meaning here' in done.stderr
    assert "gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all" in done.stderr
    assert 'use_cpu: read "yes" as true\n' in done.stderr
