"""Functions that the launch tests start: a TPU launch calls them for each device."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from loop import ACCUMULATION, by_hand, largest_difference, make_parts, train


def main() -> None:
    """Train. Write how the process was started, and the difference to plain torch."""
    from zero_plugin import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    run, wanted = train(accelerator, make_parts()), by_hand(1)[0]
    found = {
        "arguments": sys.argv[1:],
        "module": __name__,
        "device": str(accelerator.device),
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "apart": {what: largest_difference(run, wanted, what) for what in ("losses", "norms", "rates", "weights")},
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


def fail_last() -> None:
    """Fail on the last replica while the others wait, like in a collective."""
    import torch_xla.runtime as runtime

    rank, world = runtime.global_ordinal(), runtime.world_size()
    os.write(1, f"replica {rank} of {world}, {os.environ['WORLD_SIZE']} wanted: {sys.argv[1:]}\n".encode())
    if rank == world - 1:
        time.sleep(1)
        raise ValueError("the last one's")
    time.sleep(600)


def save_when_stopped() -> None:
    """Take a second to end after a stop request, on each replica."""
    from zero_plugin.distributed.process_end import StopRequest

    request = StopRequest()
    request.listen()
    os.write(1, b"listens\n")
    deadline = time.monotonic() + 120
    while not request.received and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    os.write(1, b"saved\n")
    raise SystemExit(143)


if __name__ == "__main__":
    raise SystemExit("a TPU launch imports the script; it does not run it")
