"""No error of this package is known by its text: by its class or an attribute, which a reworded message keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import zero_plugin

PACKAGE = Path(zero_plugin.__file__).parent
_SEARCHES = ("search", "match", "fullmatch", "startswith", "endswith", "partition", "removeprefix", "split", "find")

_IN_OTHERS = {"dtype|scalar type"}  # searched in a RuntimeError, which no error of the package is


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The module's constants, by name."""
    found = {}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and (value := getattr(node, "value", None)) is not None:
            found[target.id] = value
    return found


def _texts(node: ast.AST, constants: dict[str, ast.expr]) -> Iterator[str]:
    """All that a node, or a constant that it names, has of texts."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value
        elif isinstance(part, ast.Name) and part.id in constants:
            yield from _texts(constants[part.id], {})


def _is_text_of_error(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and bool(node.args)
        and re.fullmatch("e|err|error|exception|one|cause", ast.unparse(node.args[0]).rpartition(".")[2]) is not None
    )


def _needles(tree: ast.Module) -> Iterator[str]:
    """What is searched for in the texts of errors."""
    constants = _constants(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.GeneratorExp) and any(_is_text_of_error(n) for n in ast.walk(node) if n is not node):  # type: ignore[arg-type]
            yield from _texts(node, constants)
        elif isinstance(node, ast.Compare) and any(map(_is_text_of_error, node.comparators)):
            yield from _texts(node.left, constants)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SEARCHES:
            if any(map(_is_text_of_error, node.args)):
                yield from _texts(node.func.value, constants)
                yield from (text for argument in node.args[:1] for text in _texts(argument, constants))
            elif _is_text_of_error(node.func.value):
                yield from (text for argument in node.args for text in _texts(argument, constants))


def _messages(tree: ast.Module) -> Iterator[str]:
    """The texts that the package's errors are made of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("Problem", "Finding", "SystemExit") or re.fullmatch(r"[A-Z]\w+Error", name):
                yield " ".join(_texts(node, {}))


def test_no_message_of_ours_is_matched_by_its_text() -> None:
    """What the package searches for in texts of errors, torch's and DeepSpeed's have, and none of its own."""
    trees = [ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))]
    needles = {needle for tree in trees for needle in _needles(tree) if re.search(r"\w{4}", needle)}
    assert {"Connection closed by peer", "SparseTensorImpl", "has already been reduced"} <= needles, "not found"
    messages = [message for tree in trees for message in _messages(tree)]
    assert len(messages) > 500
    ours = {needle: message for needle in needles - _IN_OTHERS for message in messages if re.search(needle, message)}
    assert not ours
