"""The folders next to a checkpoint while it is written, replaced or removed, and their state after a kill."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zero_plugin import Accelerator
from zero_plugin.checkpoint import locks, publish, verify
from zero_plugin.checkpoint.disk import reserve
from zero_plugin.checkpoint.folders import choose_checkpoint
from zero_plugin.checkpoint.locks import is_held, let_go
from zero_plugin.checkpoint.manifest import MANIFEST_NAME, Manifest
from zero_plugin.checkpoint.publish import discard_draft, open_draft, publish_draft, rotate_checkpoints
from zero_plugin.checkpoint.verify import find_damage
from zero_plugin.errors import CheckpointError
from zero_plugin.loop.checkpoints import _resolved


def fill(folder: Path, content: str, run: str = "mine") -> None:
    """Make a folder a complete checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text(content)
    files = {"file": {"size": len(content), "crc32": None}}
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "run": run, "files": files, "models": []}))


def save(target: Path, content: str, run: str = "mine") -> None:
    """Save a checkpoint as `save_state` does."""
    draft = open_draft(target, 10)
    fill(draft, content, run)
    publish_draft(draft, target)


def tree(folder: Path) -> set[str]:
    """Return all files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class Killed(BaseException):
    """Simulated end of the process."""


def is_killed(moment: int, call: Callable[[], object]) -> bool:
    """Return whether `call` reaches the system call after `moment` others, and is killed right before it."""
    left = moment

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return original(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(publish, "exchange", counted(publish.exchange))
        try:
            call()
        except Killed:
            for held in list(locks._descriptors):
                let_go(held)
            return True
    return False


@pytest.mark.parametrize("swaps", [True, False])
def test_there_is_always_a_complete_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool) -> None:
    """After a kill at any rename or removal of a replacement, a complete checkpoint is found and repaired."""
    if not swaps:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    for moment in range(100):
        out = tmp_path / str(moment) / "out"
        save(out, "old")
        (out / "logs").mkdir()
        (out / "logs" / "mine").write_text("")
        killed = is_killed(moment, lambda out=out: save(out, "newer"))
        chosen, _ = choose_checkpoint(out)
        assert (chosen / "file").read_text() in ("old", "newer")
        if moment % 2:
            out.mkdir(exist_ok=True)  # as scripts do
            (out / "log of the next run").write_text("")
            assert choose_checkpoint(out)[0] == chosen
        draft = open_draft(out, 10)
        draft.rmdir()
        assert [path.name for path in out.parent.iterdir()] == ["out"]
        assert tree(out) - {"log of the next run"} == {"file", "manifest.json", "logs/mine"}
        assert choose_checkpoint(out) == (out, [])
        if not killed:
            assert moment > 10
            return
    raise AssertionError


def test_one_that_is_replaced_while_it_is_looked_at_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is replaced during the check is not damaged: old manifest and new file sizes may mix."""
    place = tmp_path / "checkpoint_1"
    save(place, "old")
    compare = verify.find_wrong_files

    def replace_and_compare(folder: Path, manifest: Manifest) -> dict[str, str]:
        monkeypatch.setattr(verify, "find_wrong_files", compare)
        save(place, "a longer text")
        return compare(folder, manifest)

    monkeypatch.setattr(verify, "find_wrong_files", replace_and_compare)
    assert choose_checkpoint(tmp_path) == (place, [])


def test_rotation_leaves_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """A rotation killed at any moment leaves only complete checkpoints under their names. The next one finishes."""
    for moment in range(100):
        place = tmp_path / str(moment)
        for number in range(4):
            save(place / f"checkpoint_{number}", "x")
        killed = is_killed(moment, lambda place=place: rotate_checkpoints(place / "checkpoint_3", 2))
        assert [find_damage(path) for path in place.glob("checkpoint_*")].count(None) == len([*place.glob("c*")]) >= 2
        rotate_checkpoints(place / "checkpoint_3", 2)
        assert {path.name for path in place.iterdir()} == {"checkpoint_2", "checkpoint_3"}
        if not killed:
            assert moment > 5
            return
    raise AssertionError


def test_rotation_leaves_other_names_alone(tmp_path: Path) -> None:
    """Drafts of another run and files with similar names stay in the folder. Leftovers are cleaned up."""
    for number in range(4):
        save(tmp_path / f"step_{number}", "x")
    (tmp_path / "step_2").rename(tmp_path / ".step_2.replaced")
    save(tmp_path / "step_0", "x", run="another's")
    left = [".step_9.0a1b2c3d.writing", ".step_8.removing"]
    others = [".step_a.0a1b2c3d.writing", ".other_1.0a1b2c3d.writing", ".step_.removing", ".5.0a1b2c3d.writing"]
    for name in left + others:
        (tmp_path / name).mkdir()
    assert rotate_checkpoints(tmp_path / "step_3", 2) == [tmp_path / "step_1"]
    assert {path.name for path in tmp_path.iterdir()} == {"step_0", "step_2", "step_3", *others}


