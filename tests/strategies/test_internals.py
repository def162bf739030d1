"""Private names of third parties: the tables in docs/ list those that this package uses, and they still exist.

The tests read sources as text with `ast` and import nothing from them. `DEEPSPEED_SOURCE=/path/to/a/checkout` reads
DeepSpeed's rows in that checkout instead of the installed package. It shows row by row what a coming release moves.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.optim import Optimizer

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "zero_plugin"
_ENGINE_FOLDER = _PACKAGE / "strategies" / "deepspeed"
# Each table, and the folder of the files that its second column names.
_TABLES = {_ROOT / "docs" / "deepspeed-internals.md": _ENGINE_FOLDER, _ROOT / "docs" / "other-internals.md": _PACKAGE}
_HEADING = re.compile(r"^### `(?P<file>[^`]+)`(?:: (?:`(?P<owner>\w+)`|(?P<kind>[a-z ]+)))?$")
_SET_ON_OTHERS, _NAMED, _TEXT = "set on other objects", "used by its own code", "text"

# Names that DeepSpeed's documentation describes: engines, classes of deepspeed.zero, its accelerator, its asynchronous
# I/O, and the modules that it says to import from.
_PUBLIC = {
    *("backward", "destroy", "eval", "get_global_grad_norm", "module", "optimizer", "scale", "step", "train"),
    *("was_step_applied", "zero_grad", "initialize", "init_distributed", "configure"),
    *("create_op_builder", "device_name", "pin_memory", "synchronize", "load"),
    *("aio_handle", "new_cpu_locked_tensor", "free_cpu_locked_tensor", "async_pread", "async_pwrite", "wait"),
}
_PUBLIC_MODULES = (
    "deepspeed",
    "deepspeed.accelerator",
    "deepspeed.ops.adagrad",
    "deepspeed.ops.adam",
    "deepspeed.ops.lion",
)
_PUBLIC_IMPORTS = (("deepspeed.ops.op_builder", "AsyncIOBuilder"), ("deepspeed.utils", "set_z3_leaf_module"))
# Our variables and attributes under strategies/deepspeed that hold objects of DeepSpeed.
_HOLDERS = ("backup", "bucket", "coordinator", "engine", "fp16", "init", "mapping", "offload", "swapper", "wrapper")
_DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_replace"}  # although their names look private
_OWN_MARKS = {"_purges", "_zero_plugin_hooks"}  # attributes that this package sets on foreign objects


@dataclass(frozen=True)
class Row:
    """One name in a table, with the places where the table says it is defined and used."""

    file: str
    owner: str
    kind: str
    name: str
    users: tuple[Path, ...]

    def __str__(self) -> str:
        return f"{self.owner or self.file}.{self.name}".replace("/", ".")


def _rows() -> Iterator[Row]:
    for table, folder in _TABLES.items():
        heading: re.Match[str] | None = None
        for line in table.read_text("utf-8").splitlines():
            if line.startswith("#"):
                heading = _HEADING.match(line)
                assert heading or not line.startswith("###"), f"{table.name}: {line}"
            elif line.startswith("| `"):
                assert heading, f"{table.name}: a row before a heading with a file: {line}"
                cells = line.strip("| ").split(" | ")
                assert len(cells) in (4, 7), f"{table.name}: neither four cells nor those of a patch: {line}"
                users = tuple(folder / user for user in re.findall(r"`([^`]+)`", cells[1]))
                assert users, f"{table.name}: no file of ours: {line}"
                yield Row(heading["file"], heading["owner"] or "", heading["kind"] or "", cells[0].strip("`"), users)


_ROWS = list(_rows())


class _Source:
    """The names that a Python file or a stub defines and uses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text("utf-8"))
        self._members: dict[str, set[str]] = {}
        self.classes = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        self.imports: dict[str, tuple[int, str, str]] = {}  # name -> level, module, name in that module
        self.attributes_set: set[str] = set()
        self.attributes: set[str] = set()
        self.strings: set[str] = set()
        self.imported: set[str] = set()  # names and modules
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
                if isinstance(node.ctx, ast.Store):
                    self.attributes_set.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.strings.add(node.value)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = (node.level, node.module or "", alias.name)
                    self.imported.add(alias.name)

    @functools.cached_property
    def names(self) -> set[str]:
        """Return the names of the module itself, including those that a function puts into `globals()`."""
        found = set(self.imports) | set(_defined_in(self.tree.body))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "globals()":
                found |= {c.value for c in ast.walk(node.slice) if isinstance(c, ast.Constant)}
            elif isinstance(node, ast.Global):
                found.update(node.names)
        return found

    def of_kind(self, kind: str) -> set[str]:
        """Describe the rows below a heading without a class."""
        return {"": self.names, _SET_ON_OTHERS: self.attributes_set, _NAMED: self.attributes}[kind]

    def members(self, class_name: str) -> set[str]:
        """Return the members of a class and its bases in the same package. Private ones are mangled as in Python."""
        if class_name not in self._members:
            self._members[class_name] = self._find_members(class_name)
        return self._members[class_name]

    def _find_members(self, class_name: str) -> set[str]:
        node = self.classes[class_name]
        found = set(_defined_in(node.body))
        for inner in ast.walk(node):
            is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
            if is_set and ast.unparse(inner.value) in ("self", "cls"):
                found.add(inner.attr)
        found = {f"_{class_name.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in found}
        for base in node.bases:
            name = ast.unparse(base).split("[")[0].split(".")[-1]
            if name != class_name and (home := self.home_of(name)) is not None:
                found |= home.members(name)
        return found

    def home_of(self, class_name: str) -> _Source | None:
        """Return the file that defines a class named in this file, or None for another package's class."""
        if class_name in self.classes:
            return self
        if class_name not in self.imports:
            return None
        level, module, name = self.imports[class_name]
        parts = module.split(".") if module else []
        if level:
            folder = self.path.parents[level - 1]
        elif parts and parts[0] in self.path.parts:
            folder = Path(*self.path.parts[: self.path.parts.index(parts[0])])
        else:
            return None
        target = folder.joinpath(*parts)
        for path in (target.with_suffix(".py"), target / "__init__.py"):
            if parts and path.is_file():
                return _source(path).home_of(name)
        return None


def _defined_in(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        for part in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from _defined_in(getattr(node, part, []))


@functools.cache
def _source(path: Path) -> _Source:
    return _Source(path)


@functools.cache
def _folder_of(package: str) -> Path | None:
    """Return the folder of an installed package without importing it, or None if it is not installed."""
    if package == "deepspeed" and (checkout := os.environ.get("DEEPSPEED_SOURCE")):
        return Path(checkout)
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.submodule_search_locations[0] if spec.submodule_search_locations else spec.origin).parent


def _party(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("row", _ROWS, ids=str)
def test_a_name_in_the_tables_is_defined(row: Row) -> None:
    """The row's place in the installed release's source defines it."""
    folder = _folder_of(_party(row.file))
    if folder is None:
        pytest.skip(f"{_party(row.file)} is not installed")
    path = folder / row.file
    assert path.is_file(), f"{row.file} is gone; {row.name} was there, used in {', '.join(u.name for u in row.users)}"
    if row.kind == _TEXT:
        assert row.name in path.read_text("utf-8"), f"{row.file} does not name {row.name} any more"
        return
    source = _source(path)
    assert not row.owner or row.owner in source.classes, f"{row.file} has no class {row.owner} any more"
    defined = source.members(row.owner) if row.owner else source.of_kind(row.kind)
    assert row.name in defined, f"{row} is gone from {row.file}; docs/ says what for, and what to do"


@pytest.mark.parametrize("row", _ROWS, ids=str)
def test_a_name_in_the_tables_is_used(row: Row) -> None:
    """Each of our files that a row names uses the row's name. Otherwise delete the row, or the file in it."""
    for path in row.users:
        source = _source(path)
        used = source.attributes | source.strings | source.imported | _methods(source)
        assert row.name in used, f"{path.relative_to(_ROOT)} does not use {row.name}; delete that from the table"


def _methods(source: _Source) -> set[str]:
    """Return the method names of the file's classes. They may override names of a table."""
    return {name for kind in source.classes.values() for name in _defined_in(kind.body)}


def test_no_name_is_in_a_table_twice() -> None:
    """A name of one class has one row, which holds all facts about it."""
    seen = [(row.file, row.owner, row.kind, row.name) for row in _ROWS]
    assert len(seen) == len(set(seen)), sorted(at for at in set(seen) if seen.count(at) > 1)


@dataclass(frozen=True)
class _Use:
    """An attribute of an object that is read, set, or named by a string."""

    where: str
    owner: str  # the expression before the dot
    name: str


def _uses(path: Path) -> Iterator[_Use]:
    """Return each attribute used by a dot, `getattr`, `hasattr`, `setattr`, `Patches`, or a key of `__dict__`."""
    for node in ast.walk(_source(path).tree):
        owner: ast.expr | None = None
        name: ast.expr | str | None = None
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("getattr", "hasattr", "setattr", "replaced"):
                owner, name = node.args[0], node.args[1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) == 3:
            if node.func.attr in ("replace", "precede"):  # of `Patches`
                owner, name = node.args[0], node.args[1]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            owner, name = node.value.value, node.slice if node.value.attr == "__dict__" else None
        if isinstance(name, ast.Constant):
            name = name.value
        if owner is not None and isinstance(name, str):
            where = f"{path.relative_to(_ROOT)}:{getattr(node, 'lineno', 0)}"
            yield _Use(where, ast.unparse(owner), name)


def _private_strings(path: Path) -> Iterator[_Use]:
    """Return strings that are names with a leading underscore, whatever call they are passed to."""
    names = {name for name in _source(path).strings if name.startswith("_") and name.isidentifier()}
    yield from (_Use(str(path.relative_to(_ROOT)), "", name) for name in names)


def _holds_a_foreign_object(owner: str) -> bool:
    last = owner.split(".")[-1].lstrip("_")
    return last in _HOLDERS or owner.endswith("engine.optimizer")


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names that the package's own classes define."""
    sources = [_source(path) for path in _PACKAGE.rglob("*.py")]
    return frozenset(name for source in sources for kind in source.classes for name in source.members(kind))


@functools.cache
def _public_names(*kinds: type) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in dir(kind) if not name.startswith("_"))


def _defined_by_tables() -> set[str]:
    """Return all members of DeepSpeed's classes in the tables, and attributes that its modules set on parameters."""
    folder, found = _folder_of("deepspeed"), set[str]()
    assert folder is not None
    for file, owner, kind in {(r.file, r.owner, r.kind) for r in _ROWS if _party(r.file) == "deepspeed"}:
        if (owner or kind == _SET_ON_OTHERS) and (folder / file).is_file():
            source = _source(folder / file)
            found |= source.attributes_set if kind else source.members(owner) if owner in source.classes else set()
    return found


def test_the_tables_leave_no_name_of_deepspeed_out() -> None:
    """Code under strategies/deepspeed uses only attributes of DeepSpeed's objects that are in a row or documented."""
    known = {row.name for row in _ROWS} | _PUBLIC | _OWN_MARKS
    of_engines = _public_names(nn.Module, Optimizer) | {"param_groups", "state"}
    of_others = of_engines | _public_names(Tensor, list, dict, set, str) | _own_names()
    suspicious = _defined_by_tables() - of_others
    left_out = [
        use
        for path in sorted(_ENGINE_FOLDER.glob("*.py"))
        for use in (*_uses(path), *_private_strings(path))
        if use.name not in known
        and not use.name.endswith("__")
        and use.owner.split(".")[0] not in ("self", "cls", "torch")
        and (
            (_holds_a_foreign_object(use.owner) and use.name not in of_engines)
            or use.name.startswith("ds_")
            or use.name in suspicious
            or (use.owner == "" and use.name not in _own_names())
        )
    ]
    assert not left_out, "\n".join(f"{use.where}: {use.owner}.{use.name}" for use in left_out)


def _is_private(module: str, name: str) -> bool:
    """Return whether an import is from inside DeepSpeed, or of a foreign name with a leading underscore."""
    parts = module.split(".")
    if parts[0] == "deepspeed":
        return module not in _PUBLIC_MODULES and (module, name) not in _PUBLIC_IMPORTS
    return parts[0] != "zero_plugin" and any(part.startswith("_") and part[:2] != "__" for part in (*parts, name))


def test_the_tables_leave_no_import_out() -> None:
    """Every import from inside DeepSpeed, or of another package's private name, is in a row."""
    modules = {row: re.sub(r"(/__init__)?\.pyi?$", "", row.file).replace("/", ".") for row in _ROWS}
    listed = {(module, row.name) for row, module in modules.items()}
    listed |= {(parent, name) for parent, _, name in (module.rpartition(".") for module in modules.values())}
    left_out = [
        f"{path.relative_to(_ROOT)}:{node.lineno}: {node.module}.{alias.name}"
        for path in sorted(_PACKAGE.rglob("*.py"))
        for node in ast.walk(_source(path).tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if _is_private(node.module, alias.name) and (node.module, alias.name) not in listed
    ]
    assert not left_out, "\n".join(left_out)


def test_the_tables_leave_no_underscore_out() -> None:
    """No code uses a foreign object's name with a leading underscore that is in no row."""
    known = {row.name for row in _ROWS} | _DOCUMENTED | _OWN_MARKS | _own_names()
    left_out = [
        use
        for path in sorted(_PACKAGE.rglob("*.py"))
        for use in _uses(path)
        if use.name.startswith("_")
        and not use.name.endswith("__")
        and use.name not in known
        and use.owner not in ("self", "cls", "super()")
    ]
    assert not left_out, "\n".join(f"{use.where}: {use.owner}.{use.name}" for use in left_out)
