"""The gradients of a split model: sums over copies, and norms and checks over all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_plugin.tensor_parallel.split import Split


def sum_over_copies(
    split: Split, held: Callable[[nn.Parameter], Tensor | None], device: torch.device | None = None
) -> list[nn.Parameter]:
    """Sum the gradients that are spread over copies of a parameter, in place. Collective in the group.

    A parameter that is not split, but computes with a part of the features, gets a part of its gradient on each
    process. The same holds for key heads that several processes have.

    Args:
        split: how the model is split.
        device: where the sum is computed; None for the gradients' own.
        held: returns this process's part of a parameter's complete gradient, or None. The processes of a group hold the
            same range of each parameter, since ZeRO partitions the parts of all of them alike.

    Returns:
        The parameters whose gradients have changed.
    """
    changed: list[nn.Parameter] = []
    everyone = split.group.size
    of_copies = {everyone: list(split.partial)}
    for p in split.repeated:
        of_copies.setdefault(split.cuts[id(p)].copies, []).append(p)
    for copies, parameters in of_copies.items():
        found = [(p, g) for p in parameters if (g := held(p)) is not None and g.numel()]
        if not found:
            continue
        joined = torch.cat([g.detach().reshape(-1).to(device or g.device, torch.float32) for _, g in found])
        dist.all_reduce(joined, group=split.group.copies_group(copies))
        for (p, g), summed in zip(found, torch.split(joined, [g.numel() for _, g in found]), strict=True):
            g.copy_(summed.view_as(g))
            changed.append(p)
    return changed


def total_norm(
    split: Split, parameters: Sequence[Tensor], gradients: Callable[[Tensor], Tensor | None], kind: float
) -> Tensor:
    """Return the norm of the complete gradients, with each element counted once. The same bits on all processes.

    Args:
        split: how the model is split.
        parameters: the parameters.
        gradients: returns a parameter's gradient on this process, or None.
        kind: the order of the norm.
    """
    counted = [g.detach() for p in parameters if (g := gradients(p)) is not None and split.counts(p)]
    device = counted[0].device if counted else next((p.device for p in parameters), torch.device("cpu"))
    norm = torch.nn.utils.get_total_norm(counted, kind).float().to(device)
    if kind == inf:
        return split.group.reduce_(norm, dist.ReduceOp.MAX)
    return split.group.reduce_(norm.pow(kind)).pow(1.0 / kind)


def are_all_finite(split: Split, finite: bool, device: torch.device) -> bool:
    """Return whether `finite` holds on all processes of the group."""
    flag = torch.tensor(0.0 if finite else 1.0, device=device)
    return not split.group.reduce_(flag, dist.ReduceOp.MAX).item()
