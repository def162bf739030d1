"""The demo's text is the same on every call, split by file, and cut into blocks without loss."""

import sysconfig
from pathlib import Path

import pytest
import torch

from zero_plugin.demo.train import Blocks, read_text
from zero_plugin.errors import MachineError


def test_two_readings_are_equal_and_as_long_as_asked() -> None:
    """Every process reads the same text, cut at the two limits."""
    train, held_out = read_text(max_bytes=200_000, held_out_bytes=30_000)
    assert (train, held_out) == read_text(max_bytes=200_000, held_out_bytes=30_000)
    assert len(train) == 200_000
    assert len(held_out) == 30_000
    assert b"import" in train


def test_order_of_the_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order depends on the files' names, not on their folder or the file system's order."""
    texts = []
    for folder, names in (("one", "abcdef"), ("two", "fedcba")):
        root = tmp_path / folder
        root.mkdir()
        for name in names:
            (root / f"{name}.py").write_text(name * 10)
        monkeypatch.setattr(sysconfig, "get_path", lambda _, root=root: str(root))
        texts.append(read_text(held_out_bytes=10))
    assert texts[0] == texts[1]


def test_no_file_is_in_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the held-out text uses in part gives nothing to the training text."""
    for name in "abcdef":
        (tmp_path / f"{name}.py").write_text(name * 10)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    train, held_out = read_text(held_out_bytes=15)
    assert len(held_out) == 15
    assert len(train) == 40
    assert not set(train) & set(held_out)


def test_installed_packages_and_tests_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the standard library is text, because installed packages would make two machines' runs differ."""
    for file in ("a.py", "b.py", "site-packages/x.py", "test/x.py", "json/tests/x.py", "notes.txt"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x" if "x.py" in file else file[0])
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert sorted(b"".join(read_text(held_out_bytes=1))) == sorted(b"ab")


def test_an_interpreter_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose library is compiled gives an error that says what to run instead."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(MachineError, match="that includes its standard library"):
        read_text()


def test_blocks_pair_each_byte_with_the_next_and_lose_none() -> None:
    """Targets are inputs one byte later, across block borders; only an incomplete last block is dropped."""
    blocks = Blocks(bytes(range(11)), block=3)
    ids, targets = (torch.stack(side) for side in zip(*(blocks[i] for i in range(len(blocks))), strict=True))
    assert ids.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.equal(ids + 1)
    assert ids.dtype is torch.int64
    with pytest.raises(IndexError):
        blocks[3]
