"""Collectives mean the same in one process and in several."""

from __future__ import annotations

import logging
from collections import OrderedDict, namedtuple

import pytest
import torch
from on_paths import in_processes

from zero_plugin.distributed import collectives
from zero_plugin.errors import LoopError

Pair = namedtuple("Pair", "left right")


class Plain(dict):
    """A script's own container. Its text is Python's, with an address that differs between processes."""

    __repr__ = object.__repr__


@in_processes(1, 2, 3)
def test_gather(rank: int, world: int) -> None:
    """A tree of tensors with uneven first dimensions, dtypes and named tuples is gathered in the order of ranks."""
    tree = {
        "rows": torch.full((rank + 1, 2), rank, dtype=torch.bfloat16),
        "nested": [Pair(torch.tensor(float(rank)), (torch.tensor([rank % 2 == 0]),))],
        "one_sided": torch.arange(3 if rank == world - 1 else 0),
        "same": torch.full((2,), rank, dtype=torch.int16),
        "nothing": torch.empty(0, 3),
    }
    got = collectives.gather(tree)
    assert list(got) == list(tree)
    assert got["rows"].dtype == torch.bfloat16
    assert got["rows"][:, 0].tolist() == [float(r) for r in range(world) for _ in range(r + 1)]
    assert isinstance(got["nested"][0], Pair)
    assert got["nested"][0].left.tolist() == [float(r) for r in range(world)]
    assert got["nested"][0].right[0].tolist() == [r % 2 == 0 for r in range(world)]
    assert got["one_sided"].tolist() == [0, 1, 2]
    assert got["same"].tolist() == [r for r in range(world) for _ in range(2)]
    assert got["nothing"].shape == (0, 3)
    assert collectives.reduce(Plain(a=torch.ones(1)), "sum")["a"].tolist() == [world]
    assert_graphs(world)
    transposed = torch.arange(6).view(2, 3).t() + rank
    assert collectives.gather(transposed)[:3].tolist() == [[0, 3], [1, 4], [2, 5]]


def assert_graphs(world: int) -> None:
    """Check graphs: one process keeps them in gathered and reduced tensors.

    Several processes warn of matrices with one.
    """
    leaf = torch.ones(2, 2, requires_grad=True)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_plugin").addHandler(handler)
    for call in (collectives.gather, collectives.reduce):
        with torch.no_grad():
            call(leaf)
        call([leaf.sum(), leaf.detach(), leaf[0]])
        assert told == []
        for _ in range(2):
            assert call(leaf * 2).requires_grad is (world == 1)
        assert len(told) == (world > 1)
        assert all(f"write {call.__name__}(tensor.detach())" in text for text in told)
        told.clear()
    logging.getLogger("zero_plugin").removeHandler(handler)
    if world == 1:
        (3 * collectives.reduce(collectives.gather(leaf), "mean", scale=2.0)).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [[6.0] * 2] * 2


@in_processes(1, 2, 3)
def test_values(rank: int, world: int) -> None:
    own = {"rank": rank, "parts": [None, True, "ü\ud800"] * rank, "loss": float("inf")}
    assert collectives.gather_values(own) == [
        {"rank": r, "parts": [None, True, "ü\ud800"] * r, "loss": float("inf")} for r in range(world)
    ]
    assert collectives.broadcast_value((rank, "x" * 5000 * rank), from_process=world - 1) == [
        world - 1,
        "x" * 5000 * (world - 1),
    ]
    with pytest.raises(TypeError, match="JSON"):
        collectives.gather_values(object())


@in_processes(1, 2, 3)
def test_objects(rank: int, world: int) -> None:
    assert collectives.gather_object([rank] * rank) == [r for r in range(world) for _ in range(r)]
    box = [f"from {rank}", {"rank": rank}]
    assert collectives.broadcast_object_list(box, from_process=world - 1) is box
    assert box == [f"from {world - 1}", {"rank": world - 1}]