def test_rotation_leaves_what_another_job_is_writing(tmp_path: Path) -> None:
    """A draft with another number stays while the process that holds it lives, and is removed after its death."""
    save(tmp_path / "step_3", "x")
    draft = tmp_path / ".step_9.0a1b2c3d.writing"
    draft.mkdir()
    other_job = (
        "import sys, pathlib; from zero_plugin.checkpoint.locks import hold\n"
        "hold(pathlib.Path(sys.argv[1])); print('holds', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", other_job, str(draft)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"holds\n"
        rotate_checkpoints(tmp_path / "step_3", 1)
        assert draft.exists()
        job.kill()
    rotate_checkpoints(tmp_path / "step_3", 1)
    assert not draft.exists()


def test_a_draft_is_held_until_it_has_its_name(tmp_path: Path) -> None:
    """A draft is held until it gets its name or is discarded. A complete checkpoint is not held."""
    for end in (lambda draft: publish_draft(draft, tmp_path / "out"), discard_draft):
        draft = open_draft(tmp_path / "out", 10)
        fill(draft, "x")
        assert is_held(draft)
        end(draft)
        assert [is_held(path) for path in tmp_path.iterdir()] == [False]


def test_replaced_ones_are_candidates(tmp_path: Path) -> None:
    """A numbered checkpoint is found where a killed run has moved it."""
    save(tmp_path / "checkpoint_1", "one")
    save(tmp_path / "checkpoint_2", "two")
    (tmp_path / "checkpoint_2").rename(tmp_path / ".checkpoint_2.replaced")
    assert choose_checkpoint(tmp_path)[0] == tmp_path / ".checkpoint_2.replaced"
    (tmp_path / ".checkpoint_2.replaced" / "file").unlink()
    assert choose_checkpoint(tmp_path)[0] == tmp_path / "checkpoint_1"


def test_other_things_stay_when_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    """Files and links that were not part of the older checkpoint are kept unchanged in the newer one's folder."""
    target = tmp_path / "out"
    save(target, "old")
    (tmp_path / "data").mkdir()
    (target / "logs").mkdir()
    (target / "logs" / "run.txt").write_text("mine")
    (target / "to_folder").symlink_to("../data")
    (target / "to_nothing").symlink_to("gone")
    save(target, "newer")
    assert (target / "file").read_text() == "newer"
    assert (target / "logs" / "run.txt").read_text() == "mine"
    assert (target / "to_folder").readlink() == Path("../data")
    assert (target / "to_nothing").readlink() == Path("gone")


def test_a_failing_replacement_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two renames is refused, the older checkpoint gets its name back."""
    save(tmp_path / "out", "old")
    draft = open_draft(tmp_path / "out", 10)
    fill(draft, "newer")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name == "out" and path.name.endswith("writing"):
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="out cannot be replaced"):
        publish_draft(draft, tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_room_is_reserved(tmp_path: Path) -> None:
    """Blocks are reserved for a draft's file, not only its length."""
    with (tmp_path / "file").open("wb") as file:
        reserve(file, 2**20)
    stat = (tmp_path / "file").stat()
    assert stat.st_size == 2**20
    assert stat.st_blocks * 512 >= 2**20


def test_what_cannot_be_read_just_now_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read error of the system, once the new checkpoint has its name, removes neither checkpoint."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    target = tmp_path / "step_1"
    accelerator.save_state(target)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    exchange, read_bytes, failures = publish.exchange, Path.read_bytes, []

    def then_fail(one: Path, other: Path) -> bool:
        failures.append(OSError(errno.EMFILE, "Too many open files", str(target / MANIFEST_NAME)))
        return exchange(one, other)

    def read(path: Path) -> bytes:
        if failures and path == target / MANIFEST_NAME:
            raise failures.pop()
        return read_bytes(path)

    monkeypatch.setattr(publish, "exchange", then_fail)
    monkeypatch.setattr(Path, "read_bytes", read)
    accelerator.save_state(target)
    failures.clear()
    expected = model.weight.detach().clone()
    accelerator.load_state(target)
    assert torch.equal(model.weight, expected)
    assert [path.name for path in tmp_path.iterdir() if "step_1" in path.name and "lock" not in path.name] == ["step_1"]
    accelerator.end_training()


def test_of_two_that_are_damaged_none_is_removed(tmp_path: Path) -> None:
    """Neither of two damaged checkpoints is removed, because either may be the more useful one."""
    for name in ("step_1", ".step_1.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST_NAME).write_text("{")
    publish._settle(tmp_path / "step_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_1.replaced", "step_1"]


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is not replaced. The process would keep a removed folder."""
    monkeypatch.chdir(tmp_path)
    for place in (Path(), tmp_path.parent):
        with pytest.raises(CheckpointError, match="is or holds the current folder"):
            open_draft(place.absolute(), 0)


def test_the_current_folder_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose working folder was removed saves to an absolute path. A relative path is an error that says so."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    save(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "new"
    with pytest.raises(CheckpointError, match="'out' is in the current folder, which has been removed"):
        _resolved("out")


def test_a_draft_that_another_process_removes_before_it_is_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removed draft is made again: without a process group, a live draft can look like a killed run's."""
    removed: list[Path] = []

    def hold(draft: Path) -> None:
        if not removed:
            removed.append(draft)
            draft.rmdir()
        locks.hold(draft)

    monkeypatch.setattr(publish, "hold", hold)
    draft = open_draft(tmp_path / "weights", 0)
    assert draft.is_dir()
    locks.let_go(draft)
    assert len(removed) == 1
