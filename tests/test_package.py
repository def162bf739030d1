"""The contents of a built wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution, requires, version
from pathlib import Path

import pytest
from launching import run_afresh
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="an environment for another torch has no newer setuptools"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the sources of a package."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "zero_plugin"):
        subprocess.run(["cp", "-r", ROOT / name, folder / name], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel without fetching anything."""
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", target, source],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    """Modules, `py.typed`, schemas and data: every file in the package's folder except build products."""
    files = (file for file in (ROOT / "zero_plugin").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    wanted = {str(file.relative_to(ROOT)) for file in files}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted <= names
    assert {"zero_plugin/py.typed", "zero_plugin/config/schema/deepspeed.schema.json"} <= wanted


def test_the_wheel_names_its_command_and_licence(wheel: Path) -> None:
    """The console script, the licence's text and the Python versions are in its metadata."""
    archive = zipfile.ZipFile(wheel)
    (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    assert "zero-plugin = zero_plugin.cli.main:main" in archive.read(f"{folder}/entry_points.txt").decode()
    metadata = archive.read(f"{folder}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Author: The zero_plugin authors" in metadata
    assert "Requires-Python: >=3.10" in metadata
    for minor in range(10, 15):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}\n" in metadata
    assert archive.read(f"{folder}/licenses/LICENSE").decode().lstrip().startswith("Apache License")


def test_what_the_wheel_holds_is_enough(wheel: Path, tmp_path: Path) -> None:
    """Installed alone, it checks by its own schema, finds a ready config by name, and starts the demo's script."""
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([sys.executable, *install], check=True, timeout=120)
    (tmp_path / "bad.json").write_text('{"zero_optimization": {"stage": 4}}')
    (tmp_path / "train.py").touch()
    for arguments, code, told in (
        (["check", "bad.json"], 2, "bad.json:1:24"),
        (["launch", "--config", "zero2", "--dry_run", "train.py"], 0, str(site / "zero_plugin/ds_configs/zero2.yaml")),
        (["demo", "--dry_run", "--num_processes", "2"], 0, str(site / "zero_plugin" / "demo" / "train.py")),
    ):
        done = run_afresh("-m", "zero_plugin", *arguments, cwd=tmp_path, PYTHONPATH=str(site))
        assert done.returncode == code, done.stderr
        assert told in done.stdout + done.stderr


def test_an_editable_install_is_a_path(source: Path, tmp_path: Path) -> None:
    """It adds the checkout's folder to the path. Type checkers follow a path, but no import hook."""
    build = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(built)
    added = {name: archive.read(name).decode().strip() for name in archive.namelist() if ".dist-info/" not in name}
    assert list(added.values()) == [str(source)], added
    assert all(name.endswith(".pth") for name in added)


def test_prepare_returns_the_types_that_it_is_given() -> None:
    """mypy accepts a typed script; so does pyright, which reads the same overloads."""
    checked = run_afresh("-m", "mypy", "tests/typed_script.py", cwd=ROOT, seconds=600)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_dependency_is_pinned_at_the_version_tested() -> None:
    """`constraints.txt` names every direct dependency, and the pins are the installed versions.

    The same holds for extras except `tpu`, which has its own environment with another torch.
    """
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins: dict[str, list[Requirement]] = {}
    for pin in map(Requirement, filter(None, lines)):
        pins.setdefault(pin.name.lower(), []).append(pin)
    required = [r for r in map(Requirement, requires("zero-plugin") or ()) if 'extra == "tpu"' not in str(r.marker)]
    assert {requirement.name.lower() for requirement in required} <= set(pins)
    if distribution("torch").locate_file("") != distribution("deepspeed").locate_file(""):
        del pins["torch"]  # in its own environment, for another torch
    for name, choices in pins.items():
        (pin,) = (pin for pin in choices if pin.marker is None or pin.marker.evaluate())
        assert pin.specifier.contains(version(name)), f"{pin}, but {version(name)} is installed"
