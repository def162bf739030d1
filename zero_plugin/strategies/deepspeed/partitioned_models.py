"""Construct, gather, load and copy models that ZeRO stage 3 partitions.

`state_dict`, `load_state_dict` and deep copies of a partitioned module raise errors that name the alternative. Hooks of
`save_state` and `load_state` may call the first two. There, `load_state_dict` gathers the parameters of one submodule
after the other. `state_dict` returns weights that were collected before or, during a load, names and shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from deepspeed import zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import DeepSpeedTensorOverride, ZeroParamStatus, free_param
from deepspeed.utils import groups
from torch import Tensor, nn

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Facts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import AUTO
from zero_plugin.distributed.processes import Processes
from zero_plugin.errors import CheckpointError, Foreign, LoopError, raise_clearer
from zero_plugin.plan.run_plan import probe_machine
from zero_plugin.strategies.deepspeed.construction import UsedByConstructors
from zero_plugin.strategies.deepspeed.nvme import give_own_swap_folders
from zero_plugin.strategies.deepspeed.patches import Patches
from zero_plugin.tensors.modules import NAMES_ALONE, parameter_like, replace_empty

SHOWS_WEIGHTS: Final[ContextVar[bool]] = ContextVar("shows_weights", default=False)
"""Whether `state_dict` of a partitioned module returns weights in this process now."""
NOTES_WRITTEN: Final = "zero_plugin_notes_written"
"""Attribute of a partitioned parameter: a function to call after a `GatheredParameters` has kept written values."""
_LINEAR: Final = torch.nn.functional.linear  # torch's own; an engine of stage 3 replaces it
_GATHERED: Final[WeakSet[nn.Module]] = WeakSet()  # modules whose weights an engine gathers
_REFUSING: Final[WeakKeyDictionary[nn.Module, Any]] = WeakKeyDictionary()  # hooks of modules that no engine gathers
# The sections that zero.Init reads. Other sections depend on the loop and the model.
_READ_BY_INIT = ("zero_optimization", "fp16", "bf16", "aio", "data_types")


class BuildConfig:
    """A marker that tells transformers to partition the models that it constructs, and with which configuration.

    It replaces transformers' HfDeepSpeedConfig, which needs Accelerate.
    """

    def __init__(self, document: Document, processes: Processes) -> None:
        self._document = document
        self._processes = processes

    def is_zero3(self) -> bool:
        """Return True: this class is used only at stage 3."""
        return True

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration for one `zero.Init`, with its own NVMe folders. Collective with NVMe offload.

        Raises:
            ConfigError: the configuration is invalid for any loop.
        """
        machine = probe_machine("cuda" if self._processes.device.type == "cuda" else "cpu", self._processes.world_size)
        tree = resolve(self._document, Facts(machine=machine, complete=False)).tree
        tree = tree.where(lambda path, entry: path[0] in _READ_BY_INIT and entry.value is not AUTO)
        config: dict[str, Any] = {**tree.nested(auto="auto"), "train_micro_batch_size_per_gpu": 1}
        give_own_swap_folders(config, self._processes)
        forget_second_copies()
        return config

    def counted_by_gpu(self) -> AbstractContextManager[None]:
        return self._processes.counted_by_gpu()

    def init(self) -> _Init:
        """Return a `zero.Init` with this configuration, on this process's device."""
        with self.counted_by_gpu():
            return _Init(self.config)


