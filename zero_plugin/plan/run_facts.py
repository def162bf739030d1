"""What resolution needs to know of the training loop, from its DataLoaders, and of what the processes run on."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from zero_plugin.config.resolve.facts import LoopFacts, MachineFacts


def probe_loop(
    loaders: Sequence[DataLoader[Any]],
    prepared: Sequence[Sized],
    *,
    processes: int = 1,
    split_batches: bool = False,
    cut: int = 1,
) -> LoopFacts:
    """Facts of the training loader: the first of `loaders` that shuffles, else the first.

    Args:
        loaders: the DataLoaders of one `prepare`, as the user gave them.
        prepared: this process's part of each.
        processes: data-parallel processes.
        split_batches: whether a loader's batch is the global one, to be split among the processes.
        cut: into how many micro-batches each of its batches comes.
    """
    if not loaders:
        return LoopFacts()
    index = next((index for index, candidate in enumerate(loaders) if _shuffles(candidate)), 0)
    size, reason, fixed = _batch_size(loaders[index])
    if size is not None and split_batches:
        size, reason = max(1, size // processes), f"{reason} {size} ÷ {processes} processes (split_batches)"
    if size is not None and cut > 1:
        size, reason = max(1, size // cut), f"{reason} {size} ÷ {cut}, since memory ran out with more"
    given = _length(loaders[index])
    return LoopFacts(size, reason, fixed, _length(prepared[index]), None if given is None else given * cut)


def surely_train(loaders: Sequence[DataLoader[Any]]) -> bool:
    """Whether some loader is none for evaluation, which would go through its data in order."""
    return any(not isinstance(getattr(loader, "sampler", None), SequentialSampler) for loader in loaders)


def _shuffles(loader: DataLoader[Any]) -> bool:
    return isinstance(getattr(loader, "sampler", None), RandomSampler)


def _batch_size(loader: DataLoader[Any]) -> tuple[int | None, str, bool]:
    """Samples per batch, how that was found, and whether every full batch has it."""
    if loader.batch_size is not None:
        return loader.batch_size, "the training DataLoader's batch_size", True
    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler
    declared = getattr(batches, "batch_size", None)
    if isinstance(declared, int):
        return declared, "the training DataLoader's batch_sampler.batch_size", True
    if isinstance(batches, list | tuple) and batches:
        return len(batches[0]), "the first batch that the training DataLoader lists", False
    return None, "", False  # what is drawn or read to look at it may be lost to the loop, or change its order


def _length(loader: Sized) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a stream or a sampler has no length
        return None


AcceleratorKind = Literal["cpu", "cuda", "xla"]


def probe_machine(accelerator: AcceleratorKind | None = None, processes: int = 1) -> MachineFacts:
    """Facts of this process's device.

    Args:
        accelerator: device kind of the run; None takes CUDA where a GPU is visible, else the CPU.
        processes: data-parallel world size.
    """
    kind: AcceleratorKind = accelerator or ("cuda" if torch.cuda.is_available() else "cpu")
    return MachineFacts(
        accelerator=kind,
        processes=processes,
        bf16=_computes_in_bf16(kind),
        fp16=kind == "cuda",
    )


def accelerator_kind(device: torch.device) -> AcceleratorKind:
    """What of a device decides how a run is resolved."""
    return "cuda" if device.type == "cuda" else "xla" if device.type == "xla" else "cpu"


def _computes_in_bf16(kind: AcceleratorKind) -> bool:
    """Whether bf16 runs in hardware; elsewhere torch emulates it slowly."""
    if kind == "cuda":
        return bool(torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False))
    if kind == "cpu":
        # oneDNN's own answer for this processor (AVX-512 or better on x86, BF16 instructions on ARM)
        return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]
    return True
