"""Checks of `zero-plugin doctor` on software: Python, packages, compilers, libraries, builds of DeepSpeed's ops."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from zero_plugin.cli.output import Finding, Level
from zero_plugin.config.installed import TESTED, is_newer
from zero_plugin.distributed.messages import working
from zero_plugin.machine.op_builds import INSTALL_COMPILER, INSTALL_LIBAIO, INSTALL_NINJA, find_libaio, missing_builds

_SHOWN_LINES: Final = 8
_LIMIT_S: Final = 1200


def check_locks(stale: Sequence[Path]) -> Finding:
    """Check for locks of killed builds, on which DeepSpeed waits silently.

    Args:
        stale: locks of needed ops that no process of this machine holds.
    """
    if not stale:
        return Finding("op build locks", "ok", "no lock of a killed build")
    found = f"a build was killed and left {', '.join(map(str, stale))}: this run would wait forever"
    return Finding("op build locks", "wrong", found, f"rm {' '.join(map(str, stale))}")


def check_builds(
    ops: Sequence[str], folder: Path, environ: Mapping[str, str], *, build: bool, config: str = ""
) -> Iterator[Finding]:
    """Yield one finding for each op.

    Args:
        ops: the ops that the configuration needs.
        folder: the build folder.
        environ: the environment of a build.
        build: whether to build missing ops.
        config: the config file, for the command that builds the ops.
    """
    if not ops:
        yield Finding("ops", "ok", "this config needs none of DeepSpeed's C++ ops")
    missing = missing_builds(ops, folder)
    for op in ops:
        if op not in missing:
            yield Finding(f"op {op}", "ok", f"built in {folder}")
        elif not build:
            command = shlex.join(["zero-plugin", "doctor", *(["--config_file", config] if config else []), "--build"])
            fix = f"{command}   (otherwise the first run builds it, while all processes wait)"
            yield Finding(f"op {op}", "warning", "not built yet", fix)
        else:
            yield _build(op, folder, environ)


def _build(op: str, folder: Path, environ: Mapping[str, str]) -> Finding:
    """Build an op in a separate process: importing DeepSpeed takes seconds, and prints."""
    command = [sys.executable, "-m", "zero_plugin.strategies.deepspeed.build_op", op]
    try:
        with working(f"compiling {op}"):
            done = subprocess.run(  # noqa: S603 - this package's own module
                command, env=dict(environ), capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
    except subprocess.TimeoutExpired:
        return Finding(f"op {op}", "wrong", f"not built within {_LIMIT_S} s", f"rm -r {folder / op}, and try again")
    if done.returncode == 0:
        return Finding(f"op {op}", "ok", f"built in {folder}")
    shown = "\n".join(_telling_lines(done.stdout + done.stderr))
    fix = f"{' '.join(command)}   (shows the complete output; the error, or the compiler's lines, name what is missing)"
    return Finding(f"op {op}", "wrong", f"does not compile:\n{shown}", fix)


def _telling_lines(output: str) -> list[str]:
    """Return the first errors without command lines and tracebacks; without errors, the last lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.search(r"\berror\s*:|: not found|Error: ", line) and "CalledProcess" not in line
    ]
    return list(dict.fromkeys(errors))[:_SHOWN_LINES] or lines[-_SHOWN_LINES:]


def check_libaio(environ: Mapping[str, str], *, needed: bool, root: Path = Path("/")) -> Finding:
    """Check for libaio in the folders that a compiler searches.

    Args:
        environ: `CPATH`, `CFLAGS` and `CONDA_PREFIX` name further header folders; `LIBRARY_PATH` and `LDFLAGS` name
            further library folders.
        needed: whether the configuration offloads to NVMe.
        root: root of the file system.
    """
    header, library = find_libaio(environ, root)
    missing = [name for name, file in (("header libaio.h", header), ("library libaio.so", library)) if file is None]
    if not missing:
        return Finding("libaio", "ok", f"{header}, {library}")
    found = f"the {' and the '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    found += ", and async_io needs it" if needed else "; only NVMe offload needs it"
    return Finding("libaio", "wrong" if needed else "warning", found, INSTALL_LIBAIO)


_LEAST_VERSION: Final = 10  # of GCC and clang: the first versions with -std=c++20, which torch 2.13 compiles with


def check_compiler(environ: Mapping[str, str], to_build: Collection[str]) -> Finding:
    """Check the compiler that torch uses: `CXX`, or `c++` if that is not set.

    Args:
        environ: the environment with `PATH`.
        to_build: ops that the configuration needs and that are not built yet.
    """
    name = environ.get("CXX", "c++")
    file = shutil.which(name, path=environ.get("PATH", ""))
    wrong: Level = "wrong" if to_build else "warning"
    why = f", and {', '.join(to_build)} must be built" if to_build else "; DeepSpeed could build no op"
    if file is None:
        return Finding("C++ compiler", wrong, f"{name} is not on the PATH{why}", INSTALL_COMPILER)
    line = (_output([file, "--version"], environ).splitlines() or [""])[0]
    version = re.search(r"(\d+)\.\d+", line.rpartition(")")[2] or line)
    if version is None:
        return Finding("C++ compiler", wrong, f"{file} does not run{why}", INSTALL_COMPILER)
    if int(version[1]) < _LEAST_VERSION:
        found = f"{line}: torch compiles C++20, which needs at least version {_LEAST_VERSION}{why}"
        return Finding("C++ compiler", wrong, found, INSTALL_COMPILER)
    return Finding("C++ compiler", "ok", line)