def forget_second_copies() -> None:
    """Make the next `zero.Init` create new groups for `zero_hpz_partition_size`: DeepSpeed fails with a second model's.

    Existing parameters keep their groups.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def allocate_partitions(module: nn.Module, build: BuildConfig) -> None:
    """Replace parameters on the meta device by partitioned ones, with uninitialized memory. Collective.

    A partition on NVMe has no file until it is written.

    Raises:
        CheckpointError: partitioning would quantize the frozen weights, or all.
    """
    init = build.init()
    if init.quantized_nontrainable_weights or init.quantized_initialization:
        raise CheckpointError(
            "partitions of quantized weights (zero_quantized_nontrainable_weights, weight_quantization_config) cannot "
            "be loaded from files; load the unpartitioned model: from_pretrained(), and zero3_init_flag: false."
        )
    replace_empty(module, lambda tensor: _partition_of(tensor, init))
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    init._convert_to_zero_parameters(module.parameters())  # the parameters that were not on the meta device
    for part in module.modules():
        refuse_forwards_of(part, describe_unprepared)


def _partition_of(tensor: Tensor, init: _Init) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=init.local_device)
    # DeepSpeed reads the shape from an unpartitioned parameter. This one takes the memory of one element.
    unpartitioned = torch.empty((), dtype=init.dtype, device=init.local_device).expand(tensor.shape)
    parameter: Any = parameter_like(tensor, unpartitioned)
    init._convert_to_deepspeed_param(parameter)
    parameter.ds_numel_aligned = init._aligned_size(parameter)
    # The same as zero.Init's partition of a parameter, but without values.
    size = parameter.ds_numel_aligned // init._partition_world_size(parameter)
    on_nvme = init.param_swapper is not None and init.param_swapper.swappable_tensor(numel=size)
    if on_nvme:
        partition = torch.empty(0, dtype=parameter.dtype)
    elif parameter.ds_persist:
        partition = torch.empty(size, dtype=parameter.dtype, device=init.local_device)
    else:
        host = init.remote_device in (OffloadDeviceEnum.cpu, OffloadDeviceEnum.nvme)
        partition = torch.empty(size, dtype=parameter.dtype, device="cpu" if host else init.local_device)
        if host and init.pin_memory:
            partition = get_accelerator().pin_memory(partition)
    partition.ds_numel = size  # type: ignore[attr-defined]
    partition.status = (  # type: ignore[attr-defined]
        PartitionedParamStatus.NOT_AVAILABLE if on_nvme else PartitionedParamStatus.AVAILABLE
    )
    partition.final_location = OffloadDeviceEnum.nvme if on_nvme else None  # type: ignore[attr-defined]
    parameter.ds_tensor = partition
    Patches().replace(parameter, "__deepcopy__", MethodType(copy_unpartitioned, parameter))
    free_param(parameter)
    return parameter  # type: ignore[no-any-return]


class _Init(zero.Init):  # type: ignore[misc]
    """A `zero.Init` that converts parameters to the dtype of training only after they are initialized.

    DeepSpeed's own class creates every floating-point tensor in that dtype. Buffers then lose precision, and random
    values are drawn in that dtype, so the model differs from a model that is constructed outside.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config_dict_or_path=config, tensor_overrides=[DeepSpeedTensorOverride.device])
        self._used = UsedByConstructors()

    def __enter__(self) -> None:
        super().__enter__()
        self._used.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> Any:
        self._used.__exit__(*error)
        return super().__exit__(*error)

    def _post_init_method(self, module: nn.Module) -> None:
        with self._used.paused():
            super()._post_init_method(module)

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(self.dtype)
        super()._zero_init_param(param)


def gathered_parameters(
    parameters: Iterable[Tensor], modifier_rank: int | None, forward_of: nn.Module | None
) -> AbstractContextManager[Any]:
    """Gather the parameters on every process inside this context; collective.

    Args:
        parameters: the parameters; some may not be partitioned.
        modifier_rank: the rank whose changes are kept; None if no code changes the parameters.
        forward_of: the module in whose forward this is called, or None.
    """
    context: AbstractContextManager[Any] = zero.GatheredParameters(parameters, modifier_rank, forward_of)
    return context


def fetch_empty(engine: Any, patches: Patches) -> None:
    """Mark parameters without elements as available whenever a module is fetched.

    DeepSpeed gathers nothing for a module without missing elements, and then asserts that all its parameters were
    gathered.
    """
    empty: list[Any] = [p for p in engine.module.parameters() if getattr(p, "ds_numel", None) == 0]

    def mark(*_: Any, **__: Any) -> None:
        for p in empty:
            if p.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                p.data = p.data.new_empty(p.ds_shape)
                p.ds_status = ZeroParamStatus.AVAILABLE

    if empty:
        patches.precede(coordinator_of(engine), "fetch_sub_module", mark)


_UNPARTITIONED = (
    "a forward of the {model} with a parameter that ZeRO stage 3 has not partitioned: it was replaced, moved, added or "
    "given after prepare() (module.weight = nn.Parameter(…), a parametrization, torch.func.functional_call), or the "
    "module is a copy of the prepared one.\n"
    "Change and copy the model before prepare(). To compute with other weights than the model's own, use stage 2."
)
_OF_UNPARTITIONED = (
    # Python's error, for a parameter that the module got after it was partitioned.
    Foreign("'(Parameter|Tensor)' object has no attribute 'ds_", "", _UNPARTITIONED, AttributeError),
    # DeepSpeed's error, for a parameter that the module has lost.
    Foreign("^tracing error at step", "deepspeed/runtime/zero/partitioned_param_coordinator.py", _UNPARTITIONED),
)


