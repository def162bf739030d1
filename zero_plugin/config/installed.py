"""The packages that a run needs: installed, tested and oldest versions; also a faster import and temporary patches."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Final

# Versions that the test suite passes with; the same as in constraints.txt.
TESTED: Final = {"torch": "2.13.0", "deepspeed": "0.19.8", "safetensors": "0.8.0", "numpy": "2.2.6"}
OLDEST_DEEPSPEED: Final = "0.19.8"
NEWER_DEEPSPEED: Final = f"Type: pip install 'deepspeed>={OLDEST_DEEPSPEED},<0.20'"


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause Python's garbage collector: each collection would traverse all objects of torch.

    For imports, which leave no garbage, and for short processes that leave little.
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
    """Replace an attribute of a package's object, class or module while this context is open."""
    own = vars(owner).get(name, _INHERITED)  # not getattr: a class method has to stay unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@functools.cache  # each call parses the package's metadata again
def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_at_least(package: str, version: str) -> bool:
    """Return whether `package` is installed in this version or a newer one."""
    found = installed_version(package)
    return found is not None and _numbers(found) >= _numbers(version)


def refuse_deepspeed() -> str:
    """Return why the installed DeepSpeed is too old; "" if it is new enough or not installed."""
    found = installed_version("deepspeed")
    if found is None or is_at_least("deepspeed", OLDEST_DEEPSPEED):
        return ""
    return (
        f"DeepSpeed {OLDEST_DEEPSPEED} or newer is needed, and {found} is installed, "
        "which has no managed_gradient_accumulation"
    )


def warn_of_deepspeed() -> str:
    """Return a warning if the installed DeepSpeed is newer than the tested one; otherwise ""."""
    found, tested = installed_version("deepspeed"), TESTED["deepspeed"]
    if found is None or not is_newer(found, tested):
        return ""
    return f"DeepSpeed {found} is newer than {tested}, the tested one. If it fails: pip install 'deepspeed=={tested}'"


def warn_of_transformers() -> str:
    """Return a warning if the installed transformers loads wrong weights at stage 3; otherwise ""."""
    if not is_at_least("transformers", "5.0") or is_at_least("transformers", "5.3"):
        return ""
    return (
        f"from_pretrained() of transformers {installed_version('transformers')} does not give all weights their values "
        "at ZeRO stage 3: in 5.0 and 5.1 not those of mixtures of experts, in 5.2 not those missing in the files. "
        "Type: pip install 'transformers>=5.3'"
    )


def is_newer(version: str, tested: str) -> bool:
    """Return whether interfaces may have changed: the major or minor number is newer, in 0.x also the third one."""
    return _release(version) > _release(tested)


def _release(version: str) -> tuple[int, ...]:
    release = _numbers(version)
    return release[:2] if release[0] else release[:3]


def _numbers(version: str) -> tuple[int, ...]:
    from packaging.version import Version  # here, because most commands compare no versions

    return Version(re.sub(r"\+.*", "", version)).release
