"""`state_dict`, `load_state_dict` and deep copies of a module whose parameters stage 3 has partitioned.

They are errors that say what to write. In hooks of `save_state` and `load_state` the first gives weights that were
collected before, and the second gathers one submodule's parameters after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final, NoReturn

from deepspeed import zero
from torch import Tensor, nn

from zero_plugin.errors import LoopError
from zero_plugin.strategies.deepspeed.states import OwnHook, own_partitioned, refuse_weights_on_nvme
from zero_plugin.tensors.modules import NAMES_ALONE

SHOWS_WEIGHTS: Final[ContextVar[bool]] = ContextVar("shows_weights", default=False)
"""Whether `state_dict` of a partitioned module has its weights in this process now."""


class PartitionedStates:
    """The hooks on a module and its submodules.

    Args:
        module: the module.

    Attributes:
        handles: remove the hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._shown: Mapping[int, Tensor] | None = None  # by the id of the parameter
        self._gathered: dict[int, Any] | None = None  # by the id of the submodule that is being loaded
        before_reading, after_reading = OwnHook(self._refuse_reading), OwnHook(self._show)
        before_writing, after_writing = OwnHook(self._gather), OwnHook(self._partition)
        self.handles: list[Any] = []
        parameters: list[Any] = [p for p in module.parameters() if hasattr(p, "ds_id")]
        for p in parameters:
            p.__deepcopy__ = MethodType(_copy_unpartitioned, p)
        parts: list[Any] = list(module.modules())
        for part in parts:
            self.handles += [
                part.register_state_dict_pre_hook(before_reading),
                part.register_state_dict_post_hook(after_reading),
                part.register_load_state_dict_pre_hook(before_writing),
                part.register_load_state_dict_post_hook(after_writing),
            ]

    @contextmanager
    def showing(self, module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, `state_dict` has these weights, and none of the parameters that are partitioned and not among them.

        Args:
            module: the complete one.
            weights: by their names in it; without any, `state_dict` stays an error.
        """
        named = module.named_parameters(remove_duplicate=False)
        self._shown = {id(p): weights[name] for name, p in named if name in weights} or None
        token = SHOWS_WEIGHTS.set(self._shown is not None)
        try:
            yield
        finally:
            SHOWS_WEIGHTS.reset(token)
            self._shown = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Inside, `load_state_dict` of the same values on every process works; each call is collective."""
        self._gathered = {}
        try:
            yield
        finally:
            for gathered in reversed(self._gathered.values()):
                gathered.__exit__(None, None, None)
            self._gathered = None

    def _refuse_reading(self, module: nn.Module, *_: Any) -> None:
        if own_partitioned(module) and not NAMES_ALONE.get() and self._shown is None:
            raise LoopError(
                f"state_dict() of a {type(module).__name__} whose parameters ZeRO stage 3 has partitioned: no process "
                "has all of them.\nUse accelerator.get_state_dict(model), or accelerator.save_model(model, folder); to "
                "resume training later, accelerator.save_state(folder); to update an average of weights (EMA), do it "
                "inside `with accelerator.whole_weights(model):`."
            )

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._shown is None:
            return
        partitioned = set(map(id, own_partitioned(module)))
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in self._shown:
                state[prefix + name] = self._shown[id(p)]
            elif id(p) in partitioned:
                state.pop(prefix + name, None)

    def _gather(self, module: nn.Module, _: Any, __: str, metadata: Mapping[str, Any], *___: Any) -> None:
        partitioned = own_partitioned(module)
        if not partitioned:
            return
        if self._gathered is None:
            raise LoopError(
                f"load_state_dict() was called on a {type(module).__name__} whose parameters are partitioned by ZeRO "
                "stage 3.\nLoad the weights before prepare(), or inside `with accelerator.whole_weights(model):`. Load "
                "a checkpoint of save_state() with accelerator.load_state(folder)."
            )
        refuse_weights_on_nvme(module, "load_state_dict() in a hook of load_state()")
        if metadata.get("assign_to_params_buffers"):
            raise LoopError("load_state_dict(assign=True) would replace partitioned parameters; leave out assign.")
        self._gathered[id(module)] = zero.GatheredParameters(partitioned, modifier_rank=0)
        self._gathered[id(module)].__enter__()

    def _partition(self, module: nn.Module, *_: Any) -> None:
        gathered = None if self._gathered is None else self._gathered.pop(id(module), None)
        if gathered is not None:
            gathered.__exit__(None, None, None)


def refuse_engine_copy(kind: str, _: Any = None) -> NoReturn:
    """In place of `__deepcopy__` of the engine of a model of class `kind`."""
    raise LoopError(
        f"deepcopy() of a prepared {kind}, inside a DeepSpeed engine.\nCopy accelerator.unwrap_model(model); "
        "at ZeRO stage 3 copy the model before prepare(), and update the copy inside `with "
        "accelerator.whole_weights(model):`."
    )


def _copy_unpartitioned(p: Any, memo: dict[int, Any]) -> Any:
    if p.numel() != p.ds_numel:
        raise LoopError(
            "deepcopy() of a model whose parameters ZeRO stage 3 has partitioned: no process has all of them.\nCopy "
            "the model before prepare(), where an average of weights is built too (torch's AveragedModel, timm's "
            "ModelEmaV3), and update it inside `with accelerator.whole_weights(model):`."
        )
    return type(p).__deepcopy__(p, memo)