def explain_foreign(engine: Any, patches: Patches) -> None:
    """Raise this package's error for a forward with parameters that the engine has not partitioned.

    DeepSpeed's hooks read attributes of partitioned parameters from all parameters of a module, also in copies of the
    module.
    """
    coordinator, kind = coordinator_of(engine), type(engine.module).__name__

    def explaining(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except (AttributeError, RuntimeError) as error:
                raise_clearer(error, _OF_UNPARTITIONED, model=kind)
                raise

        # DeepSpeed's methods are untraced too. Otherwise the compiler would trace a model into this call.
        untraced: Any = torch.compiler.disable
        return untraced(call)  # type: ignore[no-any-return]

    patches.replace(coordinator, "fetch_sub_module", explaining(coordinator.fetch_sub_module))
    patches.replace(coordinator, "release_sub_module", explaining(coordinator.release_sub_module))
    patches.replace(coordinator, "reset_step", explaining(coordinator.reset_step))


def coordinator_of(engine: Any) -> Any:
    """Return the object that gathers and releases the weights of an engine of stage 3."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()


class OwnHook:
    """A hook of one module that does nothing in copies of the module."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> Any:
        return OwnHook, (do_nothing,)


class PartitionedStates:
    """The hooks on `state_dict` and `load_state_dict` of a module and its submodules.

    Args:
        module: the module.

    Attributes:
        handles: the handles that remove the hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._shown: Mapping[int, Tensor] | None = None  # by the id of the parameter
        self._gathered: dict[int, Any] | None = None  # by the id of the submodule that is being loaded
        before_reading, after_reading = OwnHook(self._refuse_reading), OwnHook(self._show)
        before_writing, after_writing = OwnHook(self._gather), OwnHook(self._partition)
        self.handles: list[Any] = []
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
        """Make `state_dict` return these weights, and no other partitioned parameters, inside this context.

        Args:
            module: the outermost module.
            weights: by their names in `module`. If empty, `state_dict` stays an error.
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
        """Allow `load_state_dict` of the same values on every process inside this context; each call is collective.

        `state_dict` returns names, shapes and dtypes of partitioned parameters, on the meta device.
        """
        self._gathered = {}
        try:
            yield
        finally:
            for gathered in reversed(self._gathered.values()):
                gathered.__exit__(None, None, None)
            self._gathered = None

    def _refuse_reading(self, module: nn.Module, *_: Any) -> None:
        if own_partitioned(module) and not NAMES_ALONE.get() and self._shown is None and self._gathered is None:
            raise LoopError(
                f"state_dict() of a {type(module).__name__} whose parameters ZeRO stage 3 has partitioned: no process "
                "has all of them.\nUse accelerator.get_state_dict(model), or accelerator.save_model(model, folder); to "
                "resume training later, accelerator.save_state(folder); to update an average of weights (EMA), do it "
                "inside `with accelerator.whole_weights(model):`."
            )

    def _show(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if self._shown is None and self._gathered is None:
            return
        shown = self._shown or {}
        partitioned = {id(p): p for p in own_partitioned(module)}
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in shown:
                state[prefix + name] = shown[id(p)]
            elif id(p) in partitioned and self._gathered is None:
                state.pop(prefix + name, None)
            elif id(p) in partitioned:  # PEFT reads names and shapes before it loads; reading a value raises
                state[prefix + name] = torch.empty(partitioned[id(p)].ds_shape, dtype=p.dtype, device="meta")

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
    """Refuse `__deepcopy__` of the engine of a model of class `kind`."""
    raise LoopError(
        f"deepcopy() of a prepared {kind}, inside a DeepSpeed engine.\nCopy accelerator.unwrap_model(model); "
        "at ZeRO stage 3 copy the model before prepare(), and update the copy inside `with "
        "accelerator.whole_weights(model):`."
    )


def copy_unpartitioned(p: Any, memo: dict[int, Any]) -> Any:
    """Copy a gathered parameter as an ordinary one. Used as `__deepcopy__` of partitioned parameters.

    Raises:
        LoopError: the parameter is not gathered.
    """
    if p.numel() != p.ds_numel:
        raise LoopError(
            "deepcopy() of a model whose parameters ZeRO stage 3 has partitioned: no process has all of them.\nCopy "
            "the model before prepare(), and also build an average of weights before (torch's AveragedModel, timm's "
            "ModelEmaV3), and update it inside `with accelerator.whole_weights(model):`."
        )
    return type(p).__deepcopy__(p, memo)


def begin_gathering(module: nn.Module) -> None:
    """Note that an engine gathers the module's weights from now on. Allow its forwards."""
    _GATHERED.add(module)
    for part in module.modules():
        if (hook := _REFUSING.pop(part, None)) is not None:
            hook.remove()


def end_gathering(module: nn.Module) -> None:
    """Note that the module's engine has ended. Refuse forwards while parameters are partitioned and not gathered.

    After the last engine, restore torch's `functional.linear`. DeepSpeed's own serves every model of the process. It
    adds the bias to a rounded product, keeps other tensors for the backward, and does not work with `torch.func`.
    """
    _GATHERED.discard(module)
    if not _GATHERED and torch.nn.functional.linear is zero3_linear_wrap:
        torch.nn.functional.linear = _LINEAR
    for part in module.modules():
        refuse_forwards_of(part, _describe_ended)


def refuse_forwards_of(part: nn.Module, describe: Callable[[str], str]) -> None:
    """Make forwards of a module raise while its parameters are partitioned, until an engine gathers them.

    Args:
        part: the module, without its submodules.
        describe: returns the message for the name of the module's class.
    """

    def refuse(module: nn.Module, *_: Any) -> None:
        if any(map(own_partitioned, module.modules())):
            raise LoopError(describe(type(module).__name__))

    if part not in _REFUSING:  # prepend: DeepSpeed's own hook marks the part as running
        _REFUSING[part] = part.register_forward_pre_hook(OwnHook(refuse), prepend=True)


def _describe_ended(kind: str) -> str:
    return (
        f"a forward of a {kind} after its training has ended: ZeRO stage 3 has partitioned its parameters, and nothing "
        "gathers them any more.\nEvaluate before accelerator.end_training(). Or save the weights with "
        "accelerator.save_model(model, folder) before, and load them into a new model. After free_memory(), prepare it "
        "again, or call it inside `with accelerator.whole_weights(model):`."
    )


def describe_unprepared(kind: str) -> str:
    """Return the message for a forward of a partitioned model that no engine gathers."""
    return (
        f"a forward of a {kind} that is not prepared: ZeRO stage 3 has partitioned it when it was built (init_model, "
        "from_pretrained, from_config), and only a prepared model gathers its parameters.\nPrepare it, even if it is "
        "never trained: model = accelerator.prepare(model). Or, if the model is small enough, call it inside `with "
        "accelerator.whole_weights(model):`."
    )


@contextmanager
def whole_weights(module: nn.Module) -> Iterator[None]:
    """Gather partitioned parameters on every process inside this context; rank 0's values are kept. Collective.

    Raises:
        LoopError: the parameters are offloaded to NVMe.
    """
    partitioned = refuse_weights_on_nvme(module, "whole_weights()")
    with zero.GatheredParameters(partitioned, modifier_rank=0):
        yield


def refuse_weights_on_nvme(module: nn.Module, call: str) -> list[Any]:
    """Return the partitioned parameters of a module, which `call` is going to gather.

    Raises:
        LoopError: the parameters are offloaded to NVMe.
    """
    partitioned: list[Any] = [p for p in module.parameters() if hasattr(p, "ds_id")]
    if any(p.ds_tensor.status == PartitionedParamStatus.NOT_AVAILABLE for p in partitioned):
        raise LoopError(f"{call}: the weights of the {type(module).__name__} are on NVMe (offload_param).")
    return partitioned


def own_partitioned(module: nn.Module) -> list[Any]:
    """Return the module's own parameters, without submodules', that are partitioned now."""
    own: list[Any] = list(module.parameters(recurse=False))
    return [p for p in own if hasattr(p, "ds_id") and p.numel() != p.ds_numel]


def do_nothing(*_: Any) -> None:
    """Do nothing."""