def check_ninja(environ: Mapping[str, str], ops: Collection[str]) -> Finding:
    """Check ninja, which torch runs even for ops that are built already.

    Args:
        environ: the environment with `PATH`.
        ops: all ops that the configuration needs.
    """
    wrong: Level = "wrong" if ops else "warning"
    file = shutil.which("ninja", path=environ.get("PATH", ""))
    if file is None:
        why = f", and {', '.join(ops)} cannot be loaded without it" if ops else "; DeepSpeed could build no op"
        return Finding("ninja", wrong, f"not on the PATH{why}", INSTALL_NINJA)
    if version := _output([file, "--version"], environ).strip():
        return Finding("ninja", "ok", f"{version} at {file}")
    return Finding("ninja", wrong, f"{file} does not run", "pip install ninja")


def check_cuda(torch_cuda: str | None, nvcc: str | None, home: str, cuda_ops: Collection[str]) -> Finding:
    """Check that nvcc compiles for the CUDA version that torch was built with.

    Args:
        torch_cuda: version of torch's CUDA, None for a torch without CUDA.
        nvcc: version of the compiler, None without a compiler.
        home: the folder searched for nvcc.
        cuda_ops: ops of the configuration that nvcc must compile.
    """
    if torch_cuda is None:
        return Finding("CUDA toolkit", "ok", "torch is built without CUDA; no op needs nvcc")
    level: Level = "wrong" if cuda_ops else "warning"
    whose = f"; {', '.join(cuda_ops)} must be compiled" if cuda_ops else "; no op of this config needs it"
    fix = f"Install CUDA {torch_cuda}'s toolkit, and export CUDA_HOME=/usr/local/cuda-{torch_cuda}"
    if "fused_adam" in cuda_ops:
        fix += "   (or write torch_adam: true into optimizer.params)"
    if nvcc is None:
        found = f"torch has CUDA {torch_cuda}, but no nvcc was found in {home or 'CUDA_HOME or on the PATH'}{whose}"
        return Finding("CUDA toolkit", level, found, fix)
    if nvcc.split(".")[0] != torch_cuda.split(".")[0]:
        return Finding("CUDA toolkit", level, f"torch has CUDA {torch_cuda}, nvcc {nvcc}{whose}", fix)
    return Finding("CUDA toolkit", "ok", f"nvcc {nvcc}, torch's CUDA {torch_cuda}")


def nvcc_version(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return nvcc's version and its CUDA folder: `CUDA_HOME`, `CUDA_PATH`, or from the PATH, in torch's order."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if not home and (file := shutil.which("nvcc", path=environ.get("PATH", ""))) is not None:
        home = str(Path(file).parents[1])
    home = home or "/usr/local/cuda"
    found = re.search(r"release (\d+\.\d+)", _output([f"{home}/bin/nvcc", "--version"], environ))
    return (found[1] if found else None), home


def installed_cuda() -> str | None:
    """Return the CUDA version of the installed torch; None without torch or CUDA."""
    spec = find_spec("torch")
    return None if spec is None or spec.origin is None else torch_cuda(Path(spec.origin).with_name("version.py"))


def torch_cuda(version_file: Path) -> str | None:
    """Read torch's CUDA version from its `version.py`, because importing torch takes a second or more."""
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


_PYTHONS: Final = ((3, 10), (3, 14))


def check_python(version: tuple[int, int]) -> Finding:
    """Check the interpreter's version, given as `(major, minor)`."""
    shown, (least, most) = ".".join(map(str, version)), _PYTHONS
    tested = f"{least[0]}.{least[1]} to {most[0]}.{most[1]}"
    if version < least:
        fix = f"Create an environment with a newer Python: python{most[0]}.{most[1]} -m venv .venv"
        return Finding("Python", "wrong", f"{shown}; the minimum is {least[0]}.{least[1]}", fix)
    if version > most:
        fix = f"If something fails, try python{most[0]}.{most[1]} -m venv .venv"
        return Finding("Python", "warning", f"{shown}; tested with {tested}", fix)
    return Finding("Python", "ok", f"{shown} (tested: {tested})")


def check_packages(installed: Mapping[str, str | None], required: list[str], *, deepspeed: bool) -> Iterator[Finding]:
    """Check each package of `TESTED`.

    Args:
        installed: versions by name, None for missing packages.
        required: this package's requirements, as in its metadata.
        deepspeed: whether the run needs DeepSpeed.
    """
    from packaging.requirements import Requirement  # late: a launch imports this module only to find torch's CUDA

    always = (r for r in map(Requirement, required) if r.marker is None or r.marker.evaluate({"extra": ""}))
    limits = {requirement.name: requirement.specifier for requirement in always}
    for name, tested in TESTED.items():
        version = installed.get(name)
        install = f"pip install '{name}=={tested}'"
        unneeded = name == "deepspeed" and not deepspeed
        if version is None:
            found = "not installed" + (", and this config does not need it" if unneeded else "")
            yield Finding(name, "warning" if unneeded else "wrong", found, install)
        elif name in limits and not limits[name].contains(version, prereleases=True):
            found = f"{version}, which is not {limits[name]}"
            yield Finding(name, "warning" if unneeded else "wrong", found, install)
        elif is_newer(version, tested):
            yield Finding(name, "warning", f"{version}, newer than the tested {tested}", f"If it fails: {install}")
        else:
            yield Finding(name, "ok", f"{version} (tested: {tested})")
