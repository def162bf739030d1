"""DeepSpeed's ops: which a configuration needs, which are built, and building them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from zero_plugin.doctor.finding import Finding

__all__ = ["check_builds", "check_locks", "missing_builds"]

_SHOWN_LINES: Final = 8
_LIMIT_S: Final = 1200


def missing_builds(ops: Sequence[str], folder: Path) -> list[str]:
    """Those of `ops` that are not built in `folder`."""
    return [op for op in ops if not (folder / op / f"{op}.so").is_file()]


def check_locks(stale: Sequence[Path]) -> Finding:
    """Locks of killed builds, on which DeepSpeed waits silently.

    Args:
        stale: those of the ops that the configuration needs that no process of this machine holds.
    """
    if not stale:
        return Finding("op build locks", "ok", "none of a killed build is in the way")
    found = f"a build was killed and left {', '.join(map(str, stale))}: this run would wait forever"
    return Finding("op build locks", "wrong", found, f"rm {' '.join(map(str, stale))}")


def check_builds(
    ops: Sequence[str], folder: Path, environ: Mapping[str, str], *, build: bool, config: str = ""
) -> Iterator[Finding]:
    """One finding for each op.

    Args:
        ops: what the configuration needs.
        folder: where they are built.
        environ: of a build.
        build: whether to build what is missing.
        config: the file that asks for them, for the command that builds them.
    """
    if not ops:
        yield Finding("ops", "ok", "this config needs none of DeepSpeed's C++ ops")
    missing = missing_builds(ops, folder)
    for op in ops:
        if op not in missing:
            yield Finding(f"op {op}", "ok", f"built in {folder}")
        elif not build:
            command = shlex.join(["zero-plugin", "doctor", *(["--config_file", config] if config else []), "--build"])
            fix = f"{command}   (else the first run builds it, while all processes wait)"
            yield Finding(f"op {op}", "warning", "not built yet", fix)
        else:
            yield _build(op, folder, environ)


def _build(op: str, folder: Path, environ: Mapping[str, str]) -> Finding:
    """Build in a process of its own: DeepSpeed's import takes seconds, and prints."""
    command = [sys.executable, "-m", "zero_plugin.strategies.deepspeed.build_op", op]
    try:
        done = subprocess.run(  # noqa: S603 - this package's own module
            command, env=dict(environ), capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(f"op {op}", "wrong", f"not built within {_LIMIT_S} s", f"rm -r {folder / op}, and once more")
    if done.returncode == 0:
        return Finding(f"op {op}", "ok", f"built in {folder}")
    shown = "\n".join(_telling_lines(done.stdout + done.stderr))
    fix = f"{' '.join(command)}   (shows all of it; what is missing is named above, or in the lines on the compiler)"
    return Finding(f"op {op}", "wrong", f"does not compile:\n{shown}", fix)


def _telling_lines(output: str) -> list[str]:
    """The first errors, else the end; neither command lines of the compiler nor the traceback around them."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line for line in lines if re.search(r"\berror\s*:|: not found|Error: ", line) and "CalledProcess" not in line
    ]
    return list(dict.fromkeys(errors))[:_SHOWN_LINES] or lines[-_SHOWN_LINES:]
