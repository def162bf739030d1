"""The TPU and torch_xla, as far as they can be told without waking either."""

from __future__ import annotations

from collections.abc import Mapping

from zero_plugin.doctor.finding import Finding
from zero_plugin.installed import installed_version
from zero_plugin.probe.tpu import PJRT_DEVICE
from zero_plugin.strategies.xla_runtime import find_version_problem

__all__ = ["check_tpu"]


def check_tpu(seen: str, environ: Mapping[str, str], *, asked: bool) -> Finding:
    """torch_xla's version, and what it would run on.

    Args:
        seen: by what a TPU is seen here, "" for none.
        environ: `PJRT_DEVICE` says what torch_xla runs on.
        asked: whether the configuration asks for a TPU.
    """
    version = installed_version("torch_xla")
    found = f"torch_xla {version}" if version else "torch_xla is not installed"
    chosen = environ.get(PJRT_DEVICE)
    where = seen or (f"{PJRT_DEVICE} is {chosen}" if chosen else "")
    if (asked or seen) and (problem := find_version_problem()):
        message, _, fix = problem.partition(": ")
        return Finding("TPU", "wrong" if asked else "warning", f"{message} ({where or 'none here'})", fix)
    if asked and chosen == "CPU":
        fix = f"unset {PJRT_DEVICE}   (to train on the TPU)"
        return Finding("TPU", "warning", f"{found}; {where}: the TPU path is tried on the CPU", fix)
    if asked and not seen:
        fix = f"{PJRT_DEVICE}=CPU zero-plugin launch …   (tries the path on the CPU)"
        return Finding("TPU", "wrong", f"{found}; there is no TPU here{f', and {where}' if where else ''}", fix)
    return Finding("TPU", "ok", f"{found}; {where}" if where else f"none{f'; {found}' if version else ''}")
