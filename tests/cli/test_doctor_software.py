"""The doctor's checks of software: versions, toolchains (in small trees that look like systems), and op builds."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from zero_plugin.cli import doctor_software
from zero_plugin.cli.doctor_software import (
    check_builds,
    check_compiler,
    check_cuda,
    check_libaio,
    check_locks,
    check_ninja,
    check_packages,
    check_python,
    missing_builds,
    nvcc_version,
    torch_cuda,
)
from zero_plugin.config.installed import TESTED
from zero_plugin.machine.op_builds import build_folder

# ---- Versions against the tested ones --------------------------------------------------------------------------------


REQUIRED = ["torch>=2.9", "deepspeed>=0.19.8", "rich>=13", 'peft>=0.21; extra == "transformers"']


def test_tested_versions_are_those_of_the_constraints() -> None:
    """The tested versions are those that the suite is installed with."""
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text()
    for name, version in TESTED.items():
        assert re.search(rf"^{name}=={re.escape(version)}\b", pinned, re.MULTILINE), name


@pytest.mark.parametrize(
    ("version", "level"), [((3, 9), "wrong"), ((3, 10), "ok"), ((3, 14), "ok"), ((3, 15), "warning")], ids=str
)
def test_python(version: tuple[int, int], level: str) -> None:
    """A Python below the minimum is an error, above the tested one a warning. Both name a command to change it."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    minors = [int(minor) for minor in re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', text)]
    assert ((3, min(minors)), (3, max(minors))) == doctor_software._PYTHONS
    found = check_python(version)
    assert found.level == level
    assert ("-m venv" in found.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("torch", "level"),
    [
        (TESTED["torch"], "ok"),
        (TESTED["torch"] + "+cu128", "ok"),
        ("2.9.1", "ok"),
        ("2.99.0", "warning"),
        ("2.8.0", "wrong"),
        (None, "wrong"),
    ],
)
def test_torch(torch: str | None, level: str) -> None:
    """A missing or too old torch is an error, one newer than tested a warning. The fix installs the tested one."""
    (found,) = [f for f in check_packages({**TESTED, "torch": torch}, REQUIRED, deepspeed=True) if f.check == "torch"]
    assert found.level == level
    assert (f"pip install 'torch=={TESTED['torch']}'" in found.fix) == (level != "ok")


@pytest.mark.parametrize(("version", "needed", "level"), [(None, True, "wrong"), (None, False, "warning")])
@pytest.mark.parametrize("other", [None, "0.18.0", "0.19.7"])
def test_deepspeed_counts_where_the_config_needs_it(version: None, needed: bool, level: str, other: str | None) -> None:
    """Without ZeRO a missing or wrong DeepSpeed is no error."""
    found = {f.check: f for f in check_packages({**TESTED, "deepspeed": other}, REQUIRED, deepspeed=needed)}
    assert found["deepspeed"].level == level


# ---- Compiler, ninja and nvcc on a PATH: small programs that answer like the real ones -------------------------------


