"""Mutants of the package: changes by cosmic-ray's operators, and by one more, that some test must notice."""

from __future__ import annotations

import difflib
import hashlib
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

PACKAGE = "zero_plugin"
ROOMS = ("loop", "strategies", "checkpoint", "data", "distributed")
_NOT_RUN = ("strategies/xla.py",)  # by tests that need torch_xla's environment

# The replacements of each operator that a test can miss. Others, like `a < b` for `a is b`, always raise.
_BINARY = "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul BitOr_BitAnd"
_COMPARISONS = "Is_IsNot IsNot_Is Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_GtE Gt_LtE LtE_Gt GtE_Lt"
_OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_USub_UAdd"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    *("RemoveDecorator", "ZeroIterationForLoop", "RemoveStatement"),
)
_TYPED = ("ReplaceBinaryOperator_BitOr_BitAnd",)  # `A | B` of types
# Text that is only printed or a type, and assertions that cannot fail.
_TOLD = re.compile(r"(_?log(ger)?|_logger|warnings)\.\w+|announce|print")
_TELLS = re.compile(r"def (_?(describe|explain)\w*|__(repr|str)__)\(")
_TOLD_TYPE = re.compile(r"->\s*(list\[str\]|str)(\s*\| None)?\s*:")
# Without these decorators the code does the same, or is only slower.
_SAME_WITHOUT = re.compile(
    r"@(abstractmethod|override|overload|staticmethod|classmethod|final|(functools\.)?(wraps|cache|lru_cache)|dataclass)\b"
)
_SAME_ARGUMENTS = ("frozen", "slots", "kw_only", "eq", "repr", "compare", "stacklevel", "strict", "maxsize")


class RemoveStatement(Operator):
    """Operator that removes a statement: a call, a raise, an attribute change, or an early return."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        """Yield the position of the statement."""
        if node.type == "simple_stmt" and _does_something(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Return `pass` instead."""
        gone = node.children[0]
        stands_in = Keyword("pass", gone.start_pos, gone.get_first_leaf().prefix)
        stands_in.parent = node
        node.children[0] = stands_in
        return node

    @classmethod
    def examples(cls) -> tuple[Any, ...]:
        """Return examples for cosmic-ray's own tests."""
        return ()


def _does_something(statement: Any) -> bool:
    code = statement.get_code(include_prefix=False)
    if statement.type in ("atom_expr", "power"):
        return bool(statement.children[-1].type == "trailer" and code.endswith(")"))
    if statement.type == "expr_stmt":
        target, sign = statement.children[0].get_code(), statement.children[1].get_code().strip()
        function = statement.search_ancestor("funcdef")
        # Code that reads a variable, or an object's initial attribute, would raise without this statement.
        starts = sign == "=" and (
            re.fullmatch(r"[\w\s,()*]+", target) or (function and function.name.value == "__init__")
        )
        return not starts and statement.children[1].type != "annassign"
    return statement.type in ("raise_stmt", "del_stmt") or code == "return"


@dataclass(frozen=True)
class Mutant:
    """A mutant: one change.

    Attributes:
        file: file in the package.
        operator: its name.
        occurrence: index among the operator's places in the file.
        line: line of the change; `column` is its column.
        column: column of the first changed character.
        places: sets of lines, the most exact first. The tests of the first set that any test runs can notice the
            change.
    """

    file: str
    operator: str
    occurrence: int
    line: int
    column: int
    places: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """File, line, column and operator."""
        return f"{PACKAGE}/{self.file}:{self.line}:{self.column} {self.operator}"

    def apply(self, copy: Path) -> None:
        """Change the file in a copy of the checkout."""
        file = copy / PACKAGE / self.file
        file.write_text(self.mutate(file.read_text()))

    def mutate(self, source: str) -> str:
        """Return the file's text with the change."""
        changed: str | None = mutate_code(source, _operator(self.operator), self.occurrence)
        assert changed is not None
        return changed

    def change(self, package: Path) -> str:
        """Return the removed and the added lines."""
        source = (package / self.file).read_text()
        lines = difflib.unified_diff(source.splitlines(), self.mutate(source).splitlines(), lineterm="", n=0)
        return "\n".join(f"    {line}" for line in list(lines)[3:])


