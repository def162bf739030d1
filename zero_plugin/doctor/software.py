"""Versions of Python and of the packages, against what this release is tested with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from zero_plugin.doctor.finding import Finding

__all__ = ["TESTED", "check_packages", "check_python"]

# What the test suite passes with, as constraints.txt says.
TESTED: Final = {"torch": "2.13.0", "deepspeed": "0.19.8", "safetensors": "0.8.0", "numpy": "2.2.6"}
_PYTHONS: Final = ((3, 10), (3, 13))


def check_python(version: tuple[int, int]) -> Finding:
    """The interpreter's version, `(major, minor)`."""
    shown, (least, most) = ".".join(map(str, version)), _PYTHONS
    tested = f"{least[0]}.{least[1]} to {most[0]}.{most[1]}"
    if version < least:
        fix = f"Make an environment of a newer Python: python{most[0]}.{most[1]} -m venv .venv"
        return Finding("Python", "wrong", f"{shown}; {least[0]}.{least[1]} is the least", fix)
    if version > most:
        fix = f"If something fails, try python{most[0]}.{most[1]} -m venv .venv"
        return Finding("Python", "warning", f"{shown}; tested with {tested}", fix)
    return Finding("Python", "ok", f"{shown} (tested: {tested})")


def check_packages(installed: Mapping[str, str | None], required: list[str], *, deepspeed: bool) -> Iterator[Finding]:
    """Each package of `TESTED`.

    Args:
        installed: versions by name, None for what is missing.
        required: this package's requirements, as its metadata writes them.
        deepspeed: whether the run needs DeepSpeed.
    """
    always = (r for r in map(Requirement, required) if r.marker is None or r.marker.evaluate({"extra": ""}))
    limits = {requirement.name: requirement.specifier for requirement in always}
    for name, tested in TESTED.items():
        version = installed.get(name)
        install = f"pip install '{name}=={tested}'"
        unneeded = name == "deepspeed" and not deepspeed
        if version is None:
            found = "not installed" + (", and this config does without" if unneeded else "")
            yield Finding(name, "warning" if unneeded else "wrong", found, install)
        elif name in limits and not limits[name].contains(version, prereleases=True):
            found = f"{version}, which is not {limits[name]}"
            yield Finding(name, "warning" if unneeded else "wrong", found, install)
        elif _release(version) > _release(tested):
            yield Finding(name, "warning", f"{version}, newer than the tested {tested}", f"If it fails: {install}")
        else:
            yield Finding(name, "ok", f"{version} (tested: {tested})")


def _release(version: str) -> tuple[int, ...]:
    """Major and minor: the last number changes no interface. `0.19.8` of a 0.x package counts whole."""
    release = Version(re.sub(r"\+.*", "", version)).release
    return release[:2] if release[0] else release[:3]
