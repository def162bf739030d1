"""Batch arithmetic: train_batch_size = micro-batch × accumulation × data-parallel processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

from zero_plugin.config.rules.asked import Asked, is_count
from zero_plugin.errors import Problem

__all__ = ["check_batch"]


def check_batch(asked: Asked) -> Iterator[Problem]:
    """The product against what is written, with as many of its factors as are known."""
    total = asked.value("train_batch_size")
    parts = {
        "train_micro_batch_size_per_gpu": asked.value("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": asked.value("gradient_accumulation_steps"),
        "num_processes": asked.document.launch.value("num_processes"),
    }
    known = {name: n for name, n in parts.items() if is_count(n)}
    if not is_count(total) or not known:
        return
    product = math.prod(known.values())
    factors = " × ".join(f"{name} {n}" for name, n in known.items())
    arithmetic = f"{factors} = {product}" if len(known) > 1 else factors
    if len(known) == len(parts) and total != product:
        fix = f"Write {product}, or auto, or delete it: it follows from the others."
        yield asked.error("train_batch_size", f"{total}, but {arithmetic}", fix)
    elif total % product:
        fix = f"Write a multiple of {product}, e.g. {max(1, round(total / product)) * product}."
        yield asked.error("train_batch_size", f"{total} is not a multiple of {arithmetic}", fix)
