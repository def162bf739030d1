"""Containers keep their kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

from zero_plugin.tensors.nested import list_leaves, map_leaves

Point = namedtuple("Point", "x y")


@dataclass(frozen=True)
class Sample:
    value: int
    name: str


def test_every_container_keeps_its_type_and_order() -> None:
    """Dict-likes, sequences, named tuples and dataclasses come back as the same kind."""
    tree = {
        "a": [1, (2, Point(3, 4))],
        "b": OrderedDict(z=5, y=UserDict(u=6)),
        "c": defaultdict(list, k=7),
        "d": Sample(8, "s"),
    }
    doubled = map_leaves(lambda leaf: leaf * 2, tree)
    assert doubled == {
        "a": [2, (4, Point(6, 8))],
        "b": OrderedDict(z=10, y=UserDict(u=12)),
        "c": defaultdict(list, k=14),
        "d": Sample(16, "ss"),
    }
    assert [type(value) for value in doubled.values()] == [type(value) for value in tree.values()]
    assert doubled["c"].default_factory is list
    assert list_leaves(tree) == [1, 2, 3, 4, 5, 6, 7, 8, "s"]


def test_the_given_tree_is_left_alone() -> None:
    """Mapping copies, and never writes into the caller's dict."""
    tree = {"a": {"b": 1}}
    map_leaves(lambda leaf: leaf + 1, tree)
    assert tree == {"a": {"b": 1}}


def test_a_container_can_be_kept_whole() -> None:
    """`is_leaf` keeps a container from being opened."""
    assert map_leaves(str, [Point(1, 2)], is_leaf=lambda node: isinstance(node, Point)) == ["Point(x=1, y=2)"]