def sample(mutants: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, the same for the same package and seed. A larger sample begins with a smaller one.

    A place is drawn first, then one of its changes, so an operator with many replacements is not drawn more often.
    """
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault((mutant.file, mutant.line, mutant.column), []).append(mutant)
    draw = random.Random(seed)
    order = sorted(places)
    draw.shuffle(order)
    return [draw.choice(places[place]) for place in order[:count]]


def mutants_of(package: Path) -> Iterator[Mutant]:
    """Return all mutants of `ROOMS`."""
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            file = path.relative_to(package).as_posix()
            if file not in _NOT_RUN:
                yield from mutants_in(file, path.read_text())


def mutants_in(file: str, source: str) -> Iterator[Mutant]:
    """Return the mutants of a file."""
    tree = parso.parse(source)
    nodes = [node for node in ast_nodes(tree) if node.type not in ("newline", "name", "string", "fstring_string")]
    for name in _OPERATORS:
        occurrence = 0
        for node in nodes:
            for (line, column), _ in _operator(name).mutation_positions(node):
                leaf = tree.get_leaf_for_position((line, column), include_prefixes=True)
                if _can_be_missed(leaf, name):
                    yield Mutant(file, name, occurrence, line, column, _places(leaf))
                occurrence += 1


def digest_of(root: Path) -> str:
    """Return a digest of the rooms' sources. Equal sources give equal samples."""
    digest = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((root / PACKAGE / room).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


@cache
def _operator(name: str) -> Operator:
    if name == RemoveStatement.__name__:
        return RemoveStatement()
    made: Operator = OperatorProvider()[name]()
    return made


def _can_be_missed(leaf: Any, operator: str) -> bool:
    """Return whether a test must notice the change: it changes behaviour, and is in no message, type or assertion."""
    if operator.startswith("ReplaceBinary") and leaf.parent.type not in ("term", "arith_expr", "expr", "power"):
        return False  # the stars of parameters and arguments
    if operator == "ExceptionReplacer" and leaf.type != "name":
        return False  # `except module.Name`, in which the dot is replaced
    inside: Any = leaf
    while (node := inside.parent) is not None:
        kind, code = node.type, node.get_code(include_prefix=False)
        if kind in ("fstring", "tfpdef", "assert_stmt") or (kind == "annassign" and inside is node.children[1]):
            return False
        if kind == "raise_stmt" and operator != "RemoveStatement":
            return False
        if kind == "decorator" and (operator != "RemoveDecorator" or _SAME_WITHOUT.match(code)):
            return False
        if kind in ("atom_expr", "power") and (_TOLD.match(code) or (operator in _TYPED and code.startswith("isinst"))):
            return False
        if kind == "argument" and code.split("=")[0].strip() in _SAME_ARGUMENTS:
            return False
        if kind == "if_stmt" and code.startswith("if TYPE_CHECKING"):
            return False
        if kind == "funcdef" and (inside is node.annotation or (_TELLS.match(code) and _TOLD_TYPE.search(code))):
            return False
        inside = node
    return True


def _places(leaf: Any) -> tuple[tuple[int, ...], ...]:
    """Return its line or statement. Outside functions, whose lines run at import, return its name's uses, or all."""
    inside, node = leaf, leaf.parent
    statement: range | None = None
    while node is not None and node.type != "funcdef":
        kinds = {node.type, *(child.type for child in node.children)}
        if statement is None and kinds & {"simple_stmt", "suite"}:
            statement = _part(node, inside)
        inside, node = node, node.parent
        if inside.type == "decorated" and inside.children[-1].type == "funcdef":
            node = inside.children[-1]
    if node is not None and inside is node.children[-1] and statement is not None:
        return ((leaf.start_pos[0],), tuple(statement))
    functions = [found for found in ast_nodes(leaf.get_root_node()) if found.type == "funcdef"]
    everywhere = {line for function in functions for line in _body(function)}
    if node is not None:  # a default, or a decorator
        return (tuple(_body(node)), tuple(sorted(everywhere)))
    text = leaf.get_root_node().get_code().splitlines()
    name = re.match(r"\s*(\w+)", text[(statement or [leaf.start_pos[0]])[0] - 1])
    uses = {line for line in everywhere if name and re.search(rf"\b{name[1]}\b", text[line - 1])}
    return (tuple(sorted(uses)), tuple(sorted(everywhere)))


def _part(node: Any, inside: Any) -> range:
    """Return the lines of a statement, or of its header, that contain the part."""
    first = last = node.children.index(inside)
    while first and node.children[first - 1].type != "suite":
        first -= 1
    while last + 1 < len(node.children) and node.children[last + 1].type != "suite":
        last += 1
    return range(node.children[first].start_pos[0], node.children[last].get_last_leaf().start_pos[0] + 1)


def _body(function: Any) -> range:
    return range(function.children[-1].start_pos[0] + 1, function.end_pos[0])
