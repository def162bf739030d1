"""Checks that all processes have the same software, configuration, kind of device, models and parameter groups."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.config.document import Document
from zero_plugin.config.installed import installed_version
from zero_plugin.config.placeholders import DummyOptim
from zero_plugin.config.tree import Tree, dotted
from zero_plugin.distributed.collective_check import collective
from zero_plugin.distributed.collectives import gather_values, is_same_on_all, process_index
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import LaunchError, LoopError
from zero_plugin.machine.hardware import number_ranges
from zero_plugin.strategies.base import CopiedWeights, Session, is_checked_step
from zero_plugin.strategies.optimizer_states import describe_states
from zero_plugin.strategies.torch_optimizers import describe_optimizer
from zero_plugin.tensors.modules import names_of

if TYPE_CHECKING:
    from zero_plugin.loop.training import Training

_SOFTWARE: Final = ("zero-plugin", "torch", "deepspeed", "transformers")
# Keys that may differ between machines; all others affect the training.
_OF_A_MACHINE: Final = frozenset(
    {
        "debug",
        "enable_cpu_affinity",
        "gpu_ids",
        "grace_period",
        "log_dir",
        "log_timestamps",
        "machine_rank",
        "main_process_ip",
        "monitor_interval",
        "num_cpu_threads_per_process",
        "nvme_path",
        "quiet",
        "rdzv_conf",
        "role",
        "tee",
    }
)
_SHOWN: Final = 5  # differences in a message; the first one nearly always names the cause
# The part of its size by which a weight may differ between copies: perturbing and restoring it rounds differently.
_ROUNDING: Final = 1e-3
_PLAIN: Final = (bool, int, float, str, tuple, type(None))


@collective("Accelerator", waits_for_all=True)
def check_same_run(document: Document, processes: Processes) -> None:
    """Compare versions, device kind and configuration with the other processes; collective.

    Raises:
        LaunchError: they differ; the error lists each value and the ranks and hosts that have it.
    """
    if processes.world_size == 1:
        return
    own = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: installed_version(name) or "not installed" for name in _SOFTWARE},
        "device": processes.device.type,
        **_settings(document.launch),
        **_settings(document.deepspeed),
    }
    if differences := _compare(own):
        raise LaunchError(
            f"the processes of this run differ:\n{differences}\n"
            "Every machine needs the same versions, the same kind of device and the same configuration."
        )


def check_same_models(models: Sequence[nn.Module], optimizers: Sequence[Optimizer | DummyOptim]) -> None:
    """Compare the arguments of `prepare` with those on the other processes; collective.

    Raises:
        LoopError: the parameters differ in name, shape, dtype or `requires_grad`, or the optimizers differ; the error
            lists each value and the ranks that have it.
    """
    own: dict[str, str] = {}
    for number, model in enumerate(models, 1):
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, p in model.named_parameters():
            trained = "" if p.requires_grad else ", frozen"
            shape = tuple(getattr(p, "ds_shape", p.shape))
            own[f"{prefix}{name}"] = f"{shape} {str(p.dtype).removeprefix('torch.')}{trained}"
    for number, optimizer in enumerate(optimizers, 1):
        facts = optimizer.describe() if isinstance(optimizer, DummyOptim) else describe_optimizer(optimizer)
        own[f"optimizer {number}"] = type(optimizer).__name__
        own[f"optimizer {number}: lr of each group"] = ", ".join(map(str, facts.group_lrs))
        if isinstance(optimizer, Optimizer) and getattr(optimizer, "state", None):
            own[f"optimizer {number}: state"] = describe_states(optimizer)
        own |= {f"optimizer {number}: {k}": str(v) for k, v in facts.given.items() if isinstance(v, _PLAIN)}
    if differences := _compare(own):
        raise LoopError(
            f"prepare() got different objects on different processes:\n{differences}\n"
            "Every process must build the same models and optimizers, with the same frozen layers."
        )


class SameSteps:
    """Checks that nothing in a model's steps differs between the processes, such as a learning rate or the weights.

    It does so in its first calls and in one of a hundred, by one small collective.

    Args:
        training: of a model with its optimizer, on several processes.
        tensors: those that the script trains by itself.
    """

    def __init__(self, training: Training, tensors: Collection[Tensor]) -> None:
        self._training = weakref.ref(training)
        self._tensors = tensors
        self._calls = 0
        self._applied = -1  # steps at the last call
        self._left_out = 0  # averages that no step of this process has applied

    def __call__(self) -> None:
        """Called by all processes at the same steps.

        Raises:
            LoopError: on every process, if one has left out a step, or numbers of the parameter groups, the weights or
                the tensors differ; it lists each value and the ranks that have it.
        """
        training, calls = self._training(), self._calls
        self._calls += 1
        if training is None or training.optimizer is None or training.session.optimizer is None:
            return
        self._left_out += training.optimizer.applied_steps == self._applied
        self._applied = training.optimizer.applied_steps
        if not is_checked_step(calls):
            return
        optimizer = training.session.optimizer
        numbers, tensors = _numbers_of(optimizer), _describe_tensors(self._tensors)
        left_out = {"backwards without a step": str(self._left_out)}
        if is_same_on_all(json.dumps([numbers, tensors, left_out], sort_keys=True)):
            _check_weights(training.session)
            return
        if differences := _compare(numbers):
            raise LoopError(
                f"the parameter groups of the {type(optimizer).__name__} differ between the processes:\n"
                f"{differences}\n"
                "Every process has to step with the same numbers. Where they come from a loss, as in a scheduler's "
                'step(loss), average it over the processes: accelerator.reduce(loss, "mean").'
            )
        if differences := _compare(left_out):
            raise LoopError(
                "the processes do not step after the same backwards, so that their weights differ: either some run "
                "more backwards before a step(), or some have left out a step() that others have made:"
                f"\n{differences}\n"
                "Where numbers of backwards differ, run all but the last one before each step() inside "
                "accelerator.no_sync(model), which sums them. "
                "Where a batch decides whether to step, let all processes decide alike, by what all of them know, as "
                'accelerator.reduce(loss, "mean").'
            )
        raise LoopError(
            "tensors that the script trains beside the prepared models, and that losses depend on, differ between the "
            f"processes:\n{_compare(tensors)}\n"
            "Make each an nn.Parameter of a module, and prepare() that with its optimizer. Or average its gradient "
            'before its own step: tensor.grad = accelerator.reduce(tensor.grad, "mean").'
        )


def check_weights_to_save(session: Session | None) -> None:
    """Check that the processes have the same weights now, since each saves a part of its own; collective.

    Raises:
        LoopError: they do not; written weights that no step has followed are a mixture in a checkpoint.
    """
    if session is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    copies = session.copies_to_save()
    if copies is not None:
        copies.note_next()
        copies.note()
    _refuse_differences(session, copies)


def _check_weights(session: Session) -> None:
    """Check that the processes have the same weights, of copies at the last noted step, of partitions as written."""
    _refuse_differences(session, session.copies)
    if session.copies is not None:
        session.copies.note_next()


def _refuse_differences(session: Session, copies: CopiedWeights | None) -> None:
    noted = "" if copies is None else _describe_noted(session.module, copies)
    if differences := noted or _describe_written(session):
        raise LoopError(
            f"the weights of the {type(session.module).__name__} were written on some processes only, or not alike:\n"
            f"{differences}\n"
            "Load and write them on every process: under `if accelerator.is_main_process:` one of the copies is "
            "changed, and the others train on with what they had."
        )


def _describe_noted(module: nn.Module, copies: CopiedWeights) -> str:
    noted, weights = copies.take_noted(), copies.weights
    # Of a process that has noted none, since its script leaves out the steps that others skip, nothing is compared.
    nothing = torch.full((2, 2 * len(weights)), -inf, device=weights[0].device)
    both = nothing if noted is None else torch.stack([noted, -noted])
    dist.all_reduce(both, dist.ReduceOp.MAX)
    largest, negated_smallest = both.view(2, -1, 2)  # of each weight the norm and the sum
    sizes = largest.abs().amax(1, keepdim=True)
    is_small = sizes[:, 0] <= _ROUNDING * sizes.max()
    differ = (largest + negated_smallest > _ROUNDING * sizes).any(1) & ~is_small
    found = names_of(module, (p for p, differs in zip(weights, differ.tolist(), strict=True) if differs))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"  they differ: {', '.join(found[:_SHOWN])}{more}" if found else ""


def _describe_written(session: Session) -> str:
    """The steps before which not all processes have written weights, if that had an effect."""
    own = session.take_written()
    if own is None or is_same_on_all(json.dumps(list(own))):  # what it changed of a partition differs in any case
        return ""
    everyone = [dict(written) for written in gather_values(list(own.items()))]
    partial = {step for written in everyone for step, has_changed in written.items() if has_changed}
    partial -= {step for step in partial if all(step in written for written in everyone)}
    steps = ", ".join(str(step) for step in sorted(own.keys() & partial)[:_SHOWN])
    return _compare({"before step": steps or "not written"})


def _describe_tensors(tensors: Collection[Tensor]) -> dict[str, str]:
    return {
        f"tensor {number} of shape {tuple(tensor.shape)}": (
            str(tensor.item()) if tensor.numel() == 1 else f"norm {torch.linalg.vector_norm(tensor.detach()).item()}"
        )
        for number, tensor in enumerate(tensors, 1)
    }


def _numbers_of(optimizer: Optimizer) -> dict[str, str]:
    return {
        f"group {index}: {key}": number
        for index, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params" and (number := _as_number(value)) is not None
    }


def _as_number(value: Any) -> str | None:
    """A number, a tensor of one, or several numbers as text; None for anything else."""
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        numbers = [number for part in value if (number := _as_number(part)) is not None]
        return f"({', '.join(numbers)})" if len(numbers) == len(value) else None
    return str(value) if isinstance(value, bool | int | float) else None


def _settings(tree: Tree) -> dict[str, str]:
    return {dotted(path): str(entry.value) for path, entry in tree.entries.items() if path[-1] not in _OF_A_MACHINE}


def _compare(own: Mapping[str, str]) -> str:
    """Lines that describe how `own` differs between the processes; "" if it does not. Digests are compared first."""
    encoded = json.dumps(own, sort_keys=True)
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    digests, hosts = zip(*gather_values([digest, socket.gethostname()]), strict=True)
    if len(set(digests)) == 1:
        return ""
    sends = digests.index(digest) == process_index()  # one process for all that have the same values
    sent = gather_values(own if sends else None)
    everyone = [sent[digests.index(digest)] for digest in digests]
    lines = [
        f"  {name}: {_ranks_by_value(found, hosts)}"
        for name in dict.fromkeys(name for values in everyone for name in values)
        if len(set(found := [values.get(name, "missing") for values in everyone])) > 1
    ]
    more = [f"  … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join([*lines[:_SHOWN], *more])


def _ranks_by_value(values: Sequence[str], hosts: Sequence[str]) -> str:
    """`A on ranks 0-2 (host-1, host-2), B on rank 3 (host-3)`."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        numbers = number_ranges(set(ranks)).replace(",", ", ")
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {numbers} ({where})")
    return "; ".join(parts)
