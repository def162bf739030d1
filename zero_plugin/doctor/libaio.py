"""libaio, by which DeepSpeed reads and writes NVMe: its header and its library."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from zero_plugin.doctor.finding import Finding

__all__ = ["check_libaio"]


def check_libaio(environ: Mapping[str, str], *, needed: bool, root: Path = Path("/")) -> Finding:
    """Look where a compiler looks.

    Args:
        environ: `CPATH`, `CFLAGS` and `CONDA_PREFIX` name further folders of headers, `LIBRARY_PATH` and `LDFLAGS` of
            libraries.
        needed: whether the configuration offloads to NVMe.
        root: of the file system.
    """
    headers = [folder / "libaio.h" for folder in _folders(environ, "CPATH", "CFLAGS", "-I", "include", root)]
    header = next((file for file in headers if file.exists()), None)
    library = next(
        (
            file
            for folder in _folders(environ, "LIBRARY_PATH", "LDFLAGS", "-L", "lib", root)
            for file in [*folder.glob("libaio.so"), *folder.glob("*-linux-gnu*/libaio.so")]
        ),
        None,
    )
    missing = [name for name, file in (("header libaio.h", header), ("library libaio.so", library)) if file is None]
    if not missing:
        return Finding("libaio", "ok", f"{header}, {library}")
    found = f"the {' and the '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    found += ", and async_io is built on it" if needed else "; only NVMe offload needs it"
    fix = "sudo apt-get install libaio-dev   (Fedora: sudo dnf install libaio-devel; conda: conda install libaio)"
    return Finding("libaio", "wrong" if needed else "warning", found, fix)


def _folders(
    environ: Mapping[str, str], variable: str, flags: str, letter: str, kind: str, root: Path
) -> Iterator[Path]:
    yield from (Path(name) for name in environ.get(variable, "").split(":") if name)
    yield from (Path(flag[2:]) for flag in shlex.split(environ.get(flags, "")) if flag.startswith(letter))
    if prefix := environ.get("CONDA_PREFIX"):
        yield Path(prefix, kind)
    yield from (root / "usr" / kind, root / "usr" / "local" / kind)
    if kind == "lib":
        yield from (root / "usr" / "lib64", root / "lib64")
