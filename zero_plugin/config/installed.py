"""The packages that a run needs: which versions are installed, tested and too old; imported quickly, and changed."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

# What the test suite passes with, as constraints.txt says.
TESTED: Final = {"torch": "2.13.0", "deepspeed": "0.19.8", "safetensors": "0.8.0", "numpy": "2.2.6"}
OLDEST_DEEPSPEED: Final = "0.19.8"
NEWER_DEEPSPEED: Final = f"Type: pip install 'deepspeed>={OLDEST_DEEPSPEED},<0.20'"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """While it is entered, Python looks for no garbage, since each look goes through all of torch.

    For imports, which leave none, and in a short process for what leaves little.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_INHERITED: Final = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a package's object, class or module another value while this context is open."""
    own = vars(owner).get(name, _INHERITED)  # a class method itself, which is not bound to this class
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@functools.cache  # each look parses the package's metadata anew
def installed_version(package: str) -> str | None:
    """The version of an installed package, None for one that is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_at_least(package: str, version: str) -> bool:
    """Whether `package` is installed in this version, or in a newer one."""
    found = installed_version(package)
    return found is not None and _numbers(found) >= _numbers(version)


def refuse_deepspeed() -> str:
    """Why the installed DeepSpeed is too old; "" for one that is not, and where there is none."""
    found = installed_version("deepspeed")
    if found is None or is_at_least("deepspeed", OLDEST_DEEPSPEED):
        return ""
    return (
        f"DeepSpeed {OLDEST_DEEPSPEED} or newer is needed, and {found} is installed, "
        "which has no managed_gradient_accumulation"
    )


def warn_of_deepspeed() -> str:
    """A warning that the installed DeepSpeed is newer than the tested one; "" for any other."""
    found, tested = installed_version("deepspeed"), TESTED["deepspeed"]
    if found is None or not is_newer(found, tested):
        return ""
    return f"DeepSpeed {found} is newer than {tested}, the tested one. If it fails: pip install 'deepspeed=={tested}'"


def warn_of_transformers() -> str:
    """A warning that the installed transformers loads other weights at stage 3; "" for any other, and where none is."""
    if not is_at_least("transformers", "5.0") or is_at_least("transformers", "5.3"):
        return ""
    return (
        f"from_pretrained() of transformers {installed_version('transformers')} does not give all weights their values "
        "at ZeRO stage 3: in 5.0 and 5.1 those of mixtures of experts, in 5.2 those that are not in the files. "
        "Type: pip install 'transformers>=5.3'"
    )


def is_newer(version: str, tested: str) -> bool:
    """Whether interfaces may have changed: by major and minor number, of a 0.x package by all three."""
    return _release(version) > _release(tested)


def _release(version: str) -> tuple[int, ...]:
    release = _numbers(version)
    return release[:2] if release[0] else release[:3]


def _numbers(version: str) -> tuple[int, ...]:
    from packaging.version import Version  # here, since most commands compare no versions

    return Version(re.sub(r"\+.*", "", version)).release
