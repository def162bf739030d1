"""libaio's header and library, in trees that look like systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.cli.doctor_software import check_libaio


def put(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


@pytest.mark.parametrize("library", ["usr/lib/x86_64-linux-gnu/libaio.so", "usr/lib64/libaio.so", "usr/lib/libaio.so"])
def test_both_are_there(library: str, tmp_path: Path) -> None:
    """Debian's and Fedora's places."""
    put(tmp_path / "usr" / "include" / "libaio.h")
    put(tmp_path / library)
    assert check_libaio({}, needed=True, root=tmp_path).level == "ok"


@pytest.mark.parametrize("there", ["usr/include/libaio.h", "usr/lib/libaio.so", None])
@pytest.mark.parametrize(("needed", "level"), [(True, "wrong"), (False, "warning")])
def test_one_is_missing(there: str | None, needed: bool, level: str, tmp_path: Path) -> None:
    """Wrong where NVMe offload needs it; what is missing is named, with the package."""
    if there:
        put(tmp_path / there)
    found = check_libaio({}, needed=needed, root=tmp_path)
    assert found.level == level
    assert ("libaio.h" in found.found) == (there is None or not there.endswith(".h"))
    assert ("libaio.so" in found.found) == (there is None or not there.endswith(".so"))
    assert "apt-get install libaio-dev" in found.fix


def test_the_library_without_its_link_is_not_enough(tmp_path: Path) -> None:
    """`libaio.so.1` is what programs run with; linking needs `libaio.so`, of the -dev package."""
    put(tmp_path / "usr" / "include" / "libaio.h")
    put(tmp_path / "usr" / "lib" / "libaio.so.1")
    assert check_libaio({}, needed=True, root=tmp_path).level == "wrong"


@pytest.mark.parametrize("kind", ["paths", "flags", "conda"])
def test_folders_that_the_environment_names(kind: str, tmp_path: Path) -> None:
    """As the compiler is told of them."""
    header, library = put(tmp_path / "own" / "include" / "libaio.h"), put(tmp_path / "own" / "lib" / "libaio.so")
    environ = {
        "paths": {"CPATH": f"/absent:{header.parent}", "LIBRARY_PATH": str(library.parent)},
        "flags": {"CFLAGS": f"-O2 -I{header.parent}", "LDFLAGS": f"-L{library.parent}"},
        "conda": {"CONDA_PREFIX": str(tmp_path / "own")},
    }[kind]
    assert check_libaio(environ, needed=True, root=tmp_path / "empty").level == "ok"