@in_processes(1, 2, 3)
def test_reduce_and_broadcast(rank: int, world: int) -> None:
    own = torch.tensor([rank, 1])
    total = world * (world - 1) // 2
    assert collectives.reduce({"a": own}, "sum")["a"].tolist() == [total, world]
    assert own.tolist() == [rank, 1]
    assert collectives.reduce(own.float(), "mean").tolist() == [total / world, 1.0]
    assert collectives.reduce(own, "mean").tolist() == [total / world, 1.0]
    assert collectives.reduce(own, "max").tolist() == [world - 1, 1]
    assert collectives.reduce(own.float(), "sum", scale=0.5).tolist() == [total / 2, world / 2]
    assert collectives.reduce(torch.tensor(True), "sum").item() == world
    assert collectives.reduce({"a": own}, "max")["a"].tolist() == [world - 1, 1]
    assert collectives.reduce(own, "none").tolist() == [rank, 1]
    assert collectives.broadcast([own], from_process=world - 1)[0].tolist() == [world - 1, 1]
    assert own.tolist() == [rank, 1]


@in_processes(1, 2, 3)
def test_padding(rank: int, world: int) -> None:
    own = torch.ones(2, rank + 1)
    padded = collectives.pad_across_processes({"x": own, "scalar": torch.tensor(1.0)}, dim=1, pad_index=-1)
    assert padded["x"].tolist() == [[1.0] * (rank + 1) + [-1.0] * (world - rank - 1)] * 2
    assert padded["scalar"].ndim == 0
    first = collectives.pad_across_processes(own, dim=-1, pad_first=True)
    assert first.tolist() == [[0.0] * (world - rank - 1) + [1.0] * (rank + 1)] * 2


@in_processes(2, 3)
def test_mismatch(rank: int, world: int) -> None:
    with pytest.raises(LoopError, match="pad_across_processes") as caught:
        collectives.gather(torch.ones(2, rank + 1))
    assert f"process {world - 1}: [((2, {world}), 'torch.float32')]" in str(caught.value)
    for most in (2, 9):
        with pytest.raises(LoopError, match="differ in number"):
            collectives.gather([torch.ones(2)] * (most - min(rank, 1)))
    with pytest.raises(LoopError, match="differ in number"):
        collectives.gather([torch.ones(2)] * min(rank, 1))
    with pytest.raises(LoopError, match=r"process 0 is in gather\(\), process 1 is in reduce\(\)"):
        (collectives.reduce if rank else collectives.gather)(torch.ones(2))
    many = collectives.gather([torch.full((rank + i,), i) for i in range(9)])
    assert [t.tolist() for t in many] == [[i] * sum(r + i for r in range(world)) for i in range(9)]
    for call in (collectives.reduce, collectives.broadcast):
        with pytest.raises(LoopError, match=rf"{call.__name__}: the processes' tensors differ"):
            call({"a": torch.ones(2), "b": torch.ones(rank + 1)})
    with pytest.raises(LoopError, match="pad_across_processes: the processes' tensors differ"):
        collectives.pad_across_processes(torch.ones([1] * (rank + 1)))
    with pytest.raises(LoopError, match="reduce: the processes' tensors differ"):
        collectives.reduce([torch.ones(2)] * (rank + 1))


