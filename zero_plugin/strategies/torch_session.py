"""A session of plain torch: the module holds its own gradients and the optimizer its own states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from zero_plugin.errors import LoopError
from zero_plugin.nested import map_leaves
from zero_plugin.optimizers import build_optimizer
from zero_plugin.placeholders import DummyOptim
from zero_plugin.resolve.facts import Precision
from zero_plugin.strategies.base import DIRECT_BACKWARD, Session, SessionRequest, persistent_tensors

__all__ = ["TorchSession", "torch_optimizer"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchSession(Session):
    """Training without an engine, on one device or under DDP.

    Args:
        model: what the loop calls: the module itself, or DDP around it.
        module: the user's module.
        optimizer: None for a model that is not trained.
        precision: under `bf16` and `fp16` the weights stay fp32, forwards run under autocast and return fp32.
        clipping: largest gradient norm of a step for which `clip` was not called; None for no clipping.
    """

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        optimizer: Optimizer | None,
        *,
        precision: Precision,
        clipping: float | None,
    ) -> None:
        self.model = model
        self.module = module
        self.optimizer = optimizer
        self._clipping = clipping
        self._clipped = False
        self._unscaled = False
        self._has_gradients = False
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._local_only = False
        self._plain_forward: Callable[..., Any] | None = None
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._scaler = torch.amp.GradScaler(device.type) if precision == "fp16" and optimizer is not None else None
        if precision != "no":
            self._plain_forward = module.forward
            module.forward = _under_autocast(module.forward, device.type, _AUTOCAST[precision])

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """See `Session.backward`."""
        if self._unscaled:
            raise LoopError(
                "backward() after clip_grad_norm_() and before optimizer.step(): the clipped gradients are unscaled, "
                "new ones would be scaled.\nCall clip_grad_norm_() after the window's last backward()."
            )
        if not self._has_gradients and self._has_strays():
            raise LoopError(DIRECT_BACKWARD)
        self._has_gradients = True
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        torch.autograd.backward(scaled, **kwargs)

    def follow_window(self, ends_window: Callable[[], bool]) -> None:
        """See `Session.follow_window`: DDP reduces only in the backward that ends the window."""
        if (ddp := self._ddp) is not None:

            def set_reduction(*_: Any) -> None:
                ddp.require_backward_grad_sync = ends_window() and not self._local_only

            ddp.register_forward_pre_hook(set_reduction)

    def clip(self, max_norm: float, *, norm_type: float = 2.0, only: list[Tensor] | None = None) -> Tensor:
        """See `Session.clip`."""
        assert self.optimizer is not None
        if self._scaler is not None and not self._unscaled:
            self._scaler.unscale_(self.optimizer)
            self._unscaled = True
        parameters = self._trained_parameters() if only is None else only
        if max_norm == float("inf"):
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
        self._clipped = True
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def scale_gradients(self, factor: float) -> None:
        """See `Session.scale_gradients`."""
        gradients = [p.grad for p in self._trained_parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self) -> bool:
        """See `Session.step`."""
        assert self.optimizer is not None
        if not self._has_gradients:
            if self._has_strays():
                raise LoopError(DIRECT_BACKWARD)
            return True  # nothing to apply, as for a torch optimizer whose gradients are all None
        if self._clipping is not None and not self._clipped:
            self.clip(self._clipping)
        if self._scaler is None:
            self.optimizer.step()
            applied = True
        else:
            before = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            applied = self._scaler.get_scale() >= before
        self.drop_gradients()
        return applied

    def drop_gradients(self) -> None:
        """See `Session.drop_gradients`."""
        self._has_gradients = self._clipped = self._unscaled = False
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)

    def drop_strays(self) -> None:
        """See `Session.drop_strays`."""
        if not self._has_gradients and self._has_strays():  # looking is cheaper than the optimizer's zero_grad
            self.drop_gradients()

    @contextmanager
    def _stay_local(self) -> Iterator[None]:
        previous, self._local_only = self._local_only, True
        try:
            yield
        finally:
            self._local_only = previous

    def no_sync(self) -> AbstractContextManager[None]:
        """See `Session.no_sync`."""
        return self._stay_local()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Session.named_tensors`."""
        for name, tensor in persistent_tensors(self.module):
            yield name, tensor.detach()

    @property
    def loss_scale(self) -> float:
        """See `Session.loss_scale`."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def close(self) -> None:
        """See `Session.close`."""
        if self._plain_forward is not None:
            del self.module.forward
        self.model = self.module
        self._ddp = None
        self.optimizer = None

    def _has_strays(self) -> bool:
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    return True
        return False

    def _trained_parameters(self) -> list[nn.Parameter]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def torch_optimizer(request: SessionRequest) -> Optimizer | None:
    """The request's optimizer, with a placeholder replaced by what the config's section describes."""
    if not isinstance(request.optimizer, DummyOptim):
        return request.optimizer
    assert request.resolved.optimizer is not None, "resolution gives every placeholder a section"
    return build_optimizer(request.resolved.optimizer, request.optimizer.params)


def _under_autocast(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            outputs = forward(*args, **kwargs)
        return map_leaves(_to_fp32, outputs)

    return autocast_forward


def _to_fp32(leaf: Any) -> Any:
    """A floating tensor in fp32, so that the loss is computed as without mixed precision."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
