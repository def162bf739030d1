"""Who goes first, who does what, and what all exchange; the same from `Accelerator` and from `PartialState`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

from zero_plugin import Accelerator
from zero_plugin.config.choices import DistributedType
from zero_plugin.distributed.processes import ProcessCalls
from zero_plugin.loop.state import PartialState


def check_order(calls: ProcessCalls, folder: Path) -> None:
    """The main process is first in, and the others come in when it is out."""
    for number, block in enumerate((calls.main_process_first, calls.local_main_process_first)):
        file = folder / f"order-{number}"
        with block():
            if calls.is_main_process:
                time.sleep(0.2)
                file.write_text("main\n")
            else:
                assert file.read_text().startswith("main")
        calls.wait_for_everyone()


def check_order_after_an_error(calls: ProcessCalls, folder: Path) -> None:
    """What the main process raises inside keeps nobody waiting, also where the script goes on after it."""
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


def check_decorators(calls: ProcessCalls, folder: Path) -> None:
    """With and without parentheses, of functions and by call; None elsewhere; the name is the function's."""
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


def check_dividing(calls: ProcessCalls, folder: Path) -> None:
    """Each process has its own share inside the context."""
    with calls.split_between_processes([1, 2, 3], apply_padding=True) as share:
        assert share == ([1, 2, 3] if calls.num_processes == 1 else [[1, 2], [3, 3]][calls.process_index])


def check_printing(calls: ProcessCalls, folder: Path, capture: list[str]) -> None:
    """`print` prints once on each machine."""
    calls.print("said", end="")
    assert capture == (["said", ""] if calls.is_local_main_process else [])


CHECKS = [check_order, check_order_after_an_error, check_decorators, check_dividing]


def check_exchange(accelerator: Accelerator) -> None:
    """Parameters have Accelerate's names; the trigger is seen by all, once."""
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


def main(store: str, rank: str, world: str) -> None:
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    state = PartialState(cpu=True, init_method=f"file://{store}")
    accelerator = Accelerator(cpu=True)
    kind = DistributedType.NO if world == "1" else DistributedType.MULTI_CPU
    for number, calls in enumerate((state, accelerator, accelerator.state)):
        assert (calls.process_index, calls.num_processes) == (int(rank), int(world))
        assert (calls.is_main_process, calls.is_last_process) == (rank == "0", int(rank) == int(world) - 1)
        assert (calls.distributed_type, calls.device) == (kind, torch.device("cpu"))
        assert calls.use_distributed == (world != "1")
        folder = Path(f"{store}-{number}")
        folder.mkdir(exist_ok=True)
        for check in CHECKS:
            check(calls, folder)
        printed: list[str] = []
        write, sys.stdout.write = sys.stdout.write, printed.append  # type: ignore[assignment]
        try:
            check_printing(calls, folder, printed)
        finally:
            sys.stdout.write = write  # type: ignore[method-assign]
    check_exchange(accelerator)


@pytest.mark.processes
@pytest.mark.parametrize("world", [1, 2])
def test_every_call(run_processes, world: int) -> None:
    """On one process and on two, which then end by themselves."""
    run_processes(__file__, world)


if __name__ == "__main__":
    main(*sys.argv[1:4])
