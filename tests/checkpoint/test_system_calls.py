"""The system calls of a save: their order, and the state of the checkpoints if any one call fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zero_plugin.checkpoint.folders import choose_checkpoint
from zero_plugin.checkpoint.load import find_differences
from zero_plugin.checkpoint.manifest import read_manifest

pytestmark = [
    pytest.mark.programs,
    pytest.mark.processes,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

SAVES = """
import json, sys, torch
from zero_plugin import Accelerator, ProjectConfiguration
project = ProjectConfiguration("out", automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
saved = []
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    try:
        accelerator.save_state()
        saved.append([step, ""])
    except Exception as error:
        saved.append([step, f"{type(error).__name__}: {error}"])
if len(sys.argv) > 1:
    accelerator.save_model(model, "weights")
print(json.dumps(saved))
accelerator.end_training()
"""
_CALL = re.compile(r'(\w+)\((?:\d+<|"|AT_FDCWD<[^>]*>, ")([^">]*)[>"](?:, (?:AT_FDCWD<[^>]*>, )?"([^"]*)")?.*\) += 0$')
_UNFINISHED, _RESUMED = "<unfinished ...>", re.compile(r"^<\.\.\. \w+ resumed>")
STRACE = ("strace", "-f", "--seccomp-bpf")  # the latter ignores calls that are not traced
CALLS = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir"


def trace(folder: Path, *arguments: str) -> list[tuple[str, str, str]]:
    """Return the successful calls, each with its path and, for a rename, the new path."""
    found = folder / "trace"
    command = [*STRACE, "-y", "-o", str(found), "-e", f"trace={CALLS}", sys.executable, "-c", SAVES, *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    lines = _complete_lines(found.read_text(errors="replace"))
    return [(match[1], match[2], match[3] or "") for line in lines if (match := _CALL.match(line))]


def _complete_lines(text: str) -> Iterator[str]:
    """Return one line for each call, at its end. strace splits a line if another thread's call comes between."""
    begun: dict[str, str] = {}
    for line in text.splitlines():
        thread, _, call = line.partition(" ")
        if call.endswith(_UNFINISHED):
            begun[thread] = call.removesuffix(_UNFINISHED).strip()
        else:
            yield _RESUMED.sub(lambda _, thread=thread: begun.pop(thread), call.strip())


def test_a_call_that_strace_prints_in_two_parts() -> None:
    """A call that strace prints in two parts is joined by its thread and counts at its end."""
    printed = """7  fsync(3</out/a>) = 0
7  rename("/out/a", "/out/b" <unfinished ...>
8  fsync(4</out> <unfinished ...>
7  <... rename resumed>) = 0
8  <... fsync resumed>)        = 0
"""
    assert list(_complete_lines(printed)) == [
        "fsync(3</out/a>) = 0",
        'rename("/out/a", "/out/b") = 0',
        "fsync(4</out>)        = 0",
    ]


def test_the_order(tmp_path: Path) -> None:
    """Each file reaches the disk before its folder, then the name. Only then an older checkpoint is removed."""
    calls = trace(tmp_path, "weights")
    out, weights = tmp_path / "out/checkpoints", tmp_path / "weights"
    moves = [
        (number, Path(source), Path(target))
        for number, (call, source, target) in enumerate(calls)
        if call.startswith("rename")
    ]
    named = [(number, source, target) for number, source, target in moves if source.name.endswith(".writing")]
    assert [target.name for _, _, target in named] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    (kept,) = (path for path in out.iterdir() if path.name.startswith("checkpoint_"))
    names = [str(path.relative_to(kept)) for path in kept.rglob("*")]
    assert len(names) > 8
    for number, source, _ in named:
        synced = [path for call, path, _ in calls[:number] if call == "fsync"]
        last = {path: place for place, path in enumerate(synced)}
        folder = last[str(source)]
        assert all(last[f"{source}/{name}"] < folder for name in names)
        later = calls[number + 1 :]
        first_removed = next((n for n, (call, *paths) in enumerate(later) if ".removing" in "".join(paths)), len(later))
        assert ("fsync", str(out), "") in later[:first_removed]
    gone = [number for number, source, target in moves if target.name.endswith(".removing")]
    assert len(gone) == 2
    for number in gone:  # an older checkpoint's name is gone from the disk before its first file
        unlinked = next(n for n in range(number, len(calls)) if calls[n][0].startswith("unlink"))
        assert ("fsync", str(out), "") in calls[number:unlinked]
    replaced = [(number, source) for number, source, target in moves if target == weights / "model.safetensors"]
    for number, source in replaced:
        assert ("fsync", str(source), "") in calls[:number]
        assert ("fsync", str(weights), "") in calls[number:]


# Of all calls of a run. The first calls belong to its start and its first save, when there is nothing to lose yet.
PLACES = {
    ("fsync", "EIO"): range(5, 52, 2),
    ("fsync", "ENOSPC"): range(6, 52, 6),
    ("rename", "EIO"): range(3, 9),
    ("rename", "EDQUOT"): range(3, 9),
}
DAILY = (("fsync", "EIO", 29), ("rename", "EDQUOT", 5))
FAILURES = [
    pytest.param(*kind, when, marks=() if (*kind, when) in DAILY else pytest.mark.campaign)
    for kind, places in PLACES.items()
    for when in places
]


@pytest.mark.parametrize(("call", "error", "when"), FAILURES)
def test_one_that_fails(call: str, error: str, when: int, tmp_path: Path, tried: Callable[..., dict[str, Any]]) -> None:
    """If the n-th call of a kind fails, that save raises an error of one line, and the older checkpoint loads."""
    row = tried(f"{call} fails with {error}", 1)
    kinds = {"fsync": "fsync", "rename": "rename,renameat,renameat2"}[call]
    inject = f"inject={kinds}:error={error}:when={when}"
    command = [*STRACE, "-qq", "-o", "/dev/null", "-e", f"trace={kinds}", "-e", inject]
    done = subprocess.run(
        [*command, sys.executable, "-c", SAVES], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    row["ended in time"] = 1
    assert done.returncode == 0, done.stderr
    saved = json.loads(done.stdout.splitlines()[-1])
    failed = [(step, message) for step, message in saved if message]
    for _, message in failed:
        assert message.startswith("CheckpointError: "), message
        assert "\n" not in message.strip(), message
    assert len(failed) <= 1
    row["right message"] = 1
    row["lost"] = 1
    complete, _ = choose_checkpoint(tmp_path / "out/checkpoints")
    assert not list(find_differences(complete, read_manifest(complete), lambda _: None))
    newest = max(step for step, message in saved if not message)
    assert json.loads((complete / "training.json").read_text())["models"][0]["optimizer"]["applied_steps"] == newest + 1
    row["lost"] = 0