@in_processes(2, 3)
def test_arguments(rank: int, world: int) -> None:
    """Arguments and containers that differ are an error on every process, for tensors of any size."""
    first = rank == 0
    for size in (2, 1000):
        x = torch.ones(size)
        with pytest.raises(LoopError, match="broadcast: the processes' containers or arguments differ"):
            collectives.broadcast(x, from_process=rank)
        with pytest.raises(LoopError, match="reduce: the processes' containers or arguments differ"):
            collectives.reduce(x, "sum" if first else "max")
        with pytest.raises(LoopError, match="reduce: the processes' containers or arguments differ"):
            collectives.reduce(x, "none" if first else "sum")
        with pytest.raises(LoopError, match="reduce: the processes' containers or arguments differ"):
            collectives.reduce(x, "sum", scale=1.0 + rank)
        with pytest.raises(LoopError, match="reduce: the processes' containers or arguments differ"):
            collectives.reduce({"a": x, "b": x} if first else {"b": x, "a": x})
        with pytest.raises(LoopError, match="gather: the processes' tensors differ"):
            collectives.gather({"a": x, "b": x} if first else {"b": x, "a": x})
        with pytest.raises(LoopError, match="pad_across_processes: the processes' containers or arguments differ"):
            collectives.pad_across_processes(x.view(1, -1), dim=int(first))
        with pytest.raises(LoopError, match=r"process 0 is in gather\(\), process 1 is in gather_object\(\)"):
            collectives.gather(x) if first else collectives.gather_object([1])
        with pytest.raises(LoopError, match=r"process 0 is in gather\(\), process 1 is in gather_values\(\)"):
            collectives.gather(x) if first else collectives.gather_values("x" * size)
    with pytest.raises(LoopError, match=f"from_process={world}; there are processes 0 to {world - 1}"):
        collectives.broadcast(torch.ones(1), from_process=world)


@in_processes(1, 2, 3)
def test_small_tensors(rank: int, world: int) -> None:
    """At the size limit of a single exchange, and if one process exceeds it, all get the same result as above it."""
    for size in range(228, 245):
        own = torch.arange(float(size)) + rank
        whole = torch.cat([torch.arange(float(size)) + r for r in range(world)])
        assert torch.equal(collectives.gather(own), whole)
        assert torch.equal(collectives.gather(own[: size if rank else 3])[:3], torch.arange(3.0))
        assert torch.equal(collectives.reduce(own, "max"), torch.arange(float(size)) + world - 1)
        assert torch.equal(collectives.broadcast(own, world - 1), torch.arange(float(size)) + world - 1)
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float64, torch.complex64):
        assert collectives.gather(torch.ones(3, dtype=dtype)).tolist() == [1] * 3 * world
    conjugate = torch.tensor([1 + 2j]).conj()
    assert collectives.gather(conjugate).tolist() == [1 - 2j] * world
    assert collectives.broadcast(conjugate.imag).tolist() == [-2]
    for size in (2, 1000):
        largest = collectives.reduce(torch.full((size,), float("nan") if rank else 1.0), "max")
        assert largest.isnan().all() == (world > 1)
    with pytest.raises(LoopError, match=r"gather: found a torch.sparse_coo tensor; give dense ones"):
        collectives.gather(torch.ones(2).to_sparse())


@pytest.mark.parametrize(
    "test",
    [test_small_tensors, test_gather, test_values, test_objects, test_reduce_and_broadcast, test_padding],
)
def test_one_process_without_a_group(test) -> None:
    """Without a process group every operation returns the result of a group of one."""
    assert (collectives.process_index(), collectives.num_processes()) == (0, 1)
    test.body(0, 1)


@pytest.mark.parametrize("call", [collectives.gather, collectives.reduce, collectives.pad_across_processes])
def test_a_leaf_that_is_no_tensor_is_named(call) -> None:
    """Numbers and texts cannot travel as tensors. The error names a function for them."""
    with pytest.raises(LoopError, match=r"found a str.*gather_object"):
        call(OrderedDict(a=torch.ones(1), b="text"))


def test_gather_object_wants_a_list() -> None:
    """Joining lists would split or lose a bare object."""
    with pytest.raises(LoopError, match=r"gather_object\(\[value\]\)"):
        collectives.gather_object({"a": 1})  # type: ignore[arg-type]


def test_reduce_names_its_ways() -> None:
    """Another word than these four is an error, not the default."""
    with pytest.raises(LoopError, match='"sum", "mean", "max" or "none"'):
        collectives.reduce(torch.ones(1), "min")  # type: ignore[arg-type]


def test_nested_tensors_are_not_padded() -> None:
    """Their target shape is unknown, and a warning says so."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    with pytest.warns(collectives.CannotPadNestedTensorWarning, match="padded one first"):
        assert collectives.pad_across_processes({"x": nested})["x"] is nested
