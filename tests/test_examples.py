"""The examples run by the commands at their top, on two processes, and learn. They name a missing package."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Callable
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from launching import run_afresh
from packaging.requirements import Requirement

pytestmark = pytest.mark.programs

EXAMPLES = Path(__file__).parents[1] / "examples"
# Each example's measure of learning: the largest allowed ratio of its last value to its first.
FALLS = {
    "plain_loop": ("loss", 0.1),
    "transformers_finetune": ("loss", 0.6),
    "lora": ("loss", 0.7),
    "gan": ("distance", 0.6),
    "streaming_data": ("loss", 0.5),
    "diffusion": ("loss", 0.5),
    "resume": ("loss", 0.3),
    "long_context": ("loss", 0.7),
    "big_model_inference": ("difference", None),
}
DAILY = ("plain_loop", "resume", "streaming_data")
INSTALL = "pip install '.[examples]'"
# Runs a script without one package, and with empty stand-ins for others, which take seconds to import.
WITHOUT = """
import runpy, sys, types

script, hidden, *others = sys.argv[1:]


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Anything(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        return Anything(name)


sys.meta_path.insert(0, Finder())
sys.modules.update({name: Anything(name) for name in others})
runpy.run_path(script, run_name="__main__")
"""


def commands_of(name: str) -> list[list[str]]:
    """Return the commands of the docstring's second paragraph, as they are typed."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8")))
    assert docstring is not None
    return [shlex.split(line, comments=True) for line in docstring.split("\n\n")[1].splitlines()]


def modules_of(name: str) -> list[str]:
    """Return the modules that an example imports and that are not Python's own, submodules included."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    found = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return sorted(module for module in found if module.partition(".")[0] not in sys.stdlib_module_names)


def test_all_are_here_and_name_themselves() -> None:
    """Each script is tested. The commands at its top install what it needs, and launch it."""
    assert sorted(FALLS) == sorted(file.stem for file in EXAMPLES.glob("*.py"))
    for name in FALLS:
        install, *launches = commands_of(name)
        assert install == shlex.split(INSTALL), name
        assert launches
        for command in launches:
            assert command[:2] == ["zero-plugin", "launch"], name
            assert f"examples/{name}.py" in command


def test_the_command_installs_what_the_examples_import() -> None:
    """Each imported package is this one, a dependency, or in the extra `examples`."""
    required = [Requirement(line) for line in requires("zero-plugin") or ()]
    installed = {one.name for one in required if one.marker is None or one.marker.evaluate({"extra": "examples"})}
    packages = {module.partition(".")[0] for name in FALLS for module in modules_of(name)}
    provided = packages_distributions()
    assert {package for package in packages if not {*provided[package]} & {*installed, "zero-plugin"}} == set()


@pytest.mark.parametrize("name", FALLS)
def test_without_a_package_it_ends_with_the_command_that_installs_it(name: str) -> None:
    """The only line names the missing package and the command, and the exit code is 1."""
    modules = modules_of(name)
    packages = {module.partition(".")[0] for module in modules}
    assert {"torch", "zero_plugin"} <= packages
    for hidden in sorted(packages):
        others = [module for module in modules if module.partition(".")[0] not in (hidden, "torch", "zero_plugin")]
        done = run_afresh("-c", WITHOUT, EXAMPLES / f"{name}.py", hidden, *others)
        line = rf"No module named '{hidden}(\.\w+)*': type  {re.escape(INSTALL)}  in a clone of zero_plugin\n"
        assert re.fullmatch(line, done.stderr), done.stderr
        assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.campaign) for name in FALLS]
)
def test_it_learns(name: str, run_launcher: Callable[..., Any], forked_workers: dict[str, str], tmp_path: Path) -> None:
    """Its commands, one after another, end without an error, and the printed values fall."""
    for package in re.findall(r"^from (sklearn|transformers|peft)\b", (EXAMPLES / f"{name}.py").read_text(), re.M):
        pytest.importorskip(package, reason="pip install 'zero-plugin[examples]'")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **forked_workers}
    printed = ""
    for _, *arguments in commands_of(name)[1:]:
        command = [sys.executable, "-m", "zero_plugin", *arguments]
        done = run_launcher(command, seconds=250, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        assert "on 2 × cpu" in done.stderr
        printed += done.stdout
    measure, part = FALLS[name]
    values = [float(value) for value in re.findall(rf"\b{measure}(?: from the plain model:)? ([\d.e+-]+)", printed)]
    if part is None:
        assert values[-1] < 1e-3, printed
        assert re.search(r"[1-9]\d* of \d+ parts stay on disk", printed)
    else:
        assert len(values) > 3, printed
        assert values[-1] < part * values[0], printed
    if name == "resume":
        assert "resumes in epoch 1 after batch 13" in printed
    if name == "transformers_finetune":
        before, after = map(float, re.findall(r"([\d.]+)% of unseen bytes are predicted right", printed))
        assert before < 5 < 30 < after, printed
        first, last = map(ast.literal_eval, re.findall(r"writes (b.*)", printed))
        assert not first.isascii(), first
        assert last.isascii(), last
