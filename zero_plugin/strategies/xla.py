"""Data parallelism on TPU devices through torch_xla: an unpartitioned copy of the model in every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.config.choices import DDPCommunicationHookType
from zero_plugin.config.handlers import DistributedDataParallelKwargs, Handlers
from zero_plugin.config.resolve.facts import Resolved
from zero_plugin.distributed import collectives
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import ConfigError, LoopError, Problem
from zero_plugin.machine.xla_runtime import import_torch_xla
from zero_plugin.strategies.base import Saving, Session, SessionRequest
from zero_plugin.strategies.torch_session import TorchSession
from zero_plugin.strategies.torch_strategies import TorchStrategy, convert_weights_to_fp32, torch_optimizer
from zero_plugin.tensors.modules import persistent_tensors
from zero_plugin.tensors.wrappers import wrap_forward


class XlaStrategy(TorchStrategy):
    """Replicas on XLA devices. One all-reduce at the end of each accumulation window averages the gradients."""

    name = "xla"

    def accept(self, handlers: Handlers) -> list[str]:
        self.handlers = handlers
        ddp = handlers.ddp or DistributedDataParallelKwargs()
        if handlers.compiles:
            message = "torch_xla itself compiles each step as one graph"
            raise ConfigError([Problem("dynamo_backend", "", message, "Leave it out on a TPU.")])
        if {ddp.comm_hook, ddp.comm_wrapper} != {DDPCommunicationHookType.NO}:
            where, message = "DistributedDataParallelKwargs(comm_hook=…)", "there is no DDP on XLA"
            raise ConfigError([Problem(where, "", message, "Leave it out: gradients are reduced in their own dtype.")])
        unused = [name for name in ddp.to_kwargs() if name not in ("broadcast_buffers", "find_unused_parameters")]
        where = f"DistributedDataParallelKwargs({', '.join(unused)})"
        line = f"{where}: has no effect on XLA, where one all-reduce averages all gradients"
        return [line] if unused else []

    def build_session(self, request: SessionRequest, processes: Processes) -> Session:
        """Build the session, as in `Strategy.build_session`.

        Raises:
            LoopError: the script keeps the model on another device, or the model cannot be moved.
        """
        convert_weights_to_fp32(request)
        module = request.model
        if request.is_placed:
            _move(module, processes.device)
        elif any(p.device.type != "xla" for p in module.parameters()):
            raise LoopError(
                f"prepare() got a {type(module).__name__} with device_placement=False that is not on the XLA device.\n"
                "Leave device_placement out, or call .to(accelerator.device) before its optimizer is built."
            )
        _broadcast_from_first(module)
        optimizer = torch_optimizer(request)  # may raise, so before the recorder is on the module
        recorder = _Recorder(module, processes, self.handlers.ddp or DistributedDataParallelKwargs())
        if optimizer is None and not request.only_evaluates and processes.world_size > 1:
            recorder.refuse_gradients(module)
        return self._session(module, request, optimizer, recorder)

    def add_optimizer(self, session: Session, request: SessionRequest) -> None:
        super().add_optimizer(session, request)
        assert isinstance(session, TorchSession)
        assert isinstance(session.recorder, _Recorder)
        session.recorder.allow_gradients()

    def savings(self, resolved: Resolved) -> tuple[Saving, ...]:  # noqa: ARG002
        """Return no savings: ZeRO is not supported on XLA."""
        return ()


class _Recorder:
    """The `Recorder` of XLA: torch_xla records operations as a graph, and compiles and runs the graph at a `sync`.

    Args:
        module: the user's module.
        processes: this replica and its peers.
        given: the script's DDP arguments; only `broadcast_buffers` and `find_unused_parameters` are used.
    """

    def __init__(self, module: nn.Module, processes: Processes, given: DistributedDataParallelKwargs) -> None:
        self._replicas = processes.world_size
        self._given = given
        self._is_first = torch.tensor(processes.rank == 0, device=processes.device)
        torch_xla = import_torch_xla()
        self._sync = torch_xla.sync
        self._operations = torch_xla.core.xla_model
        # Not a hook: copying or pickling a module includes its hooks, and all objects that the hooks refer to.
        self._undo_forward = wrap_forward(module, self._run_before_inference)
        self._refusal: Any = None

    def run(self) -> None:
        self._sync()

    def end_backward(self, module: nn.Module, *, averages: bool) -> None:
        """Average the gradients, or run the recorded operations.

        A backward that does not end an accumulation window runs immediately, so the graph of a step is the same for any
        number of micro-batches.
        """
        if not averages:
            self._sync()
        elif self._replicas > 1:
            gradients = self._gradients(module)
            self._operations.all_reduce(self._operations.REDUCE_SUM, gradients, scale=1.0 / self._replicas)
            if self._given.broadcast_buffers:
                self._share_buffers(module)

    def close(self) -> None:
        self._undo_forward()
        self.allow_gradients()

    def refuse_gradients(self, module: nn.Module) -> None:
        """Make a backward through a model without an optimizer raise, because its gradients would not be averaged."""
        name = type(module).__name__

        def refuse(_: Tensor) -> None:
            raise LoopError(
                f"this backward() computes gradients of a {name} that was prepared without an optimizer: on XLA they "
                "would not be averaged over the processes.\nPass its optimizer to prepare(), or freeze it: "
                "model.requires_grad_(False)."
            )

        first = next((p for p in module.parameters() if p.requires_grad), None)
        if first is not None:
            self._refusal = first.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]

    def allow_gradients(self) -> None:
        """Undo `refuse_gradients`, when an optimizer is added."""
        if self._refusal is not None:
            self._refusal.remove()

    def _run_before_inference(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the recorded operations before a forward without gradients, so an evaluation is not one huge graph."""
        if not torch.is_grad_enabled():
            self._sync()
        return forward(*args, **kwargs)

    def _gradients(self, module: nn.Module) -> list[Tensor]:
        """Return the gradients to average, of the same parameters in every replica."""
        trained = [p for p in module.parameters() if p.requires_grad]
        if self._given.find_unused_parameters:
            used = collectives.reduce(torch.tensor([p.grad is not None for p in trained]), "sum").tolist()
            for p, count in zip(trained, used, strict=True):
                if count:  # create tensors in the same order: a graph with a collective must be equal on all replicas
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            self._sync()  # keep the earlier operations, which may differ between replicas, out of the graph
        elif unused := [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]:
            raise LoopError(
                f"the losses of this window do not depend on {', '.join(unused[:8])}"
                f"{' and others' if len(unused) > 8 else ''} of the {type(module).__name__}: the replicas wait for "
                "their gradients.\nIf parameters are unused intentionally: Accelerator(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)]). Otherwise freeze them before prepare()."
            )
        return [p.grad for p in trained if p.grad is not None]

    @torch.no_grad()
    def _share_buffers(self, module: nn.Module) -> None:
        """Broadcast the floating-point buffers of rank 0, as DDP does."""
        buffers = [
            tensor
            for _, tensor in persistent_tensors(module)
            if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        ]
        for buffer in buffers:
            buffer.copy_(torch.where(self._is_first, buffer, torch.zeros_like(buffer)))
        if buffers:
            self._operations.all_reduce(self._operations.REDUCE_SUM, buffers)


def _broadcast_from_first(module: nn.Module) -> None:
    """Broadcast the parameters and buffers of rank 0, as DDP does; collective."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(collectives.broadcast(tensor))


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to XLA and keep its parameter objects, to which the optimizer and tied layers refer.

    `module.to` would create new parameter objects on a device of another kind.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device == device:
            continue
        moved: Tensor = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        moved.__dict__.update(tensor.__dict__)
        try:
            torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise LoopError(
                f"prepare() cannot move the {type(module).__name__} to {device}: a view of one of its parameters or "
                f"buffers, or a weak reference to one, exists ({error}).\nDelete it before prepare(), or call "
                "model.to(accelerator.device) before the optimizer is built."
            ) from error
