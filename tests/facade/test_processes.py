"""Order, roles and exchange of processes, the same from `Accelerator` and from `PartialState`."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from on_paths import in_processes

from zero_plugin import Accelerator
from zero_plugin.config.choices import DistributedType
from zero_plugin.distributed.processes import ProcessCalls
from zero_plugin.loop.state import PartialState

OWNERS = ("PartialState", "Accelerator", "AcceleratorState")


@contextmanager
def calls_of(owner: str) -> Iterator[ProcessCalls]:
    """Return the object with the calls, of a run that ends after the test."""
    accelerator = Accelerator(cpu=True)
    try:
        owners: tuple[Any, ...] = (PartialState(), accelerator, accelerator.state)
        yield owners[OWNERS.index(owner)]
    finally:
        accelerator.end_training()


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_who_this_process_is(owner: str, rank: int, world: int) -> None:
    """A process has its index, the number of processes, and the kind of run."""
    with calls_of(owner) as calls:
        assert (calls.process_index, calls.num_processes) == (rank, world)
        assert (calls.is_main_process, calls.is_last_process) == (rank == 0, rank == world - 1)
        kind = DistributedType.NO if world == 1 else DistributedType.MULTI_CPU
        assert (calls.distributed_type, calls.device) == (kind, torch.device("cpu"))
        assert calls.use_distributed == (world > 1)


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_order(owner: str, folder: Path) -> None:
    """The main process enters first, and the others enter when it has left."""
    with calls_of(owner) as calls:
        for number, block in enumerate((calls.main_process_first, calls.local_main_process_first)):
            file = folder / f"order-{number}"
            with block():
                if calls.is_main_process:
                    time.sleep(0.2)
                    file.write_text("main\n")
                else:
                    assert file.read_text().startswith("main")
            calls.wait_for_everyone()


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_order_after_an_error(owner: str) -> None:
    """An error of the main process inside blocks no other process, even if the script continues."""
    with calls_of(owner) as calls:
        came = []
        try:
            with calls.main_process_first():
                came.append(calls.process_index)
                if calls.is_main_process:
                    raise OSError("cannot be read")
        except OSError:
            pass
        assert came == [calls.process_index]
        with pytest.raises(ValueError, match="everywhere"), calls.local_main_process_first():
            raise ValueError("everywhere")
        calls.wait_for_everyone()


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_decorators(owner: str) -> None:
    """Decorators work with and without parentheses, and return None elsewhere. The function keeps its name."""
    with calls_of(owner) as calls:
        rank, last = calls.process_index, calls.num_processes - 1

        @calls.on_main_process
        def on_main(value: int, *, more: int = 0) -> tuple[int, int]:
            return value, more

        @calls.on_local_main_process()
        def on_local_main() -> int:
            return rank

        @calls.on_process(process_index=1)
        def on_one() -> int:
            return rank

        @calls.on_local_process(local_process_index=0)
        def on_local_zero() -> int:
            return rank

        assert on_main.__name__ == "on_main"
        assert on_main(1, more=2) == ((1, 2) if rank == 0 else None)
        assert on_local_main() == (0 if rank == 0 else None)
        assert on_one() == (rank if rank == 1 or last == 0 else None)
        assert on_local_zero() == (0 if rank == 0 else None)
        assert calls.on_last_process(lambda: rank)() == (last if rank == last else None)
        assert calls.on_process(lambda: rank, process_index=0)() == (0 if rank == 0 else None)


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_dividing(owner: str) -> None:
    """Each process has its own part inside the context."""
    with calls_of(owner) as calls, calls.split_between_processes([1, 2, 3], apply_padding=True) as share:
        assert share == ([1, 2, 3] if calls.num_processes == 1 else [[1, 2], [3, 3]][calls.process_index])


@pytest.mark.parametrize("owner", OWNERS)
@in_processes(1, 2)
def test_printing(owner: str) -> None:
    """`print` prints once on each machine."""
    printed = io.StringIO()
    with calls_of(owner) as calls, contextlib.redirect_stdout(printed):
        calls.print("said", end="")
        assert printed.getvalue() == ("said" if calls.is_local_main_process else "")


@in_processes(1, 2)
def test_exchange() -> None:
    """Parameters have Accelerate's names. All processes see the trigger once."""
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    own = torch.tensor([float(rank)])
    ranks = [float(r) for r in range(world)]
    assert accelerator.gather(tensor=own).tolist() == ranks
    assert accelerator.reduce(tensor={"a": own})["a"].item() == sum(ranks)
    assert accelerator.reduce(own, reduction="mean").item() == sum(ranks) / world
    assert accelerator.reduce(own, "max", scale=2.0).item() == 2 * (world - 1)
    padded = accelerator.pad_across_processes(tensor=torch.ones(rank + 1), dim=0, pad_index=7, pad_first=True)
    assert padded.tolist() == [7.0] * (world - rank - 1) + [1.0] * (rank + 1)
    assert accelerator.broadcast(own, from_process=world - 1).item() == world - 1
    assert accelerator.check_trigger() is False
    if accelerator.is_last_process:
        accelerator.set_trigger()
    assert accelerator.check_trigger() is True
    assert accelerator.check_trigger() is False
    accelerator.end_training()
