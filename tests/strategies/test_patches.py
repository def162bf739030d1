"""`PATCHES` and `Patches`: each row is real, used and documented. Undoing a patch restores the exact state.

`python tests/strategies/test_patches.py` writes the rows into docs/deepspeed-internals.md.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from zero_plugin.strategies.deepspeed import patches as patching
from zero_plugin.strategies.deepspeed.patches import PATCHES, Patch, Patches, replaced

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "zero_plugin" / "strategies" / "deepspeed"
_DOCUMENT = _ROOT / "docs" / "deepspeed-internals.md"
_BEGIN, _END = "<!-- rows of patches.py -->\n", "<!-- end of the rows of patches.py -->\n"
_HEAD = "| Name | Where | What for | Without it, a user sees | Undone | Public way | Read in |\n" + "|---" * 7 + "|\n"


class _Base:
    def inherited(self) -> str:
        return "base"


class _Owner(_Base):
    def own(self) -> str:
        return "own"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add rows for this file's classes. Closing undoes them, except `kept`."""
    owner = f"{_Owner.__module__}.{_Owner.__qualname__}"
    names = {"own": "at close", "inherited": "at close", "of_class": "after the call", "kept": "with the engine"}
    made: dict[tuple[str, str], Any] = {
        (owner, name): Patch(owner=owner, name=name, what_for="", without_it="", undone=undone)  # type: ignore[arg-type]
        for name, undone in names.items()
    }
    monkeypatch.setattr(patching, "_ROWS", {**patching._ROWS, **made})


@pytest.mark.parametrize("name", ["own", "inherited"])
def test_undo_deletes_an_attribute_that_the_object_did_not_have(name: str) -> None:
    owner, patches = _Owner(), Patches()
    patches.replace(owner, name, lambda: "new")
    assert getattr(owner, name)() == "new"
    patches.undo()
    assert vars(owner) == {}


def test_undo_restores_an_attribute_of_the_object_itself() -> None:
    owner, patches = _Owner(), Patches()
    owner.own = before = lambda: "set by the script"  # type: ignore[method-assign]
    patches.replace(owner, "own", lambda: "new")
    patches.undo()
    assert vars(owner) == {"own": before}


def test_undo_restores_the_last_one_first() -> None:
    owner, patches, seen = _Owner(), Patches(), list[str]()
    patches.precede(owner, "own", lambda: seen.append("first"))
    patches.precede(owner, "own", lambda: seen.append("second"))
    assert owner.own() == "own"
    assert seen == ["second", "first"]
    patches.undo()
    patches.undo()
    assert vars(owner) == {}


def test_an_attribute_that_lives_with_its_owner_stays() -> None:
    owner, patches = _Owner(), Patches()
    patches.replace(owner, "kept", 1)
    patches.undo()
    assert vars(owner) == {"kept": 1}


def test_a_context_restores_a_method_of_a_class_after_an_error() -> None:
    before = dict(vars(_Owner))

    def fail() -> None:
        with replaced(_Owner, "of_class", 1), replaced(_Owner, "inherited", 2):
            assert (_Owner.of_class, _Owner.inherited) == (1, 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert dict(vars(_Owner)) == before


def test_a_name_without_a_row_is_refused_and_not_replaced() -> None:
    owner = _Base()
    with pytest.raises(KeyError, match=r"no row of PATCHES names inherited of .*_Base"):
        Patches().replace(owner, "inherited", None)
    with pytest.raises(KeyError, match="no row of PATCHES names other"):
        Patches().replace(torch.nn.Linear(1, 1), "other", None)
    assert vars(owner) == {}


def test_no_attribute_has_two_rows() -> None:
    assert len({(patch.owner, patch.name) for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_the_owner_of_a_row_has_the_attribute(patch: Patch) -> None:
    """The source is read as text if only instances have the attribute, or if another module sets it."""
    pytest.importorskip(patch.owner.split(".")[0])
    pytest.importorskip((patch.defined_in or patch.owner).split(".")[0])
    assert _find(patch.owner) is not None
    place = _find(patch.defined_in or patch.owner)
    assert hasattr(place, patch.name) or re.search(rf'\.{patch.name} = |"{patch.name}"', inspect.getsource(place))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_a_row_is_used(patch: Patch) -> None:
    assert _users(patch.name), f"no code replaces {patch.name}: delete its row"


def test_the_document_has_the_rows() -> None:
    found = _DOCUMENT.read_text("utf-8").partition(_BEGIN)[2].partition(_END)[0]
    assert found == _rows(), "type: python tests/strategies/test_patches.py"


def _find(place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ImportError:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)


def _users(name: str) -> list[str]:
    """Return the files that replace or precede an attribute of this name."""
    return [path for path, names in _REPLACED.items() if name in names]


def _replaced_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and len(node.args) == 3 and isinstance(name := node.args[1], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("replace", "precede", "replaced"):
                yield str(name.value)


_REPLACED = {str(path.relative_to(_FOLDER)): set(_replaced_in(path)) for path in sorted(_FOLDER.rglob("*.py"))}


def _rows() -> str:
    """Return the tables of the document, one for each place that defines attributes."""
    tables: dict[str, list[str]] = {}
    for patch in PATCHES:
        where = ", ".join(f"`{user}`" for user in _users(patch.name))
        cells = (f"`{patch.name}`", where, patch.what_for, patch.without_it, patch.undone, patch.public, patch.releases)
        tables.setdefault(_heading(patch), []).append(f"| {' | '.join(cells)} |\n")
    return "".join(f"\n### {heading}\n\n{_HEAD}{''.join(lines)}" for heading, lines in tables.items()) + "\n"


def _heading(patch: Patch) -> str:
    place = patch.defined_in or ("torch._tensor.Tensor" if patch.owner == "torch.Tensor" else patch.owner)
    module, _, kind = place.rpartition(".")
    if isinstance(_find(place), ModuleType):
        module, kind = place, ""
    if module == "torch._C":  # in the stubs
        return f"`torch/_C/__init__.pyi`: `{kind}`"
    file = f"`{module.replace('.', '/')}.py`"
    if kind:
        return f"{file}: `{kind}`"
    return f"{file}: text" if place == "copy" else f"{file}: set on other objects" if patch.defined_in else file


def main() -> None:
    """Write the rows into the document."""
    before, _, rest = _DOCUMENT.read_text("utf-8").partition(_BEGIN)
    _DOCUMENT.write_text(before + _BEGIN + _rows() + _END + rest.partition(_END)[2], "utf-8")


if __name__ == "__main__":
    main()