def program(folder: Path, name: str, output: str, code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {code}\n")
    file.chmod(0o755)
    return file


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose PATH holds only what the test's programs need."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cat").symlink_to("/bin/cat")
    return {"PATH": str(tmp_path / "bin")}


GCC_12 = "c++ (Debian 12.2.0-14+deb12u1) 12.2.0"
GCC_7 = "c++ (GCC) 7.5.0"
CLANG = "Debian clang version 14.0.6"


@pytest.mark.parametrize(("line", "level"), [(GCC_12, "ok"), (CLANG, "ok"), (GCC_7, "wrong")])
def test_the_compilers_version(line: str, level: str, environ: dict[str, str]) -> None:
    """torch compiles C++20, so an older compiler is an error if an op must be built."""
    program(Path(environ["PATH"]), "c++", line)
    found = check_compiler(environ, ["cpu_adam"])
    assert found.level == level
    assert line in found.found


@pytest.mark.parametrize(("to_build", "level"), [(["cpu_adam"], "wrong"), ([], "warning")], ids=str)
def test_no_compiler(to_build: list[str], level: str, environ: dict[str, str]) -> None:
    """A missing compiler is an error if an op must be built, and a warning otherwise. Both say what to install."""
    found = check_compiler(environ, to_build)
    assert found.level == level
    assert all(op in found.found for op in to_build)
    assert "apt-get install g++" in found.fix


def test_cxx_names_the_compiler(environ: dict[str, str]) -> None:
    """`CXX` is used instead of `c++`. A program that fails is no compiler."""
    program(Path(environ["PATH"]), "c++", GCC_12)
    broken = program(Path(environ["PATH"]), "mine", "", code=1)
    assert check_compiler({**environ, "CXX": str(broken)}, ["cpu_adam"]).level == "wrong"
    assert check_compiler({**environ, "CXX": "absent"}, ["cpu_adam"]).level == "wrong"


@pytest.mark.parametrize(("ops", "level"), [(["cpu_adam"], "wrong"), ([], "warning")], ids=str)
def test_no_ninja(ops: list[str], level: str, environ: dict[str, str]) -> None:
    """Without ninja, even an op that is built already cannot be loaded."""
    found = check_ninja(environ, ops)
    assert found.level == level
    assert "pip install ninja" in found.fix


def test_ninja(environ: dict[str, str]) -> None:
    """The version of ninja is shown. A ninja that does not run counts as missing."""
    program(Path(environ["PATH"]), "ninja", "1.11.1")
    assert (check_ninja(environ, ["cpu_adam"]).level, "1.11.1" in check_ninja(environ, []).found) == ("ok", True)
    program(Path(environ["PATH"]), "ninja", "", code=1)
    assert check_ninja(environ, ["cpu_adam"]).level == "wrong"


NVCC = "Cuda compilation tools, release 12.4, V12.4.131"


def test_nvcc_is_found_as_torch_finds_it(environ: dict[str, str], tmp_path: Path) -> None:
    """`CUDA_HOME` has priority over the PATH, as in torch."""
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
    """Another major version or no nvcc is an error if an op needs nvcc. The fix names torch's version."""
    found = check_cuda(torch, nvcc, "/usr/local/cuda", ops)
    assert found.level == level
    assert level == "ok" or "CUDA_HOME=/usr/local/cuda-12.8" in found.fix
    assert ("torch_adam" in found.fix) == (level == "wrong")


@pytest.mark.parametrize(
    ("line", "version"), [("cuda: Optional[str] = '12.8'", "12.8"), ("cuda: Optional[str] = None", None)]
)
def test_cuda_of_torch_without_importing_it(line: str, version: str | None, tmp_path: Path) -> None:
    """torch's CUDA version is read from `version.py`, without importing torch."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    assert torch_cuda(file) == version
    assert torch_cuda(tmp_path / "absent") is None


def test_cuda_of_this_torch() -> None:
    """The version read from the file equals what torch reports."""
    import torch

    assert torch_cuda(Path(torch.__file__).parent / "version.py") == torch.version.cuda


# ---- libaio's header and library, in trees that look like systems ----------------------------------------------------


def put(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.mark.parametrize("library", ["usr/lib/x86_64-linux-gnu/libaio.so", "usr/lib64/libaio.so", "usr/lib/libaio.so"])
def test_both_are_there(library: str, tmp_path: Path) -> None:
    """Debian's and Fedora's places are found."""
    put(tmp_path / "usr" / "include" / "libaio.h")
    put(tmp_path / library)
    assert check_libaio({}, needed=True, root=tmp_path).level == "ok"


@pytest.mark.parametrize("there", ["usr/include/libaio.h", "usr/lib/libaio.so", None])
@pytest.mark.parametrize(("needed", "level"), [(True, "wrong"), (False, "warning")])
def test_one_is_missing(there: str | None, needed: bool, level: str, tmp_path: Path) -> None:
    """A missing header or library is an error if NVMe offload needs it, and its package is named."""
    if there:
        put(tmp_path / there)
    found = check_libaio({}, needed=needed, root=tmp_path)
    assert found.level == level
    assert ("libaio.h" in found.found) == (there is None or not there.endswith(".h"))
    assert ("libaio.so" in found.found) == (there is None or not there.endswith(".so"))
    assert "apt-get install libaio-dev" in found.fix


def test_the_library_without_its_link_is_not_enough(tmp_path: Path) -> None:
    """`libaio.so.1` serves running programs only. Linking needs `libaio.so` from the -dev package."""
    put(tmp_path / "usr" / "include" / "libaio.h")
    put(tmp_path / "usr" / "lib" / "libaio.so.1")
    assert check_libaio({}, needed=True, root=tmp_path).level == "wrong"


@pytest.mark.parametrize("kind", ["paths", "flags", "conda"])
def test_folders_that_the_environment_names(kind: str, tmp_path: Path) -> None:
    """The compiler's environment variables add folders to the search."""
    header, library = put(tmp_path / "own" / "include" / "libaio.h"), put(tmp_path / "own" / "lib" / "libaio.so")
    environ = {
        "paths": {"CPATH": f"/absent:{header.parent}", "LIBRARY_PATH": str(library.parent)},
        "flags": {"CFLAGS": f"-O2 -I{header.parent}", "LDFLAGS": f"-L{library.parent}"},
        "conda": {"CONDA_PREFIX": str(tmp_path / "own")},
    }[kind]
    assert check_libaio(environ, needed=True, root=tmp_path / "empty").level == "ok"


# ---- Op builds: built, not built, stale locks, and a build that fails without a compiler -----------------------------


def test_what_is_built_is_seen(tmp_path: Path) -> None:
    """An op is built if its library exists. A folder without a library is an unfinished build."""
    for op in ("cpu_adam", "async_io"):
        (tmp_path / op).mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert missing_builds(["cpu_adam", "async_io", "cpu_lion"], tmp_path) == ["async_io", "cpu_lion"]
    found = {f.check: f for f in check_builds(["cpu_adam", "async_io"], tmp_path, {}, build=False)}
    assert found["op cpu_adam"].level == "ok"
    assert found["op async_io"].level == "warning"
    assert "doctor --build" in found["op async_io"].fix
    assert [f.level for f in check_builds([], tmp_path, {}, build=False)] == ["ok"]


def test_the_folder_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is the one that torch's builder uses, with and without TORCH_EXTENSIONS_DIR."""
    import torch
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "own"))
    assert build_folder(os.environ, torch.version.cuda) / "op" == Path(_get_build_directory("op", False))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build_folder(os.environ, torch.version.cuda) / "op" == Path(_get_build_directory("op", False))


