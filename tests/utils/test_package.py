"""`zero_plugin.utils` has Accelerate's names, and loads each on first use."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_plugin import Accelerator, utils
from zero_plugin.utils.imports import DEVICES, PACKAGES
from zero_plugin.utils.lazy import LEFT_OUT


def names_of(module: Any) -> set[str]:
    """Return a module's names for scripts: definitions, and imports `as` the same name, without underscores."""
    names: set[str] = set()
    for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body:
        match node:
            case ast.ImportFrom():
                names |= {alias.name for alias in node.names if alias.name == alias.asname}
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("module", utils._NAMES)
def test_a_module_offers_at_the_top_what_it_offers_itself(module: str) -> None:
    """The table of names agrees with each module's names, and both give the same object."""
    names = set(utils._NAMES[module].split())
    home = importlib.import_module(f"zero_plugin.utils.{module}")
    assert names == names_of(home)
    for name in names:
        assert getattr(utils, name) is getattr(home, name)
    assert names <= set(dir(utils)) & set(utils.__all__)


def test_importing_is_lazy() -> None:
    """Neither the package, nor a query of the environment or of a package, loads torch."""
    code = """
import sys
from zero_plugin.utils import is_torch_version, is_wandb_available, patch_environment, str_to_bool, tqdm
is_wandb_available(), is_torch_version(">", "1")
print([m for m in ("torch", "deepspeed", "numpy") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_the_function_that_is_called_like_its_module() -> None:
    """`tqdm` stays the function, in every order of imports."""
    code = "from zero_plugin.utils.tqdm import tqdm as a; from zero_plugin.utils import tqdm as b; assert a is b"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.parametrize("module", ["zero_plugin", "zero_plugin.utils", "zero_plugin.utils.dataclasses"])
def test_what_is_left_out_says_why_when_it_is_used(module: str) -> None:
    """A name of Accelerate alone can be imported and used in isinstance. Any other use raises an explanation."""
    absent: Any = importlib.import_module(module).FullyShardedDataParallelPlugin
    assert absent is utils.FullyShardedDataParallelPlugin
    assert not isinstance(Accelerator, absent)
    sentence = r"FullyShardedDataParallelPlugin is FSDP's; .* DeepSpeed stage 3 config\."
    with pytest.raises(NotImplementedError, match=sentence):
        absent(cpu_offload=True)
    with pytest.raises(AttributeError, match=sentence):
        _ = absent.FULL_SHARD


def test_what_refuses_does_so_when_it_is_called() -> None:
    """Each missing name of Accelerate's modules is importable from the same module, and a call is an error."""
    pytest.importorskip("accelerate")
    tried = set()
    for module in ("tracking", *(f"utils.{name}" for name in (*utils._NAMES, "dataclasses"))):
        theirs, ours = (importlib.import_module(f"{package}.{module}") for package in ("accelerate", "zero_plugin"))
        for name in sorted(set(vars(theirs)) & set(LEFT_OUT)):
            with pytest.raises(NotImplementedError, match=f"^{name} "):
                getattr(ours, name)()
            tried.add(name)
    assert {"AimTracker", "convert_dict_to_env_variables", "DeepSpeedEngineWrapper", "get_grad_scaler"} <= tried


def test_nothing_that_is_here_is_left_out() -> None:
    """No name is both present and listed as missing."""
    here = {*utils.__all__, *(f"is_{name}_available" for name in (*PACKAGES, *DEVICES))}
    assert here.isdisjoint(LEFT_OUT)


@pytest.mark.parametrize("name", ["gatther", "is_nonsense_available"])
def test_a_name_that_nobody_has(name: str) -> None:
    """A mistyped name is an AttributeError, as in every module."""
    assert not hasattr(utils, name)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(utils, name)
