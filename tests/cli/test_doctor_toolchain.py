"""Compiler, ninja and nvcc, as far as a PATH shows them: small programs that answer as the real ones do."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.cli.doctor_software import check_compiler, check_cuda, check_ninja, nvcc_version, torch_cuda


def program(folder: Path, name: str, output: str, code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A PATH with nothing on it but what the test's programs need themselves."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cat").symlink_to("/bin/cat")
    return {"PATH": str(tmp_path / "bin")}


GCC_12 = "c++ (Debian 12.2.0-14+deb12u1) 12.2.0"
GCC_7 = "c++ (GCC) 7.5.0"
CLANG = "Debian clang version 14.0.6"


@pytest.mark.parametrize(("line", "level"), [(GCC_12, "ok"), (CLANG, "ok"), (GCC_7, "wrong")])
def test_the_compilers_version(line: str, level: str, environ: dict[str, str]) -> None:
    """torch compiles C++20: an older compiler is wrong where an op is to be built."""
    program(Path(environ["PATH"]), "c++", line)
    found = check_compiler(environ, ["cpu_adam"])
    assert found.level == level
    assert line in found.found


@pytest.mark.parametrize(("to_build", "level"), [(["cpu_adam"], "wrong"), ([], "warning")], ids=str)
def test_no_compiler(to_build: list[str], level: str, environ: dict[str, str]) -> None:
    """Wrong where an op must be built, which it names; else a warning. Both say what to install."""
    found = check_compiler(environ, to_build)
    assert found.level == level
    assert all(op in found.found for op in to_build)
    assert "apt-get install g++" in found.fix


def test_cxx_names_the_compiler(environ: dict[str, str]) -> None:
    """`CXX` is asked in place of `c++`; a program that fails is no compiler."""
    program(Path(environ["PATH"]), "c++", GCC_12)
    broken = program(Path(environ["PATH"]), "mine", "", code=1)
    assert check_compiler({**environ, "CXX": str(broken)}, ["cpu_adam"]).level == "wrong"
    assert check_compiler({**environ, "CXX": "absent"}, ["cpu_adam"]).level == "wrong"


@pytest.mark.parametrize(("ops", "level"), [(["cpu_adam"], "wrong"), ([], "warning")], ids=str)
def test_no_ninja(ops: list[str], level: str, environ: dict[str, str]) -> None:
    """An op that is built already is not loaded without ninja either."""
    found = check_ninja(environ, ops)
    assert found.level == level
    assert "pip install ninja" in found.fix


def test_ninja(environ: dict[str, str]) -> None:
    """Its version is shown; one that does not run is as none."""
    program(Path(environ["PATH"]), "ninja", "1.11.1")
    assert (check_ninja(environ, ["cpu_adam"]).level, "1.11.1" in check_ninja(environ, []).found) == ("ok", True)
    program(Path(environ["PATH"]), "ninja", "", code=1)
    assert check_ninja(environ, ["cpu_adam"]).level == "wrong"


NVCC = "Cuda compilation tools, release 12.4, V12.4.131"


def test_nvcc_is_found_as_torch_finds_it(environ: dict[str, str], tmp_path: Path) -> None:
    """`CUDA_HOME` before the PATH."""
    program(tmp_path / "cuda" / "bin", "nvcc", NVCC)
    home = str(tmp_path / "cuda")
    assert nvcc_version({**environ, "CUDA_HOME": home}) == ("12.4", home)
    assert nvcc_version({"PATH": f"{environ['PATH']}:{home}/bin"}) == ("12.4", home)
    assert nvcc_version({**environ, "CUDA_HOME": str(tmp_path)}) == (None, str(tmp_path))


@pytest.mark.parametrize(
    ("torch", "nvcc", "ops", "level"),
    [
        (None, None, [], "ok"),
        ("12.8", "12.4", ["fused_adam"], "ok"),
        ("12.8", "13.0", ["fused_adam"], "wrong"),
        ("12.8", "11.8", [], "warning"),
        ("12.8", None, ["fused_adam"], "wrong"),
        ("12.8", None, [], "warning"),
    ],
    ids=str,
)
def test_cuda(torch: str | None, nvcc: str | None, ops: list[str], level: str) -> None:
    """Another major version, or no nvcc, is wrong where an op must be compiled by it; the fix names torch's."""
    found = check_cuda(torch, nvcc, "/usr/local/cuda", ops)
    assert found.level == level
    assert level == "ok" or "CUDA_HOME=/usr/local/cuda-12.8" in found.fix
    assert ("torch_adam" in found.fix) == (level == "wrong")


@pytest.mark.parametrize(
    ("line", "version"), [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", None)]
)
def test_cuda_of_torch_without_importing_it(line: str, version: str | None, tmp_path: Path) -> None:
    """torch writes it into `version.py`."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    assert torch_cuda(file) == version
    assert torch_cuda(tmp_path / "absent") is None


def test_cuda_of_this_torch() -> None:
    """What is read is what torch says of itself."""
    import torch

    assert torch_cuda(Path(torch.__file__).parent / "version.py") == torch.version.cuda
