"""Weights that the script writes or reads by itself: masters follow, and partitions are not taken for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn

from deepspeed import zero
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import nn

from zero_plugin.errors import LoopError

__all__ = ["follow_loading", "precede_setting", "refuse_lost_weights", "refuse_partitioned_states", "whole_weights"]

_SETTERS: Final = ("set_full_hp_param", "set_local_hp_param")  # what DeepSpeed's safe_set_… call


class _OwnHook:
    """A hook of one module, which copies of the module do not carry on."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return _OwnHook, (_do_nothing,)


class _Restoring:
    """Gives a method back to whom it was taken from."""

    def __init__(self, owner: Any, name: str, method: Callable[..., None]) -> None:
        self._restore = partial(setattr, owner, name, method)

    def remove(self) -> None:
        self._restore()


def precede_setting(owners: Iterable[Any], call: Callable[[], None]) -> list[Any]:
    """Call `call` before a script changes masters or states by DeepSpeed's `safe_set_…`; the handles end it.

    Args:
        owners: DeepSpeed's optimizer and its parameters: at stage 3 the one sets values, below it the others.
        call: gets nothing.
    """

    def preceded(method: Callable[..., None]) -> Callable[..., None]:
        def setter(*args: Any, **kwargs: Any) -> None:
            call()
            method(*args, **kwargs)

        return setter

    handles: list[Any] = []
    for owner in owners:
        for name in _SETTERS:
            if (method := getattr(owner, name, None)) is not None:
                handles.append(_Restoring(owner, name, method))
                setattr(owner, name, preceded(method))
    return handles


def follow_loading(module: nn.Module, written: Callable[[], None]) -> list[Any]:
    """Call `written` after each `load_state_dict` of the module or of one inside it; the handles end it."""
    hook = _OwnHook(lambda *_: written())
    parts: Iterable[Any] = module.modules()
    return [part.register_load_state_dict_post_hook(hook) for part in parts]


def refuse_partitioned_states(module: nn.Module) -> list[Any]:
    """Have `state_dict` and `load_state_dict` raise where parameters are partitioned; the handles end it."""
    reads, writes = _OwnHook(_refuse_reading), _OwnHook(_refuse_writing)
    parts: list[Any] = list(module.modules())
    return [
        *(part.register_state_dict_pre_hook(reads) for part in parts),
        *(part.register_load_state_dict_pre_hook(writes) for part in parts),
    ]


def refuse_lost_weights(module: nn.Module, written: Iterable[nn.Parameter]) -> NoReturn:
    """Raise where a script has written into parameters that were partitioned.

    Args:
        module: whose they are.
        written: these parameters.

    Raises:
        LoopError: always; it names one of them.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    found = [names.get(id(p), "a parameter") for p in written]
    raise LoopError(
        f"the script has written into {len(found)} parameters of the {type(module).__name__}, e.g. {found[0]}, which "
        "ZeRO stage 3 has partitioned: no process had their values, and nothing was changed.\n"
        "Write before prepare(), or inside `with accelerator.whole_weights(model):`."
    )


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Inside, partitioned parameters are whole on every process; process 0's stay. Collective.

    Raises:
        LoopError: they lie on NVMe.
    """
    partitioned: list[Any] = [p for p in module.parameters() if hasattr(p, "ds_id")]
    if any(p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE for p in partitioned):
        raise LoopError(f"whole_weights(): the weights of the {type(module).__name__} lie on NVMe (offload_param).")
    with zero.GatheredParameters(partitioned, modifier_rank=0):
        yield


def _refuse_reading(module: nn.Module, *_: Any) -> None:
    if _holds_partitions(module):
        raise LoopError(
            f"state_dict() of a {type(module).__name__} whose parameters ZeRO stage 3 has partitioned: no process has "
            "them.\nUse accelerator.get_state_dict(model), or accelerator.save_model(model, folder); for all that the "
            "training goes on from, accelerator.save_state(folder)."
        )


def _refuse_writing(module: nn.Module, *_: Any) -> None:
    if _holds_partitions(module):
        raise LoopError(
            f"load_state_dict() of a {type(module).__name__} whose parameters ZeRO stage 3 has partitioned.\n"
            "Load before prepare(), or inside `with accelerator.whole_weights(model):`; what save_state() wrote, with "
            "accelerator.load_state(folder)."
        )


def _holds_partitions(module: nn.Module) -> bool:
    own: list[Any] = list(module.parameters(recurse=False))
    return any(hasattr(p, "ds_id") and p.numel() != p.ds_numel for p in own)


def _do_nothing(*_: Any) -> None:
    pass
