"""Functions for scripts on the tensors of all processes, on one process and on two."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from on_paths import in_processes
from torch import nn

from zero_plugin.distributed.collectives import CannotPadNestedTensorWarning
from zero_plugin.utils.operations import (
    DistributedOperationException,
    GatheredParameters,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)

pytestmark = pytest.mark.usefixtures("ends_processes")

Pair = namedtuple("Pair", "left right")


@in_processes(2)
def test_collecting(rank: int, world: int) -> None:
    """Tensors and objects are gathered, reduced and padded over the processes."""
    own = torch.arange(2.0) + 2 * rank
    tree = {"a": own, "b": Pair(torch.full((rank + 1,), rank), [torch.ones(1, 2).t()])}
    got = gather(tree)
    assert got["a"].tolist() == list(range(2 * world))
    assert isinstance(got["b"], Pair)
    assert got["b"].left.tolist() == [r for r in range(world) for _ in range(r + 1)]
    assert gather_object([rank]) == list(range(world))
    total = world * (world - 1) / 2
    assert reduce({"a": own}, "sum")["a"].tolist() == [2 * total, 2 * total + world]
    assert reduce(own).tolist() == [2 * total / world, 2 * total / world + 1]
    assert reduce(own, "max").tolist() == [2 * world - 2, 2 * world - 1]
    assert reduce(own, "none").tolist() == own.tolist()
    assert reduce(own, "sum", scale=0.5).tolist() == [total, total + world / 2]
    assert pad_across_processes([torch.ones(rank + 1)], pad_index=-1)[0].tolist() == [1] * (rank + 1) + [-1] * (
        world - rank - 1
    )


@in_processes(2)
def test_broadcasting(rank: int, world: int) -> None:
    """Tensors change in place to those of one process, objects in their list."""
    own = torch.full((2,), float(rank))
    weight = nn.Parameter(torch.full((2, 2), float(rank)).t())
    assert broadcast([own, weight], from_process=world - 1)[0] is own
    assert own.tolist() == [world - 1] * 2
    assert weight.tolist() == [[world - 1] * 2] * 2
    box = [rank, {"rank": rank}]
    assert broadcast_object_list(box, from_process=world - 1) is box
    assert box == [world - 1, {"rank": world - 1}]


@in_processes(2)
def test_disagreements(rank: int, world: int) -> None:
    """Tensors that differ between processes are errors of Accelerate's classes."""
    one, other = {"x": torch.ones(1, 5)}, {"x": torch.ones(1, 2, 5)}
    for call in (gather, reduce, broadcast, pad_across_processes):
        with pytest.raises(DistributedOperationException, match=rf"{call.__name__}: .*differ"):
            call(other if rank else one)
        with pytest.raises(TypeError, match=rf"<class 'str'>\) passed to `{call.__name__}`"):
            call([torch.ones(1), "text"])
    assert gather_object((rank,)) == list(range(world))
    with pytest.raises(DistributedOperationException, match=r"gather_object\(\[value\]\)"):
        gather_object({"rank": rank})


def test_one_process() -> None:
    """Every function has the same meaning on one process as on several."""
    test_collecting.body(0, 1)
    test_broadcasting.body(0, 1)


def test_one_process_gets_its_own_back() -> None:
    """On one process the given value is returned, with its gradient."""
    loss = torch.ones(1, requires_grad=True).sum()
    assert gather(loss) is loss
    assert gather_object({"a": 1}) == {"a": 1}


def test_nested_tensors_are_not_padded() -> None:
    """A nested tensor is returned unchanged with a warning. A tensor without the dimension is returned unchanged."""
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(1)], layout=torch.jagged)
    with pytest.warns(CannotPadNestedTensorWarning):
        assert pad_across_processes(nested) is nested
    flat = torch.ones(4, 3)
    assert pad_across_processes(flat, dim=-3) is flat


def test_parameters_that_are_whole_need_no_gathering() -> None:
    """Without ZeRO-3 the context does nothing, and loads nothing."""
    weight = nn.Parameter(torch.ones(1))
    for given in (weight, [weight], iter([weight])):
        with GatheredParameters(given, modifier_rank=0), torch.no_grad():
            weight.add_(1)
    assert weight.item() == 4
