"""The package's processes exchange tensors and JSON, so a process that joins a group cannot make them run code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import zero_plugin

PACKAGE = Path(zero_plugin.__file__).parent
# Functions that send or read pickles.
PICKLES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
# The script's objects: gathered values, batches, and its own sampler's draws.
FOR_SCRIPTS = {
    "accelerator.py",
    "data/batch_sampler.py",
    "data/batches.py",
    "data/dispatch.py",
    "distributed/collectives.py",
    "utils/__init__.py",
    "utils/operations.py",
}


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("json", "yaml")):
                yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if "pickle" in (node.module or "") else alias.name
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def found_in(source: str) -> set[str]:
    found = set(names(ast.parse(source)))
    return (found & PICKLES) | {name for name in found if name.startswith(("pickle.", "cloudpickle"))}


def test_objects_travel_for_scripts_alone() -> None:
    """Every use of an object collective is in a file that sends the script's own objects."""
    users = {
        str(file.relative_to(PACKAGE)): sorted(uses)
        for file in PACKAGE.rglob("*.py")
        if (uses := found_in(file.read_text()))
    }
    assert {file: uses for file, uses in users.items() if file not in FOR_SCRIPTS} == {}
    assert "distributed/collectives.py" in users
    assert found_in("import torch.distributed as d\nd.all_gather_object(a, b)") == {"all_gather_object"}
    assert found_in("from pickle import loads") == {"pickle.loads"}


def test_pickles_are_read_from_files_alone() -> None:
    """`pickle.loads` and `dumps` of bytes are never used. torch reads files, with `weights_only`."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle":
                allowed = {"UnpicklingError", "PicklingError"}
                if file.name == "seeding.py":
                    allowed |= {"dumps"}  # to compare two states
                assert node.attr in allowed, f"{file}: pickle.{node.attr}"
