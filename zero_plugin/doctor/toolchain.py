"""What DeepSpeed compiles its ops with: a C++ compiler, ninja, and nvcc of torch's CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from zero_plugin.doctor.finding import Finding, Level

__all__ = ["check_compiler", "check_cuda", "check_ninja", "nvcc_version", "torch_cuda"]

_LEAST_VERSION: Final = 10  # of GCC and of clang: the first that know -std=c++20, with which torch 2.13 compiles


def check_compiler(environ: Mapping[str, str], to_build: Collection[str]) -> Finding:
    """The compiler that torch takes: `CXX`, else `c++`.

    Args:
        environ: with `PATH`.
        to_build: ops that the configuration needs and that are not built yet.
    """
    name = environ.get("CXX", "c++")
    file = shutil.which(name, path=environ.get("PATH", ""))
    wrong: Level = "wrong" if to_build else "warning"
    why = f", and {', '.join(to_build)} must be built" if to_build else "; DeepSpeed could build no op"
    install = "sudo apt-get install g++   (Fedora: sudo dnf install gcc-c++; conda: conda install gxx)"
    if file is None:
        return Finding("C++ compiler", wrong, f"{name} is not on the PATH{why}", install)
    line = (_output([file, "--version"], environ).splitlines() or [""])[0]
    version = re.search(r"(\d+)\.\d+", line.rpartition(")")[2] or line)
    if version is None:
        return Finding("C++ compiler", wrong, f"{file} does not run{why}", install)
    if int(version[1]) < _LEAST_VERSION:
        found = f"{line}: torch compiles C++20, which needs {_LEAST_VERSION} at least{why}"
        return Finding("C++ compiler", wrong, found, install)
    return Finding("C++ compiler", "ok", line)


def check_ninja(environ: Mapping[str, str], ops: Collection[str]) -> Finding:
    """Torch asks ninja also for an op that is built already.

    Args:
        environ: with `PATH`.
        ops: all that the configuration needs.
    """
    if (file := shutil.which("ninja", path=environ.get("PATH", ""))) is not None:
        if version := _output([file, "--version"], environ).strip():
            return Finding("ninja", "ok", f"{version} at {file}")
        return Finding("ninja", "wrong" if ops else "warning", f"{file} does not run", "pip install ninja")
    why = f", and {', '.join(ops)} cannot be loaded without" if ops else "; DeepSpeed could build no op"
    fix = "pip install ninja   (and have the environment's bin folder on the PATH)"
    return Finding("ninja", "wrong" if ops else "warning", f"not on the PATH{why}", fix)


def check_cuda(torch_cuda: str | None, nvcc: str | None, home: str, cuda_ops: Collection[str]) -> Finding:
    """Whether nvcc compiles for the CUDA that torch was built with.

    Args:
        torch_cuda: version of torch's CUDA, None for a torch without.
        nvcc: version of the compiler, None where there is none.
        home: where nvcc was looked for.
        cuda_ops: ops of the configuration that it must compile.
    """
    if torch_cuda is None:
        return Finding("CUDA toolkit", "ok", "torch is built without CUDA; no op needs nvcc")
    level: Level = "wrong" if cuda_ops else "warning"
    whose = f"; {', '.join(cuda_ops)} must be compiled" if cuda_ops else "; no op of this config needs it"
    fix = f"Install CUDA {torch_cuda}'s toolkit, and export CUDA_HOME=/usr/local/cuda-{torch_cuda}"
    if "fused_adam" in cuda_ops:
        fix += "   (or write torch_adam: true into optimizer.params)"
    if nvcc is None:
        found = f"torch has CUDA {torch_cuda}, and there is no nvcc in {home or 'CUDA_HOME or on the PATH'}{whose}"
        return Finding("CUDA toolkit", level, found, fix)
    theirs, ours = nvcc.split("."), torch_cuda.split(".")
    if theirs[0] != ours[0]:
        return Finding("CUDA toolkit", level, f"torch has CUDA {torch_cuda}, nvcc {nvcc}{whose}", fix)
    return Finding("CUDA toolkit", "ok", f"nvcc {nvcc}, torch's CUDA {torch_cuda}")


def nvcc_version(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Version of nvcc, and the folder it belongs to: `CUDA_HOME`, `CUDA_PATH`, that of nvcc on the PATH, as torch."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if not home and (file := shutil.which("nvcc", path=environ.get("PATH", ""))) is not None:
        home = str(Path(file).parents[1])
    home = home or "/usr/local/cuda"
    found = re.search(r"release (\d+\.\d+)", _output([f"{home}/bin/nvcc", "--version"], environ))
    return (found[1] if found else None), home


def torch_cuda(version_file: Path) -> str | None:
    """CUDA of torch, from its `version.py`: importing torch takes a second or more."""
    try:
        text = version_file.read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b[^=]*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return found[1] if found else None


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a compiler of the user's own PATH
            command, env=dict(environ), capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
