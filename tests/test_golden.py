"""User-visible text stays, or its change is seen in review: public signatures, and the output of commands.

`python tests/test_golden.py` rewrites the files of tests/golden.
"""

from __future__ import annotations

import enum
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
# They have no machine's own facts: the options give every value that a command would look up.
COMMANDS = {
    "help": ["--help"],
    **{
        f"help-{name}": [*name.split("-"), "--help"]
        for name in ("check", "config", "demo", "doctor", "env", "explain", "launch", "plan", "test")
    },
    **{f"help-checkpoint-{name}": ["checkpoint", name, "--help"] for name in ("inspect", "verify", "import", "export")},
    "help-all": ["launch", "--help-all"],
    "check-right": ["check", "ds_configs/zero2.yaml"],
    "check-wrong": ["check", "tests/golden/wrong.yaml"],
    "explain-zero2": ["explain", "ds_configs/zero2.yaml", "--accelerator", "cpu", "--world_size", "2"],
    "plan-7b": ["plan", "--params", "7B", "--gpu", "A100-80GB", "--gpus", "8", "--host_memory", "1TB", "--what_if"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints(name: str) -> None:
    """The width is 80 columns, without colours. The exit code is the last line. No crash is ever the wanted text."""
    assert "Traceback" not in (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert run(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_public_signatures() -> None:
    """They have every public name, and every public method of `Accelerator`, with its arguments and their defaults."""
    assert "\n".join(signatures()) + "\n" == (GOLDEN / "signatures.txt").read_text(encoding="utf-8")


def run(name: str) -> str:
    """Run the command. Return its output and its exit code."""
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "zero_plugin", *COMMANDS[name]],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join([*lines, f"exit code {done.returncode}", ""])


def signatures() -> Iterator[str]:
    """Return one line for each."""
    import zero_plugin

    for name in sorted(zero_plugin.__all__):
        found = getattr(zero_plugin, name)
        yield f"{name}{_signature(found)}"
        if name != "Accelerator":
            continue
        for method in sorted(set(dir(found)) - set(dir(object))):
            if not method.startswith("_"):
                kind = "" if callable(getattr(found, method)) else "  # an attribute"
                yield f"  {name}.{method}{_signature(getattr(found, method)) if not kind else ''}{kind}"


def _signature(thing: object) -> str:
    if isinstance(thing, enum.EnumMeta):
        return f": {', '.join(f'{member.name}={member.value!r}' for member in thing)}"
    try:
        return str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""


if __name__ == "__main__":
    for command in COMMANDS:
        (GOLDEN / f"{command}.txt").write_text(run(command), encoding="utf-8")
    (GOLDEN / "signatures.txt").write_text("\n".join(signatures()) + "\n", encoding="utf-8")
