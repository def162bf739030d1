"""A training session on a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import zero
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_plugin.errors import LoopError
from zero_plugin.nested import map_leaves
from zero_plugin.strategies.base import DIRECT_BACKWARD, Session, persistent_tensors
from zero_plugin.strategies.deepspeed.gradients import engine_gradients
from zero_plugin.strategies.deepspeed.swap_folders import remove_swap_folders

__all__ = ["EngineSession"]

# Weights are gathered this many elements at a time: enough to fill the link, little beside a layer of a large model.
_GATHER_ELEMENTS = 2**26


class EngineSession(Session):
    """ZeRO 0-3.

    Args:
        engine: a DeepSpeed engine with an optimizer, made with `managed_gradient_accumulation: false`.
        clipping: largest gradient norm of a step for which `clip` was not called; None for no clipping.
        swap_folders: this engine's own folders of NVMe files, removed at the end.
    """

    def __init__(self, engine: Any, *, clipping: float | None, swap_folders: tuple[Path, ...]) -> None:
        self.engine = engine
        self.model = engine
        self.module: nn.Module = engine.module
        self.optimizer: Optimizer | None = engine.basic_optimizer
        self._gradients = engine_gradients(engine)
        self._clipping = clipping or 0.0
        self._swap_folders = swap_folders
        self._micro_batches = 0  # backwards of the window
        self._factor = 1.0
        self._finalized = False
        engine._backward_prologue = _ours_only(engine, engine._backward_prologue)
        dtype = engine.get_data_types()[0]
        if dtype != torch.float32:
            engine.register_forward_pre_hook(_casting_to(dtype), with_kwargs=True)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """See `Session.backward`."""
        if self._finalized:
            raise LoopError(
                "backward() after clip_grad_norm_() and before optimizer.step(): the clipped norm would not be the "
                "step's.\nCall clip_grad_norm_() after the window's last backward()."
            )
        self._gradients.before_backward(self._micro_batches)
        # The facade has divided the loss by the true size of the window.
        self.engine.backward(loss, scale_wrt_gas=False, **kwargs)
        self._micro_batches += 1

    def follow_window(self, ends_window: Callable[[], bool]) -> None:
        """See `Session.follow_window`: stages 2 and 3 reduce in every backward, 0 and 1 in the step."""

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only: list[Tensor] | None = None) -> Tensor:
        """See `Session.clip`."""
        if norm_type != 2.0:
            raise LoopError(f"clip_grad_norm_(norm_type={norm_type}): under ZeRO only the L2 norm (2) is computed.")
        if only is not None:
            raise LoopError(
                "clip_grad_norm_ got a subset of the optimizer's parameters; under ZeRO all are clipped together.\n"
                "Pass model.parameters() of the whole prepared model."
            )
        self._finalize()
        if max_norm != float("inf"):
            self._gradients.set_clipping(max_norm)
        return self._gradients.norm()

    def scale_gradients(self, factor: float) -> None:
        """See `Session.scale_gradients`."""
        self._factor *= factor

    def step(self) -> bool:
        """See `Session.step`."""
        if not self._micro_batches:
            return True  # nothing to apply, as for a torch optimizer whose gradients are all None
        self._finalize()
        self.engine.step()
        self._gradients.set_clipping(self._clipping)
        self._start_window()
        return bool(self.engine.was_step_applied())

    def drop_gradients(self) -> None:
        """See `Session.drop_gradients`."""
        self._gradients.drop()
        self._gradients.set_clipping(self._clipping)
        self._start_window()

    def drop_strays(self) -> None:
        """See `Session.drop_strays`: an engine lets none in."""

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Session.no_sync`: at stages 0 and 1 no backward reduces anyway, at 2 and 3 every one has to."""
        return nullcontext()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Session.named_tensors`; stage 3 gathers a few parameters at a time."""
        batch: list[tuple[str, Tensor]] = []
        elements = 0
        for name, tensor in persistent_tensors(self.module):
            batch.append((name, tensor))
            elements += getattr(tensor, "ds_numel", tensor.numel())
            if elements >= _GATHER_ELEMENTS:
                yield from _gathered(batch)
                batch, elements = [], 0
        yield from _gathered(batch)

    @property
    def loss_scale(self) -> float:
        """See `Session.loss_scale`."""
        return float(getattr(self.engine.optimizer, "loss_scale", 1.0))

    def close(self) -> None:
        """See `Session.close`."""
        self.engine.destroy()
        self.engine.optimizer = None
        self.engine.basic_optimizer = None
        self.model = self.module
        self.optimizer = None
        self.engine = None
        if self._swap_folders:
            dist.barrier()  # another process may still be writing the last step's states
            remove_swap_folders(self._swap_folders)

    def _finalize(self) -> None:
        if not self._finalized:
            self._gradients.finalize(self._factor)
            self._finalized = True

    def _start_window(self) -> None:
        self._micro_batches = 0
        self._factor = 1.0
        self._finalized = False


def _gathered(batch: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    partitioned = [tensor for _, tensor in batch if hasattr(tensor, "ds_id")]
    with zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        for name, tensor in batch:
            yield name, tensor.detach()


def _ours_only(engine: Any, prologue: Callable[[], None]) -> Callable[[], None]:
    """The engine's hook on the model's outputs, which refuses a backward that this session did not start."""

    def refusing() -> None:
        if not engine._running_engine_backward:
            raise LoopError(DIRECT_BACKWARD)
        prologue()

    return refusing


def _casting_to(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    """A forward pre-hook: floating inputs come in the engine's type; integers never change."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return map_leaves(cast, args), map_leaves(cast, kwargs)

    return hook