def test_stale_locks(tmp_path: Path) -> None:
    """The fix removes all stale locks."""
    assert check_locks([]).level == "ok"
    locks = [tmp_path / op / "lock" for op in ("a", "b")]
    found = check_locks(locks)
    assert found.level == "wrong"
    assert found.fix == f"rm {locks[0]} {locks[1]}"


@pytest.mark.processes
def test_a_build_that_fails_shows_why(tmp_path: Path) -> None:
    """Without compiler and ninja on the PATH, the real build fails, and its own error is shown."""
    environ = {**os.environ, "PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    (found,) = check_builds(["cpu_lion"], tmp_path, environ, build=True)
    assert found.level == "wrong"
    assert "ninja" in found.found.lower()
    assert found.fix.startswith(f"{sys.executable} -m zero_plugin.strategies.deepspeed.build_op cpu_lion")


BROKEN = """#!/bin/sh
case "$1" in
--version | -v) echo "c++ (GCC) 12.2.0" ;;
*) echo "cc1plus: fatal error: immintrin.h: No such file or directory" >&2; exit 1 ;;
esac
"""


@pytest.mark.campaign
def test_a_compiler_that_lacks_a_header(tmp_path: Path) -> None:
    """A compiler's errors are shown without the surrounding command lines and traceback."""
    compiler = tmp_path / "c++"
    compiler.write_text(BROKEN)
    compiler.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    (found,) = check_builds(["cpu_lion"], tmp_path, environ, build=True)
    assert found.level == "wrong"
    assert "immintrin.h" in found.found
    assert len(found.found.splitlines()) < 10
    assert all(len(line) < 300 for line in found.found.splitlines())


@pytest.mark.campaign
@pytest.mark.timeout(1200)  # a compiler on a busy machine
def test_a_build_that_works(tmp_path: Path) -> None:
    """The smallest op is built from scratch, and a second check finds it."""
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    assert [f.level for f in check_builds(["cpu_lion"], tmp_path, environ, build=True)] == ["ok"]
    assert missing_builds(["cpu_lion"], tmp_path) == []
