"""Accelerate scripts give the same results after `accelerate` is replaced by `zero_plugin` in their imports.

Intended differences are listed at the top of the script that shows them, and are rows of the documented differences.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

HERE = Path(__file__).parent
SCRIPTS = sorted((HERE / "scripts").glob("*.py"))
DIFFERENCES = (HERE.parents[1] / "docs/differences-reference.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("migrate", HERE / "migrate.py")
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
migrate = _module.migrate


def read_differences(script: Path, world: int) -> dict[str, str]:
    """Return the differences on this number of processes, each with its row of the documented differences."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DIFFERENCES":
            return {key: row for key, (worlds, row) in ast.literal_eval(node.value).items() if world in worlds}
    return {}


def find_differences(theirs: Any, ours: Any, where: str) -> Iterator[str]:
    """Return the places where two results differ: learning rates by more than 1e-12, other numbers by 1e-5."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for key in theirs:
            yield from find_differences(theirs[key], ours[key], f"{where}.{key}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from find_differences(*pair, f"{where}[{index}]")
    elif isinstance(theirs, float) and isinstance(ours, float):
        tolerance = 1e-12 if "rates" in where or where.endswith(".lr") else 1e-5
        if not math.isclose(theirs, ours, rel_tol=tolerance, abs_tol=tolerance):
            yield f"{where}: {theirs} with accelerate, {ours} with zero_plugin"
    elif type(theirs) is not type(ours) or theirs != ours:
        yield f"{where}: {theirs!r} with accelerate, {ours!r} with zero_plugin"


@pytest.fixture(scope="session")
def finished() -> dict[tuple[str, int], Path]:
    """Cache the folder of each library and number of processes."""
    return {}


@pytest.fixture
def results(
    run_processes: Callable[..., list[str]],
    finished: dict[tuple[str, int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, int, str], dict[str, Any]]:
    """Return a script's results with LIBRARY on WORLD processes. All scripts run once, one after another."""

    def results(library: str, world: int, name: str) -> dict[str, Any]:
        if (library, world) not in finished:
            finished[library, world] = folder = tmp_path_factory.mktemp(f"{library}-{world}")
            run_processes(HERE / "worker.py", world, library, folder, *SCRIPTS)
        folder = finished[library, world]
        outcomes = [json.loads(file.read_text())[name] for file in sorted(folder.glob("rank-*.json"))]
        assert outcomes == ["ok"] * world, "\n".join([f"with {library}", *outcomes])
        written: dict[str, Any] = json.loads((folder / name / "results.json").read_text())
        return written

    return results


@pytest.mark.processes
@pytest.mark.timeout(3600)  # the first one runs all scripts with both libraries
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.campaign), 2])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_same_results(results: Callable[[str, int, str], dict[str, Any]], script: Path, world: int) -> None:
    """Losses, applied learning rates and metrics are equal, except for listed differences, which do occur."""
    theirs, ours = (results(library, world, script.stem) for library in ("accelerate", "zero_plugin"))
    differences = read_differences(script, world)
    assert theirs.keys() == ours.keys() >= differences.keys()
    unexpected = []
    for key in theirs:
        found = list(find_differences(theirs[key], ours[key], key))
        if key not in differences:
            unexpected += found
        else:
            assert found, f"{key} is the same; the difference, and perhaps its row in docs, has gone"
    assert unexpected == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_only_imports_change(script: Path) -> None:
    """The migrated script differs only in lines that import from accelerate."""
    before, after = script.read_text().splitlines(), migrate(script.read_text()).splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed
    for old, new in changed:
        assert old.split()[0] in ("from", "import")
        assert new == old.replace("accelerate", "zero_plugin", 1)
    assert not any("accelerate" in line.lower() for line in after if line.split()[:1] in (["from"], ["import"]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_differences_are_told(script: Path) -> None:
    """Each listed difference is a row of the documented differences, with the behaviour of this package."""
    rows = [line.split("|") for line in DIFFERENCES.splitlines()]
    told = {cells[1].strip() for cells in rows if len(cells) == 6}
    assert {row for world in (1, 2) for row in read_differences(script, world).values()} <= told


@pytest.mark.campaign
@pytest.mark.processes
def test_launched(run_launcher: Callable[..., Any], forked_workers: dict[str, str], tmp_path: Path) -> None:
    """`zero-plugin launch` and `accelerate launch` on two processes differ only in command name and import."""
    script = HERE / "scripts/early_stopping.py"
    commands = {  # accelerate's --cpu would start one process; the script requests the CPU itself
        "accelerate": ["accelerate.commands.launch", "--multi_gpu"],
        "zero_plugin": ["zero_plugin", "launch", "--cpu"],
    }
    found = {}
    for library, command in commands.items():
        folder = tmp_path / library
        folder.mkdir()
        source = script.read_text()
        (folder / "train.py").write_text(source if library == "accelerate" else migrate(source))
        flags = ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--main_process_port", "0"]
        done = run_launcher(
            [sys.executable, "-m", *command, *flags, "train.py", "results.json"],
            seconds=120,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **forked_workers},
        )
        # About one Accelerate process in six aborts as it ends (gloo), after everything is written.
        assert done.returncode == 0 or library == "accelerate", done.stdout + done.stderr
        assert (folder / "results.json").exists(), done.stdout + done.stderr
        found[library] = json.loads((folder / "results.json").read_text())
    assert list(find_differences(found["accelerate"], found["zero_plugin"], "results")) == []


# Accelerate's own script for sequence parallelism, with a small model instead of the hub's.
_BY_HAND = """
import runpy, sys
import torch, transformers

def build(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **sizes))

transformers.AutoModelForCausalLM.from_pretrained = build
transformers.AutoTokenizer.from_pretrained = lambda name: None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.processes
@pytest.mark.parametrize("library", ["accelerate", "zero_plugin"])
def test_sequence_parallelism_by_hand(
    library: str, run_launcher: Callable[..., Any], forked_workers: dict[str, str], tmp_path: Path
) -> None:
    """Accelerate's script trains with its own import. With ours it ends before a wrong step."""
    name = "accelerate.test_utils.scripts.external_deps.test_ds_alst_ulysses_sp"
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip("this Accelerate has no such script")
    source = Path(found.origin).read_text()
    (tmp_path / "script.py").write_text(source if library == "accelerate" else migrate(source))
    (tmp_path / "train.py").write_text(_BY_HAND)
    command = ["-m", "zero_plugin", "launch", "--num_processes", "2", "--zero_stage", "2"]
    done = run_launcher(
        [sys.executable, *command, "train.py", "script.py"],
        seconds=120,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", **forked_workers},
    )
    steps = re.findall(r"^\d+: loss=tensor\((\d+\.\d+)", done.stdout, flags=re.MULTILINE)
    if library == "accelerate":
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(steps) == 8
    else:
        assert done.returncode != 0
        assert steps == []
        assert "No sequence parallel group found" in done.stderr
