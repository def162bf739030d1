"""Kinds of training code on every path, against plain torch in one process over the same global batches.

`make campaign` prints the table: kind | path | processes | relative difference of the final weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

PATHS = {1: "single,zero2", 2: "ddp,zero1,zero2,zero3,zero2-cpu,zero3-cpu", 3: "ddp,zero1,zero2,zero3,zero2-cpu"}
# What a path refuses, in words that the error has.
REFUSED = {("gradient penalty", path): "Use stage 2" for path in ("zero3", "zero3-cpu")}
PLAIN, KERNELS = 3e-6, 1e-4  # the second with DeepSpeed's own kernels, under offload


@pytest.mark.campaign
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize("world", PATHS)
def test_kinds_train_as_in_plain_torch(world: int, run_processes: Callable[..., list[str]], tmp_path: Path) -> None:
    """Final weights are plain torch's, for each kind on each path."""
    worker = Path(__file__).with_name("kinds_worker.py")
    run_processes(worker, world, PATHS[world], tmp_path, seconds=3000)
    rows = [
        json.loads(line) for file in sorted(tmp_path.glob("rank-*.jsonl")) for line in file.read_text().splitlines()
    ]
    wrong = []
    for kind, path, processes, found in rows:
        told = found.strip().splitlines()[-1] if isinstance(found, str) else f"{found:.1e}"
        line = f"{kind} | {path} | {processes} | {told}"
        print(line)
        limit = KERNELS if path.endswith("-cpu") else PLAIN
        if (words := REFUSED.get((kind, path))) is not None:
            if not isinstance(found, str) or words not in found:
                wrong.append(line)
        elif isinstance(found, str) or not found <= limit:
            wrong.append(line)
    assert not wrong, "\n".join(dict.fromkeys(wrong))
