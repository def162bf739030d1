"""A loader shared out among the processes: every sample comes once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils.data import DataLoader

from zero_plugin.selftest.outcome import CheckError
from zero_plugin.selftest.run import Run

__all__ = ["check_data_loader"]

_SAMPLES = 1003  # no multiple of any usual number of processes
_BATCH = 4


def check_data_loader(run: Run) -> str:
    """Go through a shuffled epoch, and collect as for a metric."""
    samples: Any = range(_SAMPLES)
    loader = run.accelerator.prepare(DataLoader(samples, batch_size=_BATCH, shuffle=True))
    seen, batches = [], 0
    for batch in loader:
        seen.append(run.accelerator.gather_for_metrics(batch))
        batches += 1
    counted = Counter(torch.cat(seen).tolist())
    missing = [sample for sample in range(_SAMPLES) if not counted[sample]]
    twice = [sample for sample, count in counted.items() if count > 1]
    if missing or twice:
        raise CheckError(f"of {_SAMPLES} samples {len(missing)} are missing and {len(twice)} come more than once")
    return f"{_SAMPLES} samples, each once; {batches} batches on every process"
