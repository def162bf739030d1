"""Other libraries' errors are known by texts of the installed releases.

No error of this package is known by its text.
"""

from __future__ import annotations

import ast
import importlib
import re
import string
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import ModuleType

import pytest
import torch

import zero_plugin
from zero_plugin.errors import OF_LOST_PEER, Foreign, LaunchError, LoopError, raise_clearer

PACKAGE = Path(zero_plugin.__file__).parent
SITE_PACKAGES = Path(torch.__file__).parents[1]
_SEARCHES = ("search", "match", "fullmatch", "startswith", "endswith", "partition", "removeprefix", "split", "find")
_IN_OTHERS = {"dtype|scalar type", "(?i)sparse"}  # searched in a RuntimeError, which no error of the package is
_OF_THE_SYSTEM = {"Connection reset by peer"}  # in a row with texts of gloo's
# Errors of this package, which are shown in part.
_OF_OURS = {
    "checkpoint/load.py: str(error).removeprefix(f'{folder}/').removesuffix('.')",
    "checkpoint/load.py: str(error).removeprefix(f'{folder}/')",
    "cli/selftest_worker.py: str(error).partition('\\n')",
}


def _rows_of(module: ModuleType) -> Iterator[Foreign]:
    """Return the rows of a file, alone or in a table."""
    for value in vars(module).values():
        yield from (row for row in (value if isinstance(value, tuple) else [value]) if isinstance(row, Foreign))


FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if "Foreign(" in file.read_text()]
MODULES = [importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)) for file in FILES]
ROWS = {row: module.__name__ for module in MODULES for row in _rows_of(module)}


def _literals(pattern: str) -> list[str]:
    """Return the words of a pattern, with adjacent words joined."""
    bare = re.sub(r"\(\?[a-zA-Z]+\)|\(\?=[^)]*\)|\[[^\]]*\]|\\[a-zA-Z]", "|", pattern)
    return [words for words in re.findall(r"[\w:' ]{5,}", bare) if words not in _OF_THE_SYSTEM]


def _is_text_of_error(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and bool(node.args)
        and re.fullmatch("e|err|error|exception|exc|one|cause", ast.unparse(node.args[0]).rpartition(".")[2])
        is not None
    )


def _searches(tree: ast.Module) -> Iterator[str]:
    """Return the places where a file searches in the texts of errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = node.comparators
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
            texts = [*node.args, node.func.value]
        else:
            continue
        if any(map(_is_text_of_error, texts)):
            yield ast.unparse(node)


def _texts(node: ast.AST) -> Iterator[str]:
    """Return all texts of a node."""
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _messages(tree: ast.Module) -> Iterator[str]:
    """Return the texts of the package's errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("Problem", "Finding", "SystemExit") or re.fullmatch(r"[A-Z]\w+Error", name):
                yield " ".join(_texts(node))


def test_no_message_of_ours_is_matched_by_its_text() -> None:
    """Searched texts exist in errors of torch and DeepSpeed, and in none of the package's own."""
    patterns = {row.pattern for row in ROWS if re.search(r"\w{4}", row.pattern)} - _IN_OTHERS
    assert {"SparseTensorImpl", "has already been reduced", "^tracing error at step"} <= patterns, "not found"
    messages = [message for file in PACKAGE.rglob("*.py") for message in _messages(ast.parse(file.read_text()))]
    assert len(messages) > 500
    assert not {pattern: message for pattern in patterns for message in messages if re.search(pattern, message)}


def test_one_function_looks_into_the_texts_of_errors() -> None:
    """A file that handles another library's error has a row for it, and searches for no words itself."""
    found = {
        f"{file.relative_to(PACKAGE)}: {search}"
        for file in PACKAGE.rglob("*.py")
        for search in _searches(ast.parse(file.read_text()))
    }
    assert found - _OF_OURS == {"errors.py: re.search(self.pattern, str(error))"}


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{ROWS[row]}-{row.pattern}") for row in ROWS if row.source])
def test_the_installed_release_has_the_text(row: Foreign) -> None:
    """If another release changes a text, it is no longer found in its file."""
    texts = _literals(row.pattern)
    assert texts, "nothing to look for"
    with (SITE_PACKAGES / row.source).open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as held:
        assert [text for text in texts if held.find(text.encode()) < 0] == []


def test_each_row_can_be_told_from_others() -> None:
    """A row is distinct by its text, its class, or the code that raises it. The facts in its text are names."""
    for row in ROWS:
        assert row.pattern or row.kinds is not RuntimeError or row.raised_in, row
        if isinstance(row.clearer, str):
            assert {name for _, name, *_ in string.Formatter().parse(row.clearer) if name is not None} <= {
                "model", "error", "dtype", "short", "names",
            }, row  # fmt: skip


def _raise_in(module: str, error: Exception) -> Exception:
    """Make code of a module of this name raise an error."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except Exception as raised:  # noqa: BLE001 - whatever it is
        return raised
    raise AssertionError


def test_class_text_and_place_of_an_error_decide() -> None:
    """All three decide, and the first matching row counts. The error itself is a fact too."""
    rows = (
        Foreign("sp[ae]ce", clearer="no {what} ({error})", kinds=OSError, raised_in=("disks.", "files.")),
        Foreign("space", clearer=lambda what, **_: f"another {what}", kinds=Exception, becomes=LaunchError),
    )
    error = _raise_in("disks.slow", OSError("out of space"))
    with pytest.raises(LoopError, match=r"^no room \(out of space\)$") as raised:
        raise_clearer(error, rows, what="room")
    assert raised.value.__cause__ is error
    for error in (
        _raise_in("disks.slow", RuntimeError("out of space")),
        _raise_in("mine.disks.slow", OSError("out of space")),
        OSError("out of space"),  # not raised yet
    ):
        with pytest.raises(LaunchError, match=r"^another room$"):
            raise_clearer(error, rows, what="room")
    raise_clearer(OSError("out of time"), rows, what="room")


def test_a_lost_peer_is_told_from_another_server() -> None:
    """gloo's name in the text, or the code that raises the error, distinguishes them."""
    lost = {
        (module, text): any(row.find(_raise_in(module, RuntimeError(text))) for row in OF_LOST_PEER)
        for module in ("torch.distributed.distributed_c10d", "deepspeed.comm.torch", "redis.connection")
        for text in ("Socket closed", "[pair.cc]\nSocket closed by gloo", "out of space")
    }
    assert {place for place, is_lost in lost.items() if not is_lost} == {
        ("redis.connection", "Socket closed"),
        *((module, "out of space") for module, _ in lost),
    }
