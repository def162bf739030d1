"""Seed every random number generator that a training script draws from."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from zero_plugin.collectives import process_index

__all__ = ["set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch (all devices).

    Args:
        seed: any non-negative integer; NumPy gets it modulo 2**32, which is all that it takes.
        device_specific: add the process index, so that processes draw differently.
        deterministic: also make torch refuse operations without a deterministic implementation.
    """
    if device_specific:
        seed += process_index()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # the CPU and every device, also one not yet initialised
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in deterministic mode
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
